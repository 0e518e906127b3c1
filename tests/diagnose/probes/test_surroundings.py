from __future__ import annotations

from pathlib import Path

from tests.diagnose.cases import cases
from tests.diagnose.trees import (
    CONTAINER_MOUNTS,
    FOLDER,
    Device,
    Link,
    Tree,
    container,
    plain_host,
    service,
    slurm,
    wsl,
)

from transload.diagnose.probes.surroundings import service_of, surroundings
from transload.machine import Surroundings, Unknown


def test_nothing_is_around_a_plain_host(tmp_path: Path) -> None:
    assert surroundings(plain_host(tmp_path)) == Surroundings(container_toolkit=False)


@cases(
    ("kind", "named"),
    [
        ("docker", "docker"),
        ("podman", "podman"),
        ("containerd", "containerd"),
        ("apptainer", "apptainer"),
        ("lxc", "lxc"),
        ("nspawn", "nspawn"),
        ("kubernetes", "containerd"),
    ],
)
def test_each_kind_of_container_is_known_by_its_marks(tmp_path: Path, kind: str, named: str) -> None:
    around = surroundings(container(tmp_path, kind))
    assert around.container == named
    assert around.kubernetes is (kind == "kubernetes")
    assert around.evidence
    assert not around.service


@cases(
    ("cgroup", "kind"),
    [
        ("12:devices:/docker/4c01db0b339c4c01db0b339c\n", "docker"),
        ("0::/system.slice/docker-4c01db0b339c4c01db0b339c.scope\n", "docker"),
        ("0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-4c01db0b339c4c01.scope\n", "podman"),
        ("0::/lxc.payload.web/init.scope\n", "lxc"),
        ("0::/kubepods.slice/kubepods-besteffort.slice/cri-containerd-4c01db0b.scope\n", "containerd"),
        ("0::/system.slice/docker.service\n", ""),
        ("0::/lxc.monitor.web\n", ""),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ""),
    ],
)
def test_a_cgroup_names_the_container(tmp_path: Path, cgroup: str, kind: str) -> None:
    assert surroundings(plain_host(tmp_path, more={"/proc/self/cgroup": cgroup})).container == kind


@cases(("told", "kind"), [("oci", "container"), ("systemd-nspawn", "nspawn"), ("wsl", ""), ("", "")])
def test_what_the_manager_says_is_translated(tmp_path: Path, told: str, kind: str) -> None:
    assert surroundings(plain_host(tmp_path, environ={"container": told})).container == kind


def test_the_first_process_may_know(tmp_path: Path) -> None:
    host = plain_host(tmp_path, more={"/proc/1/environ": "PATH=/bin\0container=lxc\0TERM=linux"})
    around = surroundings(host)
    assert (around.container, around.evidence) == ("lxc", ("the variable container of process 1 is lxc",))


def test_an_overlay_alone_is_no_container(tmp_path: Path) -> None:
    live = {"/proc/self/mountinfo": CONTAINER_MOUNTS.format(layers="/cdrom")}
    assert surroundings(plain_host(tmp_path, more=live)).container == ""


def test_images_of_kubernetes_lie_where_those_of_podman_do(tmp_path: Path) -> None:
    crio = {"/proc/self/mountinfo": CONTAINER_MOUNTS.format(layers="/var/lib/containers/storage/overlay")}
    assert surroundings(container(tmp_path, "kubernetes", more=crio)).container == "container"


def test_wsl_is_known_by_its_kernel(tmp_path: Path) -> None:
    assert surroundings(wsl(tmp_path / "2")).wsl == 2
    assert surroundings(wsl(tmp_path / "1", version=1)).wsl == 1
    own = plain_host(tmp_path / "own", environ={"WSL_DISTRO_NAME": "Ubuntu"}, more={"/dev/dxg": Device(10, 125)})
    assert surroundings(own).wsl == 2
    azure = plain_host(tmp_path / "azure", more={"/proc/version": "Linux version 6.5.0-1015-azure (buildd@lcy02)"})
    assert surroundings(azure).wsl == 0


def test_a_job_of_slurm(tmp_path: Path) -> None:
    around = surroundings(slurm(tmp_path))
    assert (around.slurm, around.service, around.container) == (True, "", "")


def test_a_service_with_devices_of_its_own(tmp_path: Path) -> None:
    around = surroundings(service(tmp_path, private=True))
    assert (around.service, around.private_dev) == ("jupyter.service", True)


def test_a_service_that_sees_the_devices(tmp_path: Path) -> None:
    around = surroundings(service(tmp_path))
    assert (around.service, around.private_dev) == ("jupyter.service", False)


@cases(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/ollama.service/worker\n", "ollama.service"),
        ("3:cpu:/x.service\n1:name=systemd:/system.slice/a@1.service\n", "a@1.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-terminal.service\n", ""),
        ("0::/init.scope\n", ""),
        ("garbage", ""),
        ("", ""),
    ],
)
def test_the_unit_of_a_process(tmp_path: Path, cgroup: str, unit: str) -> None:
    assert service_of(plain_host(tmp_path, more={"/proc/self/cgroup": cgroup})) == unit


def test_a_container_without_devices_has_a_private_dev(tmp_path: Path) -> None:
    assert surroundings(container(tmp_path / "without", gpu=False)).private_dev
    assert not surroundings(container(tmp_path / "with")).private_dev


@cases(
    ("environ", "notebook"),
    [
        ({"COLAB_GPU": "0"}, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "x"}, "kaggle"),
        ({"RUNPOD_POD_ID": "abc"}, "runpod"),
        ({}, ""),
    ],
)
def test_rented_notebooks_are_known_by_their_variables(tmp_path: Path, environ: dict[str, str], notebook: str) -> None:
    assert surroundings(plain_host(tmp_path, environ=environ)).notebook == notebook


@cases(
    ("version", "line", "sandbox"),
    [
        ("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016", "", "gvisor"),
        ("Linux version 6.1.62", "tsc=reliable systemd.unit=kata-containers.target agent.log=debug", "kata"),
        ("Linux version 6.1.0", "console=ttyS0 reboot=k panic=1 pci=off", "firecracker"),
        ("Linux version 6.1.0", "root=/dev/sda1 quiet", ""),
    ],
)
def test_kernels_that_are_not_the_hosts(tmp_path: Path, version: str, line: str, sandbox: str) -> None:
    more = {"/proc/version": version, "/proc/cmdline": line}
    assert surroundings(plain_host(tmp_path, more=more, without=("/sys/class/dmi",))).sandbox == sandbox


def test_cdi_selinux_and_the_toolkit(tmp_path: Path) -> None:
    cdi = "kind: nvidia.com/gpu\n  - hostPath: /usr/lib/libcuda.so.550.54.15\n    libcuda.so.550.54.15\n"
    more: Tree = {
        "/etc/cdi/nvidia.yaml": cdi,
        "/var/run/cdi/other.json": '{"hostPath": "/usr/lib64/libcuda.so.580.65.06"}',
        "/etc/cdi/unreadable.yaml": FOLDER,
        "/sys/fs/selinux/enforce": "1",
        "/usr/bin/nvidia-ctk": "",
    }
    around = surroundings(plain_host(tmp_path, more=more))
    assert around.cdi == ("550.54.15", "580.65.06")
    assert (around.selinux, around.container_toolkit) == ("enforcing", True)


def test_a_toolkit_is_not_known_where_programs_cannot_be_listed(tmp_path: Path) -> None:
    around = surroundings(plain_host(tmp_path, without=("/usr/bin",)))
    assert around.container_toolkit == Unknown("/usr/bin is not there")


@cases(
    ("path", "content", "docker"),
    [
        ("/usr/bin/docker", b"\x7fELF", "installed"),
        ("/usr/bin/docker", b"#!/bin/sh\nexec /usr/bin/podman ", ""),
        ("/usr/bin/docker", Link("docker"), ""),
        ("/snap/bin/docker", b"", "snap"),
        ("/usr/bin/dockerd", b"", ""),
    ],
)
def test_how_docker_is_installed(tmp_path: Path, path: str, content: bytes | Link, docker: str) -> None:
    assert surroundings(plain_host(tmp_path, more={path: content})).docker == docker
