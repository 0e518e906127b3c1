"""All commands in fixes: of every machine in the tests, for each package manager, shell and distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from tests.diagnose.machines import (
    cuda_fails,
    cuinit_fails,
    healthy,
    in_container,
    install,
    library,
    pci_gpu,
    resolved_library,
    with_facts,
    without_gpu,
)
from tests.golden.record import machines

from transload.diagnose.report import judge_machine
from transload.diagnose.saved import machine_from
from transload.machine import ExtensionPackage, Machine, Platform, Step, Torch, Unknown


class Fix(NamedTuple):
    """The commands in the fix of one finding, in order, without the leading ``$``."""

    code: str
    machine: Machine
    commands: tuple[str, ...]


FIRED: set[str] = set()
"""The codes of all findings; empty until ``fixes`` is called."""


@cache
def fixes() -> tuple[Fix, ...]:
    """The distinct fixes of all machines."""
    distinct: dict[tuple[str, ...], Fix] = {}
    for machine in (*map(machine_from, machines().values()), *variants()):
        diagnosis = judge_machine(machine)
        for finding in (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted)):
            FIRED.add(finding.code)
            commands = tuple(line[2:] for line in finding.fix if line.startswith("$ "))
            if commands:
                key = (machine.platform.system, machine.platform.machine, *commands)
                distinct.setdefault(key, Fix(finding.code, machine, commands))
    return tuple(distinct.values())


def variants() -> Iterator[Machine]:
    """Machines with faults whose fix depends on the package manager, the shell or the distribution, one for each."""
    for machine in (*broken_packages(), *machines_without_gpu()):
        for tool, project in (("uv", False), ("uv", True), ("poetry", True), ("pdm", True), ("conda", False)):
            installs = tuple(replace(entry, installer=tool) for entry in machine.torch.installs or ())
            yield with_facts(machine, python__tool=tool, python__project=project, torch__installs=installs)
        yield with_facts(machine, python__tool="pixi", python__environment="pixi")
        yield with_facts(machine, python__externally_managed=True)
        yield with_facts(machine, python__pip=False)
        yield machine
    lxc = with_facts(
        in_container(cuinit_fails(healthy(), 803), "lxc"), driver__libraries__cuda=(library("libcuda.so.1", "570.1"),)
    )
    absent = tuple(replace(node, exists=False, error="ENOENT") for node in healthy().nodes.found)
    kinds = ("lxc", "nspawn", "singularity")
    yield from (
        lxc,
        *(with_facts(in_container(cuinit_fails(healthy(), 100), kind), nodes__found=absent) for kind in kinds),
    )
    mps = {"kernel__daemons": ("nvidia-cuda-mps-control",), "variables__values": {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/x"}}  # noqa: S108
    yield with_facts(cuinit_fails(healthy(), 805), **mps)
    conda_library = replace(
        resolved_library("libcudart.so.13", "nvidia/cu13/lib"), path="/opt/venv/lib/libcudart.so.13"
    )
    pixi = {"python__environment": "pixi", "python__tool": "pixi", "torch_libraries__needed": (conda_library,)}
    yield with_facts(healthy(), **pixi)
    variables = {"LD_LIBRARY_PATH": "/opt/x", "CUDA_VISIBLE_DEVICES": "-1"}
    hidden = with_facts(cuinit_fails(healthy(), 100), variables__values=variables)
    for shell in ("fish", "tcsh"):
        yield with_facts(hidden, platform__shell=shell)
        yield with_facts(healthy(), platform__shell=shell, platform__laptop=True, variables__values={"LD_PRELOAD": "x"})
    yield with_facts(hidden, platform__system="Windows")
    for processor, translator in (("x86_64", "Rosetta"), ("arm64", "")):
        mac = Platform("Darwin", processor, "22.6.0", translator=translator)
        yield with_facts(without_gpu(), platform=mac, hardware__pci=Unknown("not examined on Darwin"))
    old_driver = with_facts(cuinit_fails(healthy(), 35), driver__cuda__version=12020, driver__nvml__cuda=12020)
    no_driver = with_facts(
        cuinit_fails(healthy(), 100), kernel__loaded=False, kernel__built_for=(), driver__libraries__cuda=()
    )
    for name, manager in (
        *(("ubuntu", "apt"), ("debian", "apt"), ("fedora", "dnf"), ("rhel", "dnf"), ("arch", "pacman")),
        *(("opensuse", "zypper"), ("nixos", "nix"), ("alpine", "apk")),
    ):
        missing_library = import_fails(healthy(), "OSError: libgomp.so.1: cannot open shared object file")
        for machine in (
            old_driver,
            no_driver,
            missing_library,
            with_facts(no_driver, hardware__pci=(pci_gpu(0x1B80),)),
        ):
            yield with_facts(
                machine,
                platform__distribution=name,
                platform__distribution_like=(),
                platform__package_manager=manager,
                platform__root=True,
            )


def broken_packages() -> Iterator[Machine]:
    """Machines with a GPU and a fault in their Python packages."""
    cpu = (install("2.13.0+cpu", ""),)
    machine = healthy()
    yield with_facts(cuda_fails(machine), torch__installs=cpu, torch_run__version="2.13.0+cpu", torch_run__cuda="")
    old_driver = with_facts(
        machine, driver__cuda__version=12020, driver__nvml__cuda=12020, driver__nvml__driver="535.54.03"
    )
    yield with_facts(cuda_fails(old_driver), torch__installs=cpu, torch_run__version="2.13.0+cpu", torch_run__cuda="")
    yield with_facts(machine, torch=Torch(()), torch_run__steps=(), torch_run__version="")
    incomplete = replace(install(), missing=("lib/libtorch_cuda.so: absent",))
    yield with_facts(
        import_fails(machine, "OSError: libtorch_cuda.so: cannot open shared object file"),
        torch__installs=(incomplete,),
    )
    yield import_fails(machine, "ModuleNotFoundError: No module named 'typing_extensions'")
    for names in (("torchvision",), ("bitsandbytes",), ("flash-attn", "torchaudio", "torchvision", "detectron2")):
        extensions = tuple(ExtensionPackage(name, "0.1", undefined=("_ZN3c10",)) for name in names)
        packages = {**machine.python.packages, **dict.fromkeys(names, "0.1")}
        yield with_facts(machine, extensions=extensions, python__packages=packages)


def machines_without_gpu() -> Iterator[Machine]:
    """Machines without a GPU whose torch is absent, broken, or installed beside a package for another build."""
    machine = without_gpu()
    yield with_facts(machine, torch=Torch(()), torch_run__steps=(), torch_run__version="")
    for version, cuda in (("2.13.0+cpu", ""), ("2.13.0+cu130", "13.0")):
        incomplete = replace(install(version, cuda), missing=("lib/libtorch.so: absent",))
        failed = import_fails(machine, "OSError: libtorch.so: cannot open shared object file")
        yield with_facts(failed, torch__installs=(incomplete,), python__packages={"torchvision": "0.28.0"})
    yield with_facts(
        import_fails(machine, "ImportError: no"), torch=Torch((), dangling=("/opt/x/torch-2.13.0.dist-info",))
    )
    other_build = ExtensionPackage("torchvision", "0.28.0+cu130", missing=("libcudart.so.13",), local="cu130")
    yield with_facts(machine, extensions=(other_build,), python__packages={"torch": "2.13.0", "torchvision": "0.28.0"})


def import_fails(machine: Machine, error: str) -> Machine:
    """The machine with a torch whose import raises ``error``."""
    step = Step("import", ok=False, error=error)
    return with_facts(machine, torch_run__steps=(step,), torch_run__available=Unknown(error), torch_run__version="")
