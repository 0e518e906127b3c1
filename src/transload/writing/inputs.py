"""What a conversion reads: the tensors of one checkpoint below a key, or those of several together.

An ``Input`` takes the tensors below the key, with numpy arrays as tensors, and leaves out what a ``state_dict()`` would
not contain. ``joined`` makes one of several; ``candidates`` is what ``--list`` shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from transload.checkpoint import Checkpoint, Tensor
from transload.contents import tie_of
from transload.errors import ConvertError
from transload.formats.graph import node_at
from transload.formats.nested import moved_storage, moved_tensor
from transload.formats.safetensors import aliases_in
from transload.frozen import NamedTuple, replace
from transload.io.sources import Source
from transload.nodes import Dict
from transload.opening.elements import ElementReader, is_constant
from transload.writing.objects import Omission, Path, with_arrays

_WEIGHTS = ("_parameters", "_buffers")


class Input:
    """The tensors of a checkpoint below a key.

    ``chosen`` are those tensors, with their names below the key; ``others`` is how many are outside of it, ``omitted``
    what a ``state_dict()`` would not contain. ``arrays`` are the paths of numpy arrays in the source, and ``reader``
    reads the source with these as tensors; ``modules`` are the paths of pickled modules. ``root`` is the object in the
    source, and ``dropped`` other objects. ``metadata`` is that of safetensors files, without aliases. ``weights_only``
    is whether only the weights of many ranks are chosen, since nothing else was asked for. ``names`` are those of the
    inputs, if there are several: the first step of each path, and of the name of each tensor there.
    """

    def __init__(self, reader: ElementReader, key: str, *, everything: bool, is_object: bool) -> None:
        weights = reader.checkpoint.traits.weights
        merged = any(tensor.path[:1] == (weights,) for tensor in reader.checkpoint.tensors)
        self.weights_only = merged and not (key or everything)
        self.key = weights if self.weights_only else key
        source, self.metadata = _with_aliases(reader)
        self.root: Any = source.checkpoint.root
        if is_object and source.checkpoint.traits.composed:
            source = ElementReader(_with_paths_as_names(source.checkpoint), source.open_file, source.files)
        self.modules = _module_paths(source.checkpoint.tensors)
        # An array inside an object cannot go into the object of the target.
        self.reader, self.arrays = with_arrays(source, self.modules, into_objects=not is_object)
        self.names: tuple[str, ...] = ()
        self.dropped: list[tuple[Path, Any]] = []
        self.chosen: list[tuple[str, Tensor]] = []
        self._choose()

    @property
    def checkpoint(self) -> Checkpoint:
        """The source, with numpy arrays as tensors."""
        return self.reader.checkpoint

    def _choose(self) -> None:
        checkpoint, key = self.checkpoint, dotted(self.key)
        below = f"{key}." if key else ""
        chosen = [tensor for tensor in checkpoint.tensors if f"{dotted(tensor.name)}.".startswith(below)]
        if key and not chosen:
            from difflib import get_close_matches

            keys = [candidate.key for candidate in candidates(checkpoint) if candidate.key]
            near = get_close_matches(self.key, keys, 3) or keys[:3]
            fix = f"There is {', '.join(near)}; --list shows all." if near else "--list shows what there is."
            what = f"there is no tensor below the key {self.key!r}"
            raise ConvertError(what, where=checkpoint.path, fix=fix)
        self.others = sum(tensor.path not in self.arrays for tensor in checkpoint.tensors)
        self.others -= sum(tensor.path not in self.arrays for tensor in chosen)
        self.omitted = [
            Omission(problem.where or "…", f"not all of it was searched: {problem.detail}", lost=True)
            for problem in checkpoint.problems
            if problem.code in ("tree-too-deep", "tree-too-large")  # there may be tensors beyond
        ]
        for tensor in chosen:
            if why := self._why_omitted(tensor, key):
                self.omitted.append(Omission(tensor.name, why))
            else:
                name = tensor.name[len(key) + 1 :] if key else tensor.name
                self.chosen.append((name or tensor.name.rpartition("/")[2], tensor))

    def _why_omitted(self, tensor: Tensor, key: str) -> str:
        """Why a ``state_dict()`` would not contain a tensor; empty if it would."""
        path = tensor.path
        if is_constant(self.checkpoint, tensor):
            wanted = {"CONSTANTS", "constants"}.intersection(key.split("."))
            return "" if wanted else "a constant of the program's code, not a weight"
        module = next((path[:length] for length in range(len(path)) if path[:length] in self.modules), None)
        if module is None:
            return ""
        inside = path[len(module) :]
        while inside[:1] == ("_modules",):
            inside = inside[2:]
        if len(inside) != 2 or inside[0] not in _WEIGHTS:
            return "an attribute of a module, which state_dict() does not have"
        # The reader names a buffer by its whole path if state_dict() would not contain it.
        hidden = inside[0] == "_buffers" and tensor.name.endswith(f"_buffers/{inside[1]}")
        return "a buffer registered with persistent=False" if hidden else ""

    def part(self) -> tuple[Any, Path]:
        """The object to convert and its path; ``None`` if the key does not name a container in the object."""
        wanted = dotted(self.key)
        if not wanted:
            return self.root, ()
        for _, tensor in self.chosen:
            path = tensor.path
            for length in range(1, len(path)):
                # Spelled as in names, which leave out the _modules dictionaries of modules.
                spelled = ".".join(str(step) for step in path[:length] if step != "_modules")
                if dotted(spelled) == wanted:
                    node = node_at(self.root, path[:length])
                    return (None, ()) if node is None else (node, path[:length])
        return None, ()

    def rest(self) -> list[tuple[Path, Any]]:
        """What is not a tensor: the object, or what is below the key; by path."""
        if self.names:
            return self.dropped
        checkpoint, form = self.checkpoint, self.checkpoint.traits
        rest: list[tuple[Path, Any]] = []
        if form.metadata == "values":
            from transload.formats.gguf import header_values

            values = header_values(self.reader.open_file(""))
            # With two components the path cannot be that of a tensor, which may have the name of a value.
            rest.append(((checkpoint.format, "metadata"), Dict.of(values.items())))
        main = [pickle for pickle in checkpoint.pickles if pickle.main]
        several = len(main) > 1 or any(pickle.path for pickle in main)
        if not self.key and several and not form.composed:
            for pickle in main:  # the object of each file
                has_more = any(leaf.path[: len(pickle.path)] == pickle.path for leaf in checkpoint.leaves)
                rest += [(pickle.path, pickle.root)] if has_more else []
            return rest
        root, path = self.part()
        if root is not None and not form.program:
            rest.append((path, root))
        return rest


def joined(inputs: Sequence[Input]) -> Input:
    """Several inputs as one: like shards, they are tensors by name, and everything else is beside these."""
    if len(inputs) == 1:
        return inputs[0]
    names = _distinct(os.path.basename(os.path.normpath(each.checkpoint.path)) or "file" for each in inputs)
    first = inputs[0]
    whole: Input = object.__new__(Input)
    whole.names, whole.key, whole.root = tuple(names), "", None
    whole.weights_only = any(each.weights_only for each in inputs)
    whole.others = sum(each.others for each in inputs)
    whole.modules = {(name, *path) for name, each in zip(names, inputs, strict=True) for path in each.modules}
    whole.arrays = {(name, *path) for name, each in zip(names, inputs, strict=True) for path in each.arrays}
    whole.metadata, whole.omitted, whole.dropped, whole.chosen = {}, [], [], []
    tensors: list[Tensor] = []
    storages, problems = [], []
    files: list[tuple[str, Checkpoint]] = []
    for number, (name, each) in enumerate(zip(names, inputs, strict=True)):
        checkpoint, start = each.checkpoint, f"{number}:"
        if not each.chosen:
            raise ConvertError("there is no tensor to convert", where=checkpoint.path)
        moved = [moved_tensor(tensor, start, (name,)) for tensor in checkpoint.tensors]
        places = {id(tensor): other for tensor, other in zip(checkpoint.tensors, moved, strict=True)}
        whole.chosen += [(key, places[id(tensor)]) for key, tensor in each.chosen]
        tensors += moved
        storages += [moved_storage(s, start, (name,), 0, f"{start}{s.file}") for s in checkpoint.storages]
        problems += [problem.within(name) for problem in checkpoint.problems]
        files += [(f"{start}{file}", part) for file, part in each.reader.files]
        whole.omitted += [omission._replace(name=f"{name}/{omission.name}") for omission in each.omitted]
        own = {key: value for key, value in each.metadata.items() if whole.metadata.setdefault(key, value) != value}
        whole.dropped += [((name, "metadata"), Dict.of(own.items()))] if own else []
        whole.dropped += [((name, *path), node) for path, node in each.rest()]
    openers = [each.reader.open_file for each in inputs]

    def open_file(file: str) -> Source:
        number, _, own = file.partition(":")
        return openers[int(number)](own)

    checkpoint = replace(
        first.checkpoint,
        format="sharded",
        flavour="",
        nbytes=sum(each.checkpoint.nbytes for each in inputs),
        tensors=tuple(tensors),
        storages=tuple(storages),
        problems=tuple(problems),
        leaves=(),
        records=(),
        parts=(),
        pickles=(),
        values=(),
        index="",
        integrity="unchecked",
    )
    whole.reader = ElementReader(checkpoint, open_file, tuple(files))
    return whole


def _distinct(names: Iterable[str]) -> list[str]:
    """Names of inputs, as few as they are; a repeated one gets a number."""
    out: list[str] = []
    for name in names:
        number, new = 2, name
        while new in out:
            new, number = f"{name}#{number}", number + 1
        out.append(new)
    return out


def difference(reader: ElementReader, one: Tensor, other: Tensor) -> str:
    """What is different between two tensors: their dtypes, shapes or values; empty if nothing is."""
    if one.dtype != other.dtype:
        return f"{one.dtype} and {other.dtype}"
    if one.shape != other.shape:
        return f"of the shapes {list(one.shape)} and {list(other.shape)}"
    pairs = zip_longest(reader.chunks(one), reader.chunks(other))
    return "" if all(ours == theirs for ours, theirs in pairs) else "with different values"


def dotted(text: str) -> str:
    """A path with one separator: ``model.state_dict`` and ``model/state_dict`` are the same key."""
    return text.replace("/", ".")


def _module_paths(tensors: Iterable[Tensor]) -> set[Path]:
    """The paths of pickled modules that have parameters or buffers, and of the modules that contain them."""
    paths: set[Path] = set()
    for tensor in tensors:
        path = tensor.path
        if path[-2:-1] and path[-2] in _WEIGHTS and not tensor.name.endswith("/".join(map(str, path[-2:]))):
            path = path[:-2]
            while path not in paths:
                paths.add(path)
                if path[-2:-1] == ("_modules",):
                    path = path[:-2]
    return paths


def _with_aliases(reader: ElementReader) -> tuple[ElementReader, dict[str, str]]:
    """The source with tied tensors under every name, and the rest of its metadata."""
    checkpoint = reader.checkpoint
    metadata = reader.header_metadata()
    by_name = {tensor.name: tensor for tensor in checkpoint.tensors}
    names = aliases_in(metadata, by_name)
    tied = [by_name[kept]._replace(name=name, path=(name,)) for name, kept in names.items()]
    others = {key: value for key, value in metadata.items() if key not in names and key != "format"}
    checkpoint = replace(checkpoint, tensors=(*checkpoint.tensors, *tied))
    return ElementReader(checkpoint, reader.open_file, reader.files), others


def _with_paths_as_names(checkpoint: Checkpoint) -> Checkpoint:
    """A composed checkpoint whose names are its paths, joined by slashes, even if it joins them with dots."""
    values = {value.path for value in checkpoint.values}
    tensors = []
    for tensor in checkpoint.tensors:
        path = tensor.path
        own = [*map(str, next((path[:length] for length in range(len(path)) if path[:length] in values), path))]
        inside = tensor.name.removeprefix(".".join(own))  # in a value, which names its own tensors
        name = "/".join(own) + inside if inside != tensor.name else tensor.name
        tensors.append(tensor._replace(name=name))
    return replace(checkpoint, tensors=tuple(tensors))


# -- the parts that a key can choose

_MAX_CANDIDATES = 200  # an optimizer's state has one for each parameter
_MAX_LEVELS = 3


class Candidate(NamedTuple):
    """A part of a checkpoint that ``--key`` can choose; the key is empty for the whole."""

    key: str
    kind: str
    tensors: int
    nbytes: int


def candidates(checkpoint: Checkpoint) -> tuple[Candidate, ...]:
    """Every part of a checkpoint that contains tensors: the whole first, then in file order."""
    form = checkpoint.traits
    parts: dict[str, list[Tensor]] = {"": []}
    for tensor in checkpoint.tensors:
        parts[""].append(tensor)
        # The names of a composed checkpoint may join the keys of nested dictionaries with dots.
        steps = [*map(str, tensor.path[:-1])] if form.composed else tensor.name.split("/")[:-1]
        for length in range(1, min(len(steps), _MAX_LEVELS) + 1):
            key = "/".join(steps[:length])
            if key in parts or len(parts) < _MAX_CANDIDATES:
                parts.setdefault(key, []).append(tensor)
    out: list[Candidate] = []
    for key, tensors in parts.items():
        if len(parts) > _MAX_LEVELS and key.rpartition("/")[2].isdecimal():
            continue  # one of many similar parts: optimizer/state/17
        depth = len(key.split("/")) if key else 0
        kind = "tensors"
        if any("_parameters" in tensor.path or "_buffers" in tensor.path for tensor in tensors):
            kind = "module"
        elif any("/" in tensor.name[len(key) :].removeprefix("/") for tensor in tensors):
            kind = "nested"
        elif any("." in str(tensor.path[depth]) for tensor in tensors if len(tensor.path) > depth):
            kind = "state dict"
        # What is tied is written once.
        distinct = {tie_of(tensor) or index: tensor.nbytes for index, tensor in enumerate(tensors)}
        out.append(Candidate(key, kind, len(tensors), sum(distinct.values())))
    return tuple(out)
