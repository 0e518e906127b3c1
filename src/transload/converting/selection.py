"""Which tensors of a checkpoint are converted, and under which names.

``Options`` is what the caller asks for. ``select`` takes the tensors below the key, leaves out what a ``state_dict()``
would not have, and gives every tensor a name of its own. ``target_contents`` then decides which of them a format can
hold. Beforehand, ``with_full_names`` restores names that the reader has cut off, and ``with_second_names`` adds those
that safetensors files note in their metadata. ``candidates`` is what ``--list`` shows.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.casting import FLOATING, is_cast
from transload.converting.transfer import Entry
from transload.dtypes import itemsize
from transload.errors import ConvertError, UsageError
from transload.formats.tensors import called, short_key
from transload.nodes import Call, Dict
from transload.tensors.content import Allowance, Content

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key, Tensor

__all__ = [
    "Candidate",
    "Distinct",
    "Named",
    "Omission",
    "Options",
    "Selection",
    "TargetContents",
    "byte_span",
    "call_items",
    "candidates",
    "dtype_of",
    "format_of",
    "last_pairs",
    "module_paths",
    "named_format",
    "node_at",
    "node_below",
    "overlapping",
    "safetensors_metadata",
    "select",
    "size_of",
    "target_contents",
    "tie_of",
    "with_full_names",
    "with_second_names",
]


# -- what is asked for

_FORMATS = ("safetensors", "torch", "npz", "raw")
_SUFFIXES = {
    ".safetensors": "safetensors",
    ".safetensors.index.json": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".ckpt": "torch",
    ".bin": "torch",
    ".npz": "npz",
    "/": "raw",
    os.sep: "raw",
}

_SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "float": "float32"}
_SHORT.update({"f64": "float64", "f32": "float32", "f16": "float16", "fp64": "float64", "double": "float64"})

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = ("", "K", "M", "G", "T")
_MAX_SIZE = float(1 << 63)


class Options(NamedTuple):
    """What the caller of ``convert`` chose; the fields are its parameters."""

    key: str = ""
    strip: tuple[str, ...] = ()
    dtype: str = ""
    allow_inf: bool = False
    max_shard_size: int = 0


def format_of(dst: str, to: str = "") -> str:
    """The format to write: ``to``, or what the name of the target says.

    >>> format_of("model.safetensors"), format_of("out/"), format_of("x", "npz")
    ('safetensors', 'raw', 'npz')
    """
    if to:
        if to not in _FORMATS:
            raise UsageError(f"unknown format {to!r}", fix=f"Choose one of {', '.join(_FORMATS)}.")
        return to
    if named := named_format(dst):
        return named
    fix = "End its name in .safetensors, .pt, .npz or a slash, or add --to torch|safetensors|npz|raw."
    raise UsageError("the name of the target does not say which format to write", where=dst, fix=fix)


def named_format(dst: str) -> str:
    """The format that a file name stands for; empty if it stands for none."""
    name = dst.lower()
    return next((format_ for suffix, format_ in _SUFFIXES.items() if name.endswith(suffix)), "")


def dtype_of(text: str) -> str:
    """The full name of a dtype to convert to; empty for none.

    >>> dtype_of("bf16"), dtype_of("torch.float16")
    ('bfloat16', 'float16')
    """
    name = text.removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name and name not in FLOATING:
        raise UsageError(f"cannot convert to {text!r}", fix=f"Choose one of {', '.join(FLOATING)}.")
    return name


def size_of(size: str | int | None) -> int:
    """Bytes, from a number with or without a unit; 0 for none.

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


# -- what is selected


class Named(NamedTuple):
    """A tensor, and the name it gets."""

    name: str
    tensor: Tensor


class Omission(NamedTuple):
    """Something that is not in the target, and why. ``lost``: it belongs there, but the target cannot hold it."""

    name: str
    why: str
    lost: bool = False


class Selection(NamedTuple):
    """The tensors to convert, in the order of the file; ``others`` counts those outside of the key.

    ``unmatched`` are prefixes to strip that no name begins with.
    """

    tensors: tuple[Named, ...]
    omitted: tuple[Omission, ...]
    others: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    unmatched: tuple[str, ...] = ()


class Distinct:
    """Gives every name once: one that comes again gets a number, with which it is none of all ``names``.

    >>> distinct = Distinct(["a", "a", "a#2"])
    >>> distinct("a"), distinct("a"), distinct.renamed
    ('a', 'a#3', [('a', 'a#3')])
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.renamed: list[tuple[str, str]] = []
        self._taken = set(names)
        self._used: set[str] = set()
        self._next: dict[str, int] = {}  # a file can have fifty thousand tensors of one name

    def __call__(self, name: str, *, invented: bool = False) -> str:
        """The name, or another one. A name that is ``invented`` gives way to one that the file has."""
        if name not in self._used and not (invented and name in self._taken):
            self._used.add(name)
            return name
        number = self._next.get(name, 2)
        while (new := f"{name}#{number}") in self._used or new in self._taken:
            number += 1
        self._next[name] = number + 1
        self._used.add(new)
        self.renamed.append((name, new))
        return new


_WEIGHTS = ("_parameters", "_buffers")
_NO_STATE = "an attribute of a module, which state_dict() does not have"
_NOT_PERSISTENT = "a buffer registered with persistent=False"
_CONSTANT = "a constant of the program's code, not a weight"


def select(checkpoint: Checkpoint, options: Options) -> Selection:
    """The tensors that are asked for, as ``state_dict()`` would name them."""
    key = _dotted(options.key)
    chosen: list[Named] = []
    for tensor in checkpoint.tensors:
        if not key:
            chosen.append(Named(tensor.name, tensor))
        elif f"{_dotted(tensor.name)}.".startswith(f"{key}."):
            below = tensor.name[len(key) + 1 :]
            chosen.append(Named(below or tensor.name.rpartition("/")[2], tensor))
    if key and not chosen:
        raise _no_such_key(checkpoint, options.key)
    omitted = [
        Omission(problem.where or "…", f"not all of it was searched: {problem.detail}", lost=True)
        for problem in checkpoint.problems
        if problem.code in ("tree-too-deep", "tree-too-large")  # tensors may lie where the reader has stopped
    ]
    modules = module_paths(checkpoint.tensors)
    kept: list[Named] = []
    unmatched = dict.fromkeys(options.strip)
    for name, tensor in chosen:
        why = _why_omitted(checkpoint, tensor, modules, key)
        if why:
            omitted.append(Omission(tensor.name, why))
            continue
        stripped, prefix = _strip(name, options.strip)
        unmatched.pop(prefix, None)
        kept.append(Named(stripped, tensor))
    distinct = Distinct(each.name for each in kept)
    renamed: list[tuple[str, str]] = []
    for index, (name, tensor) in enumerate(kept):
        writable = _writable(name)
        unique = distinct(writable, invented=writable != name)
        if unique != writable and options.strip:
            raise ConvertError(f"two tensors would be called {writable!r} without the prefix", fix="Strip another one.")
        if unique != name:
            renamed.append((name, unique))
            kept[index] = Named(unique, tensor)
    others = len(checkpoint.tensors) - len(chosen)
    return Selection(tuple(kept), tuple(omitted), others, tuple(renamed), tuple(unmatched))


def _dotted(text: str) -> str:
    """A path with one separator: ``model.state_dict`` and ``model/state_dict`` are the same key."""
    return text.replace("/", ".")


def _no_such_key(checkpoint: Checkpoint, key: str) -> ConvertError:
    from difflib import get_close_matches

    known = [candidate.key for candidate in candidates(checkpoint) if candidate.key]
    near = get_close_matches(key, known, 3) or known[:3]
    fix = f"There is {', '.join(near)}; --list shows all." if near else "--list shows what there is."
    return ConvertError(f"there is no tensor below the key {key!r}", where=checkpoint.path, fix=fix)


def module_paths(tensors: Iterable[Tensor]) -> set[tuple[Key, ...]]:
    """The paths of pickled modules: of those that hold parameters or buffers, and of all around them."""
    paths: set[tuple[Key, ...]] = set()
    for tensor in tensors:
        path = tensor.path
        if path[-2:-1] and path[-2] in _WEIGHTS and not tensor.name.endswith("/".join(map(str, path[-2:]))):
            path = path[:-2]
            while path not in paths:
                paths.add(path)
                if path[-2:-1] == ("_modules",):
                    path = path[:-2]
    return paths


def _why_omitted(checkpoint: Checkpoint, tensor: Tensor, modules: set[tuple[Key, ...]], key: str) -> str:
    """Why a tensor is not part of the state dict; empty if it is."""
    path = tensor.path
    if checkpoint.format == "torchscript" and tensor.name.startswith("CONSTANTS."):
        return "" if key.startswith("CONSTANTS") else _CONSTANT
    if checkpoint.format == "torch-export" and "constants" in path[:2]:
        return "" if "constants" in key.split(".") else _CONSTANT
    module = next((path[:length] for length in range(len(path)) if path[:length] in modules), None)
    if module is None:
        return ""
    inside = path[len(module) :]
    while inside[:1] == ("_modules",):
        inside = inside[2:]
    if len(inside) != 2 or inside[0] not in _WEIGHTS:
        return _NO_STATE
    # The reader names a buffer by its whole path where state_dict() would not have it.
    return _NOT_PERSISTENT if inside[0] == "_buffers" and tensor.name.endswith(f"_buffers/{inside[1]}") else ""


def _strip(name: str, prefixes: tuple[str, ...]) -> tuple[str, str]:
    """A name without the first prefix that it, or the last part of a nested one, begins with; and that prefix."""
    lead, slash, last = name.rpartition("/")
    for prefix in prefixes:
        if name.startswith(prefix):
            return name[len(prefix) :], prefix
        if last.startswith(prefix):
            return f"{lead}{slash}{last[len(prefix) :]}", prefix
    return name, ""


def _writable(name: str) -> str:
    """A name that every format can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 does not have
        name = name.encode("utf-8", "backslashreplace").decode()
    return f"{name}#2" if name == "__metadata__" else name or "tensor"


# -- what the target holds

_CANNOT_HOLD = {
    "meta": "it was on the meta device and has no values",
    "quantized": "it is quantized: its values mean nothing without their scales",
    "subclass": "it is a tensor subclass",
    "device": "its values are in the pickle, as a numpy array",
}


class TargetContents(NamedTuple):
    """The tensors of a target: ``aliases`` are second names of entries, ``in_parts`` became several entries.

    ``renamed`` are parts whose name another tensor has.
    """

    entries: tuple[Entry, ...]
    aliases: tuple[tuple[str, str], ...]
    omitted: tuple[Omission, ...]
    in_parts: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()


def target_contents(
    named: Iterable[Named],
    content: Content,
    options: Options,
    holds: Callable[[str], bool],
    *,
    tied: bool = False,
    views: bool = False,
) -> TargetContents:
    """What a target can hold of the named tensors; ``holds`` says which dtypes it has.

    With ``tied``, equal views become names of one entry. A target that holds ``views`` does not write all the bytes
    that they claim, so nothing is refused for claiming too much.
    """
    allowance = None if views else Allowance(content.checkpoint)
    entries: list[Entry] = []
    aliases: list[tuple[str, str]] = []
    omitted: list[Omission] = []
    in_parts: list[str] = []
    names_by_tie: dict[Any, str] = {}
    simple = list(_simple_tensors(named, omitted, in_parts))
    distinct = Distinct(each.name for each in simple)
    for each in simple:
        name, tensor = distinct(each.name), each.tensor
        dtype = options.dtype if is_cast(tensor.dtype, options.dtype) else tensor.dtype
        if not holds(dtype):
            omitted.append(Omission(name, f"the format has no {dtype}", lost=True))
            continue
        # In the metadata of a safetensors file, "format" is what its loaders look for, never a second name.
        tie = tie_of(tensor) if tied and name != "format" else None
        if tie is not None and names_by_tie.setdefault(tie, name) != name:
            aliases.append((name, names_by_tie[tie]))
            continue
        if allowance is not None:
            allowance.spend(tensor)
        entries.append(Entry(name, tensor, dtype))
    return TargetContents(tuple(entries), tuple(aliases), tuple(omitted), tuple(in_parts), tuple(distinct.renamed))


def _simple_tensors(named: Iterable[Named], omitted: list[Omission], in_parts: list[str]) -> Iterator[Named]:
    """Tensors that are plain runs of numbers; of those made of others, the others."""
    for name, tensor in named:
        kind = tensor.kind
        wraps_one = kind == "device" and len(tensor.parts) == 1 and tensor.parts[0].dtype == tensor.dtype
        if kind in ("strided", "sharded") or wraps_one:
            yield Named(name, tensor)
        elif tensor.parts and kind != "quantized":
            in_parts.append(name)
            lead = len(tensor.name) + 1 if tensor.name else 0
            parts = [Named(f"{name}/{part.name[lead:]}", part) for part in tensor.parts]
            yield from _simple_tensors(parts, omitted, in_parts)
        else:
            omitted.append(Omission(name, _CANNOT_HOLD.get(kind, f"it is {kind}"), lost=True))


def tie_of(tensor: Tensor) -> Any:
    """What two names of the same numbers have in common; ``None`` where there are no numbers to share."""
    if tensor.kind != "strided" or tensor.storage is None or not tensor.numel:
        return None
    steps = [(size, step) for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1]
    return (tensor.storage, tensor.offset, tensor.shape, tuple(steps), tensor.dtype, tensor.flags)


_Spanned = tuple[int, int, Any]


def byte_span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first to the last that a tensor reaches."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return itemsize(tensor.dtype, tensor.offset), itemsize(tensor.dtype, tensor.offset + last + 1)


def overlapping(spans: Iterable[_Spanned]) -> Iterator[list[_Spanned]]:
    """Groups of spans (first byte, end, anything) that overlap, directly or by way of others."""
    group: list[_Spanned] = []
    reached = 0
    for span in sorted(spans, key=lambda span: span[:2]):
        if group and span[0] >= reached:
            yield group
            group, reached = [], 0
        group.append(span)
        reached = max(reached, span[1])
    yield group


# -- the parts that a key can choose

_MAX_CANDIDATES = 200  # an optimizer's state has one for each parameter
_MAX_LEVELS = 3


class Candidate(NamedTuple):
    """A part of a checkpoint: its key (empty for all), what it is, and how much is in it."""

    key: str
    kind: str
    tensors: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self._asdict()


def candidates(checkpoint: Checkpoint) -> tuple[Candidate, ...]:
    """Every part of a checkpoint that holds tensors, the whole first, then in the order of the file."""
    parts: dict[str, list[Tensor]] = {"": []}
    for tensor in checkpoint.tensors:
        parts[""].append(tensor)
        steps = tensor.name.split("/")[:-1]
        for length in range(1, min(len(steps), _MAX_LEVELS) + 1):
            key = "/".join(steps[:length])
            if key in parts or len(parts) < _MAX_CANDIDATES:
                parts.setdefault(key, []).append(tensor)
    many = len(parts) > _MAX_LEVELS
    return tuple(
        Candidate(key, _kind(key, tensors), len(tensors), sum(tensor.nbytes for tensor in tensors))
        for key, tensors in parts.items()
        if not (many and key.rpartition("/")[2].isdecimal())  # one of many alike: optimizer/state/17
    )


def _kind(key: str, tensors: list[Tensor]) -> str:
    depth = len(key.split("/")) if key else 0
    if any("_parameters" in tensor.path or "_buffers" in tensor.path for tensor in tensors):
        return "module"
    if any("/" in tensor.name[len(key) :].removeprefix("/") for tensor in tensors):
        return "nested"
    dotted = any("." in str(tensor.path[depth]) for tensor in tensors if len(tensor.path) > depth)
    return "state dict" if dotted else "tensors"


# -- the file's own object


def node_below(root: object, key: str, paths: list[tuple[Key, ...]]) -> tuple[Any, tuple[Key, ...]]:
    """The node that a key names, and its path; ``(None, ())`` where the key is not a container of the object.

    ``paths`` are those of the tensors below it.
    """
    wanted = _dotted(key)
    for path in paths:
        for length in range(1, len(path)):
            # As names have it: without the tables of a module's children.
            spelled = _dotted(".".join(str(step) for step in path[:length] if step != "_modules"))
            if spelled == wanted:
                node = node_at(root, path[:length])
                return (None, ()) if node is None else (node, path[:length])
    return None, ()


def node_at(root: object, path: tuple[Key, ...]) -> Any:
    """The node at a path; ``None`` if there is none."""
    node: Any = root
    for step in path:
        if type(node) in (list, tuple):
            node = node[step] if type(step) is int and step < len(node) else None
        else:
            items = _node_items(node)
            keys = range(len(items) // 2 * 2 - 2, -1, -2)  # of equal keys the last counts
            node = next((items[index + 1] for index in keys if short_key(items[index]) == step), None)
        if node is None:
            return None
    return node


def last_pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    """Keys and values; of a text key that occurs twice the last, as in a dictionary."""
    pairs = list(zip(items[::2], items[1::2], strict=False))
    last = {key: index for index, (key, _) in enumerate(pairs) if type(key) is str}
    return [pair for index, pair in enumerate(pairs) if type(pair[0]) is not str or last[pair[0]] == index]


def call_items(node: Call) -> list[Any]:
    """Keys and values of a mapping: those it was made with (a counter's, or pairs, as Python 2 has it), then others."""
    given = node.args[0] if type(node.args) is tuple and node.args else None
    items: list[Any] = []
    if type(given) is Dict:
        items += given.items
    elif type(given) is list:
        for pair in given:
            if type(pair) in (list, tuple) and len(pair) == 2:
                items += pair
    return [*items, *(node.items or [])]


def _node_items(node: Any) -> list[Any]:
    """Keys and values of a mapping, or the attributes of an object; nothing for anything else."""
    if type(node) is Dict:
        return node.items
    if type(node) is not Call:
        return []
    state = node.states[-1] if node.states else None
    attributes = state.items if type(state) is Dict and called(node) != "collections.OrderedDict" else []
    return [*attributes, *call_items(node)]


# -- names that the reader does not give as they are

MAX_NAMES = 64 << 20
"""Characters of all restored names together: a key of a megabyte can stand above any number of tensors."""

_CUT = re.compile(r".{200}… \([0-9]{4,} characters\)", re.DOTALL)  # as formats.tensors.short writes it


def with_full_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with whole names, however long; ``ConvertError`` where they are ambiguous or too much."""
    if not checkpoint.pickles or not any("… (" in tensor.name for tensor in checkpoint.tensors):
        return checkpoint
    names = _FullNames(checkpoint)
    return replace(checkpoint, tensors=tuple(map(names.restored, checkpoint.tensors)))


class _FullNames:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._where = checkpoint.path
        self._roots = [(pickle.path, pickle.root) for pickle in checkpoint.pickles if pickle.main]
        self._children: dict[int, dict[Key, list[tuple[Any, Any]]]] = {}
        self._alike = Counter(tensor.path for tensor in checkpoint.tensors)
        self._seen: Counter[tuple[Key, ...]] = Counter()
        self._left = MAX_NAMES

    def restored(self, tensor: Tensor) -> Tensor:
        """A tensor under its whole name."""
        if not any(type(step) is str and _CUT.fullmatch(step) for step in tensor.path):
            return tensor
        number = self._seen[tensor.path]
        self._seen[tensor.path] += 1
        for start, root in self._roots:
            path = tensor.path[len(start) :]
            keys = self._keys(root, path, number) if tensor.path[: len(start)] == start else None
            if keys is None:
                continue
            name, at = tensor.name, 0
            for step, key in zip(path, keys, strict=True):
                if type(key) is str and type(step) is str and key != step and (at := name.find(step, at)) >= 0:
                    name = f"{name[:at]}{key}{name[at + len(step) :]}"
                    at += len(key)
                    self._left -= len(key)
                if self._left < 0:
                    raise ConvertError(f"its names add up to more than {MAX_NAMES >> 20} MiB", where=self._where)
            return _renamed(tensor, tensor.name, name)
        what = f"a key is longer than 1,000 characters, and cannot be told apart from others: {tensor.name[-60:]}"
        raise ConvertError(what, where=self._where, fix="Save it again with shorter keys.")

    def _keys(self, node: Any, path: tuple[Key, ...], number: int) -> list[Any] | None:
        """The keys that a path stands for; of several tensors with this path, those of the one with that number."""
        keys = []
        for index, step in enumerate(path):
            if type(node) in (list, tuple):
                matching = [(step, node[step])] if type(step) is int and step < len(node) else []
            else:
                if id(node) not in self._children:
                    children = self._children[id(node)] = {}
                    for key, child in last_pairs(_node_items(node)):
                        children.setdefault(short_key(key), []).append((key, child))
                matching = self._children[id(node)].get(step, [])
            alike = index == len(path) - 1 and len(matching) == self._alike[path]
            if not matching or (len(matching) > 1 and not alike):
                return None
            key, node = matching[number if alike else 0]
            keys.append(key)
        return keys


def _renamed(tensor: Tensor, old: str, new: str) -> Tensor:
    """A tensor and its parts, whose names begin with its own."""
    parts = tuple(_renamed(part, old, new) for part in tensor.parts)
    return tensor._replace(name=f"{new}{tensor.name[len(old) :]}", parts=parts)


def safetensors_metadata(content: Content) -> dict[str, str]:
    """The metadata of all safetensors files of a checkpoint."""
    from transload.formats.safetensors import header_metadata, looks_like
    from transload.formats.zip import starts_like_zip

    metadata: dict[str, str] = {}
    if content.checkpoint.format not in ("safetensors", "sharded", "directory"):
        return metadata
    for file in dict.fromkeys(storage.file for storage in content.checkpoint.storages):
        source = content.open_file(file)
        if looks_like(source) and not starts_like_zip(source):
            metadata.update(header_metadata(source))
    return metadata


def with_second_names(checkpoint: Checkpoint, metadata: dict[str, str]) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint with tied tensors under all their names, and what else the metadata says.

    safetensors files hold every tensor once, and their writers note its second names in the metadata.
    """
    by_name = {tensor.name: tensor for tensor in checkpoint.tensors}
    names = {a: b for a, b in metadata.items() if b in by_name and a not in by_name and a != "format"}
    tied = [by_name[kept]._replace(name=name, path=(name,)) for name, kept in names.items()]
    others = {key: value for key, value in metadata.items() if key not in names and key != "format"}
    return replace(checkpoint, tensors=(*checkpoint.tensors, *tied)), others
