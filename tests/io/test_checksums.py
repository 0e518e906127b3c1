"""CRC-32: combining the checksums of parts, and choosing the fastest implementation."""

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
def test_combine_two_parts(first: bytes, second: bytes) -> None:
    assert crc32_combine(crc32(first), crc32(second), len(second)) == crc32(first + second)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_combine_any_number_of_parts(parts: list[bytes]) -> None:
    value = 0
    for part in parts:
        value = crc32_combine(value, crc32(part), len(part))
    assert value == crc32(b"".join(parts))


@each("length", [1, 255, 256, 4095, 4096, 65_537, 1 << 20, (4 << 20) - 1, 4 << 20])
def test_combine_long_parts(length: int) -> None:
    second = bytes(range(256)) * (length // 256) + bytes(length % 256)
    assert crc32_combine(crc32(b"before"), crc32(second), len(second)) == crc32(b"before" + second)


@pytest.mark.parametrize("first", [b"", b"\0", b"\0" * 9, b"x"])
def test_combine_with_an_empty_part(first: bytes) -> None:
    assert crc32_combine(crc32(first), 0, 0) == crc32(first)
    assert crc32_combine(0, crc32(first), len(first)) == crc32(first)


def test_combine_parts_of_a_tebibyte() -> None:
    """A tebibyte of zeros: by repeated doubling, and combined from parts of different sizes."""
    doubled = [crc32(b"\0")]
    for power in range(40):
        doubled.append(crc32_combine(doubled[-1], doubled[-1], 1 << power))
    value = doubled[0]
    for power in range(40):
        value = crc32_combine(value, doubled[power], 1 << power)
    assert value == doubled[40]


def test_flipped_bit_changes_the_combined_checksum() -> None:
    parts = [bytes([index]) * 1000 for index in range(5)]
    expected = crc32(b"".join(parts))
    value = 0
    for part in (*parts[:3], b"\x07" + parts[3][1:], parts[4]):
        value = crc32_combine(value, crc32(part), len(part))
    assert value != expected


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    fastest_crc32.cache_clear()
    yield
    fastest_crc32.cache_clear()


NOISE = bytes(range(256)) * 400


@each("size", [0, 1, 4095, 4096, 100_000])
@each("kind", [bytes, bytearray])
def test_fastest_crc32_agrees_with_zlib(size: int, kind: type[bytes | bytearray]) -> None:
    data = kind(NOISE[:size])
    assert fastest_crc32()(memoryview(data), 0) == crc32(data)
    assert fastest_crc32()(memoryview(data), crc32(b"before")) == crc32(b"before" + data)


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize("broken", [False, True])
def test_package_is_used_only_if_its_results_are_correct(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.SimpleNamespace(crc32=lambda data, value: crc32(data, value) + broken)
    monkeypatch.setattr(checksum, "import_module", lambda _: package)
    assert (fastest_crc32() is package.crc32) is not broken


def raise_import_error(*names: object) -> None:
    raise ImportError(*names)


@pytest.mark.usefixtures("fresh_choice")
def test_zlib_is_used_without_packages_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "import_module", raise_import_error)
    monkeypatch.setattr(checksum, "_of_library", raise_import_error)
    assert fastest_crc32() is crc32


@pytest.mark.usefixtures("fresh_choice")
@pytest.mark.parametrize(
    "wrong", [lambda *_: 0, lambda data, value: crc32(data) if value == 1 else 5, raise_import_error]
)
def test_library_with_wrong_results_is_skipped(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def of_library(path: str) -> object:
        tried.append(path)
        return wrong

    monkeypatch.setattr(checksum, "import_module", raise_import_error)
    monkeypatch.setattr(checksum, "_of_library", of_library)
    monkeypatch.setattr("sys.platform", "linux")
    assert fastest_crc32() is crc32
    assert len(tried) >= 2


@pytest.mark.usefixtures("fresh_choice")
def test_no_library_is_loaded_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty entry in LD_LIBRARY_PATH the dynamic loader also searches the working directory."""
    tried: list[str] = []

    def load_library(name: str) -> None:
        tried.append(name)
        raise OSError(name)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.base_prefix", ".")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", load_library)
    monkeypatch.setattr(checksum, "import_module", raise_import_error)
    assert fastest_crc32() is crc32
    assert tried
    assert [name for name in tried if not name.startswith(("/usr/lib", "/usr/local/lib"))] == []


def library_path(library: str) -> str:
    paths = [path for folder in checksum._folders() if Path(path := f"{folder}/{library}").exists()]
    return paths[0] if paths else pytest.skip(f"no {library} found")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the libraries have other names outside Linux")
@pytest.mark.parametrize("library", ["libdeflate.so.0", "liblzma.so.5"])
def test_system_libraries_agree_with_zlib(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_LEAST_LZMA", 0)
    library_crc32 = checksum._of_library(library_path(library))
    data = memoryview(bytearray(NOISE))
    for at in (0, 1, 7, 16, 3333):
        assert library_crc32(data[at:], crc32(NOISE[:at])) == crc32(NOISE)
    assert library_crc32(memoryview(NOISE), 0) == crc32(NOISE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the libraries have other names outside Linux")
def test_liblzma_below_the_minimum_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_LEAST_LZMA", 2_000_000_000)
    with pytest.raises(ImportError):
        checksum._of_library(library_path("liblzma.so.5"))
