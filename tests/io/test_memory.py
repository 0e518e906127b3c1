"""Access to memory by address, page buffers and huge pages."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transload.io import memory
from transload.io.memory import PAGE, FreshPages, Pages, copy, huge_pages_pay, memory_at

MIB = 1 << 20


def test_memory_at_reads_and_writes() -> None:
    buffer = ctypes.create_string_buffer(b"abcdef", 6)
    view = memory_at(ctypes.addressof(buffer) + 1, 3)
    assert bytes(view) == b"bcd"
    view[:] = b"xyz"
    assert buffer.raw == b"axyzef"
    assert not view.readonly
    assert bytes(memory_at(ctypes.addressof(buffer), 0)) == b""


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (64 << 10) - 1, 64 << 10, 1_000_003])
def test_copy_copies_exactly_the_bytes(nbytes: int) -> None:
    source = bytes(range(256)) * (nbytes // 256 + 1)
    target = ctypes.create_string_buffer(nbytes + 8)
    buffer = ctypes.create_string_buffer(source, len(source))
    copy(ctypes.addressof(target), ctypes.addressof(buffer), nbytes)
    assert target.raw == source[:nbytes] + bytes(8)


@pytest.mark.parametrize("nbytes", [PAGE, 4 << 20, 8 << 20])
def test_pages_are_aligned_to_huge_pages_and_writable(nbytes: int) -> None:
    pages = Pages(nbytes)
    assert pages.address % (2 << 20) == 0
    view = memory_at(pages.address, nbytes)
    view[0] = view[nbytes - 1] = 7
    assert bytes(view[:2]) == b"\x07\0"
    del view, pages
    gc.collect()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")
@pytest.mark.parametrize("huge", [True, False], ids=["huge", "small"])
def test_pages_are_private_and_not_inherited_by_a_child(*, huge: bool) -> None:
    pages = Pages(4 << 20, huge=huge)
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="utf-8"))
    part = next(part for part in parts if part.startswith(f"{pages.address:x}-"))
    assert part.split()[1] == "rw-p"
    flags = part.rpartition("VmFlags:")[2].split()
    assert "wf" in flags  # not copied to a child
    assert huge or "hg" not in flags  # the kernel may not support huge pages


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_frees_pages_keeps_its_own_memory() -> None:
    pages = Pages(64 << 20)
    child = os.fork()
    if not child:
        others = [mmap.mmap(-1, 2 << 20) for _ in range(64)]  # where the pages are, unless they are in the child, too
        del pages
        gc.collect()
        os._exit(sum(other[0] for other in others))
    assert os.waitpid(child, 0)[1] == 0


BUDDYINFO_LINE = "Node 0, zone {name:>8} 4 3 2 1 1 0 1 0 1 {blocks} {more}\n"


def fake_root(root: Path, enabled: str, buddyinfo: str) -> str:
    for name, text in (("sys/kernel/mm/transparent_hugepage/enabled", enabled), ("proc/buddyinfo", buddyinfo)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("enabled", "pays"),
    [("always [madvise] never", True), ("[always] madvise never", False), ("always madvise [never]", False)],
    ids=["madvise", "always", "never"],
)
def test_huge_pages_pay_only_if_enabled_by_madvise(enabled: str, tmp_path: Path, *, pays: bool) -> None:
    assert (
        huge_pages_pay(1 << 20, fake_root(tmp_path, enabled, BUDDYINFO_LINE.format(name="Normal", blocks=10, more=10)))
        is pays
    )


def test_huge_pages_pay_only_if_enough_are_free(tmp_path: Path) -> None:
    table = BUDDYINFO_LINE.format(name="DMA", blocks=1, more=0) + BUDDYINFO_LINE.format(name="Normal", blocks=2, more=5)
    root = fake_root(tmp_path, "always [madvise] never", table)
    free = 3 * (2 << 20) + 5 * (4 << 20)
    assert huge_pages_pay(free, root)
    assert not huge_pages_pay(free + 1, root)


@pytest.mark.parametrize("table", ["", "nonsense", "Node 0, zone Normal a b c"], ids=["empty", "words", "no numbers"])
def test_huge_pages_do_not_pay_if_buddyinfo_is_unusable(table: str, tmp_path: Path) -> None:
    assert not huge_pages_pay(1 << 20, fake_root(tmp_path, "[madvise]", table))
    assert not huge_pages_pay(1 << 20, str(tmp_path / "nowhere"))


class FakeSystem:
    """A system that takes ``huge`` and ``small`` milliseconds for each MiB of fresh memory."""

    def __init__(self, huge: float = 1, small: float = 2, *, late: int = 0, old: bool = False) -> None:
        self.advised: list[tuple[int, int, int]] = []
        self.clock = 0.0
        self.huge, self.small = huge, small
        self.late, self.old = late, old

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        if advice != 23:
            self.advised.append((address, nbytes, advice))
            return 0
        for page in range(address // MIB, (address + nbytes) // MIB):
            each = self.huge if self.is_huge(page * MIB) else self.small
            self.clock += (each + 15 * (page * MIB == self.late)) / 1e3
        return -1 if self.old else 0

    def is_huge(self, address: int) -> bool:
        advice = [kind for begin, nbytes, kind in self.advised if begin <= address < begin + nbytes]
        return advice[-1:] == [14]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeSystem], None]:
    def install(system: FakeSystem) -> None:
        monkeypatch.setattr(memory, "libc", lambda: system)
        monkeypatch.setattr(memory, "thread_time", lambda: system.clock)

    return install


def use(fresh: FreshPages, blocks: list[tuple[int, int]]) -> None:
    fresh.advise(blocks)
    for begin, nbytes in blocks:
        for at in range(begin, begin + nbytes, 4 * MIB):
            fresh.populate(at, 4 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="transparent huge pages are Linux-only")
def test_only_complete_huge_pages_of_a_range_are_advised(install: Callable[[FakeSystem], None]) -> None:
    system = FakeSystem()
    install(system)
    fresh = FreshPages(huge=True)
    first = (64 * MIB, 8 * MIB)
    fresh.advise([first])
    assert not system.advised, "the first bytes get small pages, to compare"
    fresh.advise([(2 * MIB - 5, 6 * MIB), (123, MIB - 1)])
    assert system.advised == [(2 * MIB, 4 * MIB, 14)]
    system.advised.clear()
    fresh.advise([(12 * MIB, MIB), (MIB, 3 * MIB), (4 * MIB + 4096, 3 * MIB)])
    assert system.advised == [(2 * MIB, 4 * MIB, 14)], "neighbours count as one; a block without a page is left out"
    FreshPages().advise([(16 * MIB, 16 * MIB)])
    assert len(system.advised) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="transparent huge pages are Linux-only")
@pytest.mark.parametrize(("huge", "old"), [(1, False), (3, False), (3, True)], ids=["quick", "slow", "old kernel"])
def test_huge_pages_are_given_up_if_they_come_more_slowly(
    huge: float, install: Callable[[FakeSystem], None], *, old: bool
) -> None:
    system = FakeSystem(huge, old=old)
    install(system)
    fresh = FreshPages(huge=True)
    blocks = [(at * 64 * MIB, 60 * MIB) for at in range(4, 0, -1)]
    use(fresh, blocks[:2])
    given_up = huge > system.small and not old
    assert not system.is_huge(blocks[0][0]), "small pages are tried first"
    assert system.is_huge(blocks[1][0]) is not given_up
    use(fresh, blocks[2:])
    assert system.is_huge(blocks[2][0]) is not given_up
    assert sum(kind == 14 for *_, kind in system.advised) == (2 if given_up else 4)


@pytest.mark.skipif(sys.platform != "linux", reason="transparent huge pages are Linux-only")
def test_one_late_huge_page_is_no_reason_to_give_up(install: Callable[[FakeSystem], None]) -> None:
    system = FakeSystem(late=192 * MIB)
    install(system)
    fresh = FreshPages(huge=True)
    use(fresh, [(64 * MIB, 16 * MIB), (128 * MIB, 128 * MIB)])
    assert system.is_huge(128 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux populates memory on request")
def test_populated_pages_are_there_and_keep_their_content() -> None:
    pages = Pages(4 << 20, huge=False)
    view, page = memory_at(pages.address, pages.nbytes), mmap.PAGESIZE
    view[page : page + 3] = b"abc"
    FreshPages().populate(pages.address + 1, pages.nbytes - 2)  # the pages at both ends also hold something else
    present = (ctypes.c_ubyte * (pages.nbytes // page))()
    libc = memory.libc()
    libc.mincore(ctypes.c_void_p(pages.address), ctypes.c_size_t(pages.nbytes), present)
    old = libc.madvise(pages.address, page, 23) != 0  # a kernel before 5.14
    assert [*present[:3]] == [0, 1, not old]
    assert [*present[-2:]] == [not old, 0]
    assert bytes(view[page : page + 3]) == b"abc"
    assert not any(view[page + 3 :: 511])
