"""Measure how fast the checksums of a checkpoint are verified, in GB/s, compared with plain reading and other tools.

    python bench/verify.py [--json] [--gb N] [--repeat N] [--folder DIR]

The file is in the page cache. ``plain read`` is one thread that reads it into a buffer of a megabyte and does nothing
with it. All contenders take turns; commands are measured with the start of their process. The file has a hundred
records, a single one, or twenty thousand small ones. Needs no other package; ``sha256sum`` is left out if it does not
exist.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or `import inspect` would find the file next to this one

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transload.formats.pickle_writer import dumps
from transload.formats.zip_writer import central_entry, descriptor, end_of_archive, local_header
from transload.io.checksums import crc32_combine, fastest_crc32
from transload.nodes import Call, Global, Persistent
from transload.verifying import verify

GOAL = 2.0
LARGE = ("100 records", "one record")
NUMBERS = bytearray(os.urandom(1 << 20))
NUMBERS[3::4] = b"\x3c\xbd\x3d\xbc" * (len(NUMBERS) // 16)  # floats of about the size of weights
NOISE = bytes(NUMBERS)


def index(tensors: int, numel: int) -> bytes:
    """The pickle of a state dict of vectors, as torch writes one."""
    rebuild, ordered = Global("torch._utils", "_rebuild_tensor_v2", 0), Global("collections", "OrderedDict", 0)
    kind = Global("torch", "FloatStorage", 0)
    root = Call(ordered, (), "reduce", 0)
    root.items = []
    for key in range(tensors):
        storage = Persistent(("storage", kind, str(key), "cpu", numel), 0)
        hooks = Call(ordered, (), "reduce", 0)
        args = (storage, 0, tuple([numel]), tuple([1]), False, hooks)  # noqa: C409 - new objects, as in torch
        root.items += [f"layers.{key}.weight", Call(rebuild, args, "reduce", 0)]
    return dumps(root)


def write(path: Path, tensors: int, nbytes: int) -> Path:
    """Write a checkpoint with this number of tensors of noise."""
    nbytes -= nbytes % 4
    entries: list[bytes] = []
    with path.open("wb") as file:

        def add(name: str, size: int, crc: int, pieces: list[bytes]) -> None:
            offset = file.tell()
            file.write(local_header(name.encode(), size, offset))
            file.writelines(pieces)
            file.write(descriptor(size, crc, offset))
            entries.append(central_entry(name.encode(), size, crc, offset))

        pickle = index(tensors, nbytes // 4)
        add("model/data.pkl", len(pickle), zlib.crc32(pickle), [pickle])
        crc = noise_crc32(nbytes)
        for key in range(tensors):
            add(f"model/data/{key}", nbytes, crc, [NOISE] * (nbytes // len(NOISE)) + [NOISE[: nbytes % len(NOISE)]])
        add("model/version", 2, zlib.crc32(b"3\n"), [b"3\n"])
        directory = b"".join(entries)
        file.write(directory + end_of_archive(len(entries), file.tell(), len(directory)))
    return path


def noise_crc32(nbytes: int) -> int:
    """The checksum of this number of bytes of noise."""
    crc, piece = 0, zlib.crc32(NOISE)
    for _ in range(nbytes // len(NOISE)):
        crc = crc32_combine(crc, piece, len(NOISE))
    rest = NOISE[: nbytes % len(NOISE)]
    return crc32_combine(crc, zlib.crc32(rest), len(rest))


def read(path: Path) -> None:
    """Read a file and do nothing with it."""
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def verified(path: Path, *, hashes: bool = False, values: bool = False) -> None:
    """Verify with transload; the file must be intact."""
    report = verify(path, hashes=hashes, values=values)
    assert report.integrity == "whole", report


def command(*arguments: str) -> Callable[[Path], None]:
    """A contender that runs as a separate process."""

    def run(path: Path) -> None:
        subprocess.run([*arguments, str(path)], check=True, stdout=subprocess.DEVNULL)

    return run


def contenders() -> dict[str, Callable[[Path], None]]:
    """Everything that is measured."""
    result: dict[str, Callable[[Path], None]] = {
        "plain read": read,
        "transload.verify": verified,
        "transload verify": command(sys.executable, "-m", "transload", "verify"),
        "transload.verify, hashes": lambda path: verified(path, hashes=True),
        "transload.verify, values": lambda path: verified(path, values=True),
        "python -m zipfile -t": command(sys.executable, "-m", "zipfile", "-t"),
    }
    if shutil.which("sha256sum"):
        result["sha256sum"] = command("sha256sum")
    return result


class Row(NamedTuple):
    """One contender on one file: median and best speed in GB/s."""

    case: str
    what: str
    speed: float
    best: float


def measure(case: str, path: Path, repeat: int) -> list[Row]:
    """Run every contender in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders()}
    size = path.stat().st_size
    read(path)
    for _ in range(repeat):
        for name, work in contenders().items():
            start = time.perf_counter()
            work(path)
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [Row(case, name, size / median[name] / 1e9, size / min(times) / 1e9) for name, times in seconds.items()]


def ratio(rows: list[Row], case: str) -> float:
    """The time of verify relative to a plain read, both at their best, because others may use the machine."""
    speeds = {row.what: row.best for row in rows if row.case == case}
    return speeds["plain read"] / speeds["transload.verify"]


def main() -> int:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the files (default 1)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each contender (default 5)")
    parser.add_argument("--folder", help="where to write the files (default: the directory for temporary files)")
    options = parser.parse_args()
    rows: list[Row] = []
    total = int(options.gb * 1e9)
    for case, tensors, nbytes in (
        (LARGE[0], 100, total // 100),
        (LARGE[1], 1, total),
        ("20,000 small records", 20_000, 256),
    ):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows += measure(case, write(Path(folder, "model.pt"), tensors, nbytes), options.repeat)
    show(rows, as_json=options.json)
    return int(max(ratio(rows, case) for case in LARGE) > GOAL)


def crc32_name() -> str:
    """The implementation of CRC-32 that is used."""
    function = fastest_crc32()
    module = function.__module__.partition(".")[0]
    return function.__name__ if module == "transload" else module


def show(rows: list[Row], *, as_json: bool) -> None:
    """Print the table, or one JSON object with the machine."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "crc32": crc32_name()}
    cases = list(dict.fromkeys(row.case for row in rows))
    if as_json:
        ratios = {case: ratio(rows, case) for case in cases[:2]}
        print(json.dumps({"schema": 1, "machine": machine, "ratio": ratios, "rows": [r._asdict() for r in rows]}))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for case in cases:
        goal = (
            f": {ratio(rows, case):.2f} times as long as a plain read (goal: at most {GOAL})" if case in LARGE else ""
        )
        print(f"{case}{goal}")
        for row in (row for row in rows if row.case == case):
            print(f"  {row.what:<26} {row.speed:8.3f} GB/s  best {row.best:8.3f} GB/s")


if __name__ == "__main__":
    sys.exit(main())
