"""A directory of ``torch.distributed.checkpoint`` with very many entries: CPU time of reading its index, and memory.

    python bench/dcp_index.py [--tensors 720] [--ranks 64] [--states 2] [--folder DIR]

The default is what a model of 70 billion parameters and its Adam state are on 64 ranks: 720 tensors, each with two
moments, in 64 pieces, 138,240 in all. The files of the ranks are sparse: they have the size of the real ones, take no
space, and every byte of a tensor is zero. Each command runs in a process of its own, on Linux. The text of a name is a
new one for each piece, as it is after ranks have sent theirs to the first.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or `import inspect` would find the file next to this one

import argparse
import pickle
import subprocess
import tempfile
import time
from pathlib import Path

_HEADER = 1641  # bytes of a piece besides its elements

_CHILD = """
import sys, time
import transload
before = time.process_time()
{}
seconds = time.process_time() - before
status = dict(line.split(":", 1) for line in open("/proc/self/status"))  # ru_maxrss includes the parent's peak
print(f"{{seconds:8.2f}} s  {{int(status['VmHWM'].split()[0]) >> 10:6,}} MiB")
"""

_COMMANDS = {
    "FileSystemReader": "import torch.distributed.checkpoint as dcp; dcp.FileSystemReader(sys.argv[1]).read_metadata()",
    "transload.inspect": "found = transload.inspect(sys.argv[1]); assert len(found.tensors) > 1000",
    "inspect and print": "text = str(transload.inspect(sys.argv[1])); assert len(text) > 100",
    "transload.open": "found = transload.open(sys.argv[1]); assert len(found) > 1000",
}


def write(folder: Path, tensors: int, ranks: int, states: int) -> int:
    """Write the directory; return the number of entries of its index."""
    import torch
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    described: dict[str, object] = {}
    places: dict[object, object] = {}
    paths: dict[str, tuple[str, ...]] = {}
    ends = [0] * ranks
    names = [f"layers.{number // 9}.part{number % 9}.weight" for number in range(tensors)]
    entries = [("model", name, "") for name in names]
    entries += [("optim", "state", f"{name}.{kind}") for name in names for kind in ("exp_avg", "exp_avg_sq")[:states]]
    properties = meta.TensorProperties(dtype=torch.float32)
    rows, columns = 8192, 8192
    for path in entries:
        fqn = ".".join(step for step in path if step)
        paths[fqn] = tuple(step for step in path if step)
        chunks = []
        for rank in range(ranks):
            start, end = rank * rows // ranks, (rank + 1) * rows // ranks
            offsets, sizes = torch.Size((start, 0)), torch.Size((end - start, columns))
            chunks.append(meta.ChunkStorageMetadata(offsets, sizes))
            length = (end - start) * columns * 4 + _HEADER
            key = meta.MetadataIndex("".join(list(fqn)), offsets, rank)
            places[key] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], length)
            ends[rank] += length
        described[fqn] = meta.TensorStorageMetadata(properties, torch.Size((rows, columns)), chunks)
    folder.mkdir(parents=True, exist_ok=True)
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    index = meta.Metadata(described, planner_data=paths, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(index, 4))
    return len(places)


def main() -> None:
    """Write the directory, run each command on it, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=720)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--states", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write it; else a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "step-1"
        before = time.perf_counter()
        count = write(folder, arguments.tensors, arguments.ranks, arguments.states)
        size = (folder / ".metadata").stat().st_size
        print(f"{count:,} entries, .metadata of {size / 1e6:.1f} MB; written in {time.perf_counter() - before:.1f} s")
        for name, command in _COMMANDS.items():
            child = [sys.executable, "-c", _CHILD.format(command), str(folder)]
            done = subprocess.run(child, capture_output=True, text=True, check=False)
            print(f"{name:24} {done.stdout.strip() or done.stderr.strip()[-200:]}")


if __name__ == "__main__":
    main()
