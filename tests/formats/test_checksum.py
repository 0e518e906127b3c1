"""CRC-32 of a whole from that of its parts."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.each import each

from transload.io import checksums as checksum
from transload.io.checksums import crc32_combine, fastest_crc32


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_of_two_parts(first: bytes, second: bytes) -> None:
    assert crc32_combine(crc32(first), crc32(second), len(second)) == crc32(first + second)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_of_any_number(parts: list[bytes]) -> None:
    value = 0
    for part in parts:
        value = crc32_combine(value, crc32(part), len(part))
    assert value == crc32(b"".join(parts))


@each("length", [1, 255, 256, 4095, 4096, 65_537, 1 << 20, (4 << 20) - 1, 4 << 20])
def test_of_long_ones(length: int) -> None:
    second = bytes(range(256)) * (length // 256) + bytes(length % 256)
    assert crc32_combine(crc32(b"before"), crc32(second), len(second)) == crc32(b"before" + second)


@pytest.mark.parametrize("first", [b"", b"\0", b"\0" * 9, b"x"])
def test_of_nothing(first: bytes) -> None:
    assert crc32_combine(crc32(first), 0, 0) == crc32(first)
    assert crc32_combine(0, crc32(first), len(first)) == crc32(first)


def test_of_more_than_there_is_memory_for() -> None:
    """A tebibyte of zeros, doubled from one, and put together from parts of all sizes."""
    doubled = [crc32(b"\0")]
    for power in range(40):
        doubled.append(crc32_combine(doubled[-1], doubled[-1], 1 << power))
    value = doubled[0]
    for power in range(40):
        value = crc32_combine(value, doubled[power], 1 << power)
    assert value == doubled[40]


def test_a_flipped_bit_shows() -> None:
    parts = [bytes([index]) * 1000 for index in range(5)]
    whole = crc32(b"".join(parts))
    value = 0
    for part in (*parts[:3], b"\x07" + parts[3][1:], parts[4]):
        value = crc32_combine(value, crc32(part), len(part))
    assert value != whole


@pytest.fixture
def chosen_again() -> Iterator[None]:
    fastest_crc32.cache_clear()
    yield
    fastest_crc32.cache_clear()


NOISE = bytes(range(256)) * 400


@each("size", [0, 1, 4095, 4096, 100_000])
@each("kind", [bytes, bytearray])
def test_the_fastest_is_the_same(size: int, kind: type[bytes | bytearray]) -> None:
    data = kind(NOISE[:size])
    assert fastest_crc32()(memoryview(data), 0) == crc32(data)
    assert fastest_crc32()(memoryview(data), crc32(b"before")) == crc32(b"before" + data)


@pytest.mark.usefixtures("chosen_again")
@pytest.mark.parametrize("broken", [False, True])
def test_a_package_is_used_if_it_is_right(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.SimpleNamespace(crc32=lambda data, value: crc32(data, value) + broken)
    monkeypatch.setattr(checksum, "import_module", lambda _: package)
    assert (fastest_crc32() is package.crc32) is not broken


def absent(*names: object) -> None:
    raise ImportError(*names)


@pytest.mark.usefixtures("chosen_again")
def test_without_packages_and_libraries_it_is_that_of_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "import_module", absent)
    monkeypatch.setattr(checksum, "_of_library", absent)
    assert fastest_crc32() is crc32


@pytest.mark.usefixtures("chosen_again")
@pytest.mark.parametrize("wrong", [lambda *_: 0, lambda data, value: crc32(data) if value == 1 else 5, absent])
def test_a_library_that_is_wrong_is_passed_over(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def made(path: str) -> object:
        asked.append(path)
        return wrong

    monkeypatch.setattr(checksum, "import_module", absent)
    monkeypatch.setattr(checksum, "_of_library", made)
    monkeypatch.setattr("sys.platform", "linux")
    assert fastest_crc32() is crc32
    assert len(asked) >= 2


@pytest.mark.usefixtures("chosen_again")
def test_no_library_is_taken_from_where_we_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty part in LD_LIBRARY_PATH the loader looks for a name in the working directory, too."""
    asked: list[str] = []

    def loaded(name: str) -> None:
        asked.append(name)
        raise OSError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.base_prefix", ".")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", loaded)
    monkeypatch.setattr(checksum, "import_module", absent)
    assert fastest_crc32() is crc32
    assert asked
    assert [name for name in asked if not name.startswith(("/usr/lib", "/usr/local/lib"))] == []


def installed(library: str) -> str:
    found = [path for folder in checksum._folders() if Path(path := f"{folder}/{library}").exists()]
    return found[0] if found else pytest.skip(f"no {library} here")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the libraries have other names outside Linux")
@pytest.mark.parametrize("library", ["libdeflate.so.0", "liblzma.so.5"])
def test_the_libraries_of_this_system_are_right(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_LEAST_LZMA", 0)
    found = checksum._of_library(installed(library))
    data = memoryview(bytearray(NOISE))
    for at in (0, 1, 7, 16, 3333):
        assert found(data[at:], crc32(NOISE[:at])) == crc32(NOISE)
    assert found(memoryview(NOISE), 0) == crc32(NOISE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the libraries have other names outside Linux")
def test_a_library_from_before_it_was_fast_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_LEAST_LZMA", 2_000_000_000)
    with pytest.raises(ImportError):
        checksum._of_library(installed("liblzma.so.5"))
