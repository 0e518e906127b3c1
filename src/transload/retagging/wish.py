"""Which tag becomes which: what a user asks for, made sure of before a file is looked at."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transload.errors import UsageError
from transload.frozen import facts
from transload.place.kinds import KINDS, near_kind

__all__ = ["OTHERS", "Wish", "wish_of"]

OTHERS = "*"
"""In a mapping, every tag that it does not name."""

_DEVICE = re.compile(r"[a-z][a-z_]*(?::(?:0|[1-9][0-9]{0,5}))?")
_SINGLE = ("cpu", "mps")
_NEVER = {
    "meta": "torch.load(path) would then give tensors without numbers",
    "xla": "torch restores no storage on xla: load with map_location='cpu' and move the tensors",
}


@facts(frozen=True)
class Wish:
    """What the tags shall be: ``named`` by tag, and ``others`` for all that are not named, empty to leave them."""

    named: tuple[tuple[str, str], ...] = ()
    others: str = ""

    def new(self, tag: str) -> str:
        """What a tag becomes. A storage on ``meta`` has no bytes, and stays there.

        >>> Wish((("cuda:1", "cuda:0"),)).new("cuda:1"), Wish(others="cpu").new("meta")
        ('cuda:0', 'meta')
        """
        for old, new in self.named:
            if tag == old:
                return new
        return self.others if self.others and tag != "meta" else tag


def wish_of(to: str | Mapping[str, str]) -> Wish:
    """A wish out of a device, or of a mapping from tags to devices.

    >>> wish_of("cpu").new("cuda:3"), wish_of({"cuda:1": "cuda:0", "*": "cpu"}).new("cuda:2")
    ('cpu', 'cpu')
    """
    if isinstance(to, str):
        return Wish(others=_device(to))
    if not isinstance(to, Mapping):
        raise UsageError(f"expected a device or a mapping of devices, not {type(to).__name__}")
    pairs = tuple((_tag(old), _device(new)) for old, new in to.items() if old != OTHERS)
    others = to.get(OTHERS, "")
    if not pairs and not others:
        raise UsageError("no device is named to change the tags to")
    return Wish(pairs, _device(others) if others else "")


def _device(name: object) -> str:
    if not isinstance(name, str):
        name = str(name)  # a torch.device
    kind, colon, _ = name.partition(":")
    if kind in _NEVER:
        raise UsageError(f"{name!r} makes no sense as a tag: {_NEVER[kind]}")
    if kind in _SINGLE and colon:
        raise UsageError(f"torch reads no tag {name!r}: there is only {kind!r}", fix=f"Write {kind}.")
    if not _DEVICE.fullmatch(name) or kind not in KINDS:
        near = near_kind(kind[:40])
        meant = f" Did you mean {near}{':0' if near == 'cuda' else ''}?" if near else ""
        raise UsageError(f"{name[:80]!r} is no device", fix=f"Write it as torch does: cpu, cuda:0, mps, xpu:1.{meant}")
    return name


def _tag(name: object) -> str:
    """A tag that a file may bear: any text, since odd ones are what is to be mended."""
    if not isinstance(name, str) or not name or name == "meta":
        raise UsageError(f"{name!r} is no tag that can be changed")
    return name
