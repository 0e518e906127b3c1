"""Measure how long it takes to change the tags of a file of 10 MB and of 10 GB, also with torch.load and torch.save.

    python bench/retag.py [--json] [--repeat N]

Each retag ends with its bytes on the disk; so does each rewrite. All contenders take turns, each time from ``cuda:0``
to ``cpu``. The large file is sparse: its numbers take no room on the disk, and nothing reads them. Needs torch.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or the standard library's `inspect` would be the file beside this one

import argparse
import io
import json
import pickle
import platform
import statistics
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transload.formats.zip_writer import central_entry, descriptor, end_of_archive, local_header
from transload.judge import inspect
from transload.retagging import retag

TENSORS = 100
GOAL = 1.2


class Storage:
    """Stands for a storage on a GPU."""

    def __init__(self, key: int, numel: int) -> None:
        self.id = str(key), numel


class Tensor:
    """Stands for a tensor of one dimension."""

    def __init__(self, key: int, numel: int) -> None:
        self.key, self.numel = key, numel

    def __reduce__(self) -> tuple[Any, ...]:
        from torch._utils import _rebuild_tensor_v2

        storage = Storage(self.key, self.numel)
        return _rebuild_tensor_v2, (storage, 0, (self.numel,), (1,), False, OrderedDict())


class Pickler(pickle.Pickler):
    """Writes ids as torch does."""

    def persistent_id(self, obj: Any) -> Any:
        """The id of a storage."""
        if not isinstance(obj, Storage):
            return None
        from torch import FloatStorage

        key, numel = obj.id  # the text of the tag is a new one each time, as in torch
        return "storage", FloatStorage, key, str.format("cuda:{}", 0), numel


def write(path: Path, tensors: int, nbytes: int) -> Path:
    """A checkpoint with so many tensors, which are holes in the file: zeros that take no room."""
    held = io.BytesIO()
    Pickler(held, 2).dump({f"layers.{key}.weight": Tensor(key, nbytes // 4) for key in range(tensors)})
    records = {b"data.pkl": held.getvalue(), b"byteorder": b"little"}
    records |= {f"data/{key}".encode(): None for key in range(tensors)}  # type: ignore[dict-item]
    records |= {b"version": b"3\n"}
    zeros = zlib.crc32(bytes(nbytes))
    lines: list[bytes] = []
    with path.open("wb") as file:
        for name, data in records.items():
            offset, size = file.tell(), nbytes if data is None else len(data)
            crc = zeros if data is None else zlib.crc32(data)
            file.write(local_header(b"model/" + name, size, offset))
            file.seek(size, 1) if data is None else file.write(data)
            file.write(descriptor(size, crc, offset))
            lines.append(central_entry(b"model/" + name, size, crc, offset))
        directory = b"".join(lines)
        file.write(directory + end_of_archive(len(lines), file.tell(), len(directory)))
        file.flush()
        os.fsync(file.fileno())
    return path


def retagged(path: Path) -> None:
    """The way measured here."""
    assert retag(path, "cpu").method == "patch"


def rewritten(path: Path) -> None:
    """The usual way, made as safe: beside, flushed, renamed."""
    import torch

    beside = path.with_suffix(".new")
    torch.save(torch.load(path, map_location="cpu"), beside)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


@dataclass
class Row:
    """One contender on one file: seconds in the middle and at best, and of the processor."""

    what: str
    megabytes: float
    tensors: int
    seconds: float
    best: float
    processor: float


def main() -> int:
    """Make the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=15, help="runs of each contender (default 15)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.repeat)
    show(rows, as_json=options.json)
    return int(ratio(rows) > GOAL)


def measure(folder: Path, repeat: int) -> list[Row]:
    """Every contender in turn."""
    contenders: list[tuple[str, Path, int, Callable[[Path], None], int]] = []
    for name, tensors, nbytes, rounds in (
        ("small", TENSORS, 100_000, repeat),
        ("large", TENSORS, 100_000_000, repeat),
        ("many", 20_000, 256, max(1, repeat // 5)),
    ):
        contenders.append(("retag", write(folder / f"{name}.pt", tensors, nbytes), tensors, retagged, rounds))
        if name != "large":  # for which there may be no room
            path = write(folder / f"{name}-rewritten.pt", tensors, nbytes)
            contenders.append(("torch.load + torch.save", path, tensors, rewritten, rounds))
    times: dict[int, list[tuple[float, float]]] = {place: [] for place in range(len(contenders))}
    for turn in range(repeat):
        for place, (_, path, _, work, rounds) in enumerate(contenders):
            if turn < rounds:
                times[place].append(timed(path, work))
    return [row(*contenders[place][:3], seen) for place, seen in times.items()]


def timed(path: Path, work: Callable[[Path], None]) -> tuple[float, float]:
    """Seconds on the clock and of the processor, with the tags back to ``cuda:0`` afterwards."""
    wall, processor = time.perf_counter(), time.process_time()
    work(path)
    taken = time.perf_counter() - wall, time.process_time() - processor
    assert {storage.device for storage in inspect(path).storages} == {"cpu"}
    retag(path, "cuda:0")
    return taken


def row(what: str, path: Path, tensors: int, seen: list[tuple[float, float]]) -> Row:
    """The middle and the best of some runs."""
    walls, processors = zip(*seen, strict=True)
    megabytes = path.stat().st_size / 1e6
    return Row(what, megabytes, tensors, statistics.median(walls), min(walls), statistics.median(processors))


def ratio(rows: list[Row]) -> float:
    """The large file against the small one."""
    small, large = (next(r for r in rows if r.what == "retag" and low < r.megabytes < high) for low, high in SIZES)
    return large.seconds / small.seconds


SIZES = ((5, 15), (1_000, 100_000))


def show(rows: list[Row], *, as_json: bool) -> None:
    """The table, or one JSON object with the machine it was measured on."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.system()}
    if as_json:
        out = {"schema": 1, "machine": machine, "ratio": ratio(rows), "rows": [vars(row) for row in rows]}
        print(json.dumps(out, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for each in rows:
        size = f"{each.megabytes:8,.0f} MB  {each.tensors:6,} tensors"
        print(f"  {size}  {each.what:<24} {each.seconds * 1e3:8.1f} ms  best {each.best * 1e3:8.1f} ms")
    print(f"the large file takes {ratio(rows):.2f} times as long as the small one (goal: at most {GOAL})")


if __name__ == "__main__":
    sys.exit(main())
