"""ELF files: what they say, and that nothing they can say is an error, a long wait, or a lie."""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import sys
from pathlib import Path

import pytest
from tests.each import each
from tests.elf_forge import CUBIN, LTO, PTX, fatbin, library
from tests.fake_driver import returns

from transload.diagnose import loader as loader_module
from transload.diagnose.loader import Elf, UndefinedSymbol, read_elf
from transload.machine import Unknown


def elf_of(tmp_path: Path, data: bytes, name: str = "libx.so") -> Elf:
    path = tmp_path / name
    path.write_bytes(data)
    elf = read_elf(str(path))
    assert isinstance(elf, Elf), elf
    return elf


def why_not(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "libx.so"
    path.write_bytes(data)
    found = read_elf(str(path))
    assert isinstance(found, Unknown)
    return found.reason


FULL = library(
    soname="libfull.so.1",
    needed=("liba.so.1", "libb.so.2"),
    rpath="$ORIGIN/r",
    runpath="$ORIGIN/../lib:",
    functions={"plain": returns(0), "new@@V_2": returns(2), "old@V_1": returns(1)},
    undefined=("free", "versioned@VA_1@liba.so.1", "nvidias@libb.so.2"),
    weak=("perhaps", "perhaps_versioned@VA_2@liba.so.1"),
    sections={".rodata": b"constant\0" * 4, ".nv_fatbin": fatbin([(CUBIN, 90, b"x" * 24)])},
    machine="x86_64",
)


# -- what a library says to the loader


def test_what_it_needs_and_where_to_look(tmp_path: Path) -> None:
    elf = elf_of(tmp_path, FULL)
    assert (elf.machine, elf.bits, elf.soname) == ("x86_64", 64, "libfull.so.1")
    assert elf.needed == ("liba.so.1", "libb.so.2")
    assert (elf.run_path, elf.has_runpath) == ("$ORIGIN/../lib:", True)


def test_a_library_that_says_nothing(tmp_path: Path) -> None:
    elf = elf_of(tmp_path, library(machine="aarch64"))
    assert (elf.machine, elf.soname, elf.needed, elf.has_runpath) == ("aarch64", "", (), False)


def test_names_need_not_be_utf_8(tmp_path: Path) -> None:
    raw = library(soname="libcafe.so", machine="x86_64").replace(b"libcafe.so", b"libcaf\xe9.so")
    assert elf_of(tmp_path, raw).soname == "libcaf\udce9.so"


def test_the_interpreter_of_a_program() -> None:
    if sys.platform != "linux":
        pytest.skip("needs an ELF executable")
    elf = read_elf(os.path.realpath(sys.executable))
    assert isinstance(elf, Elf)
    assert "/ld-" in elf.interpreter


def test_32_bits_and_big_endian_are_named_and_left_alone(tmp_path: Path) -> None:
    small = b"\x7fELF\x01\x01\x01" + bytes(9) + struct.pack("<HH", 3, 3) + bytes(64)
    big = b"\x7fELF\x02\x02\x01" + bytes(9) + struct.pack(">HH", 3, 22) + bytes(64)
    assert elf_of(tmp_path, small).bits == 32
    assert elf_of(tmp_path, small).machine == "i386"
    read = elf_of(tmp_path, big)
    assert (read.machine, read.segments, read.needed) == ("s390x", (), ())


@each(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"INPUT(libcuda.so)\n", "not an ELF file"),
        (b"\x7fELF", "cut off within the header"),
        (FULL[:63], "cut off within the header"),
        (FULL[:100], "cut off: 224 bytes should be at 64, but the file has 100"),
    ],
)
def test_files_that_are_none(tmp_path: Path, data: bytes, reason: str) -> None:
    assert why_not(tmp_path, data) == reason


def test_a_library_whose_end_is_missing(tmp_path: Path) -> None:
    """The loader would map it, and the process die of SIGBUS. The headers of sections are no part of what is mapped."""
    elf = elf_of(tmp_path, FULL)
    end = max(offset + size for _, offset, size in elf.segments)
    assert why_not(tmp_path, FULL[: end - 1]) == f"cut off after {end - 1} of {end} bytes"
    assert elf_of(tmp_path, FULL[:end]).needed == elf.needed


def test_what_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    if hasattr(os, "mkfifo"):
        os.mkfifo(pipe)
        assert read_elf(str(pipe)) == Unknown("not a regular file")
    assert read_elf(str(tmp_path)) == Unknown("not a regular file")
    assert read_elf("/nowhere/libx.so") == Unknown("/nowhere/libx.so does not exist")
    assert isinstance(read_elf("/a\0b"), Unknown)


# -- sections


def test_sections_by_name(tmp_path: Path) -> None:
    elf = elf_of(tmp_path, FULL)
    assert elf.section_bytes(".rodata", 1000) == b"constant\0" * 4
    assert elf.section_bytes(".rodata", 8) == b"constant"
    assert elf.section_bytes(".data", 8) == Unknown("it has no section .data")


def test_without_section_headers(tmp_path: Path) -> None:
    elf = elf_of(tmp_path, library(soname="libx.so", section_headers=False, sections={".nv_fatbin": b"x"}))
    assert elf.soname == "libx.so"
    assert elf.section_bytes(".text", 8) == elf.architectures() == Unknown("it has no section headers")


# -- symbols


def test_what_it_takes_from_others(tmp_path: Path) -> None:
    elf = elf_of(tmp_path, FULL)
    nvidias = UndefinedSymbol("nvidias", "libb.so.2", "libb.so.2")
    versioned = UndefinedSymbol("versioned", "VA_1", "liba.so.1")
    versions = (("VA_1", "liba.so.1"), ("VA_2", "liba.so.1"), ("libb.so.2", "libb.so.2"))
    required = (UndefinedSymbol("", version, file) for version, file in versions)
    assert elf.undefined() == (UndefinedSymbol("free"), versioned, nvidias, *required)


def test_what_it_gives_and_in_which_version(tmp_path: Path) -> None:
    elf = elf_of(tmp_path, FULL)
    given = [
        UndefinedSymbol("", "V_2"),
        UndefinedSymbol("plain"),
        UndefinedSymbol("plain", "ANY"),
        UndefinedSymbol("new", "V_2"),
        UndefinedSymbol("old", "V_1"),
        UndefinedSymbol("new"),
    ]
    absent = [UndefinedSymbol("free"), UndefinedSymbol("new", "V_1"), UndefinedSymbol("nothing")]
    absent.append(UndefinedSymbol("", "V_3"))
    assert elf.not_defined([*given, *absent]) == tuple(absent)


def test_a_library_without_versions_satisfies_any(tmp_path: Path) -> None:
    elf = elf_of(tmp_path, library(functions={"f": returns(0)}))
    assert elf.not_defined([UndefinedSymbol("", "V_1", "libx.so")]) == ()
    assert elf.not_defined([UndefinedSymbol("f", "V_1", "libx.so"), UndefinedSymbol("g", "V_1", "libx.so")]) == (
        UndefinedSymbol("g", "V_1", "libx.so"),
    )


def torch_library(name: str) -> Elf:
    spec = importlib.util.find_spec("torch")
    if sys.platform != "linux" or spec is None or spec.origin is None:
        pytest.skip("needs a Linux build of torch")
    elf = read_elf(f"{Path(spec.origin).parent}/lib/{name}")
    if not isinstance(elf, Elf):
        pytest.skip(elf.reason)
    return elf


def test_symbols_as_a_real_linker_writes_them() -> None:
    """What torch's own libraries take from c10 and torch_cpu is found there, and nothing else is."""
    asker = torch_library("libtorch_python.so")
    wanted = [each for each in asker.undefined() or () if each.name.startswith(("_ZN3c10", "_ZN2at"))]
    assert len(wanted) > 100
    left = tuple(wanted)
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libshm.so", "libc10_cuda.so", "libtorch_cuda.so"):
        giver = read_elf(str(Path(asker.path).with_name(name)))
        rest = giver.not_defined(left) if isinstance(giver, Elf) else left
        assert isinstance(rest, tuple)
        left = rest
    assert left == ()
    stranger = (UndefinedSymbol("_ZN3c105ErrorC2ENS_14SourceLocationESs_never"),)
    assert torch_library("libc10.so").not_defined(stranger) == stranger


@each("name", ["libtorch_python.so", "libtorch_cpu.so"])
def test_the_hash_table_hides_no_undefined_symbol(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    elf = torch_library(name)
    found = elf.undefined()
    monkeypatch.setattr(loader_module, "_GNU_HASH", -1)  # as if it had none
    assert elf.undefined() == found


# -- code for cards


def test_architectures(tmp_path: Path) -> None:
    first = fatbin([(CUBIN, 75, b"a" * 40), (CUBIN, "90a", b"b" * 8), (PTX, 90, b"c" * 16), (LTO, 80, b"d" * 8)])
    second = fatbin([(CUBIN, 75, b"a" * 40), (CUBIN, "103f", b""), (PTX, "120a", b"e")])
    elf = elf_of(tmp_path, library(sections={".nv_fatbin": first + bytes(5) + second, "__nv_relfatbin": first}))
    found = elf.architectures()
    assert found == {"sm_75": 3, "sm_90a": 2, "sm_103f": 1, "compute_90": 2, "compute_120a": 1}
    assert list(found) == ["sm_75", "sm_90a", "sm_103f", "compute_90", "compute_120a"]


def test_no_code_for_cards(tmp_path: Path) -> None:
    assert elf_of(tmp_path, library()).architectures() == {}
    assert elf_of(tmp_path, library(sections={".nv_fatbin": bytes(64)})).architectures() == {}


def test_a_fatbin_far_behind_padding(tmp_path: Path) -> None:
    section = bytes(100_000) + fatbin([(CUBIN, 86, b"x")])
    assert elf_of(tmp_path, library(sections={".nv_fatbin": section})).architectures() == {"sm_86": 1}


def test_sizes_that_lie(tmp_path: Path) -> None:
    """A container or an entry that claims more than there is ends the walk, without counting what does not exist."""
    honest = fatbin([(CUBIN, 80, b"x" * 16), (CUBIN, 86, b"y" * 16)])
    for at in (8, 16 + 8):  # the size of the container; the size of its first payload
        lying = honest[:at] + struct.pack("<Q", 1 << 62) + honest[at + 8 :]
        found = elf_of(tmp_path, library(sections={".nv_fatbin": lying})).architectures()
        assert found in ({"sm_80": 1, "sm_86": 1}, {"sm_80": 1})


def test_a_file_of_headers_alone_does_not_take_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "_MOST_READS", 1000)
    entry = fatbin([(CUBIN, 80, b"")])[16:]
    for count, found in ((900, {"sm_80": 900}), (1100, Unknown("it has too many parts"))):
        section = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) * count) + entry * count
        assert elf_of(tmp_path, library(sections={".nv_fatbin": section})).architectures() == found


# -- broken and hostile files


def everything(path: Path) -> None:
    """Ask all questions; only an exception is wrong."""
    elf = read_elf(str(path))
    if isinstance(elf, Elf):
        assert isinstance(elf.section_bytes(".rodata", 1 << 20), (bytes, Unknown))
        assert isinstance(elf.architectures(), (dict, Unknown))
        assert isinstance(elf.undefined(), (tuple, Unknown))
        assert isinstance(elf.not_defined([UndefinedSymbol("plain", "V_1"), UndefinedSymbol("free")]), (tuple, Unknown))


def test_every_prefix(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    for size in (*range(400), *range(400, len(FULL), 37)):
        path.write_bytes(FULL[:size])
        everything(path)


def test_every_byte_changed(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    generator = random.Random(3)  # noqa: S311
    for at in (*range(300), *range(300, len(FULL), 11)):
        data = bytearray(FULL)
        data[at] = generator.choice((0, 0xFF, 0x7F, data[at] ^ 1 << generator.randrange(8)))
        path.write_bytes(data)
        everything(path)


def test_random_words_in_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    generator = random.Random(7)  # noqa: S311
    for _ in range(250):
        data = bytearray(FULL)
        for _ in range(3):
            at = generator.randrange(0, len(FULL) - 8, 8)
            struct.pack_into(
                "<Q", data, at, generator.choice((1 << 63, (1 << 64) - 1, 1 << 31, generator.getrandbits(16)))
            )
        path.write_bytes(data)
        everything(path)


def test_version_tables_that_run_in_a_circle(tmp_path: Path) -> None:
    """A table whose entries follow one another for ever is left in the end."""
    data = bytearray(FULL)
    elf = elf_of(tmp_path, FULL)
    needs = elf.offset(0x6FFFFFFE)
    struct.pack_into("<HHIII", data, needs, 1, 0xFFFF, 0, 16, 0xFFFFFFF0)
    struct.pack_into("<IHHII", data, needs + 16, 0, 0, 2, 0, 0xFFFFFFFF)
    path = tmp_path / "circle.so"
    path.write_bytes(data)
    everything(path)
