"""Rules about whether the driver, the card and the torch build fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.diagnose.machines import (
    cuda_fails,
    cuda_gpu,
    healthy,
    in_wsl,
    install,
    no_torch_run,
    nvml_gpu,
    pci_gpu,
    with_facts,
    without_gpu,
)
from tests.diagnose.rules.rule_helpers import alarms, cause, find
from tests.diagnose.rules.torch_machines import failing, finding_of, with_variables
from tests.each import each

from transload.diagnose.tables import index_builds, numbers_of, releases
from transload.machine import Driver, Hardware, Machine, Unknown

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_KERNEL = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def with_driver(machine: Machine, cuda: int, version: str = "") -> Machine:
    """The machine with a driver for a CUDA version."""
    return with_facts(
        machine,
        driver__cuda__version=cuda,
        driver__nvml__cuda=cuda,
        driver__nvml__driver=version,
        kernel__version=version,
    )


def with_torch(machine: Machine, version: str, cuda: str, archs: tuple[str, ...] = ARCHS) -> Machine:
    """The machine with a torch of a version, built for some architectures."""
    installed = replace(install(version, cuda), dist_version=version.partition("+")[0])
    run = {"torch_run__version": version, "torch_run__cuda": cuda} if machine.torch_run.version else {}
    return with_facts(
        machine,
        torch__installs=(installed,),
        torch_libraries__architectures=archs,
        torch_libraries__cubins=dict.fromkeys(archs, 100),
        **run,
    )


def with_cards(machine: Machine, *capabilities: tuple[int, int]) -> Machine:
    """The machine with cards of some compute capabilities."""
    cuda = tuple(cuda_gpu(index, f"GPU {index}", capability) for index, capability in enumerate(capabilities))
    nvml = tuple(nvml_gpu(index, f"GPU {index}", capability) for index, capability in enumerate(capabilities))
    count = len(cuda)
    return with_facts(
        machine,
        driver__cuda__gpus=cuda,
        driver__cuda__count=count,
        driver__nvml__gpus=nvml,
        driver__nvml__count=count,
    )


# -- the driver


def test_driver_too_old_for_the_torch_build() -> None:
    machine = with_driver(cuda_fails(healthy(), warning=TOO_OLD.format(12080)), 12080, "570.86.10")
    assert cause(machine) == "V01"
    finding = finding_of("V01", machine)
    assert "driver 570.86.10 supports CUDA up to 12.8" in finding.evidence
    assert "torch 2.13.0+cu130 was built with CUDA 13.0, which needs driver 580.65.06 or newer" in finding.evidence
    assert any("--index-url https://download.pytorch.org/whl/cu126" in line for line in finding.fix)
    assert any("580" in line for line in finding.fix)
    assert cause(no_torch_run(machine)) == "V01"


def test_old_driver_raises_no_alarm_where_torch_runs() -> None:
    assert alarms(with_driver(healthy(), 12080)) == []


@each(
    ("driver", "cuda", "too_old"),
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
def test_driver_is_too_old_by_its_cuda_version(driver: int, cuda: str, too_old: bool) -> None:
    machine = with_torch(with_driver(no_torch_run(healthy()), driver), "2.13.0+x", cuda)
    assert (cause(machine) == "V01") == too_old


def test_fix_under_wsl_updates_the_windows_driver() -> None:
    machine = in_wsl(with_driver(no_torch_run(healthy()), 12080, "572.16"))
    assert any("Windows" in line for line in finding_of("V01", machine).fix)


def test_cpu_build_fits_any_driver() -> None:
    assert find("V01", without_gpu()) is None


def test_false_message_that_the_driver_is_too_old() -> None:
    machine = cuda_fails(healthy(), warning=TOO_OLD.format(13000))
    assert cause(machine) == "V05"
    assert finding_of("V05", machine).title.startswith("probably: ")
    assert "$ unset LD_PRELOAD" in finding_of("V05", with_variables(machine, LD_PRELOAD="/opt/shim.so")).fix
    listed = with_facts(machine, driver__libraries__preload=("/opt/shim.so",))
    assert finding_of("V05", listed).fix[0].startswith("Remove /opt/shim.so from /etc/ld.so.preload")
    assert find("V05", cuda_fails(healthy(), warning=TOO_OLD.format(12080))) is None


@each(
    ("code", "error"),
    [
        ("V02", "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."),
        ("V03", "RuntimeError: CUDA error: API call is not supported in the installed CUDA driver"),
    ],
)
def test_driver_of_the_same_major_version_lacks_a_feature(code: str, error: str) -> None:
    machine = with_driver(failing(healthy(), "kernel", error), 13000)
    assert cause(machine) == code
    assert find(code, healthy()) is None


def test_driver_too_old_for_the_only_ptx() -> None:
    machine = with_torch(
        with_driver(no_torch_run(with_cards(healthy(), (12, 0))), 12040), "2.7.0+x", "12.8", ("sm_90", "compute_90")
    )
    assert finding_of("V02", machine).title.startswith("probably: ")
    assert find("V02", with_driver(machine, 12080)) is None
    assert find("V02", with_cards(machine, (9, 0))) is None


def test_fix_for_an_old_card_is_another_build_not_a_newer_driver() -> None:
    machine = with_facts(with_cards(healthy(), (6, 1)), hardware__pci=(pci_gpu(0x1B80),), kernel__flavour="proprietary")
    machine = with_driver(cuda_fails(machine, warning=TOO_OLD.format(12040)), 12040, "550.54.14")
    finding = finding_of("V01", with_facts(machine, driver__cuda__init=0))
    assert not any("nvidia-driver" in line for line in finding.fix)
    assert any(line.endswith("/cu126") for line in finding.fix)


# -- the card


@each(
    ("capability", "archs", "code"),
    [
        ((12, 0), ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"), "A01"),
        ((10, 0), ("sm_80", "sm_90a"), "A01"),
        ((6, 1), ARCHS, "A02"),
        ((7, 0), ARCHS, "A02"),
        ((5, 2), ARCHS, "A02"),
        ((8, 0), ("sm_75", "sm_86", "sm_90"), "A02"),
        ((8, 7), ARCHS, "A05"),
        ((7, 2), ARCHS, "A05"),
        ((8, 9), ARCHS, ""),
        ((8, 6), ("sm_80",), ""),
        ((6, 1), ("sm_50", "sm_60"), ""),
        ((12, 1), ARCHS, ""),
        ((10, 3), ARCHS, ""),
        ((12, 0), ("sm_90", "compute_90"), ""),
        ((9, 0), ("sm_90a",), ""),
    ],
)
def test_card_and_architectures_of_the_build(capability: tuple[int, int], archs: tuple[str, ...], code: str) -> None:
    machine = with_torch(with_cards(healthy(), capability), "2.13.0+cu130", "13.0", archs)
    assert cause(no_torch_run(machine)) == code
    assert cause(failing(machine, "kernel", NO_KERNEL)) == (code or "X12")
    assert alarms(machine) == []  # a kernel ran: no list overrules that


def test_server_code_runs_on_a_jetson_since_cuda_13_2() -> None:
    machine = with_cards(no_torch_run(healthy()), (8, 7))
    assert alarms(with_torch(machine, "2.15.0+cu132", "13.2", ("sm_80", "sm_90"))) == []
    assert cause(with_torch(machine, "2.12.0+cu130", "13.0", ("sm_80", "sm_90"))) == "A05"


def test_evidence_and_fix_for_a_card_that_is_too_old() -> None:
    machine = with_torch(with_cards(no_torch_run(healthy()), (6, 1)), "2.13.0+cu130", "13.0")
    finding = finding_of("A02", machine)
    assert finding.evidence[0] == "GPU 0 has compute capability 6.1"
    assert "torch 2.13.0+cu130 has code for sm_75 sm_80 sm_86 sm_90 sm_100 sm_120" in finding.evidence
    assert any("whl/cu126" in line for line in finding.fix)


def test_one_of_two_cards_without_code_is_a_warning() -> None:
    machine = with_cards(healthy(), (9, 0), (6, 1))
    assert alarms(machine) == ["A02"]
    finding_of("A02", machine, "warning")
    finding_of("A02", no_torch_run(machine), "warning")
    finding_of("A02", failing(with_cards(healthy(), (6, 1), (9, 0)), "kernel", NO_KERNEL))
    assert alarms(with_cards(with_variables(healthy(), CUDA_VISIBLE_DEVICES="0"), (9, 0))) == []


def binaries_unread(machine: Machine) -> Machine:
    """The machine whose torch was not run, and whose binaries could not be read."""
    unknown = Unknown("not there")
    return with_facts(
        no_torch_run(machine),
        torch_libraries__architectures=unknown,
        torch_libraries__cubins=unknown,
        torch_libraries__needed=(),
    )


def test_cubins_override_the_architecture_list_which_overrides_the_tables() -> None:
    pascal = with_cards(no_torch_run(healthy()), (6, 1))
    listed = with_facts(pascal, torch_libraries__architectures=("sm_75",), torch_libraries__cubins={"sm_60": 1})
    assert alarms(listed) == []
    only_list = with_facts(pascal, torch_libraries__architectures=("sm_60",), torch_libraries__cubins=Unknown("x"))
    assert alarms(only_list) == []
    assert finding_of("A02", binaries_unread(pascal)).title.startswith("probably: ")
    assert alarms(binaries_unread(with_torch(pascal, "2.13.0+cu126", "12.6"))) == []


@each("version", ["2.99.0+cu130", "2.13.0+git1234", "2.13.0a0+ecf3.nv25.01", "nonsense"])
def test_unknown_build_raises_no_alarm(version: str) -> None:
    pascal = with_cards(no_torch_run(healthy()), (6, 1))
    assert alarms(binaries_unread(with_torch(pascal, version, "13.0"))) == []


def test_card_known_only_from_the_pci_bus() -> None:
    facts: dict[str, Any] = {"driver": Driver(), "hardware__pci": (pci_gpu(0x1B80, ""),)}
    machine = with_facts(no_torch_run(healthy()), **facts)
    assert cause(machine) == "A02"
    assert "GP104" in finding_of("A02", machine).evidence[0]
    assert alarms(with_facts(machine, hardware__pci=(pci_gpu(0x1B80, "vfio-pci"),))) == []
    assert alarms(with_facts(machine, hardware=Hardware(Unknown("no sysfs")))) == []


# -- combinations that fit


CARDS = (
    *((3, 7), (5, 0), (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0)),
    *((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
)
FLOORS = {11: 11000, 12: 12000, 13: 13000}


def fitting_machines() -> Iterator[tuple[str, Machine]]:
    for release in releases():
        for platform, cpu in (("linux-x86_64", "x86_64"), ("linux-aarch64", "aarch64")):
            for build in (candidate for candidate in index_builds(release, platform) if candidate.cuda):
                driver = FLOORS[numbers_of(build.cuda)[0]]
                machine = with_torch(
                    with_driver(with_facts(healthy(), platform__machine=cpu), driver),
                    f"{release}+{build.build}",
                    build.cuda,
                    build.archs,
                )
                for capability in (
                    each_capability for each_capability in CARDS if build.supports_card(each_capability)
                ):
                    yield f"{release}+{build.build} {cpu} {capability}", with_cards(machine, capability)


def test_no_false_alarm_where_driver_card_and_build_fit(record_property: Callable[[str, object], None]) -> None:
    """With the oldest driver; with torch run, judged by its binaries, and judged by the tables alone."""
    judged = 0
    for label, machine in fitting_machines():
        for variant in (machine, no_torch_run(machine), binaries_unread(machine)):
            assert alarms(variant) == [], label
            judged += 1
    record_property("combinations", judged)
    assert judged > 2500
