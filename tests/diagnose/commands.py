"""Every command that a fix prints: on all machines that the tests know, and with each tool, shell and distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from tests.diagnose.machines import (
    bare,
    card,
    changed,
    dead,
    healthy,
    in_container,
    install,
    library,
    needed,
    refused,
)
from tests.golden.record import machines

from transload.diagnose.report import judge_machine
from transload.diagnose.saved import machine_from
from transload.machine import Extension, Machine, Step, Torch, Unknown


class Fix(NamedTuple):
    """The commands of one finding, in order, without the dollar."""

    code: str
    machine: Machine
    commands: tuple[str, ...]


FIRED: set[str] = set()
"""The codes of all findings, once ``fixes`` was called."""


@cache
def fixes() -> tuple[Fix, ...]:
    """Each different one once."""
    found: dict[tuple[str, ...], Fix] = {}
    for machine in (*map(machine_from, machines().values()), *variants()):
        diagnosis = judge_machine(machine)
        for finding in (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted)):
            FIRED.add(finding.code)
            commands = tuple(line[2:] for line in finding.fix if line.startswith("$ "))
            if commands:
                key = (machine.platform.system, machine.platform.machine, *commands)
                found.setdefault(key, Fix(finding.code, machine, commands))
    return tuple(found.values())


def variants() -> Iterator[Machine]:
    """Faults whose commands depend on the tool, the shell or the distribution, with each of these."""
    for machine in (*broken(), *without_gpu()):
        for tool, project in (("uv", False), ("uv", True), ("poetry", True), ("pdm", True), ("conda", False)):
            installs = tuple(replace(each, installer=tool) for each in machine.torch.installs or ())
            yield changed(machine, python__tool=tool, python__project=project, torch__installs=installs)
        yield changed(machine, python__tool="pixi", python__environment="pixi")
        yield changed(machine, python__externally_managed=True)
        yield changed(machine, python__pip=False)
        yield machine
    lxc = changed(
        in_container(refused(healthy(), 803), "lxc"), driver__libraries__cuda=(library("libcuda.so.1", "570.1"),)
    )
    absent = tuple(replace(node, exists=False, error="ENOENT") for node in healthy().nodes.found)
    kinds = ("lxc", "nspawn", "singularity")
    yield from (lxc, *(changed(in_container(refused(healthy(), 100), kind), nodes__found=absent) for kind in kinds))
    mps = {"kernel__daemons": ("nvidia-cuda-mps-control",), "variables__values": {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/x"}}  # noqa: S108
    yield changed(refused(healthy(), 805), **mps)
    of_conda = replace(needed("libcudart.so.13", "nvidia/cu13/lib"), path="/opt/venv/lib/libcudart.so.13")
    pixi = {"python__environment": "pixi", "python__tool": "pixi", "torch_libraries__needed": (of_conda,)}
    yield changed(healthy(), **pixi)
    path = {"LD_LIBRARY_PATH": "/opt/x", "CUDA_VISIBLE_DEVICES": "-1"}
    hidden = changed(refused(healthy(), 100), variables__values=path)
    for shell in ("fish", "tcsh"):
        yield changed(hidden, platform__shell=shell)
        yield changed(healthy(), platform__shell=shell, platform__laptop=True, variables__values={"LD_PRELOAD": "x"})
    yield changed(hidden, platform__system="Windows")
    old = changed(refused(healthy(), 35), driver__cuda__version=12020, driver__nvml__cuda=12020)
    gone = changed(refused(healthy(), 100), kernel__loaded=False, kernel__built_for=(), driver__libraries__cuda=())
    for name, manager in (
        *(("ubuntu", "apt"), ("debian", "apt"), ("fedora", "dnf"), ("rhel", "dnf"), ("arch", "pacman")),
        *(("opensuse", "zypper"), ("nixos", "nix"), ("alpine", "apk")),
    ):
        lacks = fails(healthy(), "OSError: libgomp.so.1: cannot open shared object file")
        for machine in (old, gone, lacks, changed(gone, hardware__pci=(card(0x1B80),))):
            yield changed(
                machine,
                platform__distribution=name,
                platform__distribution_like=(),
                platform__package_manager=manager,
                platform__root=True,
            )


def broken() -> Iterator[Machine]:
    """A machine with a GPU and something wrong with its packages."""
    cpu = (install("2.13.0+cpu", ""),)
    machine = healthy()
    yield changed(dead(machine), torch__installs=cpu, torch_run__version="2.13.0+cpu", torch_run__cuda="")
    older = changed(machine, driver__cuda__version=12020, driver__nvml__cuda=12020, driver__nvml__driver="535.54.03")
    yield changed(dead(older), torch__installs=cpu, torch_run__version="2.13.0+cpu", torch_run__cuda="")
    yield changed(machine, torch=Torch(()), torch_run__steps=(), torch_run__version="")
    lost = replace(install(), missing=("lib/libtorch_cuda.so: absent",))
    yield changed(fails(machine, "OSError: libtorch_cuda.so: cannot open shared object file"), torch__installs=(lost,))
    yield fails(machine, "ModuleNotFoundError: No module named 'typing_extensions'")
    for names in (("torchvision",), ("bitsandbytes",), ("flash-attn", "torchaudio", "torchvision", "detectron2")):
        extensions = tuple(Extension(name, "0.1", undefined=("_ZN3c10",)) for name in names)
        packages = {**machine.python.packages, **dict.fromkeys(names, "0.1")}
        yield changed(machine, extensions=extensions, python__packages=packages)


def without_gpu() -> Iterator[Machine]:
    """A machine without a GPU whose torch, of either build, is broken, absent, or beside a package of another build."""
    machine = bare()
    yield changed(machine, torch=Torch(()), torch_run__steps=(), torch_run__version="")
    for version, cuda in (("2.13.0+cpu", ""), ("2.13.0+cu130", "13.0")):
        lost = replace(install(version, cuda), missing=("lib/libtorch.so: absent",))
        failed = fails(machine, "OSError: libtorch.so: cannot open shared object file")
        yield changed(failed, torch__installs=(lost,), python__packages={"torchvision": "0.28.0"})
    yield changed(fails(machine, "ImportError: no"), torch=Torch((), dangling=("/opt/x/torch-2.13.0.dist-info",)))
    beside = Extension("torchvision", "0.28.0+cu130", missing=("libcudart.so.13",), local="cu130")
    yield changed(machine, extensions=(beside,), python__packages={"torch": "2.13.0", "torchvision": "0.28.0"})


def fails(machine: Machine, error: str) -> Machine:
    """The machine whose torch cannot be imported."""
    step = Step("import", ok=False, error=error)
    return changed(machine, torch_run__steps=(step,), torch_run__available=Unknown(error), torch_run__version="")
