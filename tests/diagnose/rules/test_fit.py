"""Driver, card and build: what fits, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    bare,
    card,
    changed,
    cuda_gpu,
    dead,
    healthy,
    in_wsl,
    install,
    no_torch_run,
    nvml_gpu,
)
from tests.diagnose.rules.machine_rows import alarms, cause, seen
from tests.diagnose.rules.torch_rows import failing, finding_of, variables
from tests.each import each

from transload.diagnose.tables import index_builds, numbers_of, releases
from transload.machine import Driver, Hardware, Machine, Unknown

OLD = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_KERNEL = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
NEW = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def driven(machine: Machine, cuda: int, version: str = "") -> Machine:
    """The machine with a driver for a CUDA version."""
    return changed(
        machine,
        driver__cuda__version=cuda,
        driver__nvml__cuda=cuda,
        driver__nvml__driver=version,
        kernel__version=version,
    )


def built(machine: Machine, version: str, cuda: str, archs: tuple[str, ...] = NEW) -> Machine:
    """The machine with a torch of a version."""
    made = replace(install(version, cuda), dist_version=version.partition("+")[0])
    run = {"torch_run__version": version, "torch_run__cuda": cuda} if machine.torch_run.version else {}
    return changed(
        machine,
        torch__installs=(made,),
        torch_libraries__architectures=archs,
        torch_libraries__cubins=dict.fromkeys(archs, 100),
        **run,
    )


def carded(machine: Machine, *capabilities: tuple[int, int]) -> Machine:
    """The machine with cards of some capabilities."""
    cuda = tuple(cuda_gpu(index, f"GPU {index}", each) for index, each in enumerate(capabilities))
    nvml = tuple(nvml_gpu(index, f"GPU {index}", each) for index, each in enumerate(capabilities))
    count = len(cuda)
    return changed(
        machine,
        driver__cuda__gpus=cuda,
        driver__cuda__count=count,
        driver__nvml__gpus=nvml,
        driver__nvml__count=count,
    )


# -- the driver


def test_the_driver_is_too_old() -> None:
    machine = driven(dead(healthy(), warning=OLD.format(12080)), 12080, "570.86.10")
    assert cause(machine) == "V01"
    found = finding_of("V01", machine)
    assert "driver 570.86.10 supports CUDA up to 12.8" in found.evidence
    assert "torch 2.13.0+cu130 was built with CUDA 13.0, which needs driver 580.65.06 or newer" in found.evidence
    assert any("--index-url https://download.pytorch.org/whl/cu126" in line for line in found.fix)
    assert any("580" in line for line in found.fix)
    assert cause(no_torch_run(machine)) == "V01"


def test_never_against_what_was_seen() -> None:
    assert alarms(driven(healthy(), 12080)) == []


@each(
    ("driver", "wheel", "old"),
    [
        (12000, "12.8", False),
        (13000, "12.6", False),
        (13000, "13.2", False),
        (11080, "12.1", True),
        (12090, "13.0", True),
        (11040, "10.2", False),
        (10010, "10.2", True),
        (10020, "10.2", False),
        (0, "13.0", False),
    ],
)
def test_the_major_version_decides(driver: int, wheel: str, old: bool) -> None:
    machine = built(driven(no_torch_run(healthy()), driver), "2.13.0+x", wheel)
    assert (cause(machine) == "V01") == old


def test_under_wsl_it_is_the_driver_of_windows() -> None:
    machine = in_wsl(driven(no_torch_run(healthy()), 12080, "572.16"))
    assert any("Windows" in line for line in finding_of("V01", machine).fix)


def test_a_torch_without_cuda_fits_any_driver() -> None:
    assert seen("V01", bare()) is None


def test_a_message_that_is_false() -> None:
    machine = dead(healthy(), warning=OLD.format(13000))
    assert cause(machine) == "V05"
    assert finding_of("V05", machine).title.startswith("probably: ")
    assert "$ unset LD_PRELOAD" in finding_of("V05", variables(machine, LD_PRELOAD="/opt/shim.so")).fix
    listed = changed(machine, driver__libraries__preload=("/opt/shim.so",))
    assert finding_of("V05", listed).fix[0].startswith("Remove /opt/shim.so from /etc/ld.so.preload")
    assert seen("V05", dead(healthy(), warning=OLD.format(12080))) is None


@each(
    ("code", "error"),
    [
        ("V02", "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."),
        ("V03", "RuntimeError: CUDA error: API call is not supported in the installed CUDA driver"),
    ],
)
def test_what_a_driver_of_the_same_major_version_cannot_do(code: str, error: str) -> None:
    machine = driven(failing(healthy(), "kernel", error), 13000)
    assert cause(machine) == code
    assert seen(code, healthy()) is None


def test_ptx_alone_and_an_older_driver() -> None:
    machine = built(driven(no_torch_run(carded(healthy(), (12, 0))), 12040), "2.7.0+x", "12.8", ("sm_90", "compute_90"))
    assert finding_of("V02", machine).title.startswith("probably: ")
    assert seen("V02", driven(machine, 12080)) is None
    assert seen("V02", carded(machine, (9, 0))) is None


def test_an_old_card_is_not_offered_a_driver_for_a_build_that_has_no_code_for_it() -> None:
    machine = changed(carded(healthy(), (6, 1)), hardware__pci=(card(0x1B80),), kernel__flavour="proprietary")
    machine = driven(dead(machine, warning=OLD.format(12040)), 12040, "550.54.14")
    found = finding_of("V01", changed(machine, driver__cuda__init=0))
    assert not any("nvidia-driver" in line for line in found.fix)
    assert any(line.endswith("/cu126") for line in found.fix)


# -- the card


@each(
    ("capability", "archs", "code"),
    [
        ((12, 0), ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"), "A01"),
        ((10, 0), ("sm_80", "sm_90a"), "A01"),
        ((6, 1), NEW, "A02"),
        ((7, 0), NEW, "A02"),
        ((5, 2), NEW, "A02"),
        ((8, 0), ("sm_75", "sm_86", "sm_90"), "A02"),
        ((8, 7), NEW, "A05"),
        ((7, 2), NEW, "A05"),
        ((8, 9), NEW, ""),
        ((8, 6), ("sm_80",), ""),
        ((6, 1), ("sm_50", "sm_60"), ""),
        ((12, 1), NEW, ""),
        ((10, 3), NEW, ""),
        ((12, 0), ("sm_90", "compute_90"), ""),
        ((9, 0), ("sm_90a",), ""),
    ],
)
def test_code_for_the_card(capability: tuple[int, int], archs: tuple[str, ...], code: str) -> None:
    machine = built(carded(healthy(), capability), "2.13.0+cu130", "13.0", archs)
    assert cause(no_torch_run(machine)) == code
    assert cause(failing(machine, "kernel", NO_KERNEL)) == (code or "X12")
    assert alarms(machine) == []  # a kernel ran there: no list overrules that


def test_the_code_for_a_jetson_since_cuda_13_2() -> None:
    machine = carded(no_torch_run(healthy()), (8, 7))
    assert alarms(built(machine, "2.15.0+cu132", "13.2", ("sm_80", "sm_90"))) == []
    assert cause(built(machine, "2.12.0+cu130", "13.0", ("sm_80", "sm_90"))) == "A05"


def test_what_is_said_of_a_card() -> None:
    machine = built(carded(no_torch_run(healthy()), (6, 1)), "2.13.0+cu130", "13.0")
    found = finding_of("A02", machine)
    assert found.evidence[0] == "GPU 0 has compute capability 6.1"
    assert "torch 2.13.0+cu130 has code for sm_75 sm_80 sm_86 sm_90 sm_100 sm_120" in found.evidence
    assert any("whl/cu126" in line for line in found.fix)


def test_of_two_cards_one_is_left_out() -> None:
    machine = carded(healthy(), (9, 0), (6, 1))
    assert alarms(machine) == ["A02"]
    finding_of("A02", machine, "warning")
    finding_of("A02", no_torch_run(machine), "warning")
    finding_of("A02", failing(carded(healthy(), (6, 1), (9, 0)), "kernel", NO_KERNEL))
    assert alarms(carded(variables(healthy(), CUDA_VISIBLE_DEVICES="0"), (9, 0))) == []


def unread(machine: Machine) -> Machine:
    unknown = Unknown("not there")
    return changed(
        no_torch_run(machine),
        torch_libraries__architectures=unknown,
        torch_libraries__cubins=unknown,
        torch_libraries__needed=(),
    )


def test_the_kernels_come_before_the_list_and_the_list_before_the_tables() -> None:
    pascal = carded(no_torch_run(healthy()), (6, 1))
    listed = changed(pascal, torch_libraries__architectures=("sm_75",), torch_libraries__cubins={"sm_60": 1})
    assert alarms(listed) == []
    only_list = changed(pascal, torch_libraries__architectures=("sm_60",), torch_libraries__cubins=Unknown("x"))
    assert alarms(only_list) == []
    assert finding_of("A02", unread(pascal)).title.startswith("probably: ")
    assert alarms(unread(built(pascal, "2.13.0+cu126", "12.6"))) == []


@each("version", ["2.99.0+cu130", "2.13.0+git1234", "2.13.0a0+ecf3.nv25.01", "nonsense"])
def test_of_a_build_that_nobody_knows_nothing_is_claimed(version: str) -> None:
    pascal = carded(no_torch_run(healthy()), (6, 1))
    assert alarms(unread(built(pascal, version, "13.0"))) == []


def test_a_card_that_only_the_bus_knows() -> None:
    facts: dict[str, Any] = {"driver": Driver(), "hardware__pci": (card(0x1B80, ""),)}
    machine = changed(no_torch_run(healthy()), **facts)
    assert cause(machine) == "A02"
    assert "GP104" in finding_of("A02", machine).evidence[0]
    assert alarms(changed(machine, hardware__pci=(card(0x1B80, "vfio-pci"),))) == []
    assert alarms(changed(machine, hardware=Hardware(Unknown("no sysfs")))) == []


# -- everything that fits


CARDS = (
    *((3, 7), (5, 0), (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)),
    *((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
)
FLOORS = {11: 11000, 12: 12000, 13: 13000}


def fitting() -> Iterator[tuple[str, Machine]]:
    for release in releases():
        for platform, cpu in (("linux-x86_64", "x86_64"), ("linux-aarch64", "aarch64")):
            for build in (found for found in index_builds(release, platform) if found.cuda):
                driver = FLOORS[numbers_of(build.cuda)[0]]
                machine = built(
                    driven(changed(healthy(), platform__machine=cpu), driver),
                    f"{release}+{build.build}",
                    build.cuda,
                    build.archs,
                )
                for capability in (each_card for each_card in CARDS if build.supports_card(each_card)):
                    yield f"{release}+{build.build} {cpu} {capability}", carded(machine, capability)


def test_no_false_alarm_where_everything_fits(record_property: Callable[[str, object], None]) -> None:
    """With the oldest driver, from binaries and from the tables, with torch run and not."""
    judged = 0
    for label, machine in fitting():
        for variant in (machine, no_torch_run(machine), unread(machine)):
            assert alarms(variant) == [], label
            judged += 1
    record_property("combinations", judged)
    assert judged > 2500
