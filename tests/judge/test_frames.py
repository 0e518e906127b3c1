"""Pickles with irregular frames: every name that one of CPython's unpicklers looks up is listed."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import forge

import transload
from transload.formats import pickle_machine


class _Stub:
    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def frame(length: int, body: bytes = b"") -> bytes:
    return b"\x95" + length.to_bytes(8, "little") + body


def looked_up(unpickler: Any, file: Any) -> set[tuple[str, str]]:
    """The names that an unpickler of CPython looks up before it ends or fails."""
    names = set()

    class Recorder(unpickler):
        def find_class(self, module: str, name: str) -> type[_Stub]:
            names.add((module, name))
            return _Stub

        def persistent_load(self, _: object) -> _Stub:
            return _Stub()

    with suppress(Exception):  # the error for a broken stream does not matter
        Recorder(file).load()
    return names


class _Unbuffered(io.RawIOBase):
    """A file that cannot peek."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def readline(self, size: int | None = -1) -> bytes:
        return self._file.readline(size)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)


def listed(data: bytes) -> set[tuple[str, str]]:
    return set(pickle_machine.run(data).globals)


def check_all_listed(data: bytes) -> None:
    files = [io.BytesIO(data), _Unbuffered(data), io.BufferedReader(io.BytesIO(data))]
    for file in files:
        assert looked_up(pickle.Unpickler, file) <= listed(data)
    assert looked_up(pickle._Unpickler, io.BytesIO(data)) <= listed(data)


STREAMS = {
    "frame ends in the module name": (
        b"\x80\x05" + frame(4) + b"cmacos\nsystem\n.",
        {("macos", "system"), ("os", "system")},
    ),
    "frame ends in the attribute name": (
        b"\x80\x05" + frame(6) + b"cos\nmysystem\n.",
        {("os", "mysystem"), ("os", "system")},
    ),
    "frame ends after a text": (
        b"\x80\x05" + frame(4) + b"\x8c\x02os\x8c\x06system\x93.",
        {("os", "system")},
    ),
    "frame in a frame": (
        b"\x80\x05" + frame(20) + frame(4) + b"cmacos\nsystem\n" + bytes(9) + b".",
        {("macos", "system")},
    ),
    "frame ends in the module name of INST": (
        b"\x80\x05(" + frame(4) + b"imacos\nsystem\n.",
        {("macos", "system"), ("os", "system")},
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_names_of_both_readings_are_listed(name: str) -> None:
    data, names = STREAMS[name]
    assert names <= listed(data)
    check_all_listed(data)


def test_inspect_reports_names_that_only_one_reading_has(tmp_path: Path) -> None:
    checkpoint = transload.inspect(forge.checkpoint(STREAMS["frame ends in the module name"][0]))
    assert checkpoint.safety == "dangerous"
    assert {"os.system", "macos.system"} <= {use.full_name for use in checkpoint.globals}
    (tmp_path / "x.pkl").write_bytes(STREAMS["frame ends in the module name"][0])
    assert "os.system" in {use.full_name for use in transload.inspect(tmp_path / "x.pkl").globals}


def test_bytes_split_by_the_end_of_a_frame() -> None:
    check_all_listed(b"\x80\x05" + frame(4) + b"C\x04abcdcos\nsystem\n.")


OPCODES = [
    *(
        b"cmacos\nsystem\n",
        b"cos\nsystem\n",
        b"(",
        b"t",
        b"N",
        b"0",
        b"R",
        b")",
        b"K\x01",
        b"\x8c\x02os",
        b"\x8c\x06system",
    ),
    *(
        b"\x93",
        b"C\x03abc",
        b"X\x02\0\0\0os",
        b"I12\n",
        b"Vos\n",
        b"\x94",
        b"h\0",
        b"]",
        b"a",
        b"imacos\nsystem\n",
        b".",
    ),
    *(b"B\x02\0\0\0ab", b"\x8a\x01\x05", b"S'os'\n", b"J\1\0\0\0", b"2", b"1"),
]


@given(
    st.lists(
        st.one_of(st.sampled_from(OPCODES), st.integers(0, 40).map(frame)),
        max_size=25,
    )
)
def test_random_frames_hide_no_name(parts: list[bytes]) -> None:
    check_all_listed(b"\x80\x05" + b"".join(parts) + b".")


def test_20_000_irregular_frames_are_read() -> None:
    data = b"\x80\x05" + (frame(3) + b"cmacos\nsystem\n") * 20_000 + b"."
    result = pickle_machine.run(data)
    assert {("macos", "system"), ("acos", "system")} & set(result.globals)
