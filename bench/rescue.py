"""Measure how much of a damaged file is rescued: flip bits and cut files at random places, and compare all results.

    python bench/rescue.py [--json] [--places N] [--seed N] [--only WORD]

For each fixture and for a file of 50 MB, written by torch.save: a bit is flipped at each of N random places (200 by
default), and the file must be restored byte for byte; and the file is cut at each of N random places, after which
exactly the tensors that are still complete must be found. The legacy format has no checksums, and is only cut. Needs
torch, for the large file.
"""

from __future__ import annotations

import os
import sys

if sys.path[0] and sys.path[0] == __file__.rpartition(os.sep)[0]:
    del sys.path[0]  # or `import inspect` would find the file next to this one

import argparse
import io
import json
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transload.checkpoint import Checkpoint, Storage, Tensor
from transload.contents import byte_span, with_parts
from transload.errors import TransloadError
from transload.io.sources import BytesSource
from transload.opening import inspect
from transload.rescuing import rescue
from transload.rescuing.recover import recover

ROOT = Path(__file__).parent.parent / "tests" / "data"
NEEDS = {"torch-zip": ("data.pkl",), "torchscript": ("data.pkl", "model.json"), "torch-export": ("archive_format",)}
DESCRIPTOR = 16


@dataclass
class Row:
    """The results for one file."""

    name: str
    nbytes: int
    flips: int
    repaired: int
    cuts: int
    exact: int
    flip_ms: float
    cut_ms: float


def large() -> bytes:
    """50 MB: a few large tensors, many small ones, shared ones, and the state of a training run."""
    import torch

    torch.manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(n % 7 + 1, 1000 + n) for n in range(400)}
    state |= {f"blocks.{n}.weight": torch.randn(1 << 20) for n in range(6)}
    state["head.weight"] = torch.randn(4_000_000)
    state["tied.weight"] = state["head.weight"][: 1 << 20]
    out = io.BytesIO()
    torch.save({"model": state, "epoch": 3, "rng": torch.get_rng_state()}, out)
    return out.getvalue()


def complete_before(checkpoint: Checkpoint, cut: int) -> list[str]:
    """The tensors that must be found in a file that is cut at a byte: those before it, if the index is, too."""
    if cut < index_end(checkpoint):
        return []
    storages = {storage.id: storage for storage in checkpoint.storages}
    ends = ((t.name, t.nbytes, [end_of(part, storages) for part in with_parts(t)]) for t in checkpoint.tensors)
    complete = sorted((name, nbytes) for name, nbytes, parts in ends if max(parts, default=0) <= cut)
    return [name for name, _ in complete] if any(nbytes for _, nbytes in complete) else []


def end_of(tensor: Tensor, storages: dict[str, Storage]) -> int:
    """The offset after the last byte of a tensor; 0 for one without bytes."""
    storage = storages.get(tensor.storage or "")
    return (storage.offset or 0) + byte_span(tensor)[1] if storage is not None and tensor.numel else 0


def index_end(checkpoint: Checkpoint) -> int:
    """The offset after the index, the part of a file that lists its contents."""
    if checkpoint.format == "torch-legacy":
        return min(s.offset - 8 for s in checkpoint.storages if s.offset is not None)
    records = {record.name: record for record in checkpoint.records}
    index_records = [records[name] for name in NEEDS.get(checkpoint.format, tuple(records)) if name in records]
    return max((record.offset or 0) + record.stored for record in index_records)


def outside_descriptor(end: int, cut: int) -> int:
    """A cut outside of the descriptor after the index: inside, it is not always known whether the index is complete."""
    return cut + DESCRIPTOR if end <= cut < end + DESCRIPTOR else cut


def is_repaired(data: bytes, position: int, bit: int) -> bool:
    """Whether a flipped bit is repaired, and nothing else is changed."""
    broken = bytearray(data)
    broken[position] ^= 1 << bit
    with ExitStack() as stack:
        fixed = recover(BytesSource(bytes(broken)), stack)
        if fixed is None or not fixed.exact or [(r.position, r.bits) for r in fixed.repairs] != [(position, (bit,))]:
            return False
        pieces = (fixed.source.read(at, 1 << 22) == data[at : at + (1 << 22)] for at in range(0, len(data), 1 << 22))
        return fixed.source.size == len(data) and all(pieces)


def finds_all_before(data: bytes, cut: int, checkpoint: Checkpoint) -> bool:
    """Whether exactly the tensors before a cut are found."""
    try:
        report = rescue(data[:cut], dry_run=True)
    except TransloadError:
        return not complete_before(checkpoint, cut)
    found = [] if report.how == "nothing" else sorted(fate.name for fate in report.tensors if fate.state != "lost")
    return found == complete_before(checkpoint, cut)


def examine(name: str, data: bytes, places: int, rng: random.Random) -> Row:
    """Flip bits in a file, and cut it."""
    checkpoint = inspect(data)
    flips = [(rng.randrange(len(data)), rng.randrange(8)) for _ in range(places)] if data[:2] == b"PK" else []
    cuts = [outside_descriptor(index_end(checkpoint), rng.randrange(1, len(data))) for _ in range(places)]
    begin = time.process_time()
    repaired = [is_repaired(data, *flip) for flip in flips]
    between = time.process_time()
    exact = [finds_all_before(data, cut, checkpoint) for cut in cuts]
    end = time.process_time()
    for flip, success in zip(flips, repaired, strict=True):
        if not success:
            print(f"{name}: byte {flip[0]}, bit {flip[1]} was not repaired", file=sys.stderr)
    for cut, success in zip(cuts, exact, strict=True):
        if not success:
            print(f"{name}: cut at byte {cut}, the wrong tensors were found", file=sys.stderr)
    ms_per_place = 1e3 / max(1, places)
    return Row(
        name,
        len(data),
        len(flips),
        sum(repaired),
        len(cuts),
        sum(exact),
        (between - begin) * ms_per_place,
        (end - between) * ms_per_place,
    )


def main() -> int:
    """Test all files; return 1 if one was not rescued as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only files whose names contain this; `large` is the one of 50 MB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(options.seed)  # noqa: S311 - not for cryptography
    rows: list[Row] = []
    for path in sorted((*ROOT.glob("h200/*"), *ROOT.glob("torch-releases/*/*"))):
        name = f"{path.parent.name}/{path.name}"
        if path.suffix in {".pt", ".pth", ".ckpt", ".pt2"} and options.only in name:
            rows.append(examine(name, path.read_bytes(), options.places, rng))
            show(rows[-1], as_json=options.json)
    if options.only in "large":
        rows.append(examine("large", large(), options.places, rng))
        show(rows[-1], as_json=options.json)
    total = [sum(getattr(row, field) for row in rows) for field in ("repaired", "flips", "exact", "cuts")]
    print("{:,} of {:,} flipped bits repaired; {:,} of {:,} cuts with exactly the right tensors".format(*total))
    return int(total[0] != total[1] or total[2] != total[3])


def show(row: Row, *, as_json: bool) -> None:
    """Print one line for a file."""
    if as_json:
        print(json.dumps(vars(row)), flush=True)
        return
    print(
        f"{row.name:<64} {row.nbytes:>11,} B  flips {row.repaired}/{row.flips} {row.flip_ms:7.1f} ms  "
        f"cuts {row.exact}/{row.cuts} {row.cut_ms:7.1f} ms",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
