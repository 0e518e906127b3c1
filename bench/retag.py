"""Measure how long it takes to change the device tags in files of 10 MB and 10 GB, also with torch.load and torch.save.

    python bench/retag.py [--json] [--repeat N]

Each retag and each rewrite ends with its bytes on the disk. All contenders take turns, each time from ``cuda:0``
to ``cpu``. The large file is sparse: its data take no disk space, and nothing reads them. Needs torch.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or `import inspect` would find the file next to this one

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
from transload.opening import inspect
from transload.retagging import retag

TENSORS = 100
GOAL = 1.2


class Storage:
    """Stands in for a storage on a GPU."""

    def __init__(self, key: int, numel: int) -> None:
        self.id = str(key), numel


class Tensor:
    """Stands in for a one-dimensional tensor."""

    def __init__(self, key: int, numel: int) -> None:
        self.key, self.numel = key, numel

    def __reduce__(self) -> tuple[Any, ...]:
        from torch._utils import _rebuild_tensor_v2

        storage = Storage(self.key, self.numel)
        return _rebuild_tensor_v2, (storage, 0, (self.numel,), (1,), False, OrderedDict())


class Pickler(pickle.Pickler):
    """Writes persistent ids as torch does."""

    def persistent_id(self, obj: Any) -> Any:
        """The id of a storage."""
        if not isinstance(obj, Storage):
            return None
        from torch import FloatStorage

        key, numel = obj.id  # a new string for every tag, as in torch
        return "storage", FloatStorage, key, str.format("cuda:{}", 0), numel


def write(path: Path, tensors: int, nbytes: int) -> Path:
    """Write a checkpoint whose tensors are holes in the file: zeros that take no disk space."""
    stream = io.BytesIO()
    Pickler(stream, 2).dump({f"layers.{key}.weight": Tensor(key, nbytes // 4) for key in range(tensors)})
    records = {b"data.pkl": stream.getvalue(), b"byteorder": b"little"}
    records |= {f"data/{key}".encode(): None for key in range(tensors)}  # type: ignore[dict-item]
    records |= {b"version": b"3\n"}
    zeros = zlib.crc32(bytes(nbytes))
    entries: list[bytes] = []
    with path.open("wb") as file:
        for name, data in records.items():
            offset, size = file.tell(), nbytes if data is None else len(data)
            crc = zeros if data is None else zlib.crc32(data)
            file.write(local_header(b"model/" + name, size, offset))
            file.seek(size, 1) if data is None else file.write(data)
            file.write(descriptor(size, crc, offset))
            entries.append(central_entry(b"model/" + name, size, crc, offset))
        directory = b"".join(entries)
        file.write(directory + end_of_archive(len(entries), file.tell(), len(directory)))
        file.flush()
        os.fsync(file.fileno())
    return path


def retagged(path: Path) -> None:
    """Change the tags with transload."""
    assert retag(path, "cpu").method == "patch"


def rewritten(path: Path) -> None:
    """The usual way, made as safe: write a new file, flush it, rename it."""
    import torch

    new = path.with_suffix(".new")
    torch.save(torch.load(path, map_location="cpu"), new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)


@dataclass
class Row:
    """One contender on one file: median and best time, and CPU time, in seconds."""

    what: str
    megabytes: float
    tensors: int
    seconds: float
    best: float
    processor: float


def main() -> int:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=15, help="runs of each contender (default 15)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.repeat)
    show(rows, as_json=options.json)
    return int(ratio(rows) > GOAL)


def measure(folder: Path, repeat: int) -> list[Row]:
    """Run every contender in turn."""
    contenders: list[tuple[str, Path, int, Callable[[Path], None], int]] = []
    for name, tensors, nbytes, rounds in (
        ("small", TENSORS, 100_000, repeat),
        ("large", TENSORS, 100_000_000, repeat),
        ("many", 20_000, 256, max(1, repeat // 5)),
    ):
        contenders.append(("retag", write(folder / f"{name}.pt", tensors, nbytes), tensors, retagged, rounds))
        if name != "large":  # for which the disk may be too small
            path = write(folder / f"{name}-rewritten.pt", tensors, nbytes)
            contenders.append(("torch.load + torch.save", path, tensors, rewritten, rounds))
    times: dict[int, list[tuple[float, float]]] = {index: [] for index in range(len(contenders))}
    for turn in range(repeat):
        for index, (_, path, _, work, rounds) in enumerate(contenders):
            if turn < rounds:
                times[index].append(timed(path, work))
    return [row(*contenders[index][:3], runs) for index, runs in times.items()]


def timed(path: Path, work: Callable[[Path], None]) -> tuple[float, float]:
    """Wall time and CPU time in seconds; sets the tags back to ``cuda:0`` afterwards."""
    wall, processor = time.perf_counter(), time.process_time()
    work(path)
    times = time.perf_counter() - wall, time.process_time() - processor
    assert {storage.device for storage in inspect(path).storages} == {"cpu"}
    retag(path, "cuda:0")
    return times


def row(what: str, path: Path, tensors: int, times: list[tuple[float, float]]) -> Row:
    """The median and the best of some runs."""
    walls, processors = zip(*times, strict=True)
    megabytes = path.stat().st_size / 1e6
    return Row(what, megabytes, tensors, statistics.median(walls), min(walls), statistics.median(processors))


def ratio(rows: list[Row]) -> float:
    """The time for the large file relative to the small one."""
    small, large = (next(r for r in rows if r.what == "retag" and low < r.megabytes < high) for low, high in SIZES)
    return large.seconds / small.seconds


SIZES = ((5, 15), (1_000, 100_000))


def show(rows: list[Row], *, as_json: bool) -> None:
    """Print the table, or one JSON object with the machine."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "system": platform.system()}
    if as_json:
        out = {"schema": 1, "machine": machine, "ratio": ratio(rows), "rows": [vars(row) for row in rows]}
        print(json.dumps(out, indent=1))
        return
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for item in rows:
        size = f"{item.megabytes:8,.0f} MB  {item.tensors:6,} tensors"
        print(f"  {size}  {item.what:<24} {item.seconds * 1e3:8.1f} ms  best {item.best * 1e3:8.1f} ms")
    print(f"the large file takes {ratio(rows):.2f} times as long as the small one (goal: at most {GOAL})")


if __name__ == "__main__":
    sys.exit(main())
