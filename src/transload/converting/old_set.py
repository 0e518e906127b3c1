"""Shards that are replaced by others of the same names: their index leads to the old ones until the new are all there.

The old files get second names, links to the same bytes. While the new ones take their names, an index in between leads
to the links; the new index comes last. So whoever reads finds a whole set at every moment, also after a crash.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from typing import Any

from transload.converting.moving import Writer
from transload.io.atomic import AtomicFile, clear_debris, flush_directory, place_of

__all__ = ["OldSet", "clear_links", "clear_parts", "other_shards"]

_SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}\.safetensors", re.DOTALL)
_LINK = re.compile(r"\.[0-9a-f]{8}\.(?:old|again)\.(.+)-[0-9]{5}-of-[0-9]{5}\.safetensors", re.DOTALL)
_PART = re.compile(r"\.((.+)-[0-9]{5}-of-[0-9]{5}\.safetensors)\.[0-9]+-[0-9a-f]{8}\.part", re.DOTALL)
_MAX_INDEX = 100_000_000


class OldSet:
    """The shards of an index that will be replaced; ``OSError`` or ``ValueError`` if they cannot be kept meanwhile."""

    def __init__(self, index: str, replaced: list[str]) -> None:
        self._index = index
        self._folder = os.path.dirname(os.path.abspath(index))  # noqa: PTH100, PTH120 - texts throughout, as given
        self._links: dict[str, str] = {}
        with open(index, "rb") as file:  # noqa: PTH123
            self._text = file.read(_MAX_INDEX)
        table = _table(self._text)
        used, token = set(table["weight_map"].values()), secrets.token_hex(4)
        try:
            for path in replaced:
                name = os.path.basename(path)  # noqa: PTH119
                if name in used:
                    self._link(path, f".{token}.old.{name}")  # by its end loaders know what it is
            if self._links:
                self._lead_to_links(table)
        except BaseException:
            self.forget()
            raise

    def _link(self, path: str, name: str) -> None:
        link = os.path.join(self._folder, name)  # noqa: PTH118
        os.link(place_of(path), link)
        self._links[path] = link

    def _lead_to_links(self, table: dict[str, Any]) -> None:
        flush_directory(self._folder)
        names = {os.path.basename(path): os.path.basename(link) for path, link in self._links.items()}  # noqa: PTH119
        held = {tensor: names.get(file, file) for tensor, file in table["weight_map"].items()}
        self._write(json.dumps({**table, "weight_map": held}, indent=2, ensure_ascii=False).encode() + b"\n")

    def _write(self, text: bytes) -> None:
        with AtomicFile(self._index) as file:
            Writer(file.descriptor, None).whole(text)

    def restore(self, *, touched: bool) -> None:
        """Put everything back; where that fails, the index in between stays, and leads to what was there."""
        for path, link in self._links.items() if touched else ():
            again = os.path.join(self._folder, os.path.basename(link).replace(".old.", ".again.", 1))  # noqa: PTH118, PTH119
            os.link(link, again)
            os.replace(again, place_of(path))  # noqa: PTH105
            with suppress(FileNotFoundError):  # a second name of what is there already stays where it is
                os.unlink(again)  # noqa: PTH108
        if self._links:
            self._write(self._text)
        self.forget()

    def forget(self) -> None:
        """Remove the second names."""
        for link in self._links.values():
            with suppress(OSError):
                os.unlink(link)  # noqa: PTH108


def _table(text: bytes) -> dict[str, Any]:
    table = json.loads(text)
    held = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(held, dict) or not all(isinstance(file, str) for file in held.values()):
        raise ValueError("no index")
    return {**table}


def clear_links(index: str) -> None:
    """Remove the second names that a killed conversion has left: the index does not lead to them any more."""
    for folder, name in _beside(index):
        if (found := _LINK.fullmatch(name)) and found[1] == _stem(index):
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))  # noqa: PTH108, PTH118


def clear_parts(index: str) -> None:
    """Remove shards that killed conversions have not finished, however many there were to be."""
    for folder, name in _beside(index):
        found = _PART.fullmatch(name)
        if found and found[2] == _stem(index):
            clear_debris(os.path.join(folder, found[1]))  # noqa: PTH118


def other_shards(index: str, paths: list[str]) -> list[str]:
    """The names of shards beside an index, which are not among some paths."""
    ours = {os.path.basename(path) for path in paths}  # noqa: PTH119
    found = (name for _, name in _beside(index) if (match := _SHARD.fullmatch(name)) and match[1] == _stem(index))
    return sorted(name for name in found if name not in ours)


def _beside(index: str) -> list[tuple[str, str]]:
    folder = os.path.dirname(os.path.abspath(index))  # noqa: PTH100, PTH120
    with suppress(OSError):
        return [(folder, name) for name in os.listdir(folder)]  # noqa: PTH208
    return []


def _stem(index: str) -> str:
    return os.path.basename(index).removesuffix(".safetensors.index.json")  # noqa: PTH119
