"""Files made to keep us busy, to fill memory or disk, or to write elsewhere: bounded, and never a foreign error."""

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
from tests.rescuing.test_streams import SAFE, table

from transload import inspect, rescue
from transload.errors import TransloadError
from transload.formats import read_source
from transload.io.sources import BytesSource
from transload.rescuing import bitflips, filled
from transload.rescuing.archive import LostRange, Recovered

STATE = (ROOT / "h200" / "state_dict_cuda0.pt").read_bytes()
MIB = 1 << 20


@contextmanager
def bounded(memory: int = 200 * MIB) -> Iterator[None]:
    """Far more than it takes, far less than what the file asks for."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


def tried(data: bytes, tmp_path: Path, **options: object) -> int:
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
def test_random_damage(seed: int, tmp_path: Path) -> None:
    """No foreign error; and what is called complete is a file with nothing wrong."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    files = [path.read_bytes() for path in FILES if path.stat().st_size < 20_000]
    for _ in range(50 * FUZZ):
        data = mutated(rng.choice([*files, SAFE]), rng)
        if tried(data, tmp_path, fill=rng.choice((None, "zeros", "nan"))) == 0:
            assert inspect(tmp_path / "out.pt", verify=True).integrity in ("whole", "unchecked", "repairable")


def test_many_lost_ranges_are_filled_in_seconds() -> None:
    """Each is looked for in one storage: comparing all with all took minutes."""
    count = 20_000
    source = BytesSource(table({f"w{number}": ("F32", [1], b"good") for number in range(count)}))
    data = source.size - 4 * count
    ranges = tuple(LostRange(at, at + 4, "damaged") for at in range(data, source.size, 8))
    begun = time.monotonic()
    out = filled(Recovered(source, exact=False, lost_ranges=ranges), read_source(source), "zeros")
    assert out.read(data, 4 * count) == (bytes(4) + b"good") * (count // 2)
    assert time.monotonic() - begun < 30


def test_a_decompression_bomb(tmp_path: Path) -> None:
    bomb = gzip.compress(gzip.compress(bytes(64 * MIB), 1))
    with bounded():
        assert tried(bomb, tmp_path) == 2


def test_endless_layers(tmp_path: Path) -> None:
    data = STATE
    for _ in range(6):
        data = gzip.compress(data)
    with bounded():
        assert tried(data, tmp_path) == 2


def test_a_compressed_record_that_inflates_to_much(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("a/data.pkl", forge.state_dict(1))
        archive.writestr("a/data/0", bytes(16))
        archive.writestr("a/code/x.py", bytes(100 * MIB))
    with bounded():
        assert tried(out.getvalue(), tmp_path) == 0


@pytest.mark.parametrize("numel", [1 << 40, 1 << 58, -1])
def test_a_storage_that_claims_everything(numel: int, tmp_path: Path) -> None:
    """Cut off, so that nothing contradicts it."""
    index = forge.pickled(forge.ordered({"w": forge.tensor("0", (4,), numel=numel), "v": forge.tensor("1")}))
    whole = forge.archive(
        [forge.Entry(b"a/data.pkl", index), forge.Entry(b"a/data/1", bytes(16)), forge.Entry(b"a/data/0", bytes(99))]
    )
    cut = whole[: whole.index(bytes(99)) + 40]
    for fill in (None, "zeros"):
        with bounded():
            assert tried(cut, tmp_path, fill=fill) in (1, 2)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < MIB


def test_endless_headers(tmp_path: Path) -> None:
    header = struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 8, 0, 0, 0, 0, 0, 0, 1, 0) + b"x"
    assert tried(header * 5000, tmp_path) == 2
    assert tried(header.replace(b"\x08\0", b"\0\0", 1) * 5000, tmp_path) == 2


def test_endless_damaged_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each could be repaired by a search of its own: after some, no more are tried."""
    searches: list[int] = []

    def search(syndrome: int, *_: int) -> list[tuple[int, int]]:
        searches.append(syndrome)
        return []

    monkeypatch.setattr(bitflips, "_MAX_REPAIRED", 50)
    monkeypatch.setattr(bitflips, "flipped_bits", search)
    entries = [forge.Entry(b"a/data.pkl", forge.state_dict(1)), forge.Entry(b"a/data/0", bytes(16))]
    entries += [forge.Entry(b"a/x%d" % number, b"12345678" * 4, raw=b"abcdefgh" * 4) for number in range(300)]
    assert tried(forge.archive(entries), tmp_path) == 1
    assert len(searches) == 50


def test_endless_damaged_compressed_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits of a record are tried, but not of all records."""
    monkeypatch.setattr(bitflips, "_MAX_TRIED", 64 * MIB)
    rng = random.Random(1)  # noqa: S311 - no secret
    plain = [bytes(rng.choice(b"abcdefgh") for _ in range(20_000)) for _ in range(9)]
    entries = [forge.Entry(b"a/data.pkl", forge.state_dict(1)), forge.Entry(b"a/data/0", bytes(16))]
    entries += [
        forge.Entry(b"a/x%d" % number, other, method=8, raw=_deflated(data))
        for number, (data, other) in enumerate(pairwise(plain))
    ]
    assert tried(forge.archive(entries), tmp_path) == 1


def _deflated(data: bytes) -> bytes:
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


def test_endless_end_records(tmp_path: Path) -> None:
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 9, 9, 100, 0, 0)
    with bounded():
        assert tried(STATE + end * 50_000, tmp_path) in (0, 1, 2)


@pytest.mark.parametrize("name", [b"../../evil", b"/etc/evil", b"a/../../evil", b"C:\\evil", b"a/\0evil"])
def test_record_names_never_become_paths(name: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "deeper"
    folder.mkdir(parents=True)
    entries = [forge.Entry(b"a/data.pkl", forge.state_dict(1)), forge.Entry(b"a/data/0", bytes(16))]
    data = forge.archive([*entries, forge.Entry(name, b"evil")])
    rescue(data, folder / "out.pt")
    rescue(data[:-30], folder / "out2.pt")
    found = {path.name for path in tmp_path.rglob("*")}
    assert found == {"deep", "deeper", "out.pt", "out.pt.rescue.json", "out2.pt", "out2.pt.rescue.json"}


def test_a_table_of_nonsense(tmp_path: Path) -> None:
    for entry in ('{"dtype":"F32"}', "[]", '{"data_offsets":[0,99999999999999999999999]}', '{"data_offsets":["a",1]}'):
        raw = b'{"w":%s}' % entry.encode()
        with bounded():
            for more in (b"", bytes(50)):
                assert tried(struct.pack("<Q", len(raw)) + raw + more, tmp_path, fill="zeros") == 2, (entry, more)
    deep = b"[" * 100_000
    assert tried(struct.pack("<Q", len(deep)) + deep, tmp_path) == 2
