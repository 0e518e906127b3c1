"""The wheel that fits the driver, the cards, the platform and the Python of a machine, all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from transload.diagnose.tables import (
    INDEX,
    PLATFORMS,
    TEGRA,
    Build,
    Capability,
    Sure,
    System,
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

__all__ = ["Alternative", "WheelChoice", "choose_wheel"]


class Target(NamedTuple):
    """The facts that decide: an empty ``driver`` and a ``driver_cuda`` of 0 are not known, no cards neither.

    ``driver_cuda`` is what ``cuDriverGetVersion`` returned. ``driver_sees_cards`` is true of a driver that named the
    cards itself: then no table may say that it cannot drive them.
    """

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

    @property
    def system(self) -> System:
        """Which column of the driver tables holds."""
        return "windows" if self.platform.startswith("windows") else "linux"

    @property
    def branch(self) -> int:
        """The driver's branch; 0 if not known."""
        if self.driver:
            return branch_of(self.driver)
        return branch_of_cuda(cuda_text(self.driver_cuda)) if self.driver_cuda else 0

    @property
    def cuda(self) -> Version:
        """The CUDA the driver announces; empty if not known."""
        text = cuda_text(self.driver_cuda) if self.driver_cuda else cuda_of_branch(self.branch)
        return parse_version(text) if text else ()

    @property
    def first_branch(self) -> int:
        """The first branch that drives all the cards."""
        return max((first_branch(card) for card in self.cards), default=0)

    @property
    def last_branch(self) -> int:
        """The last branch that drives all the cards; 0 if there is no last one."""
        found = (generation_of(card) for card in self.cards)
        return min((each.last_branch for each in found if each and each.last_branch), default=0)

    @property
    def too_new(self) -> bool:
        """Whether the driver no longer drives one of the cards."""
        return not self.driver_sees_cards and 0 < self.last_branch < self.branch

    def dropped(self) -> tuple[Capability, ...]:
        """The cards that the driver no longer drives."""
        found = ((card, generation_of(card)) for card in self.cards)
        return tuple(card for card, each in found if each and 0 < each.last_branch < self.branch)

    def floor(self, build: Build) -> str:
        """The least driver that runs a build on these cards."""
        first = 0 if self.driver_sees_cards else self.first_branch
        return max(driver_floor(build.cuda, self.system), str(first), key=parse_version)

    def can_use(self, build: Build) -> bool:
        """Whether the Python and every card can use a build, whatever the driver."""
        return build.supports_python(self.python) and self.has_code(build)

    def has_code(self, build: Build) -> bool:
        """Whether a build has code for every card."""
        return all(build.supports_card(card) for card in self.cards)

    def drives(self, build: Build) -> bool:
        """Whether the driver runs a build on these cards; a driver that is not known is believed to."""
        if not self.driver_known:
            return True
        seen = self.driver_sees_cards or (self.branch >= self.first_branch and not self.too_new)
        return seen and self._runs_cuda(build)

    def _runs_cuda(self, build: Build) -> bool:
        # The runtime itself asks for no more than the driver's major version.
        if self.driver_cuda:
            return self.driver_cuda // 1000 >= parse_version(build.cuda)[0]
        return parse_version(self.driver) >= parse_version(driver_floor(build.cuda, self.system))

    def has_driver_for(self, build: Build) -> bool:
        """Whether any driver runs a build on these cards: none does that is too new for one and too old for another."""
        return not self.last_branch or branch_of(self.floor(build)) <= self.last_branch


def cuda_builds(platform: str, releases: Iterable[str]) -> list[Build]:
    """The CUDA builds of some releases."""
    return [build for release in releases for build in index_builds(release, platform) if build.archs]


def best_build(target: Target, builds: Iterable[Build]) -> Build:
    """The newest release; of its builds PyPI's, else one no newer than the driver's CUDA, else the usual one."""

    def merit(build: Build) -> tuple[Version, bool, bool, bool, Version]:
        usual = default_build(build.torch, "linux-x86_64")
        cuda = parse_version(build.cuda)
        native = not target.cuda or cuda <= target.cuda
        return parse_version(build.torch), build.on_pypi, native, usual is not None and usual.build == build.build, cuda

    return max(builds, key=merit)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another wheel worth knowing of; ``why`` says when it is the better one."""

    torch_version: str
    build: str
    index: str
    why: str


@dataclass(frozen=True, slots=True)
class WheelChoice:
    """A wheel, or why there is none.

    ``torch_version`` is empty where no wheel exists for these cards, this Python or this platform. ``index`` is empty
    for PyPI. ``needs_driver`` is empty if the present driver will do; otherwise the driver has to change first:
    ``direction`` says if to a ``newer`` one (``needs_driver`` or later) or an ``older`` one (of that branch).
    ``floor`` is the least driver that runs this wheel on these cards. ``reason`` is whole sentences.
    """

    torch_version: str
    build: str
    index: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()
    needs_driver: str = ""
    direction: Literal["", "newer", "older"] = ""
    floor: str = ""
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
    target = Target(known, driver_cuda or 0, cards, platform, python, driver_sees_cards)
    wanted = _releases(torch)
    usable = [build for build in cuda_builds(platform, wanted) if target.can_use(build)]
    if fitting := [build for build in usable if target.drives(build)]:
        return _fitting(target, fitting, usable)
    if possible := [build for build in usable if target.has_driver_for(build)]:
        return _after_new_driver(target, possible)
    reason, alternatives = _no_wheel(target, wanted, torch or "")
    return WheelChoice("", "", "", reason, alternatives)


def _releases(torch: str | None) -> tuple[str, ...]:
    if torch is None:
        return releases()
    numbers = numbers_of(torch)
    return tuple(each for each in releases() if numbers and parse_version(each)[: len(numbers)] == numbers)


def _fitting(target: Target, fitting: list[Build], usable: list[Build]) -> WheelChoice:
    best = best_build(target, fitting)
    reason = [f"{_has_code(target, best)}.", _why_not_pypi(target, best)]
    if not target.driver_known:
        reason.append(f"The driver is not known: it must be {target.floor(best)} or newer.")
    if not target.cards:
        reason.append("The card is not known: the wheel is chosen by the driver alone.")
    others = (*_newest(target, best, usable), *_surest(target, best, fitting))
    return replace(_choice(target, best), reason=" ".join(filter(None, reason)), alternatives=others)


def _after_new_driver(target: Target, possible: list[Build]) -> WheelChoice:
    if target.too_new:
        needs = str(target.last_branch)
        best = best_build(target, possible)
        change = (
            f"Drivers after branch {needs} do not support {_names(target.dropped())}: install one of branch {needs}."
        )
    else:
        least = min(branch_of(target.floor(build)) for build in possible)
        best = best_build(target, [build for build in possible if branch_of(target.floor(build)) == least])
        needs = target.floor(best)
        change = f"{_driver(target)} is too old for {_names(target.cards)}: install {needs} or newer."
    newest = _newest(target, best, possible)
    more = [f"torch {each.torch_version} {each.build} runs {each.why}." for each in newest]
    if set(target.cards) & TEGRA:
        more.append("On a Jetson board the driver comes with JetPack, for which NVIDIA has wheels of its own.")
    return replace(
        _choice(target, best),
        reason=" ".join([change, f"{_has_code(target, best)}.", *more]),
        alternatives=newest,
        needs_driver=needs,
        direction="older" if target.too_new else "newer",
    )


def _choice(target: Target, build: Build) -> WheelChoice:
    certain = target.driver_known and target.cards and not set(target.cards) & TEGRA
    sure: Sure = build.sure if certain else "guess"
    return WheelChoice(build.torch, build.build, _index(build), "", floor=target.floor(build), how_sure=sure)


def _index(build: Build) -> str:
    return "" if build.on_pypi else f"{INDEX}/{build.build}"


def _alternative(build: Build, why: str) -> Alternative:
    return Alternative(build.torch, build.build, _index(build), why)


def _newest(target: Target, chosen: Build, usable: list[Build]) -> tuple[Alternative, ...]:
    """A newer torch, or PyPI's, that only another driver would run."""
    best = best_build(
        target._replace(driver="", driver_cuda=0), [each for each in usable if target.has_driver_for(each)]
    )
    if best == chosen or parse_version(target.floor(best)) <= parse_version(target.floor(chosen)):
        return ()
    return (_alternative(best, f"with driver {target.floor(best)} or newer"),)


def _surest(target: Target, chosen: Build, fitting: list[Build]) -> tuple[Alternative, ...]:
    """The newest one whose list of architectures was seen, if the chosen one's was not."""
    seen = [build for build in fitting if build.sure == "seen"]
    if chosen.sure == "seen" or not seen:
        return ()
    return (_alternative(best_build(target, seen), "known for certain to have code for these cards"),)


def _no_wheel(target: Target, wanted: tuple[str, ...], torch: str) -> tuple[str, tuple[Alternative, ...]]:
    """Which side has to give way, and what there is if it does."""
    here = cuda_builds(target.platform, wanted)
    with_code = [build for build in here if target.has_code(build)]
    if not wanted:
        return f"torch {torch} is not in the table, which goes from {releases()[0]} to {releases()[-1]}.", ()
    if not here:
        return _no_platform(target.platform, torch), ()
    if not with_code:
        return _no_code(target, torch)
    if not any(build.supports_python(target.python) for build in with_code):
        return _no_python(target, with_code)
    return f"No driver supports all of {_names(target.cards)} and a torch with code for them.", _each_card(target)


def _no_platform(platform: str, torch: str) -> str:
    if platform.startswith("macos"):
        return "There is no CUDA on macOS: torch uses the GPU there as the device mps."
    name = f"torch {torch}" if torch else "torch"
    known = "" if platform in PLATFORMS else f"; wheels are for {', '.join(PLATFORMS)}"
    return f"There is no CUDA build of {name} for {platform}{known}."


def _no_code(target: Target, torch: str) -> tuple[str, tuple[Alternative, ...]]:
    name = f"of torch {torch}" if torch else f"of torch since {releases()[0]}"
    if len(target.cards) > 1:
        hint = "Show torch one kind of card with CUDA_VISIBLE_DEVICES, with an environment for each kind."
        return f"No build {name} has code for all of {_names(target.cards)}. {hint}", _each_card(target)
    board = " NVIDIA has wheels of its own for Jetson boards." if set(target.cards) & TEGRA else ""
    return f"No build {name} has code for {_names(target.cards)}.{board}", ()


def _no_python(target: Target, with_code: list[Build]) -> tuple[str, tuple[Alternative, ...]]:
    newest = best_build(target, with_code)
    range_text = f"Python {_dotted(newest.python[0])} to {_dotted(newest.python[1])}"
    reason = f"No torch with code for {_names(target.cards)} has wheels for Python {_dotted(target.python)}."
    return f"{reason} torch {newest.torch} has them for {range_text}.", (_alternative(newest, f"with {range_text}"),)


def _each_card(target: Target) -> tuple[Alternative, ...]:
    """The best wheel for each card alone."""
    found = []
    for card in target.cards if len(target.cards) > 1 else ():
        alone = target._replace(cards=(card,))
        usable = [build for build in cuda_builds(target.platform, releases()) if alone.can_use(build)]
        if fitting := [build for build in usable if alone.drives(build)]:
            found.append(_alternative(best_build(alone, fitting), f"for {_names((card,))} alone"))
    return tuple(found)


def _why_not_pypi(target: Target, chosen: Build) -> str:
    default = default_build(chosen.torch, target.platform)
    if chosen.on_pypi or default is None:
        return ""
    if not default.archs:
        return "The wheel on PyPI has no CUDA on this platform."
    missing = tuple(card for card in target.cards if not default.supports_card(card))
    if missing:
        return f"The wheel on PyPI, {default.build}, has no code for {_names(missing)}."
    return f"The wheel on PyPI, {default.build}, needs driver {target.floor(default)} or newer."


def _has_code(target: Target, build: Build) -> str:
    code = f"has code for {_names(target.cards)} and " if target.cards else ""
    return f"torch {build.torch} {build.build} {code}needs driver {target.floor(build)} or newer"


def _driver(target: Target) -> str:
    return f"Driver {target.driver}" if target.driver else f"The driver, for CUDA {cuda_text(target.driver_cuda)},"


def _names(cards: Sequence[Capability]) -> str:
    """``capability 6.1 and 12.0``."""
    texts = [_dotted(card) for card in cards]
    return f"capability {' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1])))}" if texts else "this card"


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
