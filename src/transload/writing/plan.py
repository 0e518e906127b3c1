"""Decide what goes into the target before anything is written, and what to note about it.

``Options`` is what the caller asks for. A ``ConversionPlan`` takes the tensors below the key, leaves out what a
``state_dict()`` would not contain, gives every tensor a unique name, and decides which of them the format can store.
``candidates`` is what ``--list`` shows.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint, Tensor
from transload.contents import tie_of
from transload.dtypes import ITEMSIZE, NUMPY, QUANTIZED, SAFETENSORS
from transload.errors import ConvertError, UsageError
from transload.findings import join_names
from transload.formats.graph import node_at
from transload.formats.pickle_writer import dumps
from transload.formats.safetensors import aliases_in
from transload.formats.zip_writer import opening_records
from transload.frozen import NamedTuple, replace
from transload.nodes import Dict
from transload.opening.elements import Allowance, ElementReader, is_constant
from transload.writing.objects import Leftovers, Omission, Path, with_arrays
from transload.writing.output import SHARD, index_name, sibling_files
from transload.writing.to_torch import Structure, TensorCalls, carry_over, lay_out, overlapping
from transload.writing.transfer import CASTABLE, ConversionJob, TargetTensor, cast_dtype

if TYPE_CHECKING:
    from transload.writing.to_dcp import Flattened
    from transload.writing.to_universal import Universal

# -- options

SAFETENSORS_DTYPES = {dtype: name for name, dtype in SAFETENSORS.items()}
_OPAQUE = {"bfloat16", "complex32", *(dtype for dtype in ITEMSIZE if dtype.startswith("float8_"))}


class TargetFormat(NamedTuple):
    """A format that can be written.

    ``suffixes`` are those of names that imply it, ``dtypes`` what it has, or can at least store the bytes of.
    ``file`` is the usual name of the file in a directory; empty if the target is the directory itself. ``is_object`` is
    whether it stores an object, not only tensors, ``has_shards`` whether it can be split over several files, and
    ``has_aliases`` whether it can name the same tensor twice. ``metadata`` is the name that its metadata take; empty if
    it has no place for them.
    """

    words: str
    suffixes: tuple[str, ...] = ()
    dtypes: Collection[str] = ITEMSIZE.keys() - QUANTIZED
    file: str = ""
    is_object: bool = False
    has_shards: bool = False
    has_aliases: bool = False
    metadata: str = ""


TARGETS = {
    "safetensors": TargetFormat(
        "safetensors",
        (".safetensors", ".safetensors.index.json"),
        SAFETENSORS_DTYPES,
        "model.safetensors",
        has_shards=True,
        has_aliases=True,
        metadata="__metadata__",
    ),
    "torch": TargetFormat("torch zip", (".pt", ".pth", ".ckpt", ".bin"), file="pytorch_model.bin", is_object=True),
    "npz": TargetFormat("npz", (".npz",), NUMPY.keys() | _OPAQUE, "model.npz"),
    "raw": TargetFormat("raw tensors", ("/", os.sep), has_aliases=True),
    "dcp": TargetFormat("DCP directory", is_object=True),
    "universal": TargetFormat("universal checkpoint of DeepSpeed", is_object=True),
}
_UNWRITTEN = {"gguf": "GGUF", "h5": "HDF5", "npy": "npy", "onnx": "ONNX", "pt2": "torch.export"}
"""Other formats that a name may ask for."""

_SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}
_SHORT.update({"f64": "float64", "f32": "float32", "f16": "float16", "fp64": "float64", "double": "float64"})

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = ("", "K", "M", "G", "T")
_MAX_SIZE = float(1 << 63)


class Options(NamedTuple):
    """What the caller of ``convert`` asks for; the fields are its parameters."""

    key: str = ""
    strip: tuple[str, ...] = ()
    dtype: str = ""
    allow_inf: bool = False
    max_shard_size: int = 0
    optimizer: bool = False


def target_format(dst: str, to: str = "") -> str:
    """The format to write: ``to``, or the one that the name of the target implies.

    >>> target_format("model.safetensors"), target_format("out/"), target_format("x", "npz")
    ('safetensors', 'raw', 'npz')
    """
    if to in TARGETS:
        return to
    if not to and (named := _named_format(dst)):
        return named
    if name := _UNWRITTEN.get((to or os.path.splitext(dst)[1].removeprefix(".")).lower()):
        raise UsageError(f"{name} cannot be written", where=dst, fix=f"Choose one of {', '.join(TARGETS)}.")
    if to:
        raise UsageError(f"unknown format {to!r}", fix=f"Choose one of {', '.join(TARGETS)}.")
    fix = f"End its name in .safetensors, .pt, .npz or a slash, or add --to {'|'.join(TARGETS)}."
    raise UsageError("the name of the target does not say which format to write", where=dst, fix=fix)


def _named_format(dst: str) -> str:
    """The format that a file name implies; empty if it implies none."""
    return next((name for name, target in TARGETS.items() if dst.lower().endswith(target.suffixes)), "")


def dtype_of(dtype: object) -> str:
    """The full name of the dtype to convert to, given as text or as a ``torch.dtype``; empty if none is given.

    >>> dtype_of("bf16"), dtype_of("torch.float16")
    ('bfloat16', 'float16')
    """
    name = "" if dtype is None else str(dtype).removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name and name not in CASTABLE:
        raise UsageError(f"cannot convert to {dtype!r}", fix=f"Choose one of {', '.join(CASTABLE)}.")
    return name


def size_of(size: str | int | None) -> int:
    """A size in bytes, from a number with or without a unit; 0 if none is given.

    >>> size_of("5GB"), size_of("1.5 MiB"), size_of(1000)
    (5000000000, 1572864, 1000)
    """
    if size is None or size == "":
        return 0
    match = _SIZE.fullmatch(str(size).strip())
    if not match or not 0 < float(match[1]) < _MAX_SIZE or (match[3] and not match[2]):
        raise UsageError(f"{size!r} is not a size", fix="Write it like 5GB, 500MB or 2GiB.")
    unit = 1024 if match[3] else 1000
    return max(1, int(float(match[1]) * unit ** _POWERS.index(match[2].upper())))


# -- what the formats can store

_CANNOT_HOLD = {
    "meta": "it was on the meta device and has no values",
    "quantized": "it is quantized: its values mean nothing without their scales",
    "subclass": "it is a tensor subclass",
    "device": "its values are in the pickle, as a numpy array",
}
_UNSAFE = re.compile(r'[\\:%"\x00-\x1f]')


def member_name(name: str) -> str:
    """The name of a tensor in a numpy archive, escaped so that no unpacker writes outside its directory.

    A trailing ``.npy`` is escaped too: numpy would take ``a.npy`` for the file of the array ``a``.

    >>> member_name("fc.weight"), member_name("../a"), member_name("/b"), member_name("a.npy")
    ('fc.weight', '%2E%2E/a', '%2Fb', 'a%2Enpy')
    """
    safe = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", name)
    steps = ["%2E" * len(step) if step in (".", "..") else step or "%2F" for step in safe.split("/")]
    member = "/".join(steps).replace("%2F/", "%2F")
    return f"{member.removesuffix('.npy')}%2Enpy" if member.endswith(".npy") else member


# -- the plan

_WEIGHTS = ("_parameters", "_buffers")


class ConversionPlan:
    """What is written and what is not; raises ``TransloadError`` if there is nothing to convert.

    ``entries`` are the tensors of the target in file order, ``aliases`` further names of the same tensors, ``in_parts``
    the names of tensors that became several entries, ``omitted`` the tensors that are left out, and ``others`` how many
    are outside the key. ``renamed`` pairs names in the source with new names; ``unmatched`` are prefixes to strip that
    no name begins with. ``metadata`` is the metadata of safetensors files, without aliases. ``dropped`` is everything
    that is not a tensor, by path; ``weights_only`` is whether only the weights of many ranks are written, since nothing
    else was asked for. ``arrays`` are the paths of numpy arrays in the source, and ``content`` is the source with these
    as tensors; ``numbers`` are the paths of numpy scalars that became Python numbers in a torch zip.

    If the target stores an object, ``root`` is that, and ``placed`` are the tensors in their order there. For a torch
    zip, ``opening`` are the records of the object, and ``storages`` the bytes to write; for DCP it is ``flattened``,
    for a universal checkpoint ``universal``.
    """

    def __init__(self, reader: ElementReader, format_: str, options: Options) -> None:
        weights = reader.checkpoint.traits.weights
        merged = any(tensor.path[:1] == (weights,) for tensor in reader.checkpoint.tensors)
        self.weights_only = merged and not (options.key or options.optimizer or format_ == "universal")
        options = options._replace(key=weights) if self.weights_only else options
        self.format, self.options = format_, options
        self.target = TARGETS[format_]
        is_object = self.target.is_object
        source, self.metadata = _with_aliases(reader)
        self._object = source.checkpoint.root
        if is_object and source.checkpoint.traits.composed:
            source = ElementReader(_with_paths_as_names(source.checkpoint), source.open_file, source.files)
        self.entries: list[TargetTensor] = []
        self.aliases: list[tuple[str, str]] = []
        self.in_parts: list[str] = []
        self.omitted: list[Omission] = []
        self.renamed: list[tuple[str, str]] = []
        self.dropped: list[tuple[Path, Any]] = []
        self.root: Any = None
        self.flattened: Flattened | None = None
        self.universal: Universal | None = None
        self.placed: list[TargetTensor] = []
        self.numbers: list[str] = []
        self._modules = _module_paths(source.checkpoint.tensors)
        # An array inside an object cannot go into the object of the target.
        self.reader, self.arrays = with_arrays(source, self._modules, into_objects=not is_object)
        self.checkpoint = self.reader.checkpoint
        selected = self._select()
        if not selected:
            raise ConvertError("there is no tensor to convert", where=self.checkpoint.path)
        before = len(self.omitted)
        if is_object:
            self._plan_object(selected)
        else:
            self._plan_entries(selected)
            if format_ == "npz":
                members = [(entry.name, member_name(entry.name)) for entry in self.entries]
                self.renamed += [(name, member) for name, member in members if name != member]
            self._drop_everything(selected)
            self.nbytes = sum(entry.nbytes for entry in self.entries)
        if not self.entries and not self.carried:
            name, why, _ = self.omitted[before]
            raise ConvertError(f"{format_} cannot hold any of its tensors: {name}: {why}", where=self.checkpoint.path)

    @property
    def carried(self) -> list[TargetTensor]:
        """Tensors that a torch zip takes over as the calls that rebuild them."""
        return [entry for entry in self.placed if entry.call is not None]

    def _select(self) -> list[TargetTensor]:
        """The requested tensors, named as in a ``state_dict()``."""
        checkpoint, strip = self.checkpoint, self.options.strip
        key = _dotted(self.options.key)
        below = f"{key}." if key else ""
        chosen = [tensor for tensor in checkpoint.tensors if f"{_dotted(tensor.name)}.".startswith(below)]
        if key and not chosen:
            from difflib import get_close_matches

            keys = [candidate.key for candidate in candidates(checkpoint) if candidate.key]
            near = get_close_matches(self.options.key, keys, 3) or keys[:3]
            fix = f"There is {', '.join(near)}; --list shows all." if near else "--list shows what there is."
            what = f"there is no tensor below the key {self.options.key!r}"
            raise ConvertError(what, where=checkpoint.path, fix=fix)
        self.others = sum(tensor.path not in self.arrays for tensor in checkpoint.tensors)
        self.others -= sum(tensor.path not in self.arrays for tensor in chosen)
        self.omitted += [
            Omission(problem.where or "…", f"not all of it was searched: {problem.detail}", lost=True)
            for problem in checkpoint.problems
            if problem.code in ("tree-too-deep", "tree-too-large")  # there may be tensors beyond
        ]
        kept: list[tuple[str, Tensor]] = []
        matched: set[str] = set()
        for tensor in chosen:
            if why := self._why_omitted(tensor, key):
                self.omitted.append(Omission(tensor.name, why))
                continue
            name = (tensor.name[len(key) + 1 :] if key else tensor.name) or tensor.name.rpartition("/")[2]
            parent, slash, last = name.rpartition("/")
            # A prefix is stripped from the whole name, or from the last component of a nested one.
            prefix = next((each for each in strip if name.startswith(each) or last.startswith(each)), "")
            matched.add(prefix)
            new = name[len(prefix) :] if name.startswith(prefix) else f"{parent}{slash}{last[len(prefix) :]}"
            kept.append((new, tensor))
        self.unmatched = [prefix for prefix in dict.fromkeys(strip) if prefix not in matched]
        distinct = _Distinct(name for name, _ in kept)
        selected = []
        for name, tensor in kept:
            writable = name.encode("utf-8", "backslashreplace").decode()  # UTF-8 has no half of a surrogate pair
            writable = writable or "tensor"
            writable = f"{writable}#2" if writable == self.target.metadata else writable
            unique = distinct(writable, invented=writable != name)
            if unique != writable and strip:
                what = f"two tensors would be called {writable!r} without the prefix"
                raise ConvertError(what, fix="Strip another prefix.")
            if unique != name:
                self.renamed.append((name, unique))
            selected.append(TargetTensor(unique, tensor, cast_dtype(tensor.dtype, self.options.dtype)))
        return selected

    def _why_omitted(self, tensor: Tensor, key: str) -> str:
        """Why a ``state_dict()`` would not contain a tensor; empty if it would."""
        path = tensor.path
        if is_constant(self.checkpoint, tensor):
            wanted = {"CONSTANTS", "constants"}.intersection(key.split("."))
            return "" if wanted else "a constant of the program's code, not a weight"
        module = next((path[:length] for length in range(len(path)) if path[:length] in self._modules), None)
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

    def _plan_entries(self, selected: Iterable[TargetTensor]) -> None:
        """Choose what the target can store: dense tensors, and the parts of tensors that consist of others."""
        simple: list[TargetTensor] = []
        stack = [*selected][::-1]
        while stack:
            entry = stack.pop()
            name, tensor = entry.name, entry.tensor
            kind = tensor.kind
            wraps_one = kind == "device" and len(tensor.parts) == 1 and tensor.parts[0].dtype == tensor.dtype
            if tensor.is_dense or wraps_one:
                simple.append(entry)
            elif tensor.parts and kind != "quantized":
                self.in_parts.append(name)
                start = len(tensor.name) + 1 if tensor.name else 0
                for part in reversed(tensor.parts):
                    dtype = cast_dtype(part.dtype, self.options.dtype)
                    stack.append(TargetTensor(f"{name}/{part.name[start:]}", part, dtype))
            else:
                self.omitted.append(Omission(name, _CANNOT_HOLD.get(kind, f"it is {kind}"), lost=True))
        # A torch zip stores views as views and tied tensors under both names, so it writes no byte twice.
        allowance = None if self.format == "torch" else Allowance(self.reader.checkpoint)
        names_by_tie: dict[Any, str] = {}
        distinct = _Distinct(entry.name for entry in simple)
        for entry in simple:
            name, tensor = distinct(entry.name), entry.tensor
            if name != entry.name:
                self.renamed.append((entry.name, name))
                entry.name = name
            if entry.dtype not in self.target.dtypes:
                self.omitted.append(Omission(name, f"the format has no {entry.dtype}", lost=True))
                continue
            # In the metadata of a safetensors file, "format" is what loaders look for, never an alias.
            tie = tie_of(tensor) if self.target.has_aliases and name != "format" else None
            if tie is not None and names_by_tie.setdefault(tie, name) != name:
                self.aliases.append((name, names_by_tie[tie]))
                continue
            if allowance is not None:
                allowance.spend(tensor)
            self.entries.append(entry)

    def _plan_object(self, selected: list[TargetTensor]) -> None:
        """Plan a target that stores an object: with the structure of the source's if possible, else a dictionary."""
        checkpoint = self.checkpoint
        # The keys 1.0 and "1.0" share a path. Then paths identify no tensor.
        paths = frozenset(tensor.path for tensor in checkpoint.tensors)
        distinct = len(paths) == len(checkpoint.tensors)
        if distinct and self.format == "torch":
            carry_over(checkpoint, selected)
        self._plan_entries(entry for entry in selected if entry.call is None)
        root, start = self._root(selected)
        stored = set(self.entries)
        kept = [entry for entry in selected if entry.call is not None or entry in stored]
        structure = None
        form = checkpoint.traits
        has_object = root is not None and not form.program and (form.composed or not form.several)
        if has_object and distinct and not self.in_parts:
            stripped = bool(self.options.strip)
            structure = Structure(root, start, kept, tensors=paths, modules=self._modules, stripped=stripped)
        if structure is not None and len(structure.placed) == len(kept):
            self.root, self.placed, self.dropped = structure.root, structure.placed, structure.dropped
            self.numbers = structure.numbers
            self.renamed = self.renamed if self.options.strip or self._modules else []
        else:
            self.placed = [*self.entries, *(entry for entry in selected if entry.call is not None)]
            for entry in self.placed:
                entry.state = True
            self.root = Dict([part for entry in self.placed for part in (entry.name, entry)])
            self._drop_everything(selected)
        if self.format == "universal":
            from transload.writing.to_universal import Universal

            for problem in checkpoint.problems:
                if problem.code == "ranks-unmerged":
                    raise ConvertError(f"its ranks cannot be merged: {problem.detail}", where=checkpoint.path)
            self.universal = Universal(self.root, self.options.strip)
            self.entries = self.universal.entries
            self.omitted += self.universal.omitted
            self.aliases += self.universal.aliases
            self.dropped += self.universal.dropped
        elif self.format == "dcp":
            from transload.writing.to_dcp import Flattened

            self.flattened = Flattened(self.root)
        if self.format != "torch":
            self.nbytes = sum(entry.nbytes for entry in self.entries)
            return
        self.storages = lay_out(self.placed, self.reader)
        self.nbytes = sum(entry.nbytes for entry in self.storages) + sum(entry.tensor.nbytes for entry in self.carried)
        expand = TargetTensor, TensorCalls(self.storages, checkpoint.storages).tensor
        self.opening = opening_records(dumps(self.root, expand=expand))

    def _drop_everything(self, selected: list[TargetTensor]) -> None:
        """Drop the source's object, or what is below the key; its tensors are stored by themselves."""
        checkpoint, form = self.checkpoint, self.checkpoint.traits
        if form.metadata == "values":
            from transload.formats.gguf import header_values

            values = header_values(self.reader.open_file(""))
            # With two components the path cannot be that of a tensor, which may have the name of a value.
            self.dropped.append(((checkpoint.format, "metadata"), Dict.of(values.items())))
        main = [pickle for pickle in checkpoint.pickles if pickle.main]
        several = len(main) > 1 or any(pickle.path for pickle in main)
        if not self.options.key and several and not form.composed:
            for pickle in main:  # the object of each file
                if any(leaf.path[: len(pickle.path)] == pickle.path for leaf in checkpoint.leaves):
                    self.dropped.append((pickle.path, pickle.root))
            return
        root, path = self._root(selected)
        if root is not None and not form.program:
            self.dropped.append((path, root))

    def _root(self, selected: list[TargetTensor]) -> tuple[Any, Path]:
        """The object to convert and its path; ``None`` if the key does not name a container in the object."""
        root, wanted = self._object, _dotted(self.options.key)
        if not wanted:
            return root, ()
        for entry in selected:
            path = entry.tensor.path
            for length in range(1, len(path)):
                # Spelled as in names, which leave out the _modules dictionaries of modules.
                spelled = ".".join(str(step) for step in path[:length] if step != "_modules")
                if _dotted(spelled) == wanted:
                    node = node_at(root, path[:length])
                    return (None, ()) if node is None else (node, path[:length])
        return None, ()


class _Distinct:
    """Makes names unique: a repeated name gets a number that makes it different from all ``names``.

    >>> distinct = _Distinct(["a", "a", "a#2"])
    >>> distinct("a"), distinct("a")
    ('a', 'a#3')
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._taken = set(names)
        self._used: set[str] = set()
        self._next: dict[str, int] = {}  # a file can have fifty thousand tensors with the same name

    def __call__(self, name: str, *, invented: bool = False) -> str:
        """The name, or a numbered one. A name that is ``invented`` gives way to the same name in the file."""
        if name not in self._used and not (invented and name in self._taken):
            self._used.add(name)
            return name
        number = self._next.get(name, 2)
        while (new := f"{name}#{number}") in self._used or new in self._taken:
            number += 1
        self._next[name] = number + 1
        self._used.add(new)
        return new


def _dotted(text: str) -> str:
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


# -- notes about the target

_SHOWN = 20


def notes(plan: ConversionPlan, job: ConversionJob, leftovers: Leftovers) -> Iterator[str]:
    """What else to know about the target, one sentence each."""
    named = _named_format(job.dst)
    if named and named != plan.format and not (named == "raw" and not plan.target.file):  # / is any directory
        yield f"it is {plan.format}, although its name says {named}"
    if plan.target.has_shards:
        index, ours = index_name(job.dst), {os.path.basename(path) for path in job.bundle.paths}
        if index not in job.bundle.paths and os.path.lexists(index):
            yield f"the index of other shards still exists, and some loaders prefer it: {index}"
        if others := sorted({os.path.basename(path) for path, _ in sibling_files(index, SHARD)} - ours):
            yield f"other shards of that name still exist: {join_names(others, _SHOWN)}"
        tensors = () if plan.options.key else plan.checkpoint.tensors
        parts = list(dict.fromkeys(str(tensor.path[0]).partition("/")[0] for tensor in tensors if len(tensor.path) > 1))
        if len(parts) > 1 and any("optim" in part.lower() for part in parts):
            yield f"it also holds an optimizer; --key converts one part alone: {join_names(parts, _SHOWN)}"
    form = plan.checkpoint.traits
    if plan.checkpoint.flavour == "DeepSpeed model states" and not form.several:
        yield "it is one of the files of a checkpoint: name their folder for float32 weights and the optimizer"
    if form.program:
        yield "the program itself is not converted, only its weights"
    if plan.weights_only and plan.others:
        yield "only the weights are written; --optimizer adds the states of the optimizer, and everything else"
    if plan.options.key and plan.checkpoint.integrity == "damaged":
        yield "other parts of the source are damaged: transload verify names what is lost"
    for problem in () if plan.options.key else plan.checkpoint.problems:
        if problem.code == "rank-values":
            yield f"where ranks differ, the value of the first counts: {problem.detail}"
    if any(problem.code == "ranks-unmerged" for problem in plan.checkpoint.problems):
        yield "the tensors of each rank are stored as they are: parts of one tensor are not joined"
    if any(problem.code == "dcp-shape-inferred" for problem in plan.checkpoint.problems):
        yield "the shapes are inferred from the pieces: if files of the last ranks are missing, tensors are too small"
    for prefix in plan.unmatched:
        yield f"no name begins with the prefix {prefix!r}"
    arrays = dict.fromkeys(entry.name for entry in plan.entries if entry.tensor.path in plan.arrays)
    if names := [*arrays, *(name for name, kept in plan.aliases if kept in arrays)]:
        yield f"numpy arrays in the source, now tensors: {join_names(names, _SHOWN)}"
    if plan.numbers:
        yield f"numpy numbers in the source, now Python numbers: {join_names(plan.numbers, _SHOWN)}"
    yield from _first(plan.in_parts, "{} is split into its component tensors")
    kept = [f"{entry.name} keeps its dtype: it is {entry.tensor.kind}" for entry in plan.carried if entry.is_cast]
    yield from _first(kept, "{}")
    dtypes = Counter(entry.dtype for entry in plan.entries)
    for dtype, count in sorted(dtypes.items()) if plan.options.dtype else ():
        if dtype.startswith("float") and dtype not in CASTABLE:
            yield f"--dtype does not apply to {dtype} (tensors: {count:,})"
    opaque = sorted(dtype for dtype in dtypes if dtype not in NUMPY)
    if plan.format == "npz" and opaque:
        hint = "; --dtype float32 converts bfloat16" if "bfloat16" in opaque else ""
        none = f"has no {opaque[0]}" if len(opaque) == 1 else f"has none of {', '.join(opaque)}"
        yield f"numpy {none}: stored as raw bytes{hint}"
    stored = (entry for entry in plan.entries if entry.tensor.kind == "strided" and entry.tensor.storage is not None)
    separated: list[str] = []
    for group in overlapping(entry for entry in stored if entry.nbytes):
        # Only in a torch zip can several tensors be in one storage.
        if len({entry.name if entry.storage < 0 else entry.storage for entry in group}) > 1:
            separated += [entry.name for entry in group]
    if separated:
        yield f"views that shared memory are separate tensors now: {join_names(separated, _SHOWN)}"
    if leftovers.ambiguous:
        names_shown = join_names(leftovers.ambiguous, _SHOWN)
        yield f"named after the printed form of a key that is neither a string nor a number: {names_shown}"
    yield from plan.universal.notes if plan.universal else ()
    folder = plan.flattened or plan.universal
    if leftovers.versions or (folder and folder.versions):
        yield "the module versions that state_dict() records (_metadata) are not kept"


def _first(names: list[str], sentence: str) -> Iterator[str]:
    yield from (sentence.format(name) for name in names[:_SHOWN])
    if len(names) > _SHOWN:
        yield f"{sentence.format('…')}, and so are {len(names) - _SHOWN:,} more"


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
        out.append(Candidate(key, kind, len(tensors), sum(tensor.nbytes for tensor in tensors)))
    return tuple(out)
