"""What the ranks that load one model together agree on: an error of one is an error of all.

Each step ends with one exchange, which every rank reaches, whatever happens to it. So none waits for one that has
given up.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any
from zlib import crc32

from transload.checkpoint import Tensor
from transload.errors import LoadError, TransloadError
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.loading.into.shards import dtensor_classes
from transload.opening import OpenCheckpoint

if TYPE_CHECKING:
    import torch

_SHOWN = 8
_OVERLAP = 1.1
"""Elements that the ranks of a host read, for each that there is: shards alone are 1."""


class Seen(NamedTuple):
    """The files that a rank has opened."""

    contents: int = 0
    """A checksum of what the checkpoint says it contains; the same for all copies of a file."""
    host: str = ""
    stamps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The sizes and times of the files; the same for all ranks of one host."""
    elements: int = 0
    """How many elements the rank reads."""
    whole: int = 0
    """How many the tensors have that it reads, or reads a part of."""

    def agrees(self, other: Seen) -> bool:
        """Whether both can have read the same files."""
        return self.contents == other.contents and (self.host != other.host or self.stamps == other.stamps)


class _Outcome(NamedTuple):
    """How a step ended on a rank."""

    error: str
    seen: Seen


def seen(opened: OpenCheckpoint, parts: Iterable[tuple[Tensor, int]]) -> Seen:
    """What to compare with the other ranks: whether all have opened the same files.

    ``parts`` are the tensors to read, each with the number of its elements that this rank reads.
    """
    checkpoint = opened.checkpoint
    index = 0
    for tensor in checkpoint.tensors:
        index = crc32(repr((tensor.name, tensor.dtype, tensor.shape, tensor.file_offset)).encode(), index)
    for record in checkpoint.records:
        index = crc32(repr((record.name, record.size, record.crc32)).encode(), index)
    stamps, tensors, elements = tuple(sorted(opened.stamps().items())), {}, 0
    for tensor, count in parts:
        tensors[id(tensor)] = tensor.numel
        elements += count
    return Seen(index, socket.gethostname(), stamps, elements, sum(tensors.values()))


def overlaps(reads: Iterable[Seen], host: str) -> bool:
    """Whether the ranks of a host read the same elements: then the page cache should keep them for the next rank."""
    here = [each for each in reads if each.host == host]
    return sum(each.elements for each in here) > _OVERLAP * max((each.whole for each in here), default=0)


class Ranks:
    """The ranks that load a model together; a single process if it is not sharded.

    Used with ``with``, once for each step; ``is_writing`` says whether the step writes to the model.
    """

    def __init__(self, model: torch.nn.Module, process_group: Any = None) -> None:
        self.seen = Seen()
        self.is_writing = False
        self.overlap = False
        """Whether other ranks of this host read the same elements."""
        self._group = _group(model, process_group)
        self.is_first = True
        if self._group is not None:
            import torch.distributed as dist

            self.is_first = dist.get_rank(self._group) == 0

    def __bool__(self) -> bool:
        return self._group is not None

    def __enter__(self) -> Ranks:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Exchange how the step ended; raise if it failed on another rank."""
        if self._group is None or not isinstance(error, Exception | None):  # an interrupt ends the process
            return
        try:
            outcomes = self._exchange(_Outcome(_text(error), self.seen))
        except RuntimeError as failure:
            if error is not None:
                return  # which says more
            fix = f"{'The model is filled' if self.is_writing else 'Nothing was written to the model'} on this rank.\n"
            fix += "All ranks must call load_into: on one whose model is not sharded, with process_group."
            raise LoadError(f"the other ranks did not answer: {failure}", fix=fix) from failure
        failed = {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error}
        if error is not None:
            if isinstance(error, TransloadError):
                error.fix = "\n".join(filter(None, (error.fix, self._left(failed, len(outcomes)))))
            return
        if failed:
            rank, text = next(iter(failed.items()))
            others = f" ({_listed([*failed])} failed)" if len(failed) > 1 else ""
            fix = self._left(failed, len(outcomes))
            raise LoadError(f"rank {rank} of {len(outcomes)} could not load it{others}: {text}", fix=fix)
        first, theirs = next(iter(outcomes.items()))
        if other := [rank for rank, outcome in outcomes.items() if not outcome.seen.agrees(theirs.seen)]:
            what = f"{_listed(other)} opened another file than rank {first}"
            fix = "It was replaced meanwhile, or machines have different copies. Try again when all see the same.\n"
            fix += "If the ranks have different models, name those of each: process_group=…"
            raise LoadError(what, fix=f"{fix}\n{self._left({}, 0)}".rstrip())
        self.overlap = overlaps((outcome.seen for outcome in outcomes.values()), self.seen.host)

    def _left(self, failed: dict[int, str], count: int) -> str:
        """What a failure leaves behind in the models."""
        if not self.is_writing:
            return "Nothing was written to the model on any rank."
        others = "; on all others it is filled" if len(failed) < count else ""
        return f"The model on {_listed([*failed])} may be partly filled{others}."

    def _exchange(self, outcome: _Outcome) -> dict[int, _Outcome]:
        """What each rank tells, by global rank."""
        import torch.distributed as dist

        received: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(received, (dist.get_rank(), outcome), group=self._group)
        return dict(sorted(received))


def _text(error: BaseException | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, TransloadError) else f"{type(error).__name__}: {error}"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {join_names([*map(str, ranks)], _SHOWN)}"


def _group(model: torch.nn.Module, process_group: Any) -> Any:
    """The process group that loads a model: the caller's, or if the model is sharded that of all ranks, as in DCP.

    The meshes of the model do not tell: those of another rank may be different, and then some would wait for ever.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = process_group
    if group is None and _is_sharded(model):
        group = dist.group.WORLD
    return None if group is None or dist.get_world_size(group) == 1 else group


def _is_sharded(model: torch.nn.Module) -> bool:
    classes = dtensor_classes()
    for module in model.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001 - those of the wrappers, too
        if any(isinstance(tensor, classes) for tensor in tensors) or vars(module).get("_handle") is not None:  # FSDP1
            return True
    return False
