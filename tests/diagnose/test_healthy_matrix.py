"""No false alarms: every torch, on every GPU it has code for, with the oldest driver that works, on each kind of host.

The machines are judged without a run of torch, whose success would overrule every rule: the rules themselves must not
raise an alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from tests.diagnose.machines import (
    cuda_gpu,
    healthy,
    in_container,
    in_slurm,
    in_windows,
    in_wsl,
    install,
    library,
    no_torch_run,
    nvml_gpu,
    pci_gpu,
    with_facts,
)

from transload.diagnose.report import judge_machine
from transload.diagnose.tables import (
    TEGRA,
    Build,
    System,
    branches,
    chip_of,
    driver_floor,
    generation,
    index_builds,
    numbers_of,
    releases,
    table,
)
from transload.machine import Machine

PLATFORMS = {"linux-x86_64": "x86_64", "linux-aarch64": "aarch64"}
MACHINES = {**PLATFORMS, "windows": "AMD64"}
AROUND = {"host": lambda machine: machine, "docker": in_container, "slurm": in_slurm, "wsl": in_wsl}


@cache
def cards() -> dict[tuple[int, ...], int]:
    """A PCI device ID for each compute capability in the table."""
    chips = ((device, chip_of(device)) for device in range(0x0FC0, 0x3500))
    return {chip.capability: device for device, chip in chips if chip and chip.capability}


def builds(platform: str) -> Iterator[Build]:
    for release in releases():
        yield from (build for build in index_builds(release, platform) if build.cuda)


def oldest_driver(build: Build, capability: tuple[int, ...], system: System = "linux") -> str:
    """The oldest driver that runs the build on the GPU."""
    minimum = driver_floor(build.cuda, system)
    first = branches(capability)[0]
    return minimum if numbers_of(minimum)[0] >= first else f"{first}.10"


def machine_with(build: Build, platform: str, capability: tuple[int, ...], driver: str) -> Machine:
    name = f"a card of {capability}"
    branch = int(driver.partition(".")[0])
    announced_text = next((row["cuda"] for row in table("drivers")["branches"] if row["branch"] == branch), build.cuda)
    announced = numbers_of(announced_text)
    version = announced[0] * 1000 + announced[1] * 10
    chip = chip_of(cards()[capability])
    chip_generation = generation(chip.generation) if chip else None
    local = f"{build.torch}+{build.build}"
    python = ".".join(map(str, build.python[1]))
    return no_torch_run(
        with_facts(
            healthy(),
            platform__machine=MACHINES[platform],
            hardware__pci=(pci_gpu(cards()[capability]),),
            kernel__version=driver,
            kernel__flavour="proprietary"
            if chip_generation is None or chip_generation.open_module == "impossible"
            else "open",
            driver__libraries__cuda=(library("libcuda.so.1", driver),),
            driver__libraries__nvml=(library("libnvidia-ml.so.1", driver),),
            driver__nvml__driver=driver,
            driver__nvml__cuda=version,
            driver__nvml__gpus=(nvml_gpu(0, name, capability),),
            driver__cuda__version=version,
            driver__cuda__gpus=(cuda_gpu(0, name, capability),),
            python__version=f"{python}.1",
            torch__installs=(install(local, build.cuda),),
            torch_libraries__architectures=build.archs,
            torch_libraries__cubins=dict.fromkeys(build.archs, 100),
        )
    )


@cache
def combinations() -> dict[str, Machine]:
    return {
        f"{build.torch}+{build.build} on {platform}, {capability}": machine_with(
            build, platform, capability, oldest_driver(build, capability)
        )
        for platform in PLATFORMS
        for build in builds(platform)
        for capability in sorted(cards())
        if capability not in TEGRA and build.supports_card(capability)
    }


@cache
def windows_combinations() -> dict[str, Machine]:
    drivers = (
        (build, capability, oldest_driver(build, capability, "windows"))
        for build in builds("windows")
        for capability in sorted(cards())
        if capability not in TEGRA and build.supports_card(capability)
    )
    return {
        f"{build.torch}+{build.build}, {capability}": in_windows(
            machine_with(build, "windows", capability, driver), driver
        )
        for build, capability, driver in drivers
    }


def test_no_false_alarm_on_windows() -> None:
    for label, machine in windows_combinations().items():
        diagnosis = judge_machine(machine)
        assert (diagnosis.status, diagnosis.findings) == ("ok", ()), label
    assert len(windows_combinations()) > 100


@pytest.mark.parametrize("host_kind", AROUND)
def test_no_false_alarm_with_the_oldest_driver_that_works(host_kind: str) -> None:
    for label, machine in combinations().items():
        diagnosis = judge_machine(AROUND[host_kind](machine))
        findings = [(finding.code, finding.title) for finding in diagnosis.findings if finding.severity != "note"]
        assert (diagnosis.status, findings) == ("ok", []), label
    assert len(combinations()) > 300


def test_matrix_has_every_release_and_the_important_gpus() -> None:
    labels = combinations().keys()
    assert all(any(label.startswith(f"{release}+") for label in labels) for release in releases())
    for build, capability in (("2.15.0+cu126", (6, 1)), ("2.15.0+cu132", (8, 9)), ("2.15.0+cu132", (12, 1))):
        assert f"{build} on linux-x86_64, {capability}" in labels or capability not in cards()
