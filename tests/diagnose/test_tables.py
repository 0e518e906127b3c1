"""The tables are consistent, and the chosen wheel fits: checked with the raw data, not with the library's own rules."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from tests.each import each

from transload.diagnose import tables
from transload.diagnose.tables import INDEX, WheelChoice, chips, choose_wheel, table

FOLDER = Path(tables.__file__).parent
DRIVERS = table("drivers")
TORCH = table("torch_builds")
CARDS = [tables.numbers_of(row["capability"]) for row in DRIVERS["capabilities"]]
BRANCHES = [row["branch"] for row in DRIVERS["branches"]]
PLATFORMS = get_args(tables.Platform)
CUDA_PLATFORMS = ("linux-x86_64", "linux-aarch64", "windows")
CERTAINTIES = {"seen", "stated", "guess"}


def choose(*, capabilities: Iterable[tuple[int, ...]], **facts: Any) -> WheelChoice:
    host = {"platform": "linux-x86_64", "python": (3, 12), **facts}
    return choose_wheel(capabilities=tuple(capabilities), **host)


def number(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def ascending(values: list[Any]) -> bool:
    return all(before < after for before, after in pairwise(values))


# ── files ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@each("path", sorted(FOLDER.glob("*.json")))
def test_every_table_has_a_description_date_and_sources(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["about"].endswith(".")
    assert dt.date.fromisoformat(data["date"]) >= dt.date(2026, 11, 15)
    assert data["sources"]


def test_tables_are_read_from_a_zip(tmp_path: Path) -> None:
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for package in ("transload", "transload/diagnose"):
            archive.writestr(f"{package}/__init__.py", "")
        for name in ("credentials.py", "findings.py", "frozen.py", "steps.py"):
            archive.write(FOLDER.parent.parent / name, f"transload/{name}")
        for path in FOLDER.glob("*.*"):
            archive.write(path, f"transload/diagnose/tables/{path.name}")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from transload.diagnose import tables as t"
    code += "; print(t.__file__.startswith(sys.argv[1]), t.driver_floor('12.8'), t.chip_of(0x2330).code)"
    process = subprocess.run([sys.executable, "-c", code, str(packed)], capture_output=True, text=True, check=False)
    assert process.stdout.split() == ["True", "525.60.13", "GH100"], process.stderr


# ── drivers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_driver_rows_are_in_order_and_unique() -> None:
    assert ascending([number(row["cuda"]) for row in DRIVERS["families"]])
    assert ascending([(number(row["cuda"]), row["update"]) for row in DRIVERS["toolkits"]])
    assert ascending(BRANCHES)
    assert ascending([number(row["cuda"]) for row in DRIVERS["branches"]])
    assert ascending(CARDS)
    rated = [*DRIVERS["branches"], *DRIVERS["generations"], *DRIVERS["capabilities"]]
    assert {row["sure"] for row in rated} <= CERTAINTIES


@each("system", ["linux", "windows"])
def test_later_toolkit_has_no_older_driver(system: str) -> None:
    drivers = [number(row[system]) for row in DRIVERS["toolkits"] if row[system]]
    assert drivers == sorted(drivers)


@each("system", ["linux", "windows"])
def test_minimum_driver_of_a_family_is_not_above_its_toolkits(system: tables.System) -> None:
    # The first toolkit of a family came with a driver older than the later minimum.
    for row in DRIVERS["toolkits"]:
        if row[system] and (number(row["cuda"])[1] or number(row["cuda"])[0] < 11):
            assert number(tables.driver_floor(row["cuda"], system)) <= number(row[system]), row


def test_every_toolkit_came_with_the_branch_that_announces_its_cuda() -> None:
    announced = {row["branch"]: row["cuda"] for row in DRIVERS["branches"]}
    for row in DRIVERS["toolkits"]:
        if row["linux"]:
            assert announced[number(row["linux"])[0]] == row["cuda"]
        assert row["cuda"] in announced.values()


def test_generations_and_capabilities_are_consistent() -> None:
    names = [row["name"] for row in DRIVERS["generations"]]
    assert {row["generation"] for row in DRIVERS["capabilities"]} == set(names) - {"Rubin"}
    order = [names.index(row["generation"]) for row in DRIVERS["capabilities"]]
    assert order == sorted(order)
    for row in DRIVERS["capabilities"]:
        last = tables.generation(row["generation"]).last_branch
        assert not last or row["first_branch"] < last


def test_open_modules_are_possible_from_turing_and_required_from_blackwell() -> None:
    rules = [row["open_module"] for row in DRIVERS["generations"]]
    assert rules == sorted(rules, key=["impossible", "possible", "required"].index)
    generations = [tables.generation(name) for name in ("Volta", "Turing", "Hopper", "Blackwell")]
    assert [generation.open_module for generation in generations] == ["impossible", "possible", "possible", "required"]


def test_versions_missing_in_the_driver_table_give_empty_results() -> None:
    assert tables.driver_floor("9.2") == ""
    assert tables.toolkit_driver("12.7") == ""
    assert tables.branch_of("390.157") == 0
    assert tables.branches((99, 9)) == (0, 0)


@each("text", ["", "R580", "not a version", "N/A", "[Not Supported]", "\x00"])
def test_nonsense_version_is_treated_as_unknown(text: str) -> None:
    assert (tables.numbers_of(text), tables.driver_floor(text), tables.toolkit_driver(text)) == ((), "", "")
    assert tables.branch_of(text) == 0
    assert tables.index_builds(text) == ()
    assert choose(driver=text, capabilities=[(8, 6)]) == choose(driver="", capabilities=[(8, 6)])
    assert choose(driver="", capabilities=[(8, 6)], torch=text or "N/A").torch_version == ""


# ── chips ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_device_ids_are_unique() -> None:
    claimed = [device for row in table("chips")["chips"].values() for device in expand_ranges(row["ids"])]
    assert len(claimed) == len(set(claimed)) == len(chips())
    assert not set(expand_ranges(table("chips")["nvswitches"])) & set(claimed)


def expand_ranges(ranges: str) -> list[int]:
    """The IDs in a list of ranges, which must ascend without touching: else two ranges should be one."""
    ids: list[int] = []
    for id_range in ranges.split():
        first, last = (int(end, 16) for end in (id_range.split("-") * 2)[:2])
        assert first <= last
        assert not ids or first > ids[-1] + 1, id_range
        ids += range(first, last + 1)
    return ids


def test_generation_and_capability_of_every_chip_are_in_the_driver_table() -> None:
    for chip in set(chips().values()):
        assert tables.generation(chip.generation).name == chip.generation
        if chip.capability:
            row = next(row for row in DRIVERS["capabilities"] if number(row["capability"]) == chip.capability)
            assert row["generation"] == chip.generation, chip


@each(
    ("device", "code", "generation", "capability"),
    [
        (0x102D, "GK210", "Kepler", (3, 7)),  # K80
        (0x1023, "GK110", "Kepler", (3, 5)),  # K40m
        (0x1380, "GM107", "Maxwell", (5, 0)),  # GTX 750 Ti
        (0x17C8, "GM200", "Maxwell", (5, 2)),  # GTX 980 Ti
        (0x15F8, "GP100", "Pascal", (6, 0)),  # P100
        (0x1B80, "GP104", "Pascal", (6, 1)),  # GTX 1080
        (0x1DB4, "GV100", "Volta", (7, 0)),  # V100
        (0x1E04, "TU102", "Turing", (7, 5)),  # RTX 2080 Ti
        (0x1EB8, "TU104", "Turing", (7, 5)),  # T4
        (0x20B5, "GA100", "Ampere", (8, 0)),  # A100
        (0x2204, "GA102", "Ampere", (8, 6)),  # RTX 3090
        (0x2684, "AD102", "Ada", (8, 9)),  # RTX 4090
        (0x27B8, "AD104", "Ada", (8, 9)),  # L4
        (0x2330, "GH100", "Hopper", (9, 0)),  # H100
        (0x2335, "GH100", "Hopper", (9, 0)),  # H200
        (0x2901, "GB100", "Blackwell", (10, 0)),  # B200
        (0x3182, "GB110", "Blackwell", (10, 3)),  # B300
        (0x2B00, "GB10B", "Blackwell", (11, 0)),  # Jetson Thor
        (0x2B85, "GB202", "Blackwell", (12, 0)),  # RTX 5090
        (0x2E12, "GB20B", "Blackwell", (12, 1)),  # GB10
    ],
)
def test_chips_of_well_known_gpus(device: int, code: str, generation: str, capability: tuple[int, int]) -> None:
    assert tables.chip_of(device) == tables.Chip(code, generation, capability)


def test_unlisted_device_id_is_inferred_from_neighbours_that_agree() -> None:
    inside = tables.chip_of(0x2332)  # between two H100
    assert inside == tables.Chip("GH100", "Hopper", (9, 0), inferred=True)
    assert tables.chip_of(0x2780) == tables.Chip("AD103 or AD104", "Ada", (8, 9), inferred=True)
    ambiguous = tables.chip_of(0x2E01)  # between 12.0 and 12.1
    assert ambiguous is not None
    assert (ambiguous.generation, ambiguous.capability) == ("Blackwell", ())
    for device in (0, 0x22A0, 0x1900, 0xFFFF):
        assert tables.chip_of(device) is None, hex(device)


@each(
    "name",
    [
        "Tesla V100-SXM2-16GB",
        "Tesla T4",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A10G",
        "NVIDIA L40S",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H200",
        "NVIDIA GH200 480GB",
        "NVIDIA B200",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    ],
)
def test_names_of_data_centre_gpus(name: str) -> None:
    assert tables.is_data_centre(name)


@each(
    "name",
    [
        "",
        "NVIDIA GeForce RTX 3090",
        "Quadro RTX 6000",
        "NVIDIA RTX A6000",
        "NVIDIA RTX 4000 Ada Generation",
        "NVIDIA GB10",
        "NVIDIA TITAN V",
        "Orin (nvgpu)",
        "NVIDIA Graphics Device",
    ],
)
def test_names_of_other_gpus(name: str) -> None:
    assert not tables.is_data_centre(name)


# ── GPU code ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@each(
    ("code", "card", "cuda", "runs"),
    [
        ("sm_60", (6, 1), None, True),
        ("sm_61", (6, 0), None, False),
        ("sm_86", (8, 9), None, True),
        ("sm_89", (8, 6), None, False),
        ("sm_75", (8, 0), None, False),
        ("sm_100", (10, 3), None, True),
        ("sm_120", (12, 1), None, True),
        ("sm_100", (12, 0), None, False),
        ("sm_90a", (9, 0), None, True),
        ("sm_100a", (10, 3), None, False),
        ("sm_100f", (10, 0), None, True),
        ("sm_100f", (10, 3), None, True),
        ("sm_103f", (10, 0), None, False),
        ("sm_103f", (10, 3), None, True),
        ("sm_120f", (12, 1), None, True),
        ("sm_120f", (10, 0), None, False),
        ("compute_50", (12, 0), None, True),
        ("compute_90", (8, 9), None, False),
        ("compute_90", (8, 7), None, False),
        ("compute_80", (8, 7), None, True),
        ("compute_90a", (10, 0), None, False),
        ("compute_100f", (12, 0), None, False),
        ("compute_100f", (10, 3), None, True),
        ("sm_80", (8, 7), None, False),
        ("sm_80", (8, 7), (13, 0), False),
        ("sm_80", (8, 7), (13, 2), True),
        ("sm_86", (8, 7), (13, 2), True),
        ("sm_70", (7, 2), (13, 2), True),
        ("sm_50", (5, 3), (13, 2), False),
        ("sm_87", (8, 7), (12, 6), True),
        ("sm_87", (8, 9), (13, 2), False),
        ("sm_101", (11, 0), None, True),
        ("sm_110", (10, 1), None, True),
        ("sm_100", (10, 1), None, False),
        ("sm_101", (10, 3), None, False),
        ("sm_", (8, 0), None, False),
        ("gfx90a", (9, 0), None, False),
        ("sm_" + "9" * 5000, (9, 0), None, False),
        ("", (9, 0), None, False),
    ],
)
def test_which_gpu_code_runs_on_which_gpu(
    code: str, card: tuple[int, int], cuda: tuple[int, int] | None, runs: bool
) -> None:
    assert tables.runs_on(code, card, cuda or ()) is runs


# ── result codes ──────────────────────────────────────────────────────────────────────────────────────────────────────


@each("library", ["cuda", "nvml"])
def test_result_codes_are_in_order_and_complete(library: str) -> None:
    rows = table("results")[library]
    codes = list(map(int, rows))
    assert ascending(codes)
    assert all(row["name"] for row in rows.values())
    assert {*codes} >= ({*range(31), 999} if library == "nvml" else DECIDING)


# Result codes of the driver by which rules distinguish causes.
DECIDING = {0, 2, 3, 34, 35, 36, 46, 100, 101, 102, 103, 209, 214, 218, 221, 222, 223, 226, 304, 700, 702, 710, 719}
DECIDING |= {*range(800, 811), 999}


@each(
    ("code", "name", "text"),
    [
        (34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"),
        (35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"),
        (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"),
        (100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"),
        (
            803,
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            "system has unsupported display driver / cuda driver combination",
        ),
        (12345, "", ""),
    ],
)
def test_names_and_texts_of_cuda_results(code: int, name: str, text: str) -> None:
    assert tables.result("cuda", code) == (name, text)


# ── torch builds ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_releases_are_in_order() -> None:
    assert ascending([number(release) for release in tables.releases()])


def test_build_rows_are_well_formed() -> None:
    for row in TORCH["releases"]:
        assert number(row["python"][0]) < number(row["python"][1])
        assert all(number(version.rstrip("t"))[:2] <= number(row["python"][1]) for version in row["free_threaded"])
        pairs = [(entry["build"], platform) for entry in [*row["builds"], *row["others"]] for platform in entry["on"]]
        assert len(pairs) == len(set(pairs)), row["versions"]
        assert {platform for _, platform in pairs} <= set(PLATFORMS)
        for entry in [*row["builds"], *row["others"]]:
            assert entry["sure"] in CERTAINTIES
        for entry in row["builds"]:
            assert entry["build"] == "cu" + "".join(entry["cuda"].split(".")[:2])
            assert ascending(list(map(int, entry["archs"].split())))
            assert tables.driver_floor(entry["cuda"])


@each("release", tables.releases())
def test_pypi_build_is_one_of_the_index_builds(release: str) -> None:
    for platform in PLATFORMS:
        default = tables.build_of(release, platform)
        if default is None:
            assert (platform, number(release) > (2, 2, 2)) == ("macos-x86_64", True)
            continue
        assert default in tables.index_builds(release, platform)
        assert [build for build in tables.index_builds(release, platform) if build.on_pypi] == [default]
    windows, mac = (tables.build_of(release, platform) for platform in ("windows", "macos-arm64"))
    assert windows is not None
    assert mac is not None
    assert windows.build == mac.build == "cpu"


@each(
    ("release", "build", "first", "last", "python"),
    [
        ("1.13.1", "cu117", "sm_37", "sm_86", (3, 11)),
        ("2.3.1", "cu121", "sm_50", "sm_90", (3, 12)),
        ("2.7.0", "cu126", "sm_50", "sm_90", (3, 13)),
        ("2.8.0", "cu128", "sm_75", "sm_120", (3, 13)),
        ("2.10.0", "cu128", "sm_70", "sm_120", (3, 14)),
        ("2.11.0", "cu130", "sm_75", "sm_120", (3, 14)),
        ("2.15.0", "cu132", "sm_75", "sm_120", (3, 15)),
    ],
)
def test_pypi_builds_match_the_examined_wheels(
    release: str, build: str, first: str, last: str, python: tuple[int, int]
) -> None:
    default = tables.build_of(release, "linux-x86_64")
    assert default is not None
    assert (default.build, default.archs[0], default.archs[-1], default.sure) == (build, first, last, "seen")
    assert default.python[1] == python


@each(("release", "build"), [("2.10.0", "cpu"), ("2.11.0", "cu130"), ("2.15.0", "cu132")])
def test_arm_wheels_on_pypi_have_cuda_since_2_11(release: str, build: str) -> None:
    default = tables.build_of(release, "linux-aarch64")
    assert default is not None
    assert default.build == build


def test_release_may_be_abbreviated_or_have_a_build_suffix() -> None:
    names = ("2.12.1", "2.12.1+cu130", "2.12")
    assert len({tables.build_of(name, "linux-x86_64") for name in names}) == 1
    assert tables.index_builds("9.9.9") == ()
    assert tables.build_of("2.15.0", "freebsd") is None
    assert tables.build_of("2.15.0", "linux-x86_64", "cu118") is None


# ── choice of a wheel ─────────────────────────────────────────────────────────────────────────────────────────────────


def fits(entry: dict[str, Any], card: tuple[int, ...], branch: int) -> bool:
    """Whether the raw row of a CUDA build fits a GPU and a driver branch: a second implementation of the rule."""
    codes = [divmod(int(code), 10) for code in entry["archs"].split()]
    row = next(row for row in DRIVERS["capabilities"] if number(row["capability"]) == card)
    last = next(
        generation["last_branch"] for generation in DRIVERS["generations"] if generation["name"] == row["generation"]
    )
    major = entry["cuda"].split(".")[0]
    floor = next(family["linux"] for family in DRIVERS["families"] if family["cuda"] == major)
    cudnn = number(entry["cudnn"] or "0")
    return (
        any(code[0] == card[0] and code[1] <= card[1] for code in codes)
        and number(floor) <= (branch, 999)
        and row["first_branch"] <= branch <= (last or 9999)
        and not (cudnn >= (9,) and card < (5, 0))
        and not (cudnn >= (9, 11) and card < (7, 5))
    )


def raw_builds(platform: str, python: tuple[int, int]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (version, entry)
        for row in TORCH["releases"]
        if number(row["python"][0]) <= python <= number(row["python"][1])
        for version in row["versions"]
        for entry in row["builds"]
        if platform in entry["on"]
    ]


@each("platform", ["linux-x86_64", "linux-aarch64"])
@each("card", CARDS)
def test_newest_torch_that_fits_gpu_and_driver_is_chosen(card: tuple[int, ...], platform: str) -> None:
    builds = raw_builds(platform, (3, 11))
    for branch in BRANCHES:
        choice = choose(driver=f"{branch}.999", capabilities=[card], platform=platform, python=(3, 11))
        fitting = [(version, entry["build"]) for version, entry in builds if fits(entry, card, branch)]
        if not fitting:
            assert not choice.torch_version or choice.needs_driver, (branch, choice)
            continue
        newest = max((version for version, _ in fitting), key=number)
        assert (choice.torch_version, choice.needs_driver) == (newest, ""), branch
        assert (newest, choice.build) in fitting
        default = tables.build_of(newest, platform)
        assert default is not None
        assert (choice.index_url == "") == ((newest, default.build) in fitting)


@each("release", tables.releases())
def test_chosen_build_of_a_release_fits_gpu_and_driver(release: str) -> None:
    builds = [(version, entry) for version, entry in raw_builds("linux-x86_64", (3, 11)) if version == release]
    for card in CARDS:
        for branch in BRANCHES:
            choice = choose(driver=f"{branch}.999", capabilities=[card], python=(3, 11), torch=release)
            fitting = {entry["build"] for _, entry in builds if fits(entry, card, branch)}
            if choice.torch_version and not choice.needs_driver:
                assert choice.torch_version == release
                assert choice.build in fitting, (card, branch)
            else:
                assert not fitting, (card, branch, choice)


def test_required_driver_is_the_oldest_that_helps() -> None:
    for card in CARDS:
        for branch in BRANCHES:
            choice = choose(driver=f"{branch}.0", capabilities=[card])
            if not choice.needs_driver:
                continue
            after = choose(driver=f"{choice.needs_driver}.999", capabilities=[card])
            assert (after.torch_version, after.needs_driver) == (choice.torch_version, ""), (card, branch)
            required = number(choice.needs_driver)
            assert (choice.direction == "newer") == (required > (branch, 0)), (card, branch)
            lower = [other for other in BRANCHES if other < required[0]]
            if choice.direction == "newer" and lower:
                assert choose(driver=f"{lower[-1]}.999", capabilities=[card]).needs_driver, (card, branch)


def test_old_gpu_with_a_new_driver_gets_a_build_with_code_for_it() -> None:
    choice = choose(driver="580.65.06", capabilities=[(6, 1)])  # GTX 1080
    assert (choice.torch_version, choice.index_url, choice.how_sure) == ("2.15.0", f"{INDEX}/cu126", "seen")
    assert "no code for capability 6.1" in choice.reason


def test_new_gpu_with_an_old_driver_needs_a_newer_driver() -> None:
    choice = choose(driver="550.54.14", capabilities=[(12, 0)])  # RTX 5090
    assert (choice.direction, choice.needs_driver, choice.build) == ("newer", "570", "cu128")
    assert "Driver 550.54.14 is too old for capability 12.0: install 570 or newer." in choice.reason
    assert "torch 2.15.0 cu132 runs with driver 580.65.06 or newer." in choice.reason


@each(
    ("driver", "card", "torch", "build", "pypi"),
    [
        ("470.82.01", (3, 7), "2.3.1", "cu118", False),  # newer ones have cuDNN 9, which dropped Kepler
        ("580.65.06", (5, 2), "2.15.0", "cu126", False),
        ("535.54.03", (7, 0), "2.15.0", "cu126", False),
        ("535.54.03", (8, 6), "2.15.0", "cu126", False),
        ("580.65.06", (7, 5), "2.15.0", "cu132", True),
        ("580.159.04", (9, 0), "2.15.0", "cu132", True),
        ("470.82.01", (8, 6), "2.7.1", "cu118", False),
        ("570.124.06", (10, 0), "2.11.0", "cu128", False),
        ("595.58.03", (12, 1), "2.15.0", "cu132", True),
    ],
)
def test_choice_for_common_gpus_and_drivers(
    driver: str, card: tuple[int, int], torch: str, build: str, pypi: bool
) -> None:
    choice = choose(driver=driver, capabilities=[card])
    assert (choice.torch_version, choice.build, choice.index_url == "") == (torch, build, pypi)
    assert choice.needs_driver == ""


def test_build_that_was_not_examined_is_only_stated() -> None:
    assert choose(driver="470.82.01", capabilities=[(3, 7)], python=(3, 11)).how_sure == "stated"


@each(("driver", "card", "branch"), [("595.58.03", (6, 1), "580"), ("580.65.06", (3, 7), "470")])
def test_older_driver_is_needed_if_the_driver_dropped_the_gpu(driver: str, card: tuple[int, int], branch: str) -> None:
    choice = choose(driver=driver, capabilities=[card])
    assert (choice.direction, choice.needs_driver) == ("older", branch)
    assert f"install one of branch {branch}" in choice.reason


def test_build_and_driver_must_support_all_gpus() -> None:
    choice = choose(driver="580.65.06", capabilities=[(8, 9), (6, 1), (8, 9)])
    assert (choice.torch_version, choice.build) == ("2.15.0", "cu126")
    choice = choose(driver="580.65.06", capabilities=[(6, 1), (12, 0)])
    assert choice.torch_version == ""
    assert "No build of torch since 1.13.0 has code for all of capability 6.1 and 12.0." in choice.reason
    choice = choose(driver="470.82.01", capabilities=[(3, 7), (9, 0)])
    assert choice.torch_version == ""
    assert choice.reason.startswith("No driver supports all of capability 3.7 and 9.0")
    # an unknown driver might support both
    assert choose(driver="", capabilities=[(3, 7), (9, 0)]).torch_version == "2.3.1"


def test_cuda_version_from_the_driver_wins_over_its_release() -> None:
    assert choose(driver="550.54.14", driver_cuda=13000, capabilities=[(8, 6)]).build == "cu132"
    assert choose(driver="580.65.06", driver_cuda=12080, capabilities=[(8, 6)]).build == "cu126"
    assert choose(driver="", driver_cuda=12020, capabilities=[(8, 6)]).build == "cu126"


def test_driver_that_lists_the_gpu_supports_it() -> None:
    assert choose(driver="550.54.14", capabilities=[(12, 0)], driver_sees_cards=True).needs_driver == ""
    assert choose(driver="595.58.03", capabilities=[(6, 1)], driver_sees_cards=True).needs_driver == ""


def test_windows_gets_cuda_builds_from_the_index() -> None:
    choice = choose(driver="581.29", capabilities=[(8, 9)], platform="windows")
    assert (choice.torch_version, choice.index_url) == ("2.15.0", f"{INDEX}/cu130")
    assert "PyPI has no CUDA" in choice.reason
    choice = choose(driver="581.29", capabilities=[(6, 1)], platform="windows")  # 581 is a driver of branch 580
    assert (choice.build, choice.needs_driver) == ("cu126", "")


def test_arm_uses_the_index_before_2_11_and_pypi_since() -> None:
    arm = partial(choose, driver="580.65.06", capabilities=[(9, 0)], platform="linux-aarch64")
    assert arm(torch="2.10.0").index_url == f"{INDEX}/cu128"
    assert arm(torch="2.11.0").index_url == ""
    assert arm(torch="2.4.1").reason == "There is no CUDA build of torch 2.4.1 for linux-aarch64."


@each(("python", "torch"), [((3, 8), "2.4.1"), ((3, 9), "2.8.0"), ((3, 10), "2.14.1"), ((3, 15), "2.15.0")])
def test_python_version_limits_the_release(python: tuple[int, int], torch: str) -> None:
    assert choose(driver="580.65.06", capabilities=[(8, 6)], python=python).torch_version == torch


def test_free_threaded_python_gets_a_release_with_wheels_for_it() -> None:
    choice = choose(driver="580.65.06", capabilities=[(8, 6)], python=(3, 13), free_threaded=True)
    assert choice.torch_version == "2.12.0"


@each(
    ("facts", "reason"),
    [
        ({"capabilities": [(3, 5)]}, "No build of torch since 1.13.0 has code for capability 3.5."),
        ({"capabilities": [(7, 2)]}, "NVIDIA has wheels of its own for Jetson boards."),
        ({"capabilities": [(99, 0)]}, "No build of torch since 1.13.0 has code for capability 99.0."),
        ({"python": (3, 16)}, "has wheels for Python 3.16. torch 2.15.0 has them for Python 3.11 to 3.15."),
        ({"platform": "macos-arm64"}, "There is no CUDA build of torch for macos-arm64."),
        ({"python": (3, 12), "free_threaded": True}, "has wheels for Python 3.12t."),
    ],
)
def test_reason_says_why_there_is_no_wheel(facts: dict[str, Any], reason: str) -> None:
    usual: dict[str, Any] = {"driver": "580.65.06", "capabilities": [(8, 6)]}
    choice = choose(**usual | facts)
    assert (choice.torch_version, choice.build, choice.index_url) == ("", "", "")
    assert reason in choice.reason


def test_unknown_driver_or_gpu_makes_the_choice_a_guess() -> None:
    choice = choose(driver="", capabilities=[(8, 6)])
    assert (choice.build, choice.how_sure) == ("cu132", "guess")
    assert "The driver is not known: it must be 580.65.06 or newer." in choice.reason
    choice = choose(driver="535.54.03", capabilities=[])
    assert (choice.build, choice.how_sure) == ("cu126", "guess")
    assert "The card is not known" in choice.reason
