"""Forged libraries, tested with the loader and the processor of this machine."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path

import pytest
from tests.each import each
from tests.elf_forge import CUBIN, HEADER, LOADABLE, LTO, NATIVE, PTX, SECTION, Function, fatbin, library, loaded
from tests.fake_driver import (
    crashes,
    exits,
    fills,
    fills_by,
    hangs,
    passes,
    returns,
    segfaults,
    switch,
)

needs_loader = pytest.mark.skipif(not LOADABLE, reason="needs the Linux loader on x86-64 or aarch64")


@contextmanager
def loaded_function(tmp_path: Path, body: Function) -> Iterator[ctypes._NamedFuncPointer]:
    path = tmp_path / "lib.so"
    path.write_bytes(library(functions={"before": returns(111), "f": body, "after": returns(222)}))
    with loaded(path) as handle:
        yield handle.f


def child(path: Path, call: str = "") -> subprocess.Popen[bytes]:
    """A process that loads the library and runs ``call`` with it as ``handle``."""
    code = f"import ctypes; handle = ctypes.CDLL({str(path)!r}); print(flush=True); {call}"
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


# -- functions ---------------------------------------------------------------------------------------------------------


@needs_loader
@each("code", [0, 1, 999, -1, 2**31 - 1, -(2**31)])
def test_function_returns_its_code(tmp_path: Path, code: int) -> None:
    with loaded_function(tmp_path, returns(code)) as f:
        assert f() == code


@needs_loader
@each("argument", range(6))
@each("size", [0, 1, 7, 8, 9, 17, 96, 2049])
def test_blob_is_copied_completely_and_nothing_around_it_changes(tmp_path: Path, argument: int, size: int) -> None:
    blob = bytes(1 + at % 255 for at in range(size))
    buffer = ctypes.create_string_buffer(b"\xff" * (size + 16), size + 16)
    arguments: list[object] = [None] * 6
    arguments[argument] = ctypes.byref(buffer, 8)
    with loaded_function(tmp_path, fills(argument, blob, code=5)) as f:
        assert f(*arguments) == 5
    assert buffer.raw == b"\xff" * 8 + blob + b"\xff" * 8


@needs_loader
def test_several_blobs_are_copied_to_several_arguments(tmp_path: Path) -> None:
    buffers = [ctypes.create_string_buffer(16) for _ in range(6)]
    with loaded_function(tmp_path, fills(0, b"zero", *((at, b"number %d" % at) for at in range(1, 6)))) as f:
        assert f(*buffers) == 0
    assert [buffer.value for buffer in buffers] == [b"zero", *(b"number %d" % at for at in range(1, 6))]


@needs_loader
@each(("source", "argument"), list(permutations(range(6), 2)))
def test_argument_is_stored_where_another_points(tmp_path: Path, source: int, argument: int) -> None:
    number = ctypes.c_uint64(0)
    arguments: list[object] = [None] * 6
    arguments[source], arguments[argument] = ctypes.c_uint64(0xFEDCBA9876543210), ctypes.byref(number)
    with loaded_function(tmp_path, passes(source, argument)) as f:
        assert f(*arguments) == 0
    assert number.value == 0xFEDCBA9876543210


@needs_loader
@each("argument", range(6))
def test_switch_runs_the_case_of_its_argument(tmp_path: Path, argument: int) -> None:
    inner = switch((argument + 1) % 6, {2: returns(22)}, returns(20))
    with loaded_function(tmp_path, switch(argument, {75: returns(1), -2: inner, 0x7001: returns(3)}, returns(4))) as f:
        rows = [[value if at == argument else 2 for at in range(6)] for value in (75, -2, 0x7001, 2, 0)]
        assert [f(*row) for row in rows] == [1, 22, 3, 4, 4]
        assert f(*(-2 for _ in range(6))) == 20


@needs_loader
def test_selector_picks_blob_and_code_or_else_the_last_ones(tmp_path: Path) -> None:
    buffer = ctypes.create_string_buffer(8)
    with loaded_function(tmp_path, fills_by(1, 0, [b"one\0", b"two\0", b"three\0"], [0, 4, 5])) as f:
        results = [(f(buffer, selector), buffer.value) for selector in (0, 1, 2, 3, -1)]
    assert results == [(0, b"one"), (4, b"two"), (5, b"three"), (5, b"three"), (5, b"three")]


@needs_loader
@pytest.mark.parametrize(
    ("body", "status"), [(crashes(), -signal.SIGILL), (segfaults(), -signal.SIGSEGV), (exits(7), 7), (exits(0), 0)]
)
def test_function_ends_the_process(tmp_path: Path, body: Function, status: int) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(functions={"f": body}))
    with child(path, "handle.f(); raise SystemExit(99)") as process:
        assert process.wait(60) == status


@needs_loader
def test_hanging_function_does_not_return(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(functions={"f": hangs()}))
    with child(path, "handle.f()") as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()
    assert process.returncode == -signal.SIGKILL


def test_aarch64_instructions_are_encoded_correctly() -> None:
    # movz x0, #42; movk x0, #0, lsl #16, #32, #48; ret
    assert returns(42).aarch64.hex() == "400580d20000a0f20000c0f20000e0f2c0035fd6"
    # movz x9, #75; three movk; cmp w1, w9; b.ne over 20 bytes; then returns(1) and returns(2)
    start = bytes.fromhex("690980d20900a0f20900c0f20900e0f23f00096bc1000054")
    assert switch(1, {75: returns(1)}, returns(2)).aarch64 == start + returns(1).aarch64 + returns(2).aarch64
    # movz x9, #0x41; three movk; strb w9, [x3]
    assert fills(3, b"A").aarch64.startswith(bytes.fromhex("290880d20900a0f20900c0f20900e0f269000039"))


# -- the loader --------------------------------------------------------------------------------------------------------


@needs_loader
@pytest.mark.parametrize("tag", ["runpath", "rpath"])
def test_needed_library_is_found_by_rpath_and_runpath(tmp_path: Path, tag: str) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / f"libforged-{tag}.so.1").write_bytes(library(functions={"answer": returns(42)}))
    path = tmp_path / "lib.so"
    where = {tag: "$ORIGIN/nowhere:$ORIGIN/beside"}
    path.write_bytes(library(needed=[f"libforged-{tag}.so.1"], undefined=["answer"], **where))  # type: ignore[arg-type]
    with loaded(path) as handle:
        assert handle.answer() == 42


@needs_loader
def test_missing_needed_library_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(needed=["libforged-absent.so.7"], runpath="$ORIGIN"))
    with pytest.raises(OSError, match=r"libforged-absent\.so\.7"):
        ctypes.CDLL(str(path))


@needs_loader
def test_undefined_symbol_must_be_resolved_but_a_weak_one_need_not(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(undefined=["nobody_defines_this"]))
    with pytest.raises(OSError, match="nobody_defines_this"):
        ctypes.CDLL(str(path))
    weak_path = tmp_path / "weak.so"
    weak_path.write_bytes(library(weak=["nobody_defines_this"], functions={"f": returns(1)}))
    with loaded(weak_path) as handle:
        assert handle.f() == 1


def jit_link(folder: Path, *names: str, **other: Function) -> None:
    """Write a library whose functions have its name as their version, as in NVIDIA's libraries."""
    functions = {f"{name}@@libforgedLink.so.12": returns(12) for name in names}
    (folder / "libforgedLink.so.12").write_bytes(
        library(soname="libforgedLink.so.12", functions={**functions, **other})
    )


def user_of(folder: Path, *undefined: str) -> Path:
    path = folder / "lib.so"
    path.write_bytes(library(needed=["libforgedLink.so.12"], runpath="$ORIGIN", undefined=undefined))
    return path


@needs_loader
def test_symbol_with_the_required_version_is_found(tmp_path: Path) -> None:
    jit_link(tmp_path, "add_12_0", "add_12_1")
    with loaded(user_of(tmp_path, "add_12_1@libforgedLink.so.12")) as handle:
        assert handle.add_12_1() == 12


@needs_loader
def test_missing_symbol_with_the_required_version_is_an_error(tmp_path: Path) -> None:
    jit_link(tmp_path, "add_12_0")
    path = user_of(tmp_path, "add_12_0@libforgedLink.so.12", "add_12_1@libforgedLink.so.12")
    with pytest.raises(OSError, match=r"add_12_1.*libforgedLink\.so\.12"):
        ctypes.CDLL(str(path))


@needs_loader
@pytest.mark.parametrize("symbol", ["add@ABSENT@libforgedLink.so.12", "puts@ABSENT@libc.so.6"])
def test_missing_version_is_an_error(tmp_path: Path, symbol: str) -> None:
    jit_link(tmp_path, "add")
    path = user_of(tmp_path, "add@libforgedLink.so.12", symbol)
    with pytest.raises(OSError, match="ABSENT"):
        ctypes.CDLL(str(path))


@needs_loader
def test_versions_of_one_symbol_are_distinguished(tmp_path: Path) -> None:
    jit_link(tmp_path, **{"add@@NEW": returns(2), "add@OLD": returns(1)})
    with loaded(tmp_path / "libforgedLink.so.12") as handle:
        assert handle.add() == 2
    with loaded(user_of(tmp_path, "add@OLD@libforgedLink.so.12", "add@NEW@libforgedLink.so.12")):
        pass


@needs_loader
def test_init_function_runs_when_the_library_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(functions={"other": returns(0), "start": exits(5)}, init="start"))
    with child(path) as process:
        assert process.wait(60) == 5


@needs_loader
def test_library_without_section_headers_loads(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(functions={"f": returns(3)}, section_headers=False))
    with loaded(path) as handle:
        assert handle.f() == 3


@needs_loader
def test_library_with_a_large_section_loads(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    body = os.urandom(300_001)
    path.write_bytes(library(functions={"f": returns(3)}, undefined=["f"], sections={".nv_fatbin": body}))
    with loaded(path) as handle:
        assert handle.f() == 3


@needs_loader
def test_library_for_another_machine_is_refused(tmp_path: Path) -> None:
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[NATIVE]
    path = tmp_path / "lib.so"
    path.write_bytes(library(functions={"f": returns(3)}, machine=other))
    with pytest.raises(OSError, match=r"lib\.so"):
        ctypes.CDLL(str(path))


# -- layout ------------------------------------------------------------------------------------------------------------


def sections_of(image: bytes) -> dict[str, bytes]:
    *_, shoff, _, _, _, _, size, count, strings = HEADER.unpack_from(image)
    assert size == SECTION.size
    headers = [SECTION.unpack_from(image, shoff + size * at) for at in range(count)]
    start = headers[strings][4]
    names = [image[start + header[0] :].split(b"\0")[0].decode() for header in headers]
    return {name: image[header[4] : header[4] + header[5]] for name, header in zip(names, headers, strict=True)}


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("aarch64", 183)])
def test_sections_are_found_by_name(machine: str, number: int) -> None:
    image = library(soname="libx.so", sections={".nv_fatbin": b"abc", "__nv_relfatbin": b""}, machine=machine)
    sections = sections_of(image)
    assert struct.unpack_from("<HH", image, 16) == (3, number)
    assert (sections[".nv_fatbin"], sections["__nv_relfatbin"]) == (b"abc", b"")
    assert b"\0libx.so\0" in sections[".dynstr"]
    assert {".text", ".hash", ".dynsym", ".dynamic", ".shstrtab"} <= set(sections)


def test_version_sections_exist_only_if_there_are_versions() -> None:
    required = {name for name in sections_of(library(undefined=["a@V"], machine="x86_64")) if "version" in name}
    exported = {"a@@V": returns(0)}
    defined = {name for name in sections_of(library(functions=exported, machine="x86_64")) if "version" in name}
    assert required == {".gnu.version", ".gnu.version_r"}
    assert defined == {".gnu.version", ".gnu.version_d"}
    assert not any("version" in name for name in sections_of(library(undefined=["a"], machine="x86_64")))


def test_fatbin_has_nvidias_layout() -> None:
    body = fatbin([(CUBIN, 75, b"x" * 8), (CUBIN, "90a", b"y"), (PTX, "100f", b"z" * 9), (LTO, 80, b"w")])
    magic, version, start, size = struct.unpack_from("<IHHQ", body)
    assert (magic, version, start + size) == (0xBA55ED50, 1, len(body))
    entries = []
    while start < len(body):
        kind, _, header, payload = struct.unpack_from("<HHIQ", body, start)
        sm, flags = struct.unpack_from("<I8xQ", body, start + 28)
        entries.append((kind, sm, flags >> 20, body[start + header : start + header + payload].rstrip(b"\0")))
        start += header + payload
    assert entries == [(2, 75, 0, b"x" * 8), (2, 90, 1, b"y"), (1, 100, 2, b"z" * 9), (8, 80, 0, b"w")]
