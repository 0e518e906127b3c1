"""How long a record is when its header does not say: by what follows it, by the index, or by its own bytes."""

from __future__ import annotations

import zlib
from struct import Struct, error

from transload.formats.tensors import Slot
from transload.formats.torch_legacy import claimed, run_at
from transload.io.sources import Source
from transload.nodes import Pickle
from transload.rescuing.headers import DESCRIPTOR, Local
from transload.rescuing.mending import mended_bytes

__all__ = ["Measure"]

_CHUNK = 1 << 20
_BLOCK = 4096
_WINDOW = 1 << 16
_MIN_SEARCH = 64 << 20
_MAX_SEARCH = 4
"""Bytes read in search of ends, all searches of one file together: so many, and so many times its size."""

_MAX_INDEX = 512 << 20
_MAX_INFLATED = 256 << 20
_NARROW = Struct("<4s3L")
_WIDE = Struct("<4sL2Q")


class Measure:
    """What is known of the sizes of records: the index of a torch archive names those of its storages."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._slots: dict[str, Slot] = {}
        self._index: tuple[int, int, int | None] | None = None
        self._budget = _MIN_SEARCH + _MAX_SEARCH * source.size

    def learn(self, names: list[bytes], payload: int, present: int, stored: int, checksum: int | None) -> None:
        """Remember where the index is, if this record is it."""
        if (
            any(name.endswith(b"/data.pkl") or name == b"data.pkl" for name in names)
            and present == stored <= _MAX_INDEX
        ):
            self._index = (payload, stored, checksum)

    @property
    def slots(self) -> dict[str, Slot]:
        """The storages that the index names, by key. It is read when it is first asked for."""
        if self._index is not None:
            from transload.formats import pickle_machine

            data = mended_bytes(self.source, *self._index)
            pickle: Pickle = pickle_machine.run(data, name="data.pkl")
            self._slots, self._index = claimed(pickle), None
        return self._slots

    def known(self, local: Local) -> int | None:
        """The size of a storage by the index; ``None`` if it has none."""
        parts = local.name.decode("utf-8", "backslashreplace").split("/")
        if len(parts) < 2 or parts[-2] not in ("data", "tensors"):
            return None
        slot = self.slots.get(parts[-1])
        return None if slot is None else slot.nbytes

    def sizes(self, local: Local | None, following: int | None) -> set[int]:
        """The sizes a record may have."""
        if local is None:
            return set()
        if not local.flags & 8:  # it says so itself
            return {local.stored}
        if local.method == 8:
            return self._inflated(local.payload)
        known = self.known(local)
        if known is not None:
            return {known}
        found = self._described(local, following)
        if not found and local.name.endswith(b".pkl"):
            found = self._pickled(local)
        return found

    def _described(self, local: Local, following: int | None) -> set[int]:
        """Where a descriptor follows that says how many bytes lie before it."""
        form = _WIDE if local.wide else _NARROW
        at, stop = local.payload, following or self.source.size
        while at < stop and self._budget > 0:
            window = self.source.read(at, _CHUNK + form.size)
            self._budget -= len(window)
            found = window.find(DESCRIPTOR)
            while 0 <= found < _CHUNK:
                size = at + found - local.payload
                try:
                    _, _, stored, whole = form.unpack_from(window, found)
                except error:
                    return self._half_described(local, size)
                if size and size in (stored, whole):
                    return {size}
                found = window.find(DESCRIPTOR, found + 1)
            at += _CHUNK
        return set()

    def _half_described(self, local: Local, size: int) -> set[int]:
        """The same where the file ends within the descriptor, if as much of it is there as tells that it is one."""
        rest = self.source.read(local.payload + size, 16)
        if len(rest) < 8 or size > _MAX_INDEX:
            return set()
        return (
            {size}
            if zlib.crc32(self.source.read(local.payload, size)) == int.from_bytes(rest[4:8], "little")
            else set()
        )

    def _pickled(self, local: Local) -> set[int]:
        pickle, end = run_at(self.source, local.payload, "data.pkl", _WINDOW)
        return set() if pickle.broken else {end - local.payload}

    def _inflated(self, payload: int) -> set[int]:
        """A deflated record tells its own end."""
        unpack, out = zlib.decompressobj(-15), 0
        at = payload
        while at < self.source.size and out < _MAX_INFLATED and self._budget > 0:
            data = self.source.read(at, _BLOCK)
            self._budget -= len(data)
            try:
                out += len(unpack.decompress(data))
            except zlib.error:
                return set()
            if unpack.eof:
                return {at + len(data) - len(unpack.unused_data) - payload}
            at += len(data)
        return set()
