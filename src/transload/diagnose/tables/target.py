"""A machine as a wheel sees it: which builds it can use, and which its driver runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transload.diagnose.tables._data import Capability, System, Version, parse_version
from transload.diagnose.tables.builds import Build, default_build, index_builds
from transload.diagnose.tables.drivers import (
    branch_of,
    branch_of_cuda,
    cuda_of_branch,
    cuda_text,
    driver_floor,
    first_branch,
    generation_of,
)

__all__ = ["Target", "best_build", "cuda_builds"]


@dataclass(frozen=True, slots=True)
class Target:
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
