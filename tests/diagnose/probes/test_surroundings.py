"""Containers, schedulers, services and environment variables, as the probes read them from a tree of files."""

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
from transload.diagnose.tables import word_lists
from transload.machine import Surroundings, Unknown

if TYPE_CHECKING:
    import pytest


def test_plain_host_has_no_special_surroundings(tmp_path: Path) -> None:
    assert surroundings(plain_host(tmp_path)) == Surroundings(container_toolkit=False)


@each(
    ("kind", "expected"),
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
def test_container_is_recognized_by_its_marks(tmp_path: Path, kind: str, expected: str) -> None:
    facts = surroundings(container(tmp_path, kind))
    assert facts.container == expected
    assert facts.kubernetes is (kind == "kubernetes")
    assert facts.evidence
    assert not facts.service


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
def test_container_is_recognized_by_its_cgroup(tmp_path: Path, cgroup: str, kind: str) -> None:
    assert surroundings(plain_host(tmp_path, more={"/proc/self/cgroup": cgroup})).container == kind


@each(("value", "kind"), [("oci", "container"), ("systemd-nspawn", "nspawn"), ("wsl", ""), ("", "")])
def test_container_variable_is_translated(tmp_path: Path, value: str, kind: str) -> None:
    assert surroundings(plain_host(tmp_path, environ={"container": value})).container == kind


def test_container_variable_of_process_1(tmp_path: Path) -> None:
    host = plain_host(tmp_path, more={"/proc/1/environ": "PATH=/bin\0container=lxc\0TERM=linux"})
    facts = surroundings(host)
    assert (facts.container, facts.evidence) == ("lxc", ("the variable container of process 1 is lxc",))


def test_overlay_alone_is_not_a_container(tmp_path: Path) -> None:
    live = {"/proc/self/mountinfo": CONTAINER_MOUNTS.format(layers="/cdrom")}
    assert surroundings(plain_host(tmp_path, more=live)).container == ""


def test_crio_pod_with_podmans_image_folder_is_not_podman(tmp_path: Path) -> None:
    crio = {"/proc/self/mountinfo": CONTAINER_MOUNTS.format(layers="/var/lib/containers/storage/overlay")}
    assert surroundings(container(tmp_path, "kubernetes", more=crio)).container == "container"


def test_wsl_is_recognized_by_its_kernel_or_dxg(tmp_path: Path) -> None:
    assert surroundings(wsl(tmp_path / "2")).wsl == 2
    assert surroundings(wsl(tmp_path / "1", version=1)).wsl == 1
    custom_kernel = plain_host(
        tmp_path / "own", environ={"WSL_DISTRO_NAME": "Ubuntu"}, more={"/dev/dxg": Device(10, 125)}
    )
    assert surroundings(custom_kernel).wsl == 2
    azure = plain_host(tmp_path / "azure", more={"/proc/version": "Linux version 6.5.0-1015-azure (buildd@lcy02)"})
    assert surroundings(azure).wsl == 0


def test_slurm_job(tmp_path: Path) -> None:
    facts = surroundings(slurm(tmp_path))
    assert (facts.slurm, facts.service, facts.container) == (True, "", "")


def test_service_with_a_private_dev(tmp_path: Path) -> None:
    facts = surroundings(service(tmp_path, private=True))
    assert (facts.service, facts.private_dev) == ("jupyter.service", True)


def test_service_without_a_private_dev(tmp_path: Path) -> None:
    facts = surroundings(service(tmp_path))
    assert (facts.service, facts.private_dev) == ("jupyter.service", False)


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
def test_systemd_unit_of_a_process(tmp_path: Path, cgroup: str, unit: str) -> None:
    assert service_of(plain_host(tmp_path, more={"/proc/self/cgroup": cgroup})) == unit


def test_container_without_devices_has_a_private_dev(tmp_path: Path) -> None:
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
def test_hosted_notebooks_are_recognized_by_their_variables(
    tmp_path: Path, environ: dict[str, str], notebook: str
) -> None:
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
def test_sandboxes_are_recognized_by_their_kernel(tmp_path: Path, version: str, line: str, sandbox: str) -> None:
    more = {"/proc/version": version, "/proc/cmdline": line}
    assert surroundings(plain_host(tmp_path, more=more, without=("/sys/class/dmi",))).sandbox == sandbox


def test_cdi_selinux_and_container_toolkit(tmp_path: Path) -> None:
    cdi = "kind: nvidia.com/gpu\n  - hostPath: /usr/lib/libcuda.so.550.54.15\n    libcuda.so.550.54.15\n"
    more: Tree = {
        "/etc/cdi/nvidia.yaml": cdi,
        "/var/run/cdi/other.json": '{"hostPath": "/usr/lib64/libcuda.so.580.65.06"}',
        "/etc/cdi/unreadable.yaml": FOLDER,
        "/sys/fs/selinux/enforce": "1",
        "/usr/bin/nvidia-ctk": "",
    }
    facts = surroundings(plain_host(tmp_path, more=more))
    assert facts.cdi == ("550.54.15", "580.65.06")
    assert (facts.selinux, facts.container_toolkit) == ("enforcing", True)


def test_container_toolkit_is_unknown_where_programs_cannot_be_listed(tmp_path: Path) -> None:
    facts = surroundings(plain_host(tmp_path, without=("/usr/bin",)))
    assert facts.container_toolkit == Unknown("/usr/bin does not exist")


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


def test_only_relevant_variables_are_reported(tmp_path: Path) -> None:
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
    facts = variables(tree_host(tmp_path, {}, environ))
    assert facts.values == {name: environ[name] for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "SLURM_JOB_ID")}


def test_no_shown_variable_is_named_like_a_secret() -> None:
    words = ("KEY", "TOKEN", "SECRET", "PASS", "JWT", "CRED", "AUTH", "URL")
    deciding, others, *_ = word_lists().values()
    assert not [name for name in (*deciding, *others) if any(word in name for word in words)]


def test_overlong_value_is_truncated(tmp_path: Path) -> None:
    facts = variables(tree_host(tmp_path, {}, {"LD_LIBRARY_PATH": "/a:" * 100_000}))
    assert len(facts.values["LD_LIBRARY_PATH"]) == 1 << 14


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
def test_file_and_line_that_set_a_variable(tmp_path: Path, path: str, text: str, line: int) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "CONDA_PREFIX": "/opt/conda", "VIRTUAL_ENV": "/opt/venv"}
    facts = variables(plain_host(tmp_path, environ=environ, more={path: text}))
    assert facts.origins == {"CUDA_VISIBLE_DEVICES": (f"{path}:{line}",)}


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
def test_line_that_only_mentions_a_variable_does_not_set_it(tmp_path: Path, text: str) -> None:
    host = plain_host(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0"}, more={"/home/user/.bashrc": text})
    assert variables(host).origins == {}


def test_several_files_are_listed_in_order(tmp_path: Path) -> None:
    more = {
        "/etc/environment": "LD_LIBRARY_PATH=/usr/local/cuda/lib64\n",
        "/home/user/.bashrc": "export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH\nexport PYTHONPATH=/y",
    }
    facts = variables(plain_host(tmp_path, environ={"LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/y"}, more=more))
    assert facts.origins == {
        "LD_LIBRARY_PATH": ("/etc/environment:1", "/home/user/.bashrc:1"),
        "PYTHONPATH": ("/home/user/.bashrc:2",),
    }


def test_variable_set_in_the_unit_of_a_service(tmp_path: Path) -> None:
    more = {
        "/etc/systemd/system/jupyter.service": '[Service]\nEnvironment="A=1" "CUDA_VISIBLE_DEVICES=-1"\n',
        "/etc/systemd/system/jupyter.service.d/gpu.conf": "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=-1\n",
    }
    facts = variables(service(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "-1"}, more=more))
    assert facts.origins["CUDA_VISIBLE_DEVICES"] == (
        "/etc/systemd/system/jupyter.service:2",
        "/etc/systemd/system/jupyter.service.d/gpu.conf:2",
    )


def test_no_origins_where_the_variable_is_not_set(tmp_path: Path) -> None:
    host = plain_host(tmp_path, more={"/home/user/.bashrc": "export CUDA_VISIBLE_DEVICES=0"})
    assert variables(host).origins == {}


@each("home", ["", "relative", "/gone", "/\0"])
@each("content", [FOLDER, Link(".bashrc"), b"\xff\xfe\0CUDA_VISIBLE_DEVICES" * 9])
def test_no_origins_without_a_home_or_with_unreadable_files(tmp_path: Path, home: str, content: Content) -> None:
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
def test_problem_of_the_compute_cache(tmp_path: Path, environ: dict[str, str], problem: str) -> None:
    host = tree_host(tmp_path, {"/home/user": FOLDER, "/home/file": ""}, environ, cwd="/home")
    assert variables(host).cache_problem == problem


def test_compute_cache_without_write_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tree_host(tmp_path, {"/home/user/.nv": FOLDER}, {"HOME": "/home/user"})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert variables(host).cache_problem == "/home/user/.nv: EACCES"
