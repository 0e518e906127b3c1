"""Files crafted to cost time or memory: each is inspected under a memory limit, timed, and shown in every way."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import forge, forks
from tests.forge import (
    Entry,
    Tail,
    archive,
    bignum,
    call,
    checkpoint,
    dictionary,
    entries,
    legacy,
    list_of,
    name,
    number,
    ordered,
    pickled,
    rebuild_call,
    storage_id,
    tensor,
    text,
    tuple_of,
    with_changes,
)

from transload.opening import inspect

SOURCE = Path(__file__).parent.parent.parent / "src"
MEMORY = 1 << 30
MANY = 10_000 * forge.FUZZ
BOMB = (64 << 20) * forge.FUZZ

# Inspects a file under a memory limit, and renders the result in every way.
READER = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
from transload.opening import inspect
checkpoint = inspect(sys.argv[1], verify=True)
shown = [repr(checkpoint), checkpoint._repr_html_(), json.dumps(checkpoint.to_dict())]
print(json.dumps({"safety": checkpoint.safety, "integrity": checkpoint.integrity, "ok": checkpoint.ok,
                  "shown": [len(text) for text in shown], "tensors": len(checkpoint.tensors),
                  "seconds": time.process_time()}))
"""
READER_IMPORTS = (
    "transload.judge.torch_releases",
    "transload.formats.plain_pickle",
    "transload.formats.torch_legacy",
    "transload.formats.torch_zip",
    "transload.formats.record_checksums",
    "transload.render.checkpoint",
    "transload.render.html",
)


def deflated_zeros(size: int) -> bytes:
    """A deflated stream of ``size`` zeros, which takes a thousandth of that."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * (size >> 20) + packer.flush()


def deflated(title: str, size: int = BOMB) -> list[Entry]:
    """The records of a checkpoint, one of which inflates to ``size`` zeros."""
    claims = {"size": size, "local_size": size, "crc32": 1, "local_crc32": 1}
    return with_changes(entries(), title, method=8, flags=0x800, raw=deflated_zeros(size), data=b"", **claims)


def shared_pairs(levels: int) -> bytes:
    """Each level is a pair of the level below, twice: 2 ** ``levels`` leaves in a few bytes."""
    out = b"Kd"
    for level in range(levels):
        out += b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    return out


def nested(levels: int, opener: bytes = b"", closer: bytes = b"\x85") -> bytes:
    return opener * levels + b"N" + closer * levels


def parameters(levels: int) -> bytes:
    """A parameter of a parameter of a parameter …"""
    out = tensor("0")
    for _ in range(levels):
        out = rebuild_call("_rebuild_parameter", out, True, ordered())
    return out


def archive_of(body: bytes, **storages: bytes) -> bytes:
    return checkpoint(pickled(body), storages or {"0": bytes(16)})


def overlapping(count: int) -> bytes:
    """Many records that share one payload."""
    one = Entry(b"archive/data/0", bytes(1 << 16))
    header = len(archive(entries()[:1], Tail())) - 22 - 46 - len(b"archive/data.pkl")
    more = [Entry(b"archive/x%d" % i, one.data, in_file=False, header=header) for i in range(count)]
    return archive([entries()[0], one, *more])


SELF = b"]q\0h\0a"
SELF_DICT = b"}q\0" + text("me") + b"h\0s"
BIG = 10**12

ATTACKS: dict[str, Callable[[], bytes]] = {
    "a string that claims four gigabytes": lambda: archive_of(b"X\xff\xff\xff\xffabc"),
    "a string that claims 2**63 bytes": lambda: archive_of(b"\x8d" + struct.pack("<Q", 1 << 63) + b"abc"),
    "bytes that claim a length of 2**63 - 1": lambda: archive_of(b"\x8e" + struct.pack("<Q", (1 << 63) - 1) + b"abc"),
    "a byte array that claims 2**62 bytes": lambda: archive_of(b"\x96" + struct.pack("<Q", 1 << 62) + b"abc"),
    "a frame that claims 2**62 bytes": lambda: archive_of(b"\x95" + struct.pack("<Q", 1 << 62) + b"N"),
    "an integer that claims two gigabytes": lambda: archive_of(b"\x8b" + struct.pack("<i", (1 << 31) - 1) + b"abc"),
    "an integer of a megabyte": lambda: archive_of(bignum(1 << (8 << 20))),
    "an integer of many digits": lambda: archive_of(b"I" + b"9" * 10 * MANY + b"\n"),
    "the largest memo index": lambda: archive_of(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff"),
    "a byte array created by its size": lambda: archive_of(call(name("builtins", "bytearray"), 1 << 30)),
    "a tensor created by its size": lambda: archive_of(call(name("torch", "FloatTensor"), bignum(1 << 38))),
    "many nested tuples": lambda: archive_of(nested(10 * MANY)),
    "many nested lists": lambda: archive_of(nested(10 * MANY, b"]", b"a")),
    "many nested dictionaries": lambda: archive_of(nested(5 * MANY, b"}K\1", b"s")),
    "many marks": lambda: archive_of(b"(" * 10 * MANY + b"N" + b"t" * 10 * MANY),
    "a hundred nested parameters": lambda: archive_of(ordered({"w": parameters(100)})),
    "ten thousand nested parameters": lambda: archive_of(ordered({"w": parameters(10_000)})),
    "pairs shared over 60 levels": lambda: archive_of(shared_pairs(60)),
    "pairs shared over 250 levels": lambda: archive_of(shared_pairs(250)),
    "a list that contains itself": lambda: archive_of(SELF),
    "a dictionary that contains itself": lambda: archive_of(SELF_DICT),
    "one tensor under many names": lambda: archive_of(tensor("0") + b"q\0](" + b"h\0" * 10 * MANY + b"e"),
    "one list of a thousand under a thousand names": lambda: archive_of(
        list_of(*[number(i) for i in range(1000)]) + b"q\0](" + b"h\0" * 1000 + b"e"
    ),
    "many values": lambda: archive_of(b"](" + b"K\1" * 10 * MANY + b"e"),
    "many empty dictionaries": lambda: archive_of(b"](" + b"}" * 10 * MANY + b"e"),
    "many tensors": lambda: archive_of(b"](" + tensor("0") * MANY + b"e"),
    "many broken tensors": lambda: archive_of(b"](" + tensor("0", (5,)) * MANY + b"e"),
    "many globals": lambda: archive_of(b"](" + b"".join(name("m", f"n{i}") for i in range(MANY)) + b"e"),
    "many storages": lambda: archive_of(b"](" + b"".join(tensor(str(i)) for i in range(MANY)) + b"e"),
    "many invalid persistent ids": lambda: archive_of(b"](" + b"K\1Q" * MANY + b"e"),
    "2**64 + 4 elements": lambda: archive_of(ordered({"w": tensor("0", numel=(1 << 64) + 4)})),
    "2**70 elements": lambda: archive_of(ordered({"w": tensor("0", (1 << 70,), numel=1 << 70)})),
    "minus four elements": lambda: archive_of(ordered({"w": tensor("0", numel=-4)})),
    "10**12 elements over four numbers": lambda: archive_of(ordered({"w": tensor("0", (BIG,), (0,))})),
    "a thousand dimensions": lambda: archive_of(ordered({"w": tensor("0", (1,) * 1000, (1,) * 1000)})),
    "a thousand dimensions of two": lambda: archive_of(ordered({"w": tensor("0", (2,) * 1000, (0,) * 1000)})),
    "a key of a megabyte": lambda: archive_of(ordered({"k" * 10 * MANY: tensor("0")})),
    "a long key above many values": lambda: archive_of(dictionary({"k" * MANY: list_of(*[tensor("0")] * 2000)})),
    "a hundred long keys in a row": lambda: archive_of(
        b"".join(b"}" + text(f"{i}" * 1000) for i in range(100)) + b"N" + b"s" * 100
    ),
    "control characters in a key": lambda: archive_of(ordered({"\x1b[2J\x07\u202e\ud800": tensor("0")})),
    "a version that is a bomb": lambda: archive(deflated("version")),
    "a byte order that is a bomb": lambda: archive(deflated("byteorder")),
    "a format version that is a bomb": lambda: archive(deflated(".format_version")),
    "an index that is a bomb": lambda: archive(deflated("data.pkl")),
    "an index that is a bomb of dictionaries": lambda: archive(
        with_changes(entries(), "data.pkl", data=b"\x80\x02" + b"}" * (60 << 20) + b".", method=8, flags=0x800)
    ),
    "an unused record that is a bomb of dictionaries": lambda: archive(
        [*entries(), Entry(b"archive/x", b"\x80\x02" + b"}" * (60 << 20) + b".", method=8, flags=0x800)]
    ),
    "a storage that is a bomb": lambda: archive(deflated("data/0")),
    "an index that claims little and is a bomb": lambda: archive(
        [replace(entry, size=99, local_size=99) if entry.raw else entry for entry in deflated("data.pkl")]
    ),
    "many overlapping records": lambda: overlapping(MANY),
    "many empty records": lambda: archive([*entries(), *(Entry(b"archive/%d" % i) for i in range(MANY))]),
    "many records of one name": lambda: archive([*entries(), *[Entry(b"archive/x")] * MANY]),
    "four billion entries claimed": lambda: archive(
        entries(), Tail(zip64=True, count=0xFFFF, wide_count=(1 << 32) - 1)
    ),
    "2**64 - 1 entries claimed": lambda: archive(entries(), Tail(zip64=True, count=0xFFFF, wide_count=(1 << 64) - 1)),
    "a directory of 2**63 bytes claimed": lambda: archive(
        entries(), Tail(zip64=True, size=forge.ALL32, wide_size=1 << 63)
    ),
    "a directory at 2**64 - 1": lambda: archive(
        entries(), Tail(zip64=True, start=forge.ALL32, wide_start=(1 << 64) - 1)
    ),
    "a record of 2**64 - 1 bytes": lambda: archive(
        with_changes(entries(), "data/0", stored=forge.ALL32, size=forge.ALL32, extra=forge.zip64_sizes((1 << 64) - 1))
    ),
    "a header at 2**64 - 1": lambda: archive(
        with_changes(entries(), "data/0", header=forge.ALL32, extra=struct.pack("<2HQ", 1, 8, (1 << 64) - 1))
    ),
    "a name of 64 kilobytes": lambda: archive([*entries(), Entry(b"archive/" + b"n" * 65_000, b"x")]),
    "legacy: 2**38 elements": lambda: legacy(
        object=pickled(ordered({"w": tensor(storage=storage_id("0", 1 << 38, "FloatStorage", "cpu", None))}))
    ),
    "legacy: many keys": lambda: legacy(keys=pickled(b"](" + text("0") * 10 * MANY + b"e")),
    "legacy: many nested tuples": lambda: legacy(object=pickled(nested(10 * MANY))),
    "tar: 2**40 storages": lambda: forge.tar({"storages": pickled(number(1 << 40))}),
    "tar: many storages": lambda: forge.tar({"storages": forge.tar_storages(MANY)}),
    "tar: many tensors": lambda: forge.tar({"tensors": forge.tar_tensors(MANY)}),
    "tar: 2**31 - 1 dimensions": lambda: forge.tar(
        {"tensors": pickled(number(1)) + pickled(tuple_of(100, 0, name("torch", "FloatTensor"))) + b"\xff\xff\xff\x7f"}
    ),
    "a cut archive of many records": lambda: archive([Entry(b"a/%d.pkl" % i, pickled(b"N")) for i in range(MANY)])[
        :-22
    ],
    "a cut archive of many descriptors": lambda: archive(
        [Entry(b"a/data/0", b"PK\x07\x08" * 10 * MANY), Entry(b"a/version", b"3\n")]
    )[:-22],
    "many pickles": lambda: pickled(b"N") * MANY,
    "many bytes that could be a pickle": lambda: b"(" * 10 * MANY,
}


def inspect_limited(path: Path, memory: int = MEMORY) -> dict[str, Any]:
    pytest.importorskip("resource")
    process = forks.run("-c", READER, path, str(memory), env={"PYTHONPATH": str(SOURCE)}, imports=READER_IMPORTS)
    assert process.returncode == 0, process.stderr[-2000:]
    result: dict[str, Any] = json.loads(process.stdout)
    return result


# These need not be reported as a problem: they are merely unusual, or too large to judge.
UNUSUAL = frozenset(
    {
        "10**12 elements over four numbers",
        "a list that contains itself",
        "a dictionary that contains itself",
        "many values",
        "many empty dictionaries",
        "many tensors",
        "many empty records",
        "one list of a thousand under a thousand names",
        "one tensor under many names",
        "a key of a megabyte",
        "a long key above many values",
        "a hundred long keys in a row",
        "control characters in a key",
        "a thousand dimensions",
        "a thousand dimensions of two",
        "an integer of a megabyte",
        "the largest memo index",
        "a name of 64 kilobytes",
        "tar: many storages",
        "tar: many tensors",
    }
)


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_AS")
@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_file_is_inspected_within_limits_and_reported(attack: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(ATTACKS[attack]())
    result = inspect_limited(path)
    mebibytes = path.stat().st_size / (1 << 20)
    assert result["seconds"] < 5 + 5 * mebibytes
    assert 0 < min(result["shown"]) <= max(result["shown"]) < (64 + 200 * mebibytes) * (1 << 20)
    if attack in UNUSUAL:
        assert result["safety"] in ("data-only", "unknown")
    else:
        assert not result["ok"]


COMMANDS = {"json": ("--json",), "tree": ("--tree",), "plain": ()}


@pytest.mark.parametrize("output", COMMANDS)
@pytest.mark.parametrize(
    "attack",
    [
        "many nested tuples",
        "pairs shared over 60 levels",
        "a dictionary that contains itself",
        "10**12 elements over four numbers",
        "control characters in a key",
        "a key of a megabyte",
    ],
)
def test_inspect_command_survives_a_hostile_file(attack: str, output: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(ATTACKS[attack]())
    env = {"PYTHONPATH": str(SOURCE), "NO_COLOR": "1", "COLUMNS": "100"}
    process = forks.run("-m", "transload", "inspect", *COMMANDS[output], path, env=env, imports=READER_IMPORTS)
    assert process.returncode in (0, 1), process.stderr[-2000:]
    assert "Traceback" not in process.stderr
    assert "\x1b" not in process.stdout
    if output == "json":
        assert json.loads(process.stdout)["schema"] == 1


def peak_memory(path: Path) -> int:
    tracemalloc.start()
    try:
        inspect(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mebibytes", [1, 64])
def test_memory_does_not_grow_with_the_tensors(mebibytes: int, tmp_path: Path) -> None:
    numel = mebibytes << 18
    path = tmp_path / "large.pt"
    path.write_bytes(checkpoint(pickled(ordered({"w": tensor("0", (numel,), numel=numel)})), {"0": bytes(4 * numel)}))
    assert peak_memory(path) < 4 << 20


def many_tensors(count: int) -> bytes:
    items = b"".join(text(f"layer.{i}.weight") + tensor(str(i)) for i in range(count))
    return archive(
        [
            Entry(b"archive/data.pkl", pickled(b"ccollections\nOrderedDict\n)R(" + items + b"u")),
            *(Entry(b"archive/data/%d" % i, bytes(16)) for i in range(count)),
            Entry(b"archive/version", b"3\n"),
        ]
    )


def test_memory_is_not_quadratic_in_the_number_of_tensors(tmp_path: Path) -> None:
    peaks = []
    for count in (200, 2000):
        path = tmp_path / f"{count}.pt"
        path.write_bytes(many_tensors(count))
        peaks.append(peak_memory(path))
    assert peaks[1] < 16 * peaks[0]
    assert peaks[1] < 20 << 20


def test_time_is_not_quadratic_in_the_number_of_tensors() -> None:
    def seconds(count: int) -> float:
        data = many_tensors(count)
        inspect(data)
        times = []
        for _ in range(3):
            start = time.process_time()
            inspect(data)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(4000) < 30 * seconds(400)


def test_zip_directory_of_three_gigabytes_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pt"
    size = 3 << 30
    with path.open("wb") as file:
        file.write(b"PK\x03\x04" + bytes(60) + b"PK\x01\x02")
        file.seek(size)
        file.write(forge.END.pack(b"PK\x05\x06", 0, 0, 1, 1, size - 64, 64, 0))
    if not forge.is_sparse(path):
        pytest.skip("the file system does not support sparse files")
    result = inspect_limited(path)
    assert result["safety"] == "unknown"


def test_large_foreign_file_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "zeros.bin"
    with path.open("wb") as file:
        file.write(b"(((X\xff\xff\xff\x7f" + os.urandom(1 << 16))  # claims a string of 2 GB
        file.truncate(8 << 30)
    result = inspect_limited(path, 512 << 20)
    assert result["integrity"] == "not-a-checkpoint"
