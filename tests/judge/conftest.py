from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping

import pytest

import transload
from transload.checkpoint import Checkpoint


def torch_zip(pickle: bytes, storages: Mapping[str, bytes] | None = None) -> bytes:
    """An archive as ``torch.save`` lays it out, around any pickle."""
    records = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}
    records |= {f"data/{key}": raw for key, raw in (storages or {}).items()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, raw in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), raw)
    return out.getvalue()


Inspect = Callable[..., Checkpoint]


@pytest.fixture
def archive_of() -> Callable[[bytes, dict[str, bytes]], bytes]:
    """The bytes of a torch archive around a pickle, with its storages."""
    return torch_zip


@pytest.fixture
def inspect_zip() -> Inspect:
    """Inspect a pickle (opcodes without STOP) in a torch archive."""

    def inspect(body: bytes, storages: Mapping[str, bytes] | None = None, *, protocol: int = 2) -> Checkpoint:
        return transload.inspect(torch_zip(b"\x80" + bytes([protocol]) + body + b".", storages))

    return inspect
