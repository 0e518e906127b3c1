"""What is known about drivers, chips, torch builds and result codes, and which wheel fits a machine.

The data is in the JSON files here, with sources and dates; the fixes of each cause are in ``steps.md``, and more about
it is in docs/doctor/CODE.md.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, partial
from typing import Any, Literal, cast

from transload.findings import manual_page, packaged
from transload.frozen import NamedTuple
from transload.steps import Step, listed, sections

Version = tuple[int, ...]
Capability = Version
Sure = Literal["seen", "stated", "guess"]
System = Literal["linux", "windows"]

INDEX = "https://download.pytorch.org/whl"
CUDA_LIBRARY = re.compile(
    r"lib(?:(?P<stem>cudart|cublas(?:Lt)?|cudnn\w*|cufft|cufile|cupti|curand|cusolver|cusparse(?:Lt)?|cudss|cutensor|nccl"
    r"|npp\w*|nvJitLink|nvToolsExt|nvtx3interop|nvrtc(?:-builtins)?|nvshmem_host|nvjpeg)"
    r"|caffe2_nvrtc|cufftw|cusolverMg|cutensorMg|nvblas|nvfatbin|nvvm)(?:-[0-9a-f]{8})?\.so.*"
)
"""Names of NVIDIA's CUDA libraries, without those of the driver, libcuda and libnvidia-*. A ``stem`` has a wheel."""
BUILD = re.compile(r"cu\d+|cpu|xpu|rocm[\d.]+")
"""The local version of a torch that PyTorch's own index has, in a folder of that name."""
_VERSION = re.compile(r"\s*\d{1,18}(?!\d)(?:\.\d{1,18}(?!\d))*", re.ASCII)


@cache
def table(name: str) -> dict[str, Any]:
    """A JSON file of this package, which may be inside a zip; cached."""
    import json

    return cast(dict[str, Any], json.loads(packaged(__package__, f"{name}.json")))


@cache
def steps() -> dict[str, list[Step]]:
    """The steps in each section of ``steps.md``, by each name in its heading."""
    pages = ((name, text) for names, text in sections(packaged(__package__, "steps.md")) for name in names.split(", "))
    return {name: [step for block in text.strip().split("\n\n") for step in listed(block)] for name, text in pages}


@cache
def word_lists() -> dict[str, dict[str, None]]:
    """The words in each section of ``words.md``, in order."""
    return {heading: dict.fromkeys(text.split()) for heading, text in sections(packaged(__package__, "words.md"))}


@lru_cache(maxsize=512)
def numbers_of(text: str) -> Version:
    """The leading numbers of a version, for comparing; empty if it is not a version.

    >>> numbers_of("580.65.06"), numbers_of("2.13.0+cu130"), numbers_of("N/A")
    ((580, 65, 6), (2, 13, 0), ())
    """
    version = _VERSION.match(text)
    return tuple(map(int, version[0].split("."))) if version else ()


# -- the page of each cause, which has its title; ``doctor --explain`` prints it, ``explain`` quotes it

_MARKUP = r"`([^`]*)`|\\([\\*_<\[`])|&(lt);|\[([^\]]*)\]\([^)]*\)|<(https?://[^>]*)>"


def page(code: str, platform: str = sys.platform) -> str:
    """The Markdown of a cause's page. On Windows, a section that ends with its name replaces the general one."""
    head, *others = manual_page(f"doctor/{code}").split("\n## ")
    sections = {heading: text for heading, _, text in (part.partition("\n") for part in others)}
    text, fix = sections.pop("On Windows", ""), sections.pop("Fix on Windows", "")
    if text and platform == "win32":
        head, sections["Fix"] = "\n\n".join((*head.split("\n\n")[:2], text.strip("\n"), "")), fix
    return "\n## ".join((head, *(f"{heading}\n{text}" for heading, text in sections.items())))


@cache
def title(code: str) -> str:
    """What a cause is, in the words that follow its code in the first line of its page."""
    return page(code).partition("\n")[0].partition(": ")[2]


def parts(markdown: str) -> Iterator[tuple[str, str]]:
    r"""What a page is made of: its ``title``, a ``heading``, a ``prose`` paragraph, an ``item`` of a list, or ``code``.

    >>> list(parts("# U04: a `stub`\n\nTwo\nlines.\n\n- <https://a.b>\n\n    $ ls\n"))
    [('title', 'U04: a stub'), ('prose', 'Two lines.'), ('item', 'https://a.b'), ('code', '$ ls')]
    """
    for_the_site = "[All causes](README.md)\n"
    for block in re.split(r"\n{2,}", markdown.removesuffix(for_the_site).strip("\n")):
        if block.startswith("    "):
            yield "code", block[4:].replace("\n    ", "\n")
        elif block.startswith("- "):
            for item in re.split(r"\n?^- ", block, flags=re.MULTILINE)[1:]:
                yield "item", _plain(item)
        else:
            mark, _, text = block.partition(" ")
            kind = {"#": "title", "##": "heading"}.get(mark, "prose")
            yield kind, _plain(block if kind == "prose" else text)


def _plain(text: str) -> str:
    def shown(match: re.Match[str]) -> str:
        return "<" if match[3] else next(group for group in match.groups() if group is not None)

    return re.sub(_MARKUP, shown, " ".join(text.split()))


def fix(code: str) -> str:
    """What a page says to do, as one line of text."""
    section = page(code).partition("\n## Fix\n")[2].partition("\n## ")[0]
    return " ".join(" ".join(text.split()) for _, text in parts(section))


# -- result codes


class Result(NamedTuple):
    """The name and the text of a result code; both are empty for a code that is not in the table."""

    name: str = ""
    text: str = ""


def result(library: Literal["cuda", "nvml"], code: int) -> Result:
    """A result code of NVML or the CUDA driver, with the text that torch prints. A few codes are the runtime's.

    >>> result("cuda", 802).name, result("cuda", 802).text, result("cuda", 35).name
    ('CUDA_ERROR_SYSTEM_NOT_READY', 'system not yet initialized', 'cudaErrorInsufficientDriver')
    >>> result("nvml", 18).name, result("nvml", 12345)
    ('NVML_ERROR_LIB_RM_VERSION_MISMATCH', Result(name='', text=''))
    """
    return Result(**table("results")[library].get(str(code), {}))


# -- which chip an NVIDIA PCI device id is

# A chip has a block of this many ids: neighbours that are farther apart say nothing about the ids between them.
_BLOCK = 0x80


class Chip(NamedTuple):
    """The chip of a device id: code name, generation and capability (empty if not published).

    ``inferred`` means that no list has the id, but its neighbours on both sides agree; ``code`` then names both.
    """

    code: str
    generation: str
    capability: Capability
    inferred: bool = False


def _ids(runs: str) -> Iterator[int]:
    for run in runs.split():
        first, _, last = run.partition("-")
        yield from range(int(first, 16), int(last or first, 16) + 1)


@cache
def chips() -> dict[int, Chip]:
    """The chip of every device id in the table, ascending."""
    by_device: dict[int, Chip] = {}
    for code, row in table("chips")["chips"].items():
        for device in _ids(row["ids"]):
            by_device[device] = Chip(code, row["generation"], numbers_of(row["capability"]))
    return dict(sorted(by_device.items()))


def chip_of(device_id: int) -> Chip | None:
    """The chip of a PCI device id of vendor 0x10de; ``None`` if it is unknown."""
    by_device = chips()
    if device_id in by_device:
        return by_device[device_id]
    order = list(by_device)
    at = bisect(order, device_id)
    if not 0 < at < len(order) or order[at] - order[at - 1] > _BLOCK:
        return None
    below, above = by_device[order[at - 1]], by_device[order[at]]
    if below.generation != above.generation:
        return None
    code = below.code if below.code == above.code else f"{below.code} or {above.code}"
    capability = below.capability if below.capability == above.capability else ()
    return Chip(code, below.generation, capability, inferred=True)


def is_data_centre(name: str) -> bool:
    """Whether the name of a card, from NVML or ``/proc/driver/nvidia/gpus``, is that of a data-center product."""
    names = table("chips")["data_centre_names"]
    words = re.split(r"[\s/-]+", name.strip().removeprefix("NVIDIA").strip())
    return words[0] in (*names["first_words"], *names["models"]) or name.strip().endswith(tuple(names["endings"]))


def is_listed(device_id: int, among: Literal["nvswitches", "intel_cards", "intel_processors"]) -> bool:
    """Whether a PCI device id of that vendor is in this list. A machine with NVSwitches needs the fabric manager."""
    return device_id in set(_ids(table("chips")[among]))


# -- which driver a CUDA version and a GPU generation need


class Generation(NamedTuple):
    """A GPU generation: the last driver branch that supports it (0: all do), and whether the open module can."""

    name: str
    last_branch: int
    open_module: Literal["impossible", "possible", "required"]
    sure: Sure


def driver_floor(cuda: str, system: System = "linux") -> str:
    """The oldest driver that runs a wheel built with this CUDA version; empty if it is not in the table.

    Since CUDA 11 a driver for the same major version is enough.

    >>> driver_floor("12.8"), driver_floor("13.2"), driver_floor("12.8", "windows"), driver_floor("10.2")
    ('525.60.13', '580.65.06', '528.33', '440.33')
    """
    floors = {row["cuda"]: str(row[system]) for row in table("drivers")["families"]}
    numbers = cuda.split(".")
    return floors.get(numbers[0]) or floors.get(".".join(numbers[:2]), "")


def toolkit_driver(cuda: str, system: System = "linux") -> str:
    """The driver that a toolkit came with, which its PTX and newest features need; empty if none was published.

    A third number up to 9 is an update of the toolkit; a larger one is the build of a library, and is ignored.

    >>> toolkit_driver("12.8"), toolkit_driver("12.8.1"), toolkit_driver("12.8.90"), toolkit_driver("13.4")
    ('570.26', '570.124.06', '570.26', '')
    """
    numbers = numbers_of(cuda)
    update = numbers[2] if len(numbers) > 2 and numbers[2] < 10 else 0
    rows = (row for row in table("drivers")["toolkits"] if numbers_of(row["cuda"]) == numbers[:2])
    drivers = [str(row[system]) for row in rows if row["update"] <= update]
    return drivers[-1] if drivers else ""


@cache
def _branches() -> dict[int, str]:
    """Driver branch → the CUDA version it supports, ascending."""
    return {row["branch"]: row["cuda"] for row in table("drivers")["branches"]}


def branch_of(driver: str) -> int:
    """The branch of a driver version; 0 if it is too old. On Windows its number may be higher than the branch's.

    >>> branch_of("580.65.06"), branch_of("581.29"), branch_of("550.54.14")
    (580, 580, 550)
    """
    listed = tuple(_branches())
    at = bisect(listed, (numbers_of(driver) or (0,))[0])
    return listed[at - 1] if at else 0


def driver_runs(driver_cuda: int, built_with: Version) -> bool:
    """Whether a driver runs what was built with a CUDA version: from 11 on the same major version suffices.

    >>> driver_runs(12000, (12, 8)), driver_runs(12080, (13, 0)), driver_runs(10010, (10, 2))
    (True, False, False)
    """
    major, minor = built_with[:2]
    return driver_cuda // 1000 >= major if major >= 11 else driver_cuda >= major * 1000 + minor * 10


def cuda_text(number: int) -> str:
    """The result of ``cuDriverGetVersion`` as text.

    >>> cuda_text(12080), cuda_text(13000)
    ('12.8', '13.0')
    """
    return f"{number // 1000}.{number % 1000 // 10}"


@cache
def generation(name: str) -> Generation:
    """A generation by its name, which is that of a ``Chip``."""
    return next(Generation(**row) for row in table("drivers")["generations"] if row["name"] == name)


@cache
def branches(capability: Capability) -> tuple[int, int]:
    """The first and the last driver branch that support cards of this capability; 0 if there is none, or unknown."""
    rows = (row for row in table("drivers")["capabilities"] if numbers_of(row["capability"]) == capability)
    return next(((row["first_branch"], generation(row["generation"]).last_branch) for row in rows), (0, 0))


# -- which compiled code runs on which card

# Chips of Jetson and Drive boards. Before CUDA 13.2 they cannot run cubins for the cards of their generation.
TEGRA: frozenset[Capability] = frozenset({(5, 3), (6, 2), (7, 2), (8, 7)})
_TEGRA_WITH_DESKTOP_CODE: frozenset[Capability] = frozenset({(7, 2), (8, 7)})
_DESKTOP_CODE_FOR_TEGRA_SINCE = (13, 2)

_CODE = re.compile(r"(sm|compute)_([0-9]{1,4})([0-9])([af]?)")


@lru_cache(maxsize=4096)
def runs_on(code: str, capability: Capability, build_cuda: Version = ()) -> bool:
    """Whether code for an architecture (``sm_86``, ``sm_90a``, ``sm_100f``, ``compute_90``) runs on a card.

    A cubin runs on cards of its major version, from its minor version on, also with the suffix ``f`` (family); with
    ``a`` it runs on that chip only. PTX runs on newer cards if the driver can compile it. ``build_cuda`` is the CUDA
    version that the code was built with; if unknown, it counts as older than 13.2. Invalid names run nowhere.

    >>> runs_on("sm_86", (8, 9)), runs_on("sm_86", (8, 0)), runs_on("sm_90a", (9, 0)), runs_on("compute_90", (12, 0))
    (True, False, True, True)
    >>> runs_on("sm_80", (8, 7), (12, 6)), runs_on("sm_80", (8, 7), (13, 2)), runs_on("sm_101", (11, 0))
    (False, True, True)
    """
    parts = _CODE.fullmatch(code)
    if parts is None:
        return False
    # Thor was 10.1 until CUDA 13 renamed it
    built, card = ((11, 0) if level == (10, 1) else level for level in ((int(parts[2]), int(parts[3])), capability))
    same_family = built[0] == card[0] and built[1] <= card[1]
    if parts[4] == "a":
        return built == card
    if parts[1] == "compute" and not parts[4]:
        return built <= card
    if parts[1] == "sm" and (card in TEGRA or built in TEGRA) and built != card:
        shares = card in _TEGRA_WITH_DESKTOP_CODE and built not in TEGRA
        return shares and same_family and build_cuda >= _DESKTOP_CODE_FOR_TEGRA_SINCE
    return same_family


def covers(codes: Iterable[str], capability: Capability, build_cuda: Version = ()) -> bool:
    """Whether any of the architectures of a build runs on a card."""
    return any(runs_on(code, capability, build_cuda) for code in codes)


# -- the builds of each torch release, from PyPI and from the PyTorch index

Platform = Literal["linux-x86_64", "linux-aarch64", "windows", "macos-arm64", "macos-x86_64"]


class Build(NamedTuple):
    """One build of one release for one platform; ``sure`` is how the list of architectures is known.

    ``cuda`` is the CUDA version, empty for a build without CUDA; ``cudnn`` is empty if unknown.
    """

    torch: str
    build: str
    cuda: str
    archs: tuple[str, ...]
    on_pypi: bool
    python: tuple[Version, Version]
    free_threaded: tuple[str, ...]
    cudnn: str
    sure: Sure

    def supports_python(self, python: Version, *, free_threaded: bool = False) -> bool:
        """Whether the release has wheels for this version of CPython."""
        if free_threaded:
            return f"{_dotted(python[:2])}t" in self.free_threaded
        return self.python[0] <= python[:2] <= self.python[1]

    def supports_card(self, capability: Capability) -> bool:
        """Whether the build has code for a card, and a cuDNN that still runs on it."""
        if not covers(self.archs, capability, numbers_of(self.cuda)):
            return False
        floors, cudnn = table("torch_builds")["cudnn_floors"], numbers_of(self.cudnn)
        reached = (numbers_of(row["capability"]) for row in floors if cudnn >= numbers_of(row["cudnn"]))
        return all(capability >= floor for floor in reached)


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return {version: row for row in table("torch_builds")["releases"] for version in row["versions"]}


def releases() -> tuple[str, ...]:
    """The releases in the table, oldest first."""
    return tuple(_rows())


@lru_cache(maxsize=512)
def index_builds(torch_version: str, platform: str = "linux-x86_64") -> tuple[Build, ...]:
    """Every build of a release for a platform, those with CUDA first; none if the table lacks it.

    The release is ``2.13.0``, ``2.13.0+cu130``, or ``2.13`` for its newest.
    """
    wanted, rows = numbers_of(torch_version), _rows()
    same = (release for release in reversed(rows) if wanted and numbers_of(release)[: len(wanted)] == wanted)
    release = next(same, "")
    if not release:
        return ()
    row = rows[release]
    low, high = map(numbers_of, row.get("python_on", {}).get(platform) or row["python"])
    return tuple(
        Build(
            torch=release,
            build=entry["build"],
            cuda=".".join(entry.get("cuda", "").split(".")[:2]),
            archs=tuple(f"sm_{number}" for number in entry.get("archs", "").split()),
            on_pypi=row["pypi"].get(platform) == entry["build"],
            python=(low, high),
            free_threaded=tuple(row["free_threaded"]),
            cudnn=entry.get("cudnn", ""),
            sure=entry["sure"],
        )
        for entry in row["builds"] + row["others"]
        if platform in entry["on"]
    )


def build_of(torch_version: str, platform: str, build: str = "") -> Build | None:
    """One build by its name; without a name the one that a plain ``pip install torch==…`` installs from PyPI."""
    builds = index_builds(torch_version, platform)
    return next((candidate for candidate in builds if (candidate.build == build if build else candidate.on_pypi)), None)


def wheel_pythons(torch_version: str, platform: str) -> tuple[Version, Version] | None:
    """The oldest and the newest CPython for which PyPI has wheels of a release; ``None`` if it has none, or is unknown.

    >>> wheel_pythons("1.4.0", "linux-x86_64"), wheel_pythons("2.3.0", "macos-x86_64")
    (((3, 5), (3, 8)), None)
    """
    for row in table("torch_builds")["earlier"]:
        if torch_version in row["versions"] and platform in row["python_on"]:
            low, high = map(numbers_of, row["python_on"][platform])
            return low, high
    build = build_of(torch_version, platform) if torch_version in _rows() else None
    return build.python if build else None


def earlier_releases() -> tuple[str, ...]:
    """The releases before the first of ``releases()``, oldest first."""
    versions = (version for row in table("torch_builds")["earlier"] for version in row["versions"])
    return tuple(sorted(versions, key=numbers_of))


# -- the wheel that fits the driver, the cards, the platform and the Python of a machine


class WheelChoice(NamedTuple):
    """A wheel, or why there is none.

    ``torch_version`` is empty if no wheel exists for these cards, this Python or this platform; ``index_url`` is empty
    for PyPI. ``needs_driver`` is empty if the present driver works; otherwise it must be replaced first, by a ``newer``
    one (``needs_driver`` or later) or an ``older`` one (of that branch), as ``direction`` says. ``reason`` consists of
    whole sentences.
    """

    reason: str
    torch_version: str = ""
    build: str = ""
    index_url: str = ""
    needs_driver: str = ""
    direction: Literal["", "newer", "older"] = ""
    how_sure: Sure = "guess"


@lru_cache(maxsize=64)  # several findings need it, and each fix several times
def choose_wheel(
    *,
    driver: str,
    driver_cuda: int = 0,
    capabilities: tuple[Capability, ...],
    platform: Platform,
    python: Version,
    free_threaded: bool = False,
    torch: str = "",
    driver_sees_cards: bool = False,
) -> WheelChoice:
    """The newest torch that has code for every card, runs with the driver, and has wheels for Python and platform.

    ``driver`` is its version and ``driver_cuda`` what ``cuDriverGetVersion`` returned, which wins; the driver is
    unknown if that is 0 and ``driver`` is not a version. ``torch`` limits the choice to one of ``releases()``.
    ``driver_sees_cards`` means that the driver itself listed the cards, so that it supports them whatever the tables
    say.
    """
    cards = tuple(sorted(set(capabilities)))
    driver = driver if numbers_of(driver) else ""
    has_driver = bool(driver or driver_cuda)
    supports = cuda_text(driver_cuda) if driver_cuda else _branches().get(branch_of(driver), "")
    # without its version, the first branch that supports that CUDA version or a newer one
    newer = (branch for branch, cuda in _branches().items() if numbers_of(cuda) >= numbers_of(supports or "9999"))
    branch = branch_of(driver) if driver else next(newer, 0)
    # the branches that support all the cards: from ``first`` to ``last``, which is 0 if there is no last one
    first = max((branches(card)[0] for card in cards), default=0)
    last = min((branches(card)[1] for card in cards if branches(card)[1]), default=0)
    too_old, too_new = (not driver_sees_cards and wrong for wrong in (branch < first, 0 < last < branch))

    def floor(build: Build) -> str:
        """The oldest driver that runs a build on these cards."""
        system: System = "windows" if platform.startswith("windows") else "linux"
        return max(driver_floor(build.cuda, system), "0" if driver_sees_cards else str(first), key=numbers_of)

    def runs(build: Build) -> bool:
        """Whether the driver runs a build on these cards; an unknown driver is assumed to."""
        if not has_driver or too_old or too_new:
            return not has_driver
        if driver_cuda:
            return driver_runs(driver_cuda, numbers_of(build.cuda))
        return numbers_of(driver) >= numbers_of(floor(build))

    def merit(build: Build, supports: str = supports) -> tuple[Version, bool, bool, bool, Version]:
        """Prefer the newest release: PyPI's build, else one no newer than the driver's CUDA, else the usual one."""
        usual, cuda = build_of(build.torch, "linux-x86_64"), numbers_of(build.cuda)
        native = not supports or cuda <= numbers_of(supports)
        same = usual is not None and usual.build == build.build
        return numbers_of(build.torch), build.on_pypi, native, same, cuda

    wanted = (torch,) if torch else releases()
    here = [build for release in wanted for build in index_builds(release, platform) if build.archs]
    with_code = [build for build in here if all(build.supports_card(card) for card in cards)]
    usable = [build for build in with_code if build.supports_python(python, free_threaded=free_threaded)]
    # no driver runs a build that is too new for one card and too old for another
    possible = [build for build in usable if not last or branch_of(floor(build)) <= last]
    fitting = [build for build in usable if runs(build)]
    if not here:
        return WheelChoice(f"There is no CUDA build of {f'torch {torch}'.strip()} for {platform}.")
    since = f"of torch {torch}" if torch else f"of torch since {releases()[0]}"
    if not with_code and len(cards) > 1:
        hint = "Make an environment for each kind of card, and show torch only that kind with CUDA_VISIBLE_DEVICES."
        return WheelChoice(f"No build {since} has code for all of {_names(cards)}. {hint}")
    if not with_code:
        board = " NVIDIA has wheels of its own for Jetson boards." if set(cards) & TEGRA else ""
        return WheelChoice(f"No build {since} has code for {_names(cards)}.{board}")
    if not usable:
        newest = max(with_code, key=merit)
        has = f"torch {newest.torch} has them for Python {_dotted(newest.python[0])} to {_dotted(newest.python[1])}."
        this = f"Python {_dotted(python)}{'t' if free_threaded else ''}"
        return WheelChoice(f"No torch with code for {_names(cards)} has wheels for {this}. {has}")
    if not fitting and not possible:
        return WheelChoice(f"No driver supports all of {_names(cards)} and a torch with code for them.")

    needs, change, more = "", "", ""
    direction: Literal["", "newer", "older"] = ""
    if fitting:
        chosen = max(fitting, key=merit)
        default = build_of(chosen.torch, platform)
        if default and not default.archs:
            more = "The wheel on PyPI has no CUDA on this platform."
        elif default and not chosen.on_pypi:
            lacks = tuple(card for card in cards if not default.supports_card(card))
            why = f"has no code for {_names(lacks)}" if lacks else f"needs driver {floor(default)} or newer"
            more = f"The wheel on PyPI, {default.build}, {why}."
        more += "" if has_driver else f" The driver is not known: it must be {floor(chosen)} or newer."
        more += "" if cards else " The card is not known: the wheel is chosen by the driver alone."
    else:
        if too_new:
            direction, needs, chosen = "older", str(last), max(possible, key=merit)
            dropped = tuple(card for card in cards if 0 < branches(card)[1] < branch)
            change = f"Drivers after branch {needs} do not support {_names(dropped)}: install one of branch {needs}. "
        else:
            least = min(branch_of(floor(build)) for build in possible)
            chosen = max((build for build in possible if branch_of(floor(build)) == least), key=merit)
            direction, needs = "newer", floor(chosen)
            present = f"Driver {driver}" if driver else f"The driver, for CUDA {supports},"
            change = f"{present} is too old for {_names(cards)}: install {needs} or newer. "
        newest = max(possible, key=partial(merit, supports=""))  # a newer torch, or PyPI's, that needs another driver
        if newest != chosen and numbers_of(floor(newest)) > numbers_of(floor(chosen)):
            more = f"torch {newest.torch} {newest.build} runs with driver {floor(newest)} or newer."
        if set(cards) & TEGRA:
            more += " On a Jetson board the driver comes with JetPack, for which NVIDIA has wheels of its own."
    code = f"has code for {_names(cards)} and " if cards else ""
    reason = f"{change}torch {chosen.torch} {chosen.build} {code}needs driver {floor(chosen)} or newer. {more.strip()}"
    index = "" if chosen.on_pypi else f"{INDEX}/{chosen.build}"
    sure = chosen.sure if has_driver and cards and not set(cards) & TEGRA else "guess"
    return WheelChoice(reason.rstrip(), chosen.torch, chosen.build, index, needs, direction, sure)


def _names(cards: tuple[Capability, ...]) -> str:
    """``capability 6.1 and 12.0``."""
    texts = [_dotted(card) for card in cards]
    return f"capability {' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1])))}" if texts else "this card"


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
