"""What the ranks that load one model together agree on: an error of one is an error of all.

Each step ends with one exchange, which every rank reaches, whatever happens to it. So none waits for one that has
given up.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import TYPE_CHECKING, Any
from zlib import crc32

from transload.errors import LoadError, TransloadError
from transload.findings import join_names
from transload.frozen import NamedTuple
from transload.loading.into.shards import dtensor_classes
from transload.opening import OpenCheckpoint

if TYPE_CHECKING:
    import torch

_SHOWN = 8


class Seen(NamedTuple):
    """The files that a rank has opened."""

    contents: int = 0
    """A checksum of what the checkpoint says it contains; the same for all copies of a file."""
    host: str = ""
    stamps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The sizes and times of the files; the same for all ranks of one host."""

    def agrees(self, other: Seen) -> bool:
        """Whether both can have read the same files."""
        return self.contents == other.contents and (self.host != other.host or self.stamps == other.stamps)


class _Outcome(NamedTuple):
    """How a step ended on a rank."""

    error: str
    seen: Seen


def seen(opened: OpenCheckpoint) -> Seen:
    """What to compare with the other ranks: whether all have opened the same files."""
    checkpoint = opened.checkpoint
    index = 0
    for tensor in checkpoint.tensors:
        index = crc32(repr((tensor.name, tensor.dtype, tensor.shape, tensor.file_offset)).encode(), index)
    for record in checkpoint.records:
        index = crc32(repr((record.name, record.size, record.crc32)).encode(), index)
    return Seen(index, socket.gethostname(), tuple(sorted(opened.stamps().items())))


class Ranks:
    """The ranks that have a part of a model each; a single process if it is not sharded.

    Used with ``with``, once for each step; ``is_writing`` says whether the step writes to the model.
    """

    def __init__(self, model: torch.nn.Module, process_group: Any = None) -> None:
        self.seen = Seen()
        self.is_writing = False
        self._groups = _groups(model, process_group)
        self.is_first = True
        if self._groups:
            import torch.distributed as dist

            self.is_first = all(dist.get_rank(group) == 0 for group in self._groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __enter__(self) -> Ranks:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Exchange how the step ended; raise if it failed on another rank."""
        if not self._groups or not isinstance(error, Exception | None):  # an interrupt ends the process
            return
        try:
            outcomes = self._exchange(_Outcome(_text(error), self.seen))
        except RuntimeError as failure:
            if error is not None:
                return  # which says more
            fix = f"{'The model is filled' if self.is_writing else 'Nothing was written to the model'} on this rank."
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
            what = f"{_listed(other)} opened another file than rank {first}, under the same name"
            fix = "It was replaced meanwhile, or machines have different copies of it. Try again when all see the same."
            raise LoadError(what, fix=f"{fix}\n{self._left({}, 0)}".rstrip())

    def _left(self, failed: dict[int, str], count: int) -> str:
        """What a failure leaves behind in the models."""
        if not self.is_writing:
            return "Nothing was written to the model on any rank."
        others = "; on all others it is filled" if len(failed) < count else ""
        return f"The model on {_listed([*failed])} may be partly filled{others}."

    def _exchange(self, outcome: _Outcome) -> dict[int, _Outcome]:
        """What each rank tells, by global rank: through each dimension of a mesh in turn."""
        import torch.distributed as dist

        outcomes = {dist.get_rank(): outcome}
        for group in self._groups:
            received: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(received, outcomes, group=group)
            outcomes = {rank: each for some in received for rank, each in some.items()}
        return dict(sorted(outcomes.items()))


def _text(error: BaseException | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, TransloadError) else f"{type(error).__name__}: {error}"


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {join_names([*map(str, ranks)], _SHOWN)}"


def _groups(model: torch.nn.Module, process_group: Any) -> list[Any]:
    """The process groups through which all ranks of a model are reached; none if it is not sharded.

    If the model is on all ranks, that is the default group; else the groups of the largest mesh, one per dimension.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups: dict[frozenset[int], list[Any]] = {}
    everywhere = frozenset(range(dist.get_world_size()))
    if process_group is not None:
        groups[frozenset(dist.get_process_group_ranks(process_group))] = [process_group]
    elif len(everywhere) > 1:
        classes = dtensor_classes()
        for module in model.modules():
            tensors = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001 - those of the wrappers, too
            for mesh in {tensor.device_mesh for tensor in tensors if isinstance(tensor, classes)}:
                if mesh.size() == len(everywhere):
                    return [dist.group.WORLD]
                ranks = frozenset(mesh.mesh.flatten().tolist())
                if ranks not in groups and dist.get_rank() in ranks:
                    groups[ranks] = [_dim_group(mesh, dim) for dim in range(mesh.mesh.ndim)]
            if vars(module).get("_handle") is not None and hasattr(module, "process_group"):  # FSDP1
                every = [module.process_group, getattr(module, "_inter_node_pg", None)]
                used = [group for group in every if group is not None]
                ranks = frozenset(rank for group in used for rank in dist.get_process_group_ranks(group))
                groups.setdefault(ranks, used)
        if groups and frozenset().union(*groups) == everywhere:
            return [dist.group.WORLD]
    largest = max(groups, key=len, default=frozenset())
    return groups[largest] if len(largest) > 1 else []


def _dim_group(mesh: Any, dim: int) -> Any:
    """The process group of one dimension of a mesh."""
    return mesh.get_group(dim) if hasattr(mesh, "get_group") else mesh.get_dim_groups(dim)  # before torch 2.2
