"""Files crafted to waste time, memory or disk, or to write elsewhere: work is bounded, errors are TransloadErrors."""

from __future__ import annotations

import gzip
import io
import random
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from tests import forge
from tests.forge import FUZZ
from tests.rescuing.makers import FILES, ROOT
from tests.rescuing.test_streams import SAFETENSORS, safetensors_file

from transload import inspect, rescue
from transload.errors import TransloadError
from transload.formats import read_source
from transload.io.sources import BytesSource
from transload.rescuing import bitflips
from transload.rescuing.archive import LostRange, Recovered
from transload.rescuing.compose import filled

STATE = (ROOT / "h200" / "state_dict_cuda0.pt").read_bytes()
MIB = 1 << 20


@contextmanager
def bounded(memory: int = 200 * MIB) -> Iterator[None]:
    """Limit the memory: far more than needed, far less than the file claims."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


def exit_code_of(data: bytes, tmp_path: Path, **options: object) -> int:
    try:
        return rescue(data, tmp_path / "out.pt", overwrite=True, **options).exit_code  # type: ignore[arg-type]
    except TransloadError:
        return 2


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 3, 8, 40))):
        place, other = rng.randrange(len(out) + 1), rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 | 1 if place < len(out):
                out[place] ^= 1 << rng.randrange(8)
            case 2:
                del out[place : place + rng.randrange(200)]
            case 3:
                out[place:place] = rng.randbytes(rng.randrange(60))
            case 4:
                out[place : place + 64] = out[other : other + 64]
            case _:
                out = out[: max(place, 30)]
    return bytes(out)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_raises_only_transload_errors(seed: int, tmp_path: Path) -> None:
    """And a rescue reported as complete yields a file without damage."""
    rng = random.Random(seed)  # noqa: S311 - not for cryptography
    files = [path.read_bytes() for path in FILES if path.stat().st_size < 20_000]
    for _ in range(50 * FUZZ):
        data = mutated(rng.choice([*files, SAFETENSORS]), rng)
        if exit_code_of(data, tmp_path, fill=rng.choice((None, "zeros", "nan"))) == 0:
            assert inspect(tmp_path / "out.pt", verify=True).integrity in ("whole", "unchecked", "repairable")


def test_many_lost_ranges_are_filled_in_seconds() -> None:
    """Each range is compared with one storage; comparing all with all took minutes."""
    count = 20_000
    source = BytesSource(safetensors_file({f"w{number}": ("F32", [1], b"good") for number in range(count)}))
    data = source.size - 4 * count
    ranges = tuple(LostRange(at, at + 4, "damaged") for at in range(data, source.size, 8))
    start = time.process_time()
    out = filled(Recovered(source, exact=False, lost_ranges=ranges), read_source(source), "zeros")
    assert out.read(data, 4 * count) == (bytes(4) + b"good") * (count // 2)
    assert time.process_time() - start < 30


def test_decompression_bomb_is_refused_within_the_memory_limit(tmp_path: Path) -> None:
    bomb = gzip.compress(gzip.compress(bytes(64 * MIB), 1))
    with bounded():
        assert exit_code_of(bomb, tmp_path) == 2


def test_six_layers_of_compression_are_refused(tmp_path: Path) -> None:
    data = STATE
    for _ in range(6):
        data = gzip.compress(data)
    with bounded():
        assert exit_code_of(data, tmp_path) == 2


def test_large_compressed_record_is_rescued_within_the_memory_limit(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("a/data.pkl", forge.state_dict(1))
        archive.writestr("a/data/0", bytes(16))
        archive.writestr("a/code/x.py", bytes(100 * MIB))
    with bounded():
        assert exit_code_of(out.getvalue(), tmp_path) == 0


@pytest.mark.parametrize("numel", [1 << 40, 1 << 58, -1])
def test_wrong_storage_size_in_a_truncated_file_is_bounded(numel: int, tmp_path: Path) -> None:
    """The file is truncated, so that nothing contradicts the size."""
    index = forge.pickled(forge.ordered({"w": forge.tensor("0", (4,), numel=numel), "v": forge.tensor("1")}))
    complete = forge.archive(
        [forge.Entry(b"a/data.pkl", index), forge.Entry(b"a/data/1", bytes(16)), forge.Entry(b"a/data/0", bytes(99))]
    )
    cut = complete[: complete.index(bytes(99)) + 40]
    for fill in (None, "zeros"):
        with bounded():
            assert exit_code_of(cut, tmp_path, fill=fill) in (1, 2)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < MIB


def test_thousands_of_local_headers_are_refused(tmp_path: Path) -> None:
    header = struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 8, 0, 0, 0, 0, 0, 0, 1, 0) + b"x"
    assert exit_code_of(header * 5000, tmp_path) == 2
    assert exit_code_of(header.replace(b"\x08\0", b"\0\0", 1) * 5000, tmp_path) == 2


def test_number_of_repaired_records_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repair needs a search; after a limit, no more are tried."""
    searches: list[int] = []

    def search(syndrome: int, *_: int) -> list[tuple[int, int]]:
        searches.append(syndrome)
        return []

    monkeypatch.setattr(bitflips, "_MAX_REPAIRED", 50)
    monkeypatch.setattr(bitflips, "flipped_bits", search)
    entries = [forge.Entry(b"a/data.pkl", forge.state_dict(1)), forge.Entry(b"a/data/0", bytes(16))]
    entries += [forge.Entry(b"a/x%d" % number, b"12345678" * 4, raw=b"abcdefgh" * 4) for number in range(300)]
    assert exit_code_of(forge.archive(entries), tmp_path) == 1
    assert len(searches) == 50


def test_work_on_damaged_compressed_records_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits of one record are tried, but not those of all records."""
    monkeypatch.setattr(bitflips, "_MAX_TRIED", 64 * MIB)
    rng = random.Random(1)  # noqa: S311 - not for cryptography
    plain = [bytes(rng.choice(b"abcdefgh") for _ in range(20_000)) for _ in range(9)]
    entries = [forge.Entry(b"a/data.pkl", forge.state_dict(1)), forge.Entry(b"a/data/0", bytes(16))]
    entries += [
        forge.Entry(b"a/x%d" % number, other, method=8, raw=_deflated(data))
        for number, (data, other) in enumerate(pairwise(plain))
    ]
    assert exit_code_of(forge.archive(entries), tmp_path) == 1


def _deflated(data: bytes) -> bytes:
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


def test_50000_end_records_stay_within_the_memory_limit(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, 100, 0, 0)
    with bounded():
        assert exit_code_of(STATE + end * 50_000, tmp_path) in (0, 1, 2)


@pytest.mark.parametrize("name", [b"../../evil", b"/etc/evil", b"a/../../evil", b"C:\\evil", b"a/\0evil"])
def test_record_names_never_become_paths(name: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "deeper"
    folder.mkdir(parents=True)
    entries = [forge.Entry(b"a/data.pkl", forge.state_dict(1)), forge.Entry(b"a/data/0", bytes(16))]
    data = forge.archive([*entries, forge.Entry(name, b"evil")])
    rescue(data, folder / "out.pt")
    rescue(data[:-30], folder / "out2.pt")
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"deep", "deeper", "out.pt", "out.pt.rescue.json", "out2.pt", "out2.pt.rescue.json"}


def test_malformed_safetensors_headers_are_refused(tmp_path: Path) -> None:
    for entry in ('{"dtype":"F32"}', "[]", '{"data_offsets":[0,99999999999999999999999]}', '{"data_offsets":["a",1]}'):
        raw = b'{"w":%s}' % entry.encode()
        with bounded():
            for data in (b"", bytes(50)):
                assert exit_code_of(struct.pack("<Q", len(raw)) + raw + data, tmp_path, fill="zeros") == 2, (
                    entry,
                    data,
                )
    deep = b"[" * 100_000
    assert exit_code_of(struct.pack("<Q", len(deep)) + deep, tmp_path) == 2
