"""The machines of a cluster, and every way in which one of them can differ from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.diagnose.machines import cuda_gpu, healthy, library, nvml_gpu, with_facts

from transload.machine import Machine

OLD = "570.86.15"


def server(gpus: int = 8) -> Machine:
    """A healthy machine with several GPUs, all connected by NVLink."""
    cards = tuple(
        replace(nvml_gpu(index), ecc="enabled", nvlinks=18, peers=gpus - 1, fabric="completed") for index in range(gpus)
    )
    return with_facts(
        healthy(),
        taken="2026-11-16T12:00:00Z",
        driver__nvml__gpus=cards,
        driver__nvml__count=gpus,
        driver__cuda__gpus=tuple(map(cuda_gpu, range(gpus))),
        driver__cuda__count=gpus,
        torch_run__nccl="2.27.5",
        torch_run__cudnn="9.10.2",
        variables__values={"NCCL_SOCKET_IFNAME": "eth0", "LD_LIBRARY_PATH": "/opt/lib", "HOME": "/root"},
    )


def gpu_with(index: int, **facts: Any) -> Callable[[Machine], Machine]:
    """A change of facts about one GPU."""

    def change(machine: Machine) -> Machine:
        cards = [*machine.driver.nvml.gpus]
        cards[index] = replace(cards[index], **facts)
        return with_facts(machine, driver__nvml__gpus=tuple(cards))

    return change


def variable(name: str, value: str, machine: Machine) -> Machine:
    return with_facts(machine, variables__values={**machine.variables.values, name: value})


def other_driver(machine: Machine) -> Machine:
    """Another release of the driver, both the kernel module and the libraries."""
    machine = with_facts(machine, driver__nvml__driver=OLD, kernel__version=OLD)
    return with_facts(machine, driver__libraries__cuda=(library("libcuda.so.1", OLD),))


def other_torch(machine: Machine) -> Machine:
    install = replace(machine.torch.first, version="2.12.0+cu130", dist_version="2.12.0")  # type: ignore[type-var]
    return with_facts(machine, torch__installs=(install,), torch_run__version="2.12.0+cu130")


def other_build(machine: Machine) -> Machine:
    install = replace(machine.torch.first, version="2.13.0+cu126", cuda="12.6")  # type: ignore[type-var]
    return with_facts(machine, torch__installs=(install,), torch_run__version="2.13.0+cu126", torch_run__cuda="12.6")


def other_model(machine: Machine) -> Machine:
    cards = tuple(replace(gpu, name="NVIDIA H100 80GB HBM3") for gpu in machine.driver.nvml.gpus)
    return with_facts(machine, driver__nvml__gpus=cards)


def one_gpu_less(machine: Machine) -> Machine:
    cards = tuple(replace(gpu, peers=6) for gpu in machine.driver.nvml.gpus[:-1])
    facts = {"driver__nvml__gpus": cards, "driver__nvml__count": 7, "driver__cuda__count": 7}
    return with_facts(machine, **facts, driver__cuda__gpus=machine.driver.cuda.gpus[:-1])


ODDITIES: dict[str, Callable[[Machine], Machine]] = {
    "GPUs": one_gpu_less,
    "GPU model": other_model,
    "torch": other_torch,
    "build of torch": other_build,
    "NCCL": partial(with_facts, torch_run__nccl="2.21.5"),
    "driver": other_driver,
    "kernel module": partial(with_facts, kernel__flavour="proprietary"),
    "MIG": gpu_with(3, mig="enabled"),
    "NVLink": gpu_with(5, nvlinks=17),
    "P2P": gpu_with(0, peers=0),
    "NVLink fabric": gpu_with(1, fabric="in-progress"),
    "ECC": gpu_with(2, ecc="disabled"),
    "compute mode": gpu_with(4, compute_mode="exclusive-process"),
    "Python": partial(with_facts, python__version="3.10.14"),
    "cuDNN": partial(with_facts, torch_run__cudnn="9.1.0"),
    "kernel": partial(with_facts, platform__kernel="6.8.0-31-generic"),
    "C library": partial(with_facts, platform__libc="glibc 2.35"),
    "container": partial(with_facts, surroundings__container="docker"),
    "clock": partial(with_facts, taken="2026-11-16T12:45:00Z"),
    "NCCL_SOCKET_IFNAME": partial(variable, "NCCL_SOCKET_IFNAME", "ib0"),
    "NCCL_IB_DISABLE": partial(variable, "NCCL_IB_DISABLE", "1"),
    "NCCL_DEBUG": partial(variable, "NCCL_DEBUG", "INFO"),
    "LD_LIBRARY_PATH": partial(variable, "LD_LIBRARY_PATH", "/usr/local/cuda/lib64"),
    "CUDA_LAUNCH_BLOCKING": partial(variable, "CUDA_LAUNCH_BLOCKING", "1"),
    "package nvidia-cudnn-cu13": partial(with_facts, python__packages={"torch": "2.13.0"}),
}
"""The name of each difference in a comparison, and the change that causes it.

The first two must stay first: later ones change single GPUs.
"""


def node(*differing: str) -> Machine:
    """A machine of the cluster that differs in these facts."""
    machine = server()
    for fact, change in ODDITIES.items():
        machine = change(machine) if fact in differing else machine
    return machine


def document(machine: Machine) -> dict[str, Any]:
    """The report of the machine, with only the fields that are read."""
    return {"schema": 1, "machine": machine.to_dict()}
