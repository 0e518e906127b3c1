from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.diagnose.trees import (
    CONTAINER_MOUNTS,
    FOLDER,
    Content,
    Device,
    Link,
    Tree,
    container,
    plain_host,
    service,
    slurm,
    tree_host,
    wsl,
)
from tests.each import each

from transload.diagnose.probes.system import service_of, surroundings, variables
from transload.diagnose.tables import shown_variables
from transload.machine import Surroundings, Unknown

if TYPE_CHECKING:
    import pytest


def test_nothing_is_around_a_plain_host(tmp_path: Path) -> None:
    assert surroundings(plain_host(tmp_path)) == Surroundings(container_toolkit=False)


@each(
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


@each(
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


@each(("told", "kind"), [("oci", "container"), ("systemd-nspawn", "nspawn"), ("wsl", ""), ("", "")])
def test_what_the_manager_says_is_translated(tmp_path: Path, told: str, kind: str) -> None:
    assert surroundings(plain_host(tmp_path, environ={"container": told})).container == kind


def test_the_first_process_may_know(tmp_path: Path) -> None:
    host = plain_host(tmp_path, more={"/proc/1/environ": "PATH=/bin\0container=lxc\0TERM=linux"})
    around = surroundings(host)
    assert (around.container, around.evidence) == ("lxc", ("the variable container of process 1 is lxc",))


def test_an_overlay_alone_is_no_container(tmp_path: Path) -> None:
    live = {"/proc/self/mountinfo": CONTAINER_MOUNTS.format(layers="/cdrom")}
    assert surroundings(plain_host(tmp_path, more=live)).container == ""


def test_images_of_kubernetes_are_where_those_of_podman_are(tmp_path: Path) -> None:
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


@each(
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


@each(
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


@each(
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
    assert around.container_toolkit == Unknown("/usr/bin does not exist")


@each(
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


# -- variables ---------------------------------------------------------------------------------------------------------


def test_values_that_decide_are_told_and_others_are_not(tmp_path: Path) -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "",
        "LD_LIBRARY_PATH": ":/opt/\udcff/lib",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "secret",
        "KAGGLE_KEY": "secret",
        "NVIDIA_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "PIP_INDEX_URL": "https://user:secret@example.org/simple",
        "PATH": "/usr/bin",
    }
    told = variables(tree_host(tmp_path, {}, environ))
    assert told.values == {name: environ[name] for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "SLURM_JOB_ID")}


def test_no_name_that_is_shown_is_one_of_a_secret() -> None:
    words = ("KEY", "TOKEN", "SECRET", "PASS", "JWT", "CRED", "AUTH", "URL")
    deciding, shown = shown_variables()
    assert deciding < shown
    assert not [name for name in shown if any(word in name for word in words)]


def test_a_value_without_an_end_is_cut(tmp_path: Path) -> None:
    told = variables(tree_host(tmp_path, {}, {"LD_LIBRARY_PATH": "/a:" * 100_000}))
    assert len(told.values["LD_LIBRARY_PATH"]) == 1 << 14


@each(
    ("path", "text", "line"),
    [
        ("/etc/environment", 'PATH="/usr/bin"\nCUDA_VISIBLE_DEVICES="0"\n', 2),
        ("/etc/profile.d/cuda.sh", "export CUDA_VISIBLE_DEVICES=0", 1),
        ("/etc/security/pam_env.conf", "# comment\nCUDA_VISIBLE_DEVICES DEFAULT=0\n", 2),
        ("/home/user/.bashrc", "\n\n  export A=1 CUDA_VISIBLE_DEVICES=0 # one card\n", 3),
        ("/home/user/.zshrc", "typeset -x CUDA_VISIBLE_DEVICES=0", 1),
        ("/home/user/.config/fish/config.fish", "if status is-login\n    set -gx CUDA_VISIBLE_DEVICES 0\nend", 2),
        ("/home/user/.config/fish/config.fish", "set --global --export CUDA_VISIBLE_DEVICES 0", 1),
        ("/home/user/.cshrc", "setenv CUDA_VISIBLE_DEVICES 0", 1),
        ("/home/user/.config/environment.d/gpu.conf", "CUDA_VISIBLE_DEVICES=0", 1),
        ("/opt/conda/etc/conda/activate.d/env.sh", "export CUDA_VISIBLE_DEVICES=0", 1),
        ("/opt/conda/conda-meta/state", '{"version": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}', 1),
        ("/opt/venv/bin/activate", "export CUDA_VISIBLE_DEVICES=0", 1),
        ("/home/user/project/.env", "CUDA_VISIBLE_DEVICES=0", 1),
        ("/home/user/project/Dockerfile", "FROM scratch\nENV CUDA_VISIBLE_DEVICES 0\n", 2),
    ],
)
def test_the_file_that_sets_it(tmp_path: Path, path: str, text: str, line: int) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "CONDA_PREFIX": "/opt/conda", "VIRTUAL_ENV": "/opt/venv"}
    told = variables(plain_host(tmp_path, environ=environ, more={path: text}))
    assert told.origins == {"CUDA_VISIBLE_DEVICES": (f"{path}:{line}",)}


@each(
    "text",
    [
        "# export CUDA_VISIBLE_DEVICES=0",
        "alias one='CUDA_VISIBLE_DEVICES=0 python'",
        'echo "CUDA_VISIBLE_DEVICES=0"',
        "unset CUDA_VISIBLE_DEVICES",
        'if [ -z "$CUDA_VISIBLE_DEVICES" ]; then true; fi',
        "export MY_CUDA_VISIBLE_DEVICES=0",
        "export LD_LIBRARY_PATH=/opt/lib",
    ],
)
def test_a_line_that_speaks_of_it_does_not_set_it(tmp_path: Path, text: str) -> None:
    host = plain_host(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0"}, more={"/home/user/.bashrc": text})
    assert variables(host).origins == {}


def test_several_files_and_variables_in_their_order(tmp_path: Path) -> None:
    more = {
        "/etc/environment": "LD_LIBRARY_PATH=/usr/local/cuda/lib64\n",
        "/home/user/.bashrc": "export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH\nexport PYTHONPATH=/y",
    }
    told = variables(plain_host(tmp_path, environ={"LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/y"}, more=more))
    assert told.origins == {
        "LD_LIBRARY_PATH": ("/etc/environment:1", "/home/user/.bashrc:1"),
        "PYTHONPATH": ("/home/user/.bashrc:2",),
    }


def test_the_unit_of_a_service(tmp_path: Path) -> None:
    more = {
        "/etc/systemd/system/jupyter.service": '[Service]\nEnvironment="A=1" "CUDA_VISIBLE_DEVICES=-1"\n',
        "/etc/systemd/system/jupyter.service.d/gpu.conf": "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=-1\n",
    }
    told = variables(service(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "-1"}, more=more))
    assert told.origins["CUDA_VISIBLE_DEVICES"] == (
        "/etc/systemd/system/jupyter.service:2",
        "/etc/systemd/system/jupyter.service.d/gpu.conf:2",
    )


def test_files_are_not_read_where_nothing_is_set(tmp_path: Path) -> None:
    host = plain_host(tmp_path, more={"/home/user/.bashrc": "export CUDA_VISIBLE_DEVICES=0"})
    assert variables(host).origins == {}


@each("home", ["", "relative", "/gone", "/\0"])
@each("content", [FOLDER, Link(".bashrc"), b"\xff\xfe\0CUDA_VISIBLE_DEVICES" * 9])
def test_no_home_and_files_that_are_none(tmp_path: Path, home: str, content: Content) -> None:
    more = {"/home/user/.bashrc": content, "/etc/environment": content}
    host = plain_host(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0", "HOME": home}, more=more)
    assert variables(host).origins == {}


@each(
    ("environ", "problem"),
    [
        ({"HOME": "/home/user"}, ""),
        ({"HOME": "/home/file"}, "/home/file: not a folder"),
        ({"HOME": "/home/file", "CUDA_CACHE_PATH": "/home/user/cache"}, ""),
        ({"HOME": "/home/user", "CUDA_CACHE_PATH": "/home/file/cache"}, "/home/file: not a folder"),
        ({"HOME": "/home/user", "CUDA_CACHE_PATH": "file"}, "/home/file: not a folder"),
        ({"HOME": "/home/file", "CUDA_CACHE_DISABLE": "1"}, ""),
        ({"HOME": "/nowhere"}, ""),
        ({}, "neither HOME nor CUDA_CACHE_PATH is set"),
    ],
)
def test_a_cache_that_cannot_be_written(tmp_path: Path, environ: dict[str, str], problem: str) -> None:
    host = tree_host(tmp_path, {"/home/user": FOLDER, "/home/file": ""}, environ, cwd="/home")
    assert variables(host).cache_problem == problem


def test_a_cache_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tree_host(tmp_path, {"/home/user/.nv": FOLDER}, {"HOME": "/home/user"})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert variables(host).cache_problem == "/home/user/.nv: EACCES"
