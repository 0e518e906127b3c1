"""``transload.CheckpointReader``: any checkpoint, read by ``torch.distributed.checkpoint``.

torch plans which part of which tensor each rank needs, and tells all ranks if one of them fails; this reads the parts.
Names are those that torch's own ``flatten_state_dict`` gives to a ``_tree`` with the structure of the object in the
file, so they are the names that the planner of this torch looks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Key, Tensor
from transload.contents import Value
from transload.credentials import text_without_credentials
from transload.errors import BrokenFileError, LoadError, TransloadError, UsageError
from transload.findings import join_names
from transload.formats.graph import call_items, short_key
from transload.formats.tensors import Budget, TooMuch
from transload.frozen import NamedTuple
from transload.geometry import Box
from transload.io import gc_paused
from transload.io.sources import SourceLike, is_url
from transload.loading import check_settings
from transload.loading.composed import pieces_in
from transload.loading.handles import TensorReader, build_node
from transload.loading.into.keys import MARKERS, branches
from transload.loading.into.ranks import Seen, overlaps, seen
from transload.loading.refusal import refuse_unmerged
from transload.nodes import Call, Dict, called, nested
from transload.opening import CheckpointFile
from transload.opening.renaming import Renaming

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
    from torch.distributed.checkpoint.planner import ReadItem
else:  # it is registered as a subclass when torch is there
    StorageReader = object

_MAX_DEPTH = 200
"""Levels of nesting whose values get names: what is deeper is part of one object. torch flattens by recursion."""
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
_MAPPINGS = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
_SHOWN = 6


class CheckpointReader(StorageReader):  # type: ignore[misc] # its type is unknown here
    """A ``StorageReader`` of ``torch.distributed.checkpoint`` for every checkpoint that transload reads.

    Each rank reads only its part of each tensor, straight into the memory of the state dict.

    >>> import torch.distributed.checkpoint as dcp
    >>> state = model.state_dict()                                                     # doctest: +SKIP
    >>> dcp.load(state, storage_reader=transload.CheckpointReader("model.pt"))         # doctest: +SKIP
    >>> model.load_state_dict(state)                                                   # doctest: +SKIP

    Names are as if the object in the file had been saved by ``dcp.save``: ``model.fc.weight``, joined by dots.
    ``prefix`` selects what is below one place and removes it from the names: ``"model"`` loads the state dict there.
    ``rename`` then changes names, as in ``load_into``; ``{"": "model."}`` puts a prefix before all of them.

    Nothing in the file is run, ``.metadata`` of a DCP directory included. Objects other than tensors are built as in
    ``transload.load``; if one needs names that are not allowed, ``UnsafeError`` lists them. An error on one rank is
    raised on all, as a ``CheckpointException``, which is not an ``Exception``: its ``failures`` are the errors by rank.
    All ranks must find the same checkpoint; if one was replaced meanwhile, all raise. ``threads``, ``pinned_mb`` and
    ``direct`` are as for ``transload.load``.

    """

    def __init__(
        self,
        path: SourceLike,
        *,
        prefix: str = "",
        rename: Any = None,
        threads: int | None = None,
        pinned_mb: int | None = None,
        direct: bool | None = None,
    ) -> None:
        from torch.distributed import checkpoint

        checkpoint.StorageReader.register(type(self))
        self._settings = check_settings(threads, pinned_mb, direct)
        self._prefix = prefix.replace("/", ".").strip(".")
        self._rename = None if rename is None else Renaming(rename)
        self._opened: TensorReader | None = None
        self._entries: dict[str, _Entry] = {}
        self.checkpoint_id: Any = path

    def __repr__(self) -> str:
        return text_without_credentials(f"{type(self).__name__}({self.checkpoint_id!r})")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is something to read at a path."""
        return is_url(checkpoint_id) or os.path.exists(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Close what is open; read another path from now on, if one is given."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Open the checkpoint, and describe what is in it.

        If that fails, the error is raised by whoever looks at the result, and by ``set_up_storage_reader``: torch would
        take an error of this method as the absence of one file, and look for others.
        """
        self.reset()
        try:
            with gc_paused():
                return self._describe()
        except TransloadError as error:
            return _unreadable(error)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: ARG002 - torch's
        """Raise the error of ``read_metadata``, if there was one."""
        metadata.state_dict_metadata  # noqa: B018 - which raises it

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add what identifies the checkpoint, and how much is read of it, so that the ranks can be compared."""
        import dataclasses

        parts = ((self._entries.get(item.storage_index.fqn), item) for item in plan.items)
        counts = ((entry.tensor, prod(item.lengths)) for entry, item in parts if entry is not None and entry.tensor)
        return dataclasses.replace(plan, storage_data=seen(self._open(), counts))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise if the ranks have opened different checkpoints; this runs on the first rank only.

        Tell each whether others of its host read the same: then it should stay in the page cache.
        """
        import dataclasses

        first: Seen = plans[0].storage_data
        other = [rank for rank, plan in enumerate(plans) if not first.agrees(plan.storage_data)]
        if other:
            what = f"rank {other[0]} and rank 0 have opened different checkpoints"
            fix = "It was replaced while the ranks opened it, or the nodes have different copies. Load it again."
            raise BrokenFileError(what, where=self._open().checkpoint.path, fix=fix)
        reads = [plan.storage_data for plan in plans]
        shared = {host: overlaps(reads, host) for host in {each.host for each in reads}}
        return [dataclasses.replace(plan, storage_data=shared[plan.storage_data.host]) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read everything in the plan. Objects are built first, so that a refused one leaves the tensors unchanged."""
        import torch
        from torch.distributed.checkpoint.planner import LoadItemType

        opened, settings = self._open(), self._settings
        if plan.storage_data is True and settings.direct is None:
            settings = settings._replace(direct=False)
        with gc_paused(user_objects=True), opened:
            objects: list[tuple[ReadItem, BytesIO]] = []
            tensors: list[tuple[ReadItem, Tensor]] = []
            for item in plan.items:
                name, is_object = item.storage_index.fqn, item.type == LoadItemType.BYTE_IO
                entry = self._entries.get(name)
                if entry is None or (entry.tensor is None and not is_object):
                    what = f"the plan asks for the {'object' if is_object else 'tensor'} {name}, which it does not have"
                    raise UsageError(what, where=opened.checkpoint.path)
                if is_object:
                    objects.append((item, _saved(entry.build())))
                elif entry.tensor is not None:
                    tensors.append((item, entry.tensor))
            for tensor in {id(tensor): tensor for _, tensor in tensors}.values():
                opened.check(tensor)
            targets = [planner.resolve_tensor(item).detach() for item, _ in tensors]
            parts = [
                (tensor, target, Box(tuple(item.storage_offsets), tuple(item.lengths)).slices)
                for (item, tensor), target in zip(tensors, targets, strict=True)
            ]
            try:
                opened.fill(parts, settings)
                opened.check_unchanged()
            except TransloadError as error:
                error.fix = f"The tensors of the state dict may be partly filled. {error.fix}".rstrip()
                raise
            for item, data in objects:
                planner.load_bytes(item, data)
            for (item, _), target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
        self.reset()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _open(self) -> TensorReader:
        if self._opened is None or self._opened.closed:
            raise UsageError("there is no checkpoint open", where=repr(self), fix="Call read_metadata first.")
        return self._opened

    def _describe(self) -> Metadata:
        from torch.distributed.checkpoint import metadata as facts

        self._opened = opened = TensorReader(self.checkpoint_id, "cpu")
        refuse_unmerged(opened.checkpoint)  # else torch would miss keys that are in the files
        self._entries = self._named(_entries(opened))
        described: dict[str, Any] = {}
        for name, entry in self._entries.items():
            if entry.tensor is None:
                described[name] = facts.BytesStorageMetadata()
                continue
            size = _size(entry.tensor.shape)
            chunks = [facts.ChunkStorageMetadata(_size((0,) * len(size)), size)]
            properties = facts.TensorProperties(dtype=_dtype(entry.tensor.dtype))
            described[name] = facts.TensorStorageMetadata(properties, size, chunks)
        return facts.Metadata(described, planner_data={name: entry.path for name, entry in self._entries.items()})

    def _named(self, entries: dict[str, _Entry]) -> dict[str, _Entry]:
        """The entries below the prefix, by their new names."""
        start = f"{self._prefix}." if self._prefix else ""
        out: dict[str, _Entry] = {}
        for name, entry in entries.items():
            if not name.startswith(start):
                continue
            new: str | None = name[len(start) :]
            if self._rename is not None:
                new = self._rename(new or "")
            if new in out:
                raise UsageError(
                    f"two values get the name {new!r}", where=repr(self), fix="Change the argument rename."
                )
            if new is not None:
                out[new] = entry._replace(path=_path_of(new, entry.path))
        if entries and not out:
            places = dict.fromkeys(name.partition(".")[0] for name in entries)
            what = f"nothing in it is below the prefix {self._prefix!r}" if start else "rename leaves nothing"
            raise UsageError(what, where=repr(self), fix=f"Names begin with: {join_names([*places], _SHOWN)}")
        return out


def _unreadable(error: TransloadError) -> Metadata:
    """A description that raises an error when it is looked at."""
    from torch.distributed.checkpoint import Metadata

    class Unreadable(Metadata):  # type: ignore[misc] # its type is unknown here
        def __init__(self) -> None:
            return

        def __getattr__(self, name: str) -> Any:
            if name == "state_dict_metadata":
                raise error.with_traceback(None)  # torch prints it for each rank
            raise AttributeError(name)

    return Unreadable()


def _saved(value: Any) -> BytesIO:
    """A value as the planner expects it: it unpickles these bytes, so they must not be those of the file."""
    import torch

    data = BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _size(shape: Iterable[int]) -> torch.Size:
    import torch

    return torch.Size(shape)


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name, None)


def _path_of(name: str, path: tuple[Key, ...]) -> tuple[Key, ...]:
    """The end of a path that has this name; the name itself if no end has.

    >>> _path_of("fc.weight", ("model", "fc.weight")), _path_of("c", ("a", "b"))
    (('fc.weight',), ('c',))
    """
    ends = (path[start:] for start in range(len(path)))
    return next((end for end in ends if type(end[0]) is str and ".".join(map(str, end)) == name), (name,))


# -- the names in a checkpoint


class _Entry(NamedTuple):
    """What has a name: a dense tensor, which is read in parts, or any other object, which is built."""

    path: tuple[Key, ...]
    build: Callable[[], Any]
    tensor: Tensor | None = None


class _Value:
    """An object in the tree that torch does not look into."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build


class _Mapping(dict[Any, Any]):
    """A mapping in the tree. torch 2.3 and older take one that has no tensors as a single object."""

    build: Callable[[], Any] | None = None


class _List(list[Any]):
    """A list in the tree. Every torch takes one of plain values as a single object."""

    build: Callable[[], Any] | None = None


def _built(value: Any) -> Any:
    """The object for a part of the tree."""
    if (build := getattr(value, "build", None)) is not None:
        return build()
    if isinstance(value, dict):
        return {key: _built(member) for key, member in value.items()}
    return [_built(member) for member in value] if isinstance(value, list) else value


def _entries(opened: TensorReader) -> dict[str, _Entry]:
    """Everything in a checkpoint, by the names that ``dcp.save`` would give it."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    path = opened.checkpoint.path
    try:
        flat, paths = flatten_state_dict(_Tree(opened).root())
    except TooMuch as error:
        raise BrokenFileError(str(error), where=path) from error
    except ValueError as error:  # two paths have the same name
        raise LoadError(
            f"its values cannot be named: {error}", where=path, fix="Load it with transload.load."
        ) from error
    return {
        name: _Entry(tuple(paths[name]), partial(_built, value), getattr(value, "facts", None))
        for name, value in flat.items()
    }


class _Tree:
    """The structure of the object in a checkpoint: mappings and lists, with placeholders for what is in them."""

    def __init__(self, opened: TensorReader) -> None:
        self._opened = opened
        self._tensors = {tensor.path: tensor for tensor in opened.checkpoint.tensors}
        self._branches = branches(opened.checkpoint)
        self._budget = Budget()
        self._pieces: Mapping[tuple[Key, ...], object] = {}
        self._open: set[int] = set()  # the containers around the current one

    def root(self) -> _Mapping:
        """The whole; anything but a mapping becomes one."""
        out = _Mapping()
        opened, checkpoint = self._opened, self._opened.checkpoint
        if checkpoint.traits.composed:
            self._pieces = pieces_in(checkpoint)
            values = {value.path: self._of_value(value) for value in checkpoint.values}
            leaves = ((path, values.get(path) or self._tensor(self._tensors[path])) for path in checkpoint.places)
            node = nested(leaves, _Mapping)
            return node if isinstance(node, _Mapping) else _Mapping({"": node})
        if checkpoint.traits.runs or not any(file.checkpoint.root is not None for file in opened.files):
            branch = self._branches.get(())
            return _Mapping({name: self._tensor(each) for name, each in (branch.tensors if branch else {}).items()})
        for file in opened.files:
            root = file.checkpoint.root
            node = self._node(file, list(root) if type(root) is tuple else root, ())
            if isinstance(node, list):
                node = _Mapping(enumerate(node))
            out.update(node if isinstance(node, dict) else {"": node})
        return out

    def _node(self, file: CheckpointFile, node: Any, path: tuple[Key, ...]) -> Any:
        kind = type(node)
        if kind in _PLAIN:
            return _Value(lambda: node)
        tensor = self._tensors.get(path)
        if tensor is not None and kind not in (Dict, list, tuple):
            return self._tensor(tensor)
        build = partial(build_node, file, node)
        items = _items(node)
        if items is None and kind is not list:
            branch = self._branches.get(path) if kind is Call else None
            if branch and any(each.path[len(path)] in MARKERS for each in branch.tensors.values()):
                return _Mapping({name: self._tensor(each) for name, each in branch.tensors.items()})  # a module
            return _Value(build)
        if id(node) in self._open or len(path) >= _MAX_DEPTH:
            return _Value(build)
        self._budget.seen(id(node))
        self._open.add(id(node))
        inside: Any
        if items is None:
            plain = all(type(child) in _PLAIN for child in node)
            inside = _Value(build) if plain else _List(self._node(file, x, (*path, i)) for i, x in enumerate(node))
        else:
            # The last value of each key, as in a dictionary.
            by_key = {short_key(key): value for key, value in zip(items[::2], items[1::2], strict=False)}
            inside = _Mapping((key, self._node(file, x, (*path, key))) for key, x in by_key.items())
        self._open.discard(id(node))
        inside.build = build
        return inside

    def _of_value(self, value: Value) -> Any:
        file = self._opened.part(value.file)
        if value.path in self._pieces:
            return self._node(file, value.node, value.path)
        return _Value(partial(build_node, file, value.node))

    def _tensor(self, tensor: Tensor) -> Any:
        """A placeholder, which must be a tensor: torch opens lists only if there are some in them."""
        import torch

        placeholder: Any = torch.empty(0, device="meta")
        placeholder.build = partial(self._opened.read, tensor)
        dense = tensor.is_dense and isinstance(_dtype(tensor.dtype), torch.dtype)
        placeholder.facts = tensor if dense else None
        return placeholder


def _items(node: object) -> list[Any] | None:
    """The alternating keys and values of a mapping."""
    if type(node) is Dict:
        return node.items
    return call_items(node) if type(node) is Call and called(node) in _MAPPINGS else None
