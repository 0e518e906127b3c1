"""PE files: what is read from them, and that no file causes an exception, a long run time or a wrong result."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.each import each
from tests.elf_forge import CUBIN, LTO, PTX, fatbin
from tests.pe_forge import dll

from transload.diagnose.pe import Pe, file_version, read_pe
from transload.machine import Unknown

FULL = dll(
    "full.dll",
    imports={"C10.dll": ["??0Device@c10@@QEAA@XZ", "#2", "close"], "KERNEL32.dll": ["GetTickCount"]},
    delayed=["nvcuda.dll", "cudnn64_9.dll"],
    exports=["first", "second", "third"],
    version="14.29.30133.4",
    linker=(14, 42),
    writable=1 << 20,
    fatbins={".nv_fatbin": fatbin([(CUBIN, 86, b"x"), (PTX, 90, b"y")])},
)


def read(tmp_path: Path, data: bytes) -> Pe:
    path = tmp_path / "x.dll"
    path.write_bytes(data)
    pe = read_pe(str(path))
    assert isinstance(pe, Pe), pe
    return pe


def test_what_a_library_contains_and_needs(tmp_path: Path) -> None:
    pe = read(tmp_path, FULL)
    assert (pe.machine, pe.bits, pe.linker) == ("x64", 64, "14.42")
    assert pe.needed == ("C10.dll", "KERNEL32.dll")
    assert pe.delayed == ("nvcuda.dll", "cudnn64_9.dll")
    assert pe.functions("c10.DLL") == ("??0Device@c10@@QEAA@XZ", "#2", "close")
    assert pe.not_exported(["first", "fir", "#3", "#4", "third", "fourth"]) == ("fir", "#4", "fourth")
    assert pe.version() == file_version(pe.path) == "14.29.30133.4"
    assert 1 << 20 <= pe.private < (1 << 20) + 4096


def test_library_without_tables(tmp_path: Path) -> None:
    pe = read(tmp_path, dll())
    assert (pe.needed, pe.delayed, pe.functions("c10.dll"), pe.version()) == ((), (), (), "")
    assert pe.not_exported(["f"]) == ("f",)


def test_architectures_are_counted_in_all_fatbins(tmp_path: Path) -> None:
    """Linkers cut the names of sections at eight bytes."""
    first = fatbin([(CUBIN, 75, b"a" * 40), (CUBIN, "90a", b"b" * 8), (PTX, 90, b"c" * 16), (LTO, 80, b"d" * 8)])
    second = fatbin([(CUBIN, 75, b"a" * 40), (CUBIN, "103f", b"")])
    pe = read(tmp_path, dll(fatbins={".nv_fatbin": first + bytes(5) + second, "__nv_relfatbin": first}))
    assert pe.architectures() == {"sm_75": 3, "sm_90a": 2, "sm_103f": 1, "compute_90": 2}
    assert read(tmp_path, dll(writable=512)).architectures() == {}
    assert read(tmp_path, dll(fatbins={".nvFatBinSegment": first})).architectures() == {}


@each("machine, bits", [("x64", 64), ("ARM64", 64), ("x86", 32)])
def test_machine(tmp_path: Path, machine: str, bits: int) -> None:
    pe = read(tmp_path, dll(machine=machine))
    assert (pe.machine, pe.bits) == (machine, bits)


@each(
    "data, why",
    [
        (b"", "empty"),
        (b"\x7fELF" + bytes(100), "not a Windows library"),
        (b"MZ", "not a Windows library"),
        (b"MZ" + bytes(100), "not a Windows library"),
        (FULL[:70], "cut off after 70 bytes"),
        (FULL[:900], f"cut off after 900 of {len(FULL)} bytes"),
    ],
)
def test_why_a_file_is_not_read(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "x.dll"
    path.write_bytes(data)
    assert read_pe(str(path)) == Unknown(why)
    assert file_version(str(path)) == ""


# -- the same answers as other readers


def compiler(name: str) -> str:
    path = shutil.which(name)
    if not path:
        pytest.skip(f"needs {name}")
    return path


def test_objdump_reads_the_same(tmp_path: Path) -> None:
    """Linked by mingw: imports by name and by number, exports, and a section for the GPU."""
    gcc, tool = compiler("x86_64-w64-mingw32-gcc"), compiler("x86_64-w64-mingw32-dlltool")
    objdump = compiler("x86_64-w64-mingw32-objdump")
    (tmp_path / "number.def").write_text("LIBRARY number.dll\nEXPORTS\nnumber @7 NONAME\n")
    code = fatbin([(CUBIN, 89, b"x" * 8)])
    kernels = f'__attribute__((section(".nv_fatbin"))) char code[] = {{{",".join(map(str, code))}}};'
    (tmp_path / "a.c").write_text(f"int number(void); int one(void) {{ return number(); }}\n{kernels}\n")
    for arguments in (
        [tool, "-d", "number.def", "-l", "libnumber.a"],
        [gcc, "-shared", "-Wl,--disable-long-section-names", "-o", "a.dll", "a.c", "-L.", "-lnumber"],
    ):
        subprocess.run(arguments, cwd=tmp_path, check=True)
    pe = read_pe(str(tmp_path / "a.dll"))
    assert isinstance(pe, Pe)
    said = subprocess.run([objdump, "-p", pe.path], capture_output=True, text=True, check=True).stdout
    assert list(pe.needed) == re.findall(r"DLL Name: (\S+)", said)
    assert pe.functions("number.dll") == ("#7",)
    assert pe.functions("KERNEL32.dll") == tuple(
        re.findall(
            r"^\t[0-9a-f]+\t +\d+  (\S+)", said.partition("KERNEL32.dll")[2].partition("DLL Name")[0], re.MULTILINE
        )
    )
    assert pe.not_exported(["one", "two"]) == ("two",)
    assert pe.architectures() == {"sm_89": 1}


@pytest.mark.skipif(sys.platform != "win32", reason="needs Windows")
def test_windows_loads_a_forged_library(tmp_path: Path) -> None:
    kernels = {".nv_fatbin": fatbin([(CUBIN, 86, b"x")])}
    forged = dll("forged_a.dll", imports={"forged_b.dll": ["f"]}, exports=["g"], fatbins=kernels)
    (tmp_path / "forged_a.dll").write_bytes(forged)
    (tmp_path / "forged_b.dll").write_bytes(dll("forged_b.dll", exports=["f"]))
    assert ctypes.CDLL(str(tmp_path / "forged_a.dll"), winmode=0x1100).g() == 0


# -- broken and hostile files


def read_everything(path: Path) -> None:
    """Call every method and check only the types of the results."""
    pe = read_pe(str(path))
    if isinstance(pe, Pe):
        assert isinstance(pe.functions("c10.dll"), (tuple, Unknown))
        assert isinstance(pe.not_exported(["first", "#2", "absent"]), (tuple, Unknown))
        assert isinstance(pe.version(), (str, Unknown))
        assert isinstance(pe.architectures(), (dict, Unknown))


def test_truncated_files_cause_no_exception(tmp_path: Path) -> None:
    path = tmp_path / "x.dll"
    for size in range(0, len(FULL), 3):
        path.write_bytes(FULL[:size])
        read_everything(path)


def test_changed_bytes_cause_no_exception(tmp_path: Path) -> None:
    path = tmp_path / "x.dll"
    generator = random.Random(3)  # noqa: S311
    for at in (*range(400), *range(400, len(FULL), 5)):
        data = bytearray(FULL)
        data[at] = generator.choice((0, 0xFF, 0x7F, data[at] ^ 1 << generator.randrange(8)))
        path.write_bytes(data)
        read_everything(path)


def test_random_words_cause_no_exception(tmp_path: Path) -> None:
    path = tmp_path / "x.dll"
    generator = random.Random(7)  # noqa: S311
    for _ in range(400):
        data = bytearray(FULL)
        for _ in range(3):
            at = generator.randrange(0, len(FULL) - 8, 4)
            struct.pack_into("<I", data, at, generator.choice((1 << 31, (1 << 32) - 1, generator.getrandbits(12))))
        path.write_bytes(data)
        read_everything(path)
