"""Pickles inside pickles: what a file hands, as bytes, to a function that loads them."""

from __future__ import annotations

from collections.abc import Iterator

from transload.formats import pickle_machine
from transload.judge.shapes import full_name
from transload.nodes import Call, Pickle

__all__ = ["MAX_DEPTH", "Nested"]

MAX_DEPTH = 3
"""Pickles in pickles in pickles; each level costs a run over the bytes of the one outside."""

_BUFFERS = frozenset({"_io.BytesIO", "io.BytesIO"})


class Nested:
    """Runs the bytes that loaders are given, each once, and no more of them than the streams outside have a level.

    Without that bound a megabyte of text named a thousand times would be read a thousand times.
    """

    def __init__(self) -> None:
        self.left = 0
        self.skipped = False
        self._seen: set[int] = set()
        self._found: dict[int, tuple[int, Pickle]] = {}

    def allow(self, pickle: Pickle) -> None:
        """Count a stream that stands in the file itself."""
        self.left += MAX_DEPTH * (pickle.end - pickle.start)

    def run(self, call: Call, outside: Pickle) -> list[Pickle]:
        """The pickles in the bytes a loader is called with."""
        depth = self._found[id(outside)][0] + 1 if id(outside) in self._found else 1
        found: list[Pickle] = []
        for node in _arguments(call):
            data = self._take(node)
            if data and depth > MAX_DEPTH:
                self.skipped = True
            elif data:
                found += _streams(data, f"{outside.name} › nested".removeprefix(" › "))
        self._found.update((id(pickle), (depth, pickle)) for pickle in found)
        return found

    def _take(self, node: object) -> bytes:
        if type(node) is Call and full_name(node.callee) == "_codecs.encode" and type(node.args) is tuple and node.args:
            node = node.args[0]
        if type(node) not in (bytes, bytearray, str) or id(node) in self._seen or not node:
            return b""
        self._seen.add(id(node))
        if len(node) > self.left:  # type: ignore[arg-type]
            self.skipped = True
            return b""
        self.left -= len(node)  # type: ignore[arg-type]
        return node.encode("latin-1", "replace") if type(node) is str else bytes(node)  # type: ignore[call-overload]


def _arguments(call: Call) -> Iterator[object]:
    """What a loader is called with, and what lies in a buffer it is called with."""
    for node in _first(call.args):
        if type(node) is Call and full_name(node.callee) in _BUFFERS:
            yield from _first(node.args)
            for state in (node.states or ())[:1]:  # BytesIO keeps its bytes in its state
                yield from _first(state)
        else:
            yield node


def _first(args: object) -> tuple[object, ...]:
    """Few arguments are enough for any loader; a million, shared by a million calls, would be too many."""
    return args[:8] if type(args) is tuple else ()


def _streams(data: bytes, name: str) -> list[Pickle]:
    from transload.formats.torch_zip import Archive
    from transload.formats.zip_index import read_index, starts_like_zip
    from transload.io.sources import BytesSource

    source = BytesSource(data)
    if not starts_like_zip(source):
        return pickle_machine.run_all(data, name)
    archive = Archive.of_zip(source, read_index(source))
    left, found = 2 * len(data), []
    for record in archive.records.values():
        if record.name.startswith(("data/", "tensors/")):
            continue
        payload = archive.read(record, left).data
        left -= len(payload)
        streams = pickle_machine.run_all(payload, f"{name} › {record.name}")
        found += [pickle for pickle in streams if pickle.globals or pickle.extensions]
    return found
