"""The parts of a checkpoint that can be converted by themselves: what ``--list`` shows, and ``--key`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Tensor

__all__ = ["Candidate", "candidates"]

MAX_SHOWN = 200
"""Parts that are told: an optimizer's state has one for each parameter."""

_DEEP = 3


class Candidate(NamedTuple):
    """A part: its key (empty for all), what it is, and how much is in it."""

    key: str
    kind: str
    tensors: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"key": self.key, "kind": self.kind, "tensors": self.tensors, "nbytes": self.nbytes}


def candidates(checkpoint: Checkpoint) -> tuple[Candidate, ...]:
    """Every part of a checkpoint that holds tensors, the whole first, then in the order of the file."""
    found: dict[str, list[Tensor]] = {"": []}
    for tensor in checkpoint.tensors:
        found[""].append(tensor)
        steps = tensor.name.split("/")[:-1]
        for length in range(1, min(len(steps), _DEEP) + 1):
            key = "/".join(steps[:length])
            if key in found or len(found) < MAX_SHOWN:
                found.setdefault(key, []).append(tensor)
    parts = (Candidate(key, _kind(key, held), len(held), sum(t.nbytes for t in held)) for key, held in found.items())
    return tuple(part for part in parts if not _only_repeats(part, found))


def _only_repeats(part: Candidate, found: dict[str, list[Tensor]]) -> bool:
    """Whether a part is one of many alike: ``optimizer/state/17``."""
    return bool(part.key) and part.key.rpartition("/")[2].isdecimal() and len(found) > _DEEP


def _kind(key: str, tensors: list[Tensor]) -> str:
    depth = len(key.split("/")) if key else 0
    if any("_parameters" in tensor.path or "_buffers" in tensor.path for tensor in tensors):
        return "module"
    nested = any("/" in tensor.name[len(key) :].removeprefix("/") for tensor in tensors)
    if nested:
        return "nested"
    dotted = sum("." in str(tensor.path[depth]) for tensor in tensors if len(tensor.path) > depth)
    return "state dict" if dotted else "tensors"
