"""Files written by torch, functions that damage them, and the tensors a rescue must find."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path

from transload.checkpoint import Checkpoint, Tensor
from transload.dtypes import itemsize
from transload.opening import OpenCheckpoint
from transload.opening.elements import ElementReader

ROOT = Path(__file__).parent.parent / "data"
FILES = sorted(
    path
    for path in (*ROOT.glob("h200/*"), *ROOT.glob("torch-releases/*/*"))
    if path.suffix in {".pt", ".pth", ".ckpt", ".pt2"}
)
ARCHIVES = [path for path in FILES if path.read_bytes()[:4] == b"PK\x03\x04"]
STREAMS = [path for path in FILES if path.read_bytes()[:2] == b"\x80\x02"]


def ident(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def flipped(data: bytes, position: int, bit: int) -> bytes:
    out = bytearray(data)
    out[position] ^= 1 << bit
    return bytes(out)


def hashes(data: bytes, names: Collection[str] | None = None) -> dict[str, str]:
    """The hash of each strided tensor by name, or of the given ones only."""
    with OpenCheckpoint(io.BytesIO(data)) as opened:
        tensors = [tensor for tensor in opened.checkpoint.tensors if tensor.kind == "strided"]
        return {
            tensor.name: _hash(opened.elements, tensor) for tensor in tensors if names is None or tensor.name in names
        }


def _hash(content: ElementReader, tensor: Tensor) -> str:
    digest = sha256(f"{tensor.dtype} {tensor.shape}".encode())
    for piece in content.chunks(tensor):
        digest.update(piece)
    return digest.hexdigest()


def complete_before(checkpoint: Checkpoint, cut: int) -> list[str]:
    """The names of the tensors whose bytes all come before a cut."""
    return sorted(tensor.name for tensor in checkpoint.tensors if max(_ends(tensor, checkpoint), default=0) <= cut)


def _ends(tensor: Tensor, checkpoint: Checkpoint) -> Iterator[int]:
    """Where the bytes of a tensor and of each of its parts end."""
    for part in tensor.parts:
        yield from _ends(part, checkpoint)
    for storage in checkpoint.storages:
        if storage.id == tensor.storage and tensor.numel:
            steps = zip(tensor.shape, tensor.stride, strict=False)
            last = tensor.offset + sum((size - 1) * step for size, step in steps)
            yield (storage.offset or 0) + itemsize(tensor.dtype, last + 1)


def index_end(checkpoint: Checkpoint) -> int:
    """The end of the part of a file that lists its tensors; in an archive, without the data descriptor."""
    if checkpoint.format == "torch-legacy":
        return min((s.offset - 8 for s in checkpoint.storages if s.offset is not None), default=checkpoint.nbytes)
    records = {record.name: record for record in checkpoint.records}
    names = {"torch-zip": ("data.pkl",), "torchscript": ("data.pkl", "model.json"), "torch-export": ("archive_format",)}
    index_records = [records[name] for name in names.get(checkpoint.format, tuple(records)) if name in records]
    return max((record.offset or 0) + record.stored for record in index_records)


def rezipped(
    data: bytes, *, compression: int = zipfile.ZIP_STORED, folder: str | None = None, mac_files: bool = False
) -> bytes:
    """The records of an archive, repacked by ``zipfile``."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            root, _, below = name.partition("/")
            lead = f"{root}/" if folder is None else folder
            if mac_files:
                new.writestr(f"__MACOSX/{lead}._{below.replace('/', '_')}", b"\0\5\x16\7")
            new.writestr(f"{lead}{below}", old.read(name))
    return out.getvalue()
