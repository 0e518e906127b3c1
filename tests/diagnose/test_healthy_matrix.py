"""No false alarm: every torch, on every card it has code for, with the oldest driver that will do, everywhere.

The machines are judged without the torch child, which would be an observation that overrules any rule: here the rules
must hold their peace by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from tests.diagnose.machines import (
    card,
    changed,
    cuda_gpu,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    install,
    library,
    no_torch_run,
    nvml_gpu,
)

from transload.diagnose.report import judge_machine
from transload.diagnose.tables import (
    TEGRA,
    Build,
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
AROUND = {"host": lambda machine: machine, "docker": in_container, "slurm": in_slurm, "wsl": in_wsl}


@cache
def cards() -> dict[tuple[int, ...], int]:
    """A PCI device id for each compute capability of the table."""
    chips = ((device, chip_of(device)) for device in range(0x0FC0, 0x3500))
    return {chip.capability: device for device, chip in chips if chip and chip.capability}


def builds(platform: str) -> Iterator[Build]:
    for release in releases():
        yield from (build for build in index_builds(release, platform) if build.cuda)


def floor(build: Build, capability: tuple[int, ...]) -> str:
    """The oldest driver that runs the build on the card."""
    least = driver_floor(build.cuda)
    first = branches(capability)[0]
    return least if numbers_of(least)[0] >= first else f"{first}.10"


def machine_with(build: Build, platform: str, capability: tuple[int, ...], driver: str) -> Machine:
    name = f"a card of {capability}"
    branch = int(driver.partition(".")[0])
    told = next((row["cuda"] for row in table("drivers")["branches"] if row["branch"] == branch), build.cuda)
    announced = numbers_of(told)
    version = announced[0] * 1000 + announced[1] * 10
    chip = chip_of(cards()[capability])
    kind = generation(chip.generation) if chip else None
    local = f"{build.torch}+{build.build}"
    python = ".".join(map(str, build.python[1]))
    return no_torch_run(
        changed(
            healthy(),
            platform__machine=PLATFORMS[platform],
            hardware__pci=(card(cards()[capability]),),
            kernel__version=driver,
            kernel__flavour="proprietary" if kind is None or kind.open_module == "impossible" else "open",
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
            build, platform, capability, floor(build, capability)
        )
        for platform in PLATFORMS
        for build in builds(platform)
        for capability in sorted(cards())
        if capability not in TEGRA and build.supports_card(capability)
    }


@pytest.mark.parametrize("around", AROUND)
def test_no_false_alarm_with_the_oldest_driver_that_will_do(around: str) -> None:
    for label, machine in combinations().items():
        diagnosis = judge_machine(AROUND[around](machine))
        told = [(found.code, found.title) for found in diagnosis.findings if found.severity != "note"]
        assert (diagnosis.status, told) == ("ok", []), label
    assert len(combinations()) > 300


def test_the_matrix_holds_every_release_and_the_cards_that_matter() -> None:
    labels = combinations().keys()
    assert all(any(label.startswith(f"{release}+") for label in labels) for release in releases())
    for build, capability in (("2.15.0+cu126", (6, 1)), ("2.15.0+cu132", (8, 9)), ("2.15.0+cu132", (12, 1))):
        assert f"{build} on linux-x86_64, {capability}" in labels or capability not in cards()
