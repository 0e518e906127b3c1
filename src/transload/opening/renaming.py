"""What trainers and wrappers do to all keys of a state dict, and how it is undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Rename", "chains", "cut", "deed", "has_inner"]

_LEADING = ("module.", "_orig_mod.", "model.")
"""What DataParallel, torch.compile and trainers put before every key."""

_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What wrappers put inside a key, where a part of the model is wrapped."""


class Rename(NamedTuple):
    """A change made to all keys of a file: ``strip`` goes from the front, ``add`` comes there, wrappers are cut out."""

    strip: str = ""
    add: str = ""
    inner: bool = False

    def __call__(self, key: str) -> str:
        """The key as the model may call it."""
        if self.inner:
            key = cut(key)
        return self.add + key[len(self.strip) :] if key.startswith(self.strip) else key

    def undone(self, key: str) -> str:
        """The key as the file may call it."""
        return self.strip + key[len(self.add) :] if key.startswith(self.add) else key

    def leaves_out(self, key: str) -> bool:
        """Whether a key is none of the model's: trainers keep other things beside it, wrappers do not."""
        return self.strip.endswith("model.") and not key.startswith(self.strip)

    @property
    def cost(self) -> int:
        """The least change is the best, where several do."""
        return self.strip.count(".") + self.add.count(".") + self.inner


def deed(rename: Rename) -> str:
    """What a change does to keys, in words: ``took 'module.' off``."""
    words = []
    if rename.strip and rename.add:
        words.append(f"put {rename.add!r} for {rename.strip!r} in")
    elif rename.strip:
        words.append(f"took {rename.strip!r} off")
    elif rename.add:
        words.append(f"put {rename.add!r} before")
    if rename.inner:
        words.append("left out the names of wrappers in")
    return " and ".join(words)


def has_inner(keys: Iterable[str]) -> bool:
    """Whether there are names of wrappers in some key."""
    return any(part in key for key in keys for part in _INNER)


def chains(keys: Iterable[str]) -> list[str]:
    """The leading parts that some key begins with: ``""``, ``module.``, ``module.model.``."""
    found = {""}
    for key in keys:
        if not key.startswith(_LEADING):
            continue
        lead = ""
        while part := next((part for part in _LEADING if key.startswith(part, len(lead))), ""):
            lead += part
            found.add(lead)
    return sorted(found, key=len)


def cut(key: str) -> str:
    """A key without the names of wrappers in it."""
    for part in _INNER:
        if part in key:
            key = key.replace(part, "")
    return key
