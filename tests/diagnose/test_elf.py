"""ELF files: what is read from them, and that no file causes an exception, a long run time or a wrong result."""

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

from transload.diagnose import binary
from transload.diagnose.elf import Elf, UndefinedSymbol, read_elf
from transload.machine import Unknown


def write_and_read(tmp_path: Path, data: bytes, name: str = "libx.so") -> Elf:
    path = tmp_path / name
    path.write_bytes(data)
    elf = read_elf(str(path))
    assert isinstance(elf, Elf), elf
    return elf


def reason_not_read(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "libx.so"
    path.write_bytes(data)
    elf = read_elf(str(path))
    assert isinstance(elf, Unknown)
    return elf.reason


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


# -- dynamic section


def test_dynamic_section_is_read(tmp_path: Path) -> None:
    elf = write_and_read(tmp_path, FULL)
    assert (elf.machine, elf.bits, elf.soname) == ("x86_64", 64, "libfull.so.1")
    assert elf.needed == ("liba.so.1", "libb.so.2")
    assert (elf.run_path, elf.has_runpath) == ("$ORIGIN/../lib:", True)


def test_library_without_dynamic_entries(tmp_path: Path) -> None:
    elf = write_and_read(tmp_path, library(machine="aarch64"))
    assert (elf.machine, elf.soname, elf.needed, elf.has_runpath) == ("aarch64", "", (), False)


def test_soname_may_be_invalid_utf8(tmp_path: Path) -> None:
    raw = library(soname="libcafe.so", machine="x86_64").replace(b"libcafe.so", b"libcaf\xe9.so")
    assert write_and_read(tmp_path, raw).soname == "libcaf\udce9.so"


def test_interpreter_of_an_executable() -> None:
    if sys.platform != "linux":
        pytest.skip("needs an ELF executable")
    elf = read_elf(os.path.realpath(sys.executable))
    assert isinstance(elf, Elf)
    assert "/ld-" in elf.interpreter


def test_32_bit_and_big_endian_files_are_identified_but_not_parsed(tmp_path: Path) -> None:
    small = b"\x7fELF\x01\x01\x01" + bytes(9) + struct.pack("<HH", 3, 3) + bytes(64)
    big = b"\x7fELF\x02\x02\x01" + bytes(9) + struct.pack(">HH", 3, 22) + bytes(64)
    assert write_and_read(tmp_path, small).bits == 32
    assert write_and_read(tmp_path, small).machine == "i386"
    read = write_and_read(tmp_path, big)
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
def test_invalid_file_is_rejected_with_a_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    assert reason_not_read(tmp_path, data) == reason


def test_truncated_library_is_rejected(tmp_path: Path) -> None:
    """The loader would map it, and the process would die of SIGBUS. Only the section headers may be missing."""
    elf = write_and_read(tmp_path, FULL)
    end = max(offset + size for _, offset, size in elf.segments)
    assert reason_not_read(tmp_path, FULL[: end - 1]) == f"cut off after {end - 1} of {end} bytes"
    assert write_and_read(tmp_path, FULL[:end]).needed == elf.needed


def test_path_that_is_not_a_regular_file_is_unknown(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    if hasattr(os, "mkfifo"):
        os.mkfifo(pipe)
        assert read_elf(str(pipe)) == Unknown("not a regular file")
    assert read_elf(str(tmp_path)) == Unknown("not a regular file")
    assert read_elf("/nowhere/libx.so") == Unknown("/nowhere/libx.so does not exist")
    assert isinstance(read_elf("/a\0b"), Unknown)


# -- sections


def test_section_bytes_by_name(tmp_path: Path) -> None:
    elf = write_and_read(tmp_path, FULL)
    assert elf.section_bytes(".rodata", 1000) == b"constant\0" * 4
    assert elf.section_bytes(".rodata", 8) == b"constant"
    assert elf.section_bytes(".data", 8) == Unknown("it has no section .data")


def test_library_without_section_headers(tmp_path: Path) -> None:
    elf = write_and_read(tmp_path, library(soname="libx.so", section_headers=False, sections={".nv_fatbin": b"x"}))
    assert elf.soname == "libx.so"
    assert elf.section_bytes(".text", 8) == elf.architectures() == Unknown("it has no section headers")


# -- symbols


def test_undefined_symbols_and_required_versions(tmp_path: Path) -> None:
    elf = write_and_read(tmp_path, FULL)
    nvidias = UndefinedSymbol("nvidias", "libb.so.2", "libb.so.2")
    versioned = UndefinedSymbol("versioned", "VA_1", "liba.so.1")
    versions = (("VA_1", "liba.so.1"), ("VA_2", "liba.so.1"), ("libb.so.2", "libb.so.2"))
    required = (UndefinedSymbol("", version, file) for version, file in versions)
    assert elf.undefined() == (UndefinedSymbol("free"), versioned, nvidias, *required)


def test_not_defined_respects_symbol_versions(tmp_path: Path) -> None:
    elf = write_and_read(tmp_path, FULL)
    defined = [
        UndefinedSymbol("", "V_2"),
        UndefinedSymbol("plain"),
        UndefinedSymbol("plain", "ANY"),
        UndefinedSymbol("new", "V_2"),
        UndefinedSymbol("old", "V_1"),
        UndefinedSymbol("new"),
    ]
    absent = [UndefinedSymbol("free"), UndefinedSymbol("new", "V_1"), UndefinedSymbol("nothing")]
    absent.append(UndefinedSymbol("", "V_3"))
    assert elf.not_defined([*defined, *absent]) == tuple(absent)


def test_library_without_versions_satisfies_any_version(tmp_path: Path) -> None:
    elf = write_and_read(tmp_path, library(functions={"f": returns(0)}))
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


def test_symbols_of_torch_are_defined_in_its_own_libraries() -> None:
    """The symbols are as a real linker writes them. One that torch does not have is not found."""
    consumer = torch_library("libtorch_python.so")
    wanted = [symbol for symbol in consumer.undefined() or () if symbol.name.startswith(("_ZN3c10", "_ZN2at"))]
    assert len(wanted) > 100
    unresolved = tuple(wanted)
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libshm.so", "libc10_cuda.so", "libtorch_cuda.so"):
        provider = read_elf(str(Path(consumer.path).with_name(name)))
        rest = provider.not_defined(unresolved) if isinstance(provider, Elf) else unresolved
        assert isinstance(rest, tuple)
        unresolved = rest
    assert unresolved == ()
    unknown = (UndefinedSymbol("_ZN3c105ErrorC2ENS_14SourceLocationESs_never"),)
    assert torch_library("libc10.so").not_defined(unknown) == unknown


# -- GPU code


def test_architectures_are_counted_in_all_fatbins(tmp_path: Path) -> None:
    first = fatbin([(CUBIN, 75, b"a" * 40), (CUBIN, "90a", b"b" * 8), (PTX, 90, b"c" * 16), (LTO, 80, b"d" * 8)])
    second = fatbin([(CUBIN, 75, b"a" * 40), (CUBIN, "103f", b""), (PTX, "120a", b"e")])
    elf = write_and_read(tmp_path, library(sections={".nv_fatbin": first + bytes(5) + second, "__nv_relfatbin": first}))
    counts = elf.architectures()
    assert counts == {"sm_75": 3, "sm_90a": 2, "sm_103f": 1, "compute_90": 2, "compute_120a": 1}
    assert list(counts) == ["sm_75", "sm_90a", "sm_103f", "compute_90", "compute_120a"]


def test_library_without_gpu_code_has_no_architectures(tmp_path: Path) -> None:
    assert write_and_read(tmp_path, library()).architectures() == {}
    assert write_and_read(tmp_path, library(sections={".nv_fatbin": bytes(64)})).architectures() == {}


def test_fatbin_after_long_padding_is_found(tmp_path: Path) -> None:
    section = bytes(100_000) + fatbin([(CUBIN, 86, b"x")])
    assert write_and_read(tmp_path, library(sections={".nv_fatbin": section})).architectures() == {"sm_86": 1}


def test_wrong_size_in_a_fatbin_ends_the_scan(tmp_path: Path) -> None:
    """A container or an entry that claims more bytes than there are ends the scan, and only what exists is counted."""
    valid = fatbin([(CUBIN, 80, b"x" * 16), (CUBIN, 86, b"y" * 16)])
    for at in (8, 16 + 8):  # the size of the container; the size of its first payload
        wrong = valid[:at] + struct.pack("<Q", 1 << 62) + valid[at + 8 :]
        counts = write_and_read(tmp_path, library(sections={".nv_fatbin": wrong})).architectures()
        assert counts in ({"sm_80": 1, "sm_86": 1}, {"sm_80": 1})


def test_number_of_fatbin_entries_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "_MOST_READS", 1000)
    entry = fatbin([(CUBIN, 80, b"")])[16:]
    for count, expected in ((900, {"sm_80": 900}), (1100, Unknown("it has too many parts"))):
        section = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) * count) + entry * count
        assert write_and_read(tmp_path, library(sections={".nv_fatbin": section})).architectures() == expected


# -- broken and hostile files


def read_everything(path: Path) -> None:
    """Call every method and check only the types of the results."""
    elf = read_elf(str(path))
    if isinstance(elf, Elf):
        assert isinstance(elf.section_bytes(".rodata", 1 << 20), (bytes, Unknown))
        assert isinstance(elf.architectures(), (dict, Unknown))
        assert isinstance(elf.undefined(), (tuple, Unknown))
        assert isinstance(elf.not_defined([UndefinedSymbol("plain", "V_1"), UndefinedSymbol("free")]), (tuple, Unknown))


def test_truncated_files_cause_no_exception(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    for size in (*range(400), *range(400, len(FULL), 37)):
        path.write_bytes(FULL[:size])
        read_everything(path)


def test_changed_bytes_cause_no_exception(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    generator = random.Random(3)  # noqa: S311
    for at in (*range(300), *range(300, len(FULL), 11)):
        data = bytearray(FULL)
        data[at] = generator.choice((0, 0xFF, 0x7F, data[at] ^ 1 << generator.randrange(8)))
        path.write_bytes(data)
        read_everything(path)


def test_random_words_cause_no_exception(tmp_path: Path) -> None:
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
        read_everything(path)


def test_endless_version_table_causes_no_exception(tmp_path: Path) -> None:
    """A table whose entries lead to each other forever is read up to a limit."""
    data = bytearray(FULL)
    elf = write_and_read(tmp_path, FULL)
    needs = elf.offset(0x6FFFFFFE)
    struct.pack_into("<HHIII", data, needs, 1, 0xFFFF, 0, 16, 0xFFFFFFF0)
    struct.pack_into("<IHHII", data, needs + 16, 0, 0, 2, 0, 0xFFFFFFFF)
    path = tmp_path / "circle.so"
    path.write_bytes(data)
    read_everything(path)
