"""Memory by its address."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from pathlib import Path

import pytest

from transload.io import memory
from transload.io.memory import PAGE, Pages, advise_huge_pages, copy, huge_pages_pay, memory_at


def test_a_view_reads_and_writes() -> None:
    held = ctypes.create_string_buffer(b"abcdef", 6)
    seen = memory_at(ctypes.addressof(held) + 1, 3)
    assert bytes(seen) == b"bcd"
    seen[:] = b"xyz"
    assert held.raw == b"axyzef"
    assert not seen.readonly
    assert bytes(memory_at(ctypes.addressof(held), 0)) == b""


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (64 << 10) - 1, 64 << 10, 1_000_003])
def test_copies(nbytes: int) -> None:
    source = bytes(range(256)) * (nbytes // 256 + 1)
    held = ctypes.create_string_buffer(nbytes + 8)
    buffer = ctypes.create_string_buffer(source, len(source))
    copy(ctypes.addressof(held), ctypes.addressof(buffer), nbytes)
    assert held.raw == source[:nbytes] + bytes(8)


@pytest.mark.parametrize("nbytes", [PAGE, 4 << 20, 8 << 20])
def test_pages_begin_where_a_huge_one_does_and_are_all_there(nbytes: int) -> None:
    pages = Pages(nbytes)
    assert pages.address % (2 << 20) == 0
    whole = memory_at(pages.address, nbytes)
    whole[0] = whole[nbytes - 1] = 7
    assert bytes(whole[:2]) == b"\x07\0"
    del whole, pages
    gc.collect()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not report it")
@pytest.mark.parametrize("huge", [True, False], ids=["huge", "small"])
def test_pages_are_of_this_process_alone(*, huge: bool) -> None:
    pages = Pages(4 << 20, huge=huge)
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(encoding="utf-8"))
    part = next(part for part in parts if part.startswith(f"{pages.address:x}-"))
    assert part.split()[1] == "rw-p"
    flags = part.rpartition("VmFlags:")[2].split()
    assert "dc" in flags  # not copied to a child
    assert huge or "hg" not in flags  # and a kernel may know no huge ones


BUDDY = "Node 0, zone {name:>8} 4 3 2 1 1 0 1 0 1 {blocks} {more}\n"


def machine(root: Path, enabled: str, buddyinfo: str) -> str:
    for name, text in (("sys/kernel/mm/transparent_hugepage/enabled", enabled), ("proc/buddyinfo", buddyinfo)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("enabled", "pays"),
    [("always [madvise] never", True), ("[always] madvise never", False), ("always madvise [never]", False)],
    ids=["asked", "always", "never"],
)
def test_huge_pages_are_asked_for_where_one_has_to(enabled: str, tmp_path: Path, *, pays: bool) -> None:
    assert huge_pages_pay(1 << 20, machine(tmp_path, enabled, BUDDY.format(name="Normal", blocks=10, more=10))) is pays


def test_huge_pages_are_asked_for_where_there_are_enough(tmp_path: Path) -> None:
    table = BUDDY.format(name="DMA", blocks=1, more=0) + BUDDY.format(name="Normal", blocks=2, more=5)
    root = machine(tmp_path, "always [madvise] never", table)
    free = 3 * (2 << 20) + 5 * (4 << 20)
    assert huge_pages_pay(free, root)
    assert not huge_pages_pay(free + 1, root)


@pytest.mark.parametrize("table", ["", "nonsense", "Node 0, zone Normal a b c"], ids=["empty", "words", "no numbers"])
def test_a_table_that_says_nothing(table: str, tmp_path: Path) -> None:
    assert not huge_pages_pay(1 << 20, machine(tmp_path, "[madvise]", table))
    assert not huge_pages_pay(1 << 20, str(tmp_path / "nowhere"))


@pytest.mark.skipif(sys.platform != "linux", reason="transparent huge pages are Linux-only")
def test_only_whole_huge_pages_inside_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    class Libc:
        @staticmethod
        def madvise(address: int, nbytes: int, advice: int) -> int:
            asked.append((address, nbytes, advice))
            return 0

    monkeypatch.setattr(memory, "libc", Libc)
    advise_huge_pages((2 << 20) - 5, 6 << 20)
    advise_huge_pages(123, (4 << 20) - 1)
    assert asked == [(2 << 20, 4 << 20, 14)]
