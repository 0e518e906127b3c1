"""Sources: the same bytes, whichever way they are read."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from tests.each import each

from transload.io.sources import BytesSource, FileSource, ObjectSource, Slice, Source


@each("kind", ["file", "bytes", "object", "slice"])
@each(("offset", "room"), [(0, 3), (2, 4), (5, 9), (6, 4), (99, 4), (0, 0), (0, 6)])
def test_readinto_fills_as_much_as_there_is(kind: str, offset: int, room: int, tmp_path: Path) -> None:
    data = b"abcdef"
    (tmp_path / "f").write_bytes(data)
    sources: dict[str, Callable[[], Source]] = {
        "file": lambda: FileSource(tmp_path / "f"),
        "bytes": lambda: BytesSource(data),
        "object": lambda: ObjectSource(io.BytesIO(data)),
        "slice": lambda: Slice(BytesSource(b"xx" + data + b"yy"), 2, 6, "part"),
    }
    source = sources[kind]()
    buffer = bytearray(b"." * room)
    count = source.readinto(offset, memoryview(buffer))
    assert count == len(data[offset : offset + room])
    assert bytes(buffer) == data[offset : offset + room].ljust(room, b".")
    source.close()
