"""The wheel that fits the driver, the cards, the platform and the Python of a machine, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from transload.diagnose.tables import (
    INDEX,
    PLATFORMS,
    TEGRA,
    Build,
    Capability,
    Sure,
    Version,
    branch_of,
    branch_of_cuda,
    cuda_of_branch,
    cuda_text,
    default_build,
    driver_floor,
    first_branch,
    generation_of,
    index_builds,
    numbers_of,
    parse_version,
    releases,
)


@dataclass(frozen=True, slots=True)
class WheelChoice:
    """A wheel, or why there is none.

    ``torch_version`` is empty where no wheel exists for these cards, this Python or this platform. ``index`` is empty
    for PyPI. ``needs_driver`` is empty if the present driver will do; otherwise the driver has to change first:
    ``direction`` says if to a ``newer`` one (``needs_driver`` or later) or an ``older`` one (of that branch).
    ``reason`` is whole sentences.
    """

    torch_version: str
    build: str
    index: str
    reason: str
    needs_driver: str = ""
    direction: Literal["", "newer", "older"] = ""
    how_sure: Sure = "guess"


def choose_wheel(
    *,
    driver: str | None,
    driver_cuda: int | None,
    capabilities: Sequence[Capability],
    platform: str,
    python: tuple[int, int],
    torch: str | None = None,
    driver_sees_cards: bool = False,
) -> WheelChoice:
    """The newest torch that has code for every card, runs with the driver, and has wheels for Python and platform.

    ``driver`` is its version and ``driver_cuda`` what ``cuDriverGetVersion`` returned, which wins; either may be None,
    not known, and so is a text that is not a version. ``torch`` limits the choice to a release (``2.13.0``, or ``2.13``
    for any of its patches). ``driver_sees_cards`` is for a driver that named the cards itself: then no table says that
    it cannot drive them.

    >>> from functools import partial
    >>> choose = partial(choose_wheel, driver_cuda=None, platform="linux-x86_64", python=(3, 12))
    >>> choice = choose(driver="580.65.06", capabilities=[(6, 1)])
    >>> choice.torch_version, choice.index
    ('2.15.0', 'https://download.pytorch.org/whl/cu126')
    >>> choice = choose(driver="550.54.14", capabilities=[(12, 0)])
    >>> choice.direction, choice.needs_driver, choice.torch_version, choice.build
    ('newer', '570', '2.11.0', 'cu128')
    """
    cards = tuple(sorted(set(capabilities)))
    known = driver if driver and numbers_of(driver) else ""
    return _choice(_Target(known, driver_cuda or 0, cards, platform, python, driver_sees_cards), torch)


@dataclass(frozen=True)
class _Target:
    """The facts that decide: an empty ``driver`` and a ``driver_cuda`` of 0 are not known, no cards neither."""

    driver: str
    driver_cuda: int
    cards: tuple[Capability, ...]
    platform: str
    python: Version
    driver_sees_cards: bool

    @property
    def driver_known(self) -> bool:
        """Whether anything is known of the driver."""
        return bool(self.driver or self.driver_cuda)

    @cached_property
    def branch(self) -> int:
        """The driver's branch; 0 if not known."""
        if self.driver:
            return branch_of(self.driver)
        return branch_of_cuda(cuda_text(self.driver_cuda)) if self.driver_cuda else 0

    @cached_property
    def first(self) -> int:
        """The first branch that drives all the cards."""
        return max(map(first_branch, self.cards), default=0)

    @cached_property
    def last(self) -> int:
        """The last branch that drives all the cards; 0 if there is no last one."""
        return min(filter(None, map(_last_branch, self.cards)), default=0)

    @property
    def too_new(self) -> bool:
        """Whether the driver no longer drives one of the cards."""
        return not self.driver_sees_cards and 0 < self.last < self.branch

    def needed_by(self, build: Build) -> str:
        """The least driver that runs a build, on whatever card."""
        return driver_floor(build.cuda, "windows" if self.platform.startswith("windows") else "linux")

    def floor(self, build: Build) -> str:
        """The least driver that runs a build on these cards."""
        first = 0 if self.driver_sees_cards else self.first
        return max(self.needed_by(build), str(first), key=parse_version)

    def drives(self, build: Build) -> bool:
        """Whether the driver runs a build on these cards; a driver that is not known is believed to."""
        if not self.driver_known:
            return True
        if not self.driver_sees_cards and (self.branch < self.first or self.too_new):
            return False
        if self.driver_cuda:  # the runtime itself asks for no more than the driver's major version
            return self.driver_cuda // 1000 >= parse_version(build.cuda)[0]
        return parse_version(self.driver) >= parse_version(self.needed_by(build))

    def best(self, builds: Iterable[Build]) -> Build:
        """The newest release; of its builds PyPI's, else one no newer than the driver's CUDA, else the usual one."""
        announced = cuda_text(self.driver_cuda) if self.driver_cuda else cuda_of_branch(self.branch)

        def merit(build: Build) -> tuple[Version, bool, bool, bool, Version]:
            usual = default_build(build.torch, "linux-x86_64")
            cuda = parse_version(build.cuda)
            native = not announced or cuda <= parse_version(announced)
            same = usual is not None and usual.build == build.build
            return parse_version(build.torch), build.on_pypi, native, same, cuda

        return max(builds, key=merit)


def _last_branch(card: Capability) -> int:
    """The last branch that drives a card; 0 if there is no last one."""
    found = generation_of(card)
    return found.last_branch if found else 0


@lru_cache(maxsize=64)  # the fix of one finding asks several times, and so do several findings
def _choice(target: _Target, torch: str | None) -> WheelChoice:
    cards, wanted = target.cards, releases()
    if torch is not None:
        numbers = numbers_of(torch)
        wanted = tuple(each for each in wanted if numbers and parse_version(each)[: len(numbers)] == numbers)
    here = [build for release in wanted for build in index_builds(release, target.platform) if build.archs]
    with_code = [build for build in here if all(build.supports_card(card) for card in cards)]
    usable = [build for build in with_code if build.supports_python(target.python)]
    # no driver runs a build that is too new for one card and too old for another
    possible = [each for each in usable if not target.last or branch_of(target.floor(each)) <= target.last]
    fitting = [build for build in usable if target.drives(build)]
    if not fitting and not possible:
        return WheelChoice("", "", "", _no_wheel(target, wanted, torch or "", here, with_code))
    needs, change = "", ""
    direction: Literal["", "newer", "older"] = ""
    if fitting:
        best = target.best(fitting)
        more = [_why_not_pypi(target, best)]
        if not target.driver_known:
            more.append(f"The driver is not known: it must be {target.floor(best)} or newer.")
        if not cards:
            more.append("The card is not known: the wheel is chosen by the driver alone.")
    else:
        if target.too_new:
            direction, needs, best = "older", str(target.last), target.best(possible)
            dropped = tuple(card for card in cards if 0 < _last_branch(card) < target.branch)
            change = f"Drivers after branch {needs} do not support {_names(dropped)}: install one of branch {needs}."
        else:
            least = min(branch_of(target.floor(build)) for build in possible)
            best = target.best(build for build in possible if branch_of(target.floor(build)) == least)
            direction, needs = "newer", target.floor(best)
            cuda = f"The driver, for CUDA {cuda_text(target.driver_cuda)},"
            present = f"Driver {target.driver}" if target.driver else cuda
            change = f"{present} is too old for {_names(cards)}: install {needs} or newer."
        more = []
        # a newer torch, or PyPI's, that only another driver would run
        newest = replace(target, driver="", driver_cuda=0).best(possible)
        floor = target.floor(newest)
        if newest != best and parse_version(floor) > parse_version(target.floor(best)):
            more.append(f"torch {newest.torch} {newest.build} runs with driver {floor} or newer.")
        if set(cards) & TEGRA:
            more.append("On a Jetson board the driver comes with JetPack, for which NVIDIA has wheels of its own.")
    code = f"has code for {_names(cards)} and " if cards else ""
    runs = f"torch {best.torch} {best.build} {code}needs driver {target.floor(best)} or newer."
    index = "" if best.on_pypi else f"{INDEX}/{best.build}"
    certain = target.driver_known and cards and not set(cards) & TEGRA
    reason = " ".join(filter(None, (change, runs, *more)))
    return WheelChoice(best.torch, best.build, index, reason, needs, direction, best.sure if certain else "guess")


def _no_wheel(target: _Target, wanted: Sequence[str], torch: str, here: list[Build], with_code: list[Build]) -> str:
    """Which side has to give way."""
    platform, names = target.platform, _names(target.cards)
    if not wanted:
        return f"torch {torch} is not in the table, which goes from {releases()[0]} to {releases()[-1]}."
    if not here and platform.startswith("macos"):
        return "There is no CUDA on macOS: torch uses the GPU there as the device mps."
    if not here:
        known = "" if platform in PLATFORMS else f"; wheels are for {', '.join(PLATFORMS)}"
        return f"There is no CUDA build of {f'torch {torch}' if torch else 'torch'} for {platform}{known}."
    if not with_code:
        since = f"of torch {torch}" if torch else f"of torch since {releases()[0]}"
        if len(target.cards) > 1:
            hint = "Show torch one kind of card with CUDA_VISIBLE_DEVICES, with an environment for each kind."
            return f"No build {since} has code for all of {names}. {hint}"
        board = " NVIDIA has wheels of its own for Jetson boards." if set(target.cards) & TEGRA else ""
        return f"No build {since} has code for {names}.{board}"
    if not any(build.supports_python(target.python) for build in with_code):
        newest = target.best(with_code)
        has = f"torch {newest.torch} has them for Python {_dotted(newest.python[0])} to {_dotted(newest.python[1])}."
        return f"No torch with code for {names} has wheels for Python {_dotted(target.python)}. {has}"
    return f"No driver supports all of {names} and a torch with code for them."


def _why_not_pypi(target: _Target, chosen: Build) -> str:
    default = default_build(chosen.torch, target.platform)
    if chosen.on_pypi or default is None:
        return ""
    if not default.archs:
        return "The wheel on PyPI has no CUDA on this platform."
    missing = tuple(card for card in target.cards if not default.supports_card(card))
    if missing:
        return f"The wheel on PyPI, {default.build}, has no code for {_names(missing)}."
    return f"The wheel on PyPI, {default.build}, needs driver {target.floor(default)} or newer."


def _names(cards: Sequence[Capability]) -> str:
    """``capability 6.1 and 12.0``."""
    texts = [_dotted(card) for card in cards]
    return f"capability {' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1])))}" if texts else "this card"


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
