"""The whole of a transfer: facts, choice, lanes, and everything given back at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transload.io.pool import cores
from transload.loading.transfer.cached import cached_share
from transload.loading.transfer.choice import LITTLE, Choice, Facts, Settings, choose
from transload.loading.transfer.crew import work
from transload.loading.transfer.files import File
from transload.loading.transfer.host import HostLane, Sums
from transload.loading.transfer.memory import huge_pages_pay, in_huge_pages
from transload.loading.transfer.plan import Job, Want, jobs

if TYPE_CHECKING:
    from transload.io.sources import Source
    from transload.loading.transfer.driver import Driver

__all__ = ["bring"]

Place = Callable[[int], int]


def bring(  # noqa: PLR0913 - options by name
    sources: Sequence[Source],
    wants: Sequence[Want],
    place: Place,
    *,
    settings: Settings = Settings(),  # noqa: B008 - a named tuple does not change
    fresh: bool = True,
    tell: Callable[[int], None] | None = None,
    sums: Sums | None = None,
) -> Choice:
    """Bring wanted bytes into memory; how it was done.

    ``place`` gives the address for the want of an index; it is asked once for each, in the order of the file, and the
    memory must stay until this returns. ``fresh`` says that nobody has touched it yet. All devices but ``cpu`` must be
    CUDA devices, with an index. ``tell`` is called with numbers of bytes as they come; ``sums`` collects checksums.
    ``Ended`` names the want that a file is too short for. Whatever is raised, nothing is under way any more then.
    """
    files = [File(source) for source in sources]
    errand = _Errand(files, wants, place, sums)
    facts = _facts(files, wants, fresh=fresh)
    choice = choose(facts, settings)
    try:
        if choice.direct:
            for file in files:
                file.go_direct()
        errand.huge = choice.huge
        with_lanes = _through_ring if choice.ring else _to_host
        with_lanes(errand, choice, tell)
    finally:
        for file in files:
            file.close()
    return choice


class _Errand:
    """Where everything goes, filled while jobs are prepared."""

    def __init__(self, files: Sequence[File], wants: Sequence[Want], place: Place, sums: Sums | None) -> None:
        self.files = files
        self.sums = sums
        self.addresses: dict[int, int] = {}
        self.fences: dict[str, int] = {}
        self.huge = False
        self._wants = wants
        self._place = place
        self._events: list[Any] = []

    def jobs(self) -> Iterator[Job]:
        """The jobs, each when there is memory for it."""
        addresses, wants, place, huge = self.addresses, self._wants, self._place, self.huge
        for job in jobs(wants):
            known = len(addresses)
            for _, index, _, _ in job.runs:
                if index not in addresses:
                    addresses[index] = place(index)
                    if huge and job.device == "cpu":
                        in_huge_pages(addresses[index], wants[index].nbytes)
            if job.device != "cpu" and (len(addresses) > known or job.device not in self.fences):
                self._fence(job.device)
            yield job

    def _fence(self, device: str) -> None:
        """Memory may still be in use by what its last owner has started: let the copies wait for that."""
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(torch.device(device)))
        self._events.append(event)
        self.fences[device] = event.cuda_event


def _facts(files: Sequence[File], wants: Sequence[Want], *, fresh: bool) -> Facts:
    cuda = sum(want.nbytes for want in wants if want.device != "cpu")
    host = sum(want.nbytes for want in wants) - cuda
    plain = all(file.plain >= 0 for file in files)
    if host + cuda < LITTLE:
        return Facts(host, cuda, 1, None, plain)
    return Facts(
        host,
        cuda,
        cores(),
        _cached(files, wants) if plain else None,
        plain,
        mappable=cuda > 0 and plain and _can_map(wants),
        huge=fresh and host >= LITTLE and huge_pages_pay(host),
    )


def _cached(files: Sequence[File], wants: Sequence[Want]) -> float | None:
    """The part that is in the page cache: of the largest file, the others will be alike."""
    spans: dict[int, list[int]] = {}
    for want in wants:
        span = spans.setdefault(want.file, [want.offset, 0])
        span[0] = min(span[0], want.offset)
        span[1] = max(span[1], want.offset + want.nbytes)
    file, (begin, end) = max(spans.items(), key=lambda item: item[1][1] - item[1][0])
    return cached_share(files[file].plain, begin, end)


def _can_map(wants: Sequence[Want]) -> bool:
    from transload.loading.transfer.driver import cuda_driver

    driver = cuda_driver()
    devices = {want.device for want in wants} - {"cpu"}
    return driver is not None and all(driver.can_pin_read_only(int(name.partition(":")[2])) for name in devices)


def _to_host(errand: _Errand, choice: Choice, tell: Callable[[int], None] | None) -> None:
    lanes = [HostLane(errand.files, errand.addresses, errand.sums) for _ in range(choice.lanes)]
    work(errand.jobs(), lanes, tell)


def _through_ring(errand: _Errand, choice: Choice, tell: Callable[[int], None] | None) -> None:
    from transload.loading.transfer.driver import cuda_driver
    from transload.loading.transfer.mapped import MappedLane
    from transload.loading.transfer.ring import Errand, borrowed, returned

    driver: Driver | None = cuda_driver()
    if driver is None:
        raise RuntimeError("there is no CUDA driver to speak to")
    common = Errand(errand.files, errand.addresses, errand.fences, errand.sums)
    mapped = [MappedLane(driver, common)] if choice.mapped else []
    ring = borrowed(driver, choice.lanes - len(mapped), common)
    try:
        work(errand.jobs(), [*ring, *mapped], tell)
    finally:
        returned(ring)
        returned(mapped, keep=0)
