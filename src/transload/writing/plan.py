"""Decide what goes into the target before anything is written, and what to note about it.

``Options`` is what the caller asks for. A ``ConversionPlan`` takes the tensors of its ``Input``, gives those
that are asked for a unique name, and decides which of them the format can store.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Tensor
from transload.contents import tie_of
from transload.dtypes import ITEMSIZE, NUMPY, QUANTIZED, SAFETENSORS
from transload.errors import ConvertError, UsageError
from transload.findings import join_names, quoted
from transload.formats.pickle_writer import dumps
from transload.formats.zip_writer import opening_records
from transload.frozen import NamedTuple
from transload.nodes import Dict
from transload.opening.elements import Allowance, ElementReader
from transload.opening.renaming import Renaming
from transload.writing.inputs import Input, difference, dotted, joined
from transload.writing.objects import Leftovers, Omission, Path
from transload.writing.output import SHARD, index_name, sibling_files
from transload.writing.to_torch import Structure, TensorCalls, carry_over, lay_out, overlapping
from transload.writing.transfer import CASTABLE, ConversionJob, TargetTensor, cast_dtype

if TYPE_CHECKING:
    from transload.writing.lora import Lora
    from transload.writing.to_dcp import Flattened
    from transload.writing.to_universal import Universal

# -- options

Patterns = tuple[re.Pattern[str], ...]

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
    """What the caller of ``convert`` asks for; the fields are its parameters.

    With ``lora``, the last input is an adapter, and this is its configuration.
    """

    key: str = ""
    strip: tuple[str, ...] = ()
    dtype: str = ""
    allow_inf: bool = False
    max_shard_size: int = 0
    optimizer: bool = False
    only: Patterns = ()
    drop: Patterns = ()
    rename: Renaming | None = None
    lora: Mapping[str, Any] | None = None


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


def patterns_of(patterns: str | re.Pattern[str] | Iterable[str | re.Pattern[str]], option: str) -> Patterns:
    """The regular expressions given for an option; ``UsageError`` names one that cannot be used."""
    return tuple(
        _compiled(each, option) for each in ([patterns] if isinstance(patterns, str | re.Pattern) else patterns)
    )


def _compiled(pattern: str | re.Pattern[str], option: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (TypeError, ValueError, re.error) as error:
        raise UsageError(f"{option} has {pattern!r}, which is no regular expression: {error}") from error


class Names:
    """Which tensors ``options`` ask for by name: prefixes are stripped, then ``only`` and ``drop`` are compared.

    ``unmatched`` are prefixes that no name begins with.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._unused = {("--only", each.pattern) for each in options.only}
        self._unused |= {("--drop", each.pattern) for each in options.drop}
        self._prefixes = dict.fromkeys(options.strip)

    @property
    def unmatched(self) -> list[str]:
        """Prefixes to strip that no name begins with."""
        return [*self._prefixes]

    def stripped(self, name: str) -> str:
        """A name without a prefix, which is at its start, or at that of the last component of a nested name."""
        parent, slash, last = name.rpartition("/")
        prefix = next((each for each in self._options.strip if name.startswith(each) or last.startswith(each)), "")
        self._prefixes.pop(prefix, None)
        return name[len(prefix) :] if name.startswith(prefix) else f"{parent}{slash}{last[len(prefix) :]}"

    def is_chosen(self, name: str) -> bool:
        """Whether it matches one of ``only``, if there are any, and none of ``drop``."""
        options = self._options
        is_wanted = self._matches("--only", options.only, name) or not options.only
        return not self._matches("--drop", options.drop, name) and is_wanted

    def _matches(self, option: str, patterns: Patterns, name: str) -> bool:
        matching = [each.pattern for each in patterns if each.search(name)]
        self._unused -= {(option, pattern) for pattern in matching}
        return bool(matching)

    def refuse_unused(self, path: str) -> None:
        """Raise if a pattern or a name to change matches nothing."""
        rename = self._options.rename
        unused = [*sorted(self._unused), *(("--rename", text) for text in (rename.unused if rename else ()))]
        if unused:
            option, text = unused[0]
            fix = f"This lists the names:\n$ transload inspect {quoted(path)} --tensors"
            if option == "--rename" and not text.endswith((".", "/")):
                fix = f"A prefix ends with a dot, as in encoder.=backbone.\n{fix}"
            raise UsageError(f"{option} {text!r} matches no name", where=path, fix=fix)


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


class ConversionPlan:
    """What is written and what is not; raises ``TransloadError`` if there is nothing to convert.

    ``entries`` are the tensors of the target in file order, ``aliases`` further names of the same tensors, ``in_parts``
    the names of tensors that became several entries, ``omitted`` the tensors that are left out, and ``others`` how many
    were not asked for. ``repeated`` are names that several inputs have for equal tensors; ``moved`` is whether some get
    names in other dictionaries than in the source. ``renamed`` pairs names in the source with names that the caller did
    not ask for; ``unmatched`` are prefixes to strip that no name begins with. ``dropped`` is everything that is not a
    tensor, by path; ``numbers`` are the paths of numpy scalars that became Python numbers in a torch zip. ``input`` is
    what is read, and describes the fields that the plan has from it.

    If the target stores an object, ``root`` is that, and ``placed`` are the tensors in their order there. For a torch
    zip, ``opening`` are the records of the object, and ``storages`` the bytes to write; for DCP it is ``flattened``,
    for a universal checkpoint ``universal``.
    """

    def __init__(self, readers: Sequence[ElementReader], format_: str, options: Options) -> None:
        self.format = format_
        self.target = TARGETS[format_]
        is_object = self.target.is_object
        if format_ == "universal" and (readers[1:] or options.only or options.drop or options.rename):
            what = "a universal checkpoint has all tensors of one checkpoint, under their names"
            raise UsageError(what, fix="Leave out --only, --drop, --rename and other inputs.")
        everything = options.optimizer or format_ == "universal"
        form = {"everything": everything, "is_object": is_object and len(readers) == 1}
        keys = [options.key for _ in readers]
        if options.lora is not None:
            keys[-1] = ""
        self.input = joined([Input(reader, key, **form) for reader, key in zip(readers, keys, strict=True)])
        self.adapter_path = readers[-1].checkpoint.path
        self.options = options = options._replace(key=self.input.key)
        self.reader, self.arrays, self.metadata = self.input.reader, self.input.arrays, self.input.metadata
        self.checkpoint = self.reader.checkpoint
        self.weights_only, self.others, self.omitted = self.input.weights_only, self.input.others, self.input.omitted
        self.entries: list[TargetTensor] = []
        self.aliases: list[tuple[str, str]] = []
        self.in_parts: list[str] = []
        self.renamed: list[tuple[str, str]] = []
        self.repeated: list[str] = []
        self.dropped: list[tuple[Path, Any]] = []
        self.root: Any = None
        self.flattened: Flattened | None = None
        self.universal: Universal | None = None
        self.placed: list[TargetTensor] = []
        self.numbers: list[str] = []
        selected = self._select(self._with_adapter(self.input.chosen))
        if not selected:
            raise ConvertError("there is no tensor to convert", where=self.checkpoint.path)
        lora = self.lora
        if lora and not any(entry.delta or entry.tensor in lora.replaced.values() for entry in selected):
            raise ConvertError("nothing that the adapter changes is left to convert", where=self.adapter_path)
        before = len(self.omitted)
        if is_object:
            self._plan_object(selected)
        else:
            self._plan_entries(selected)
            if format_ == "npz":
                members = [(entry.name, member_name(entry.name)) for entry in self.entries]
                self.renamed += [(name, member) for name, member in members if name != member]
            self.dropped += self.input.rest()
            self.nbytes = sum(entry.nbytes for entry in self.entries)
        if not self.entries and not self.carried:
            name, why, _ = self.omitted[before]
            raise ConvertError(f"{format_} cannot hold any of its tensors: {name}: {why}", where=self.checkpoint.path)

    @property
    def carried(self) -> list[TargetTensor]:
        """Tensors that a torch zip takes over as the calls that rebuild them."""
        return [entry for entry in self.placed if entry.call is not None]

    def _with_adapter(self, chosen: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """The tensors of the base model, and those that an adapter has in their place or adds to them."""
        self.lora: Lora | None = None
        if self.options.lora is None:
            return chosen
        from transload.writing.lora import Lora

        of_adapter = self.input.names[-1]
        adapter = [pair for pair in chosen if pair[1].path[0] == of_adapter]
        base = [pair for pair in chosen if pair[1].path[0] != of_adapter]
        self.lora = lora = Lora(self.options.lora, adapter, base, self.adapter_path)
        names = dict(base).keys()
        added = [pair for pair in lora.replaced.items() if pair[0] not in names]
        return [(name, lora.replaced.get(name, tensor)) for name, tensor in base] + added

    def _select(self, chosen: list[tuple[str, Tensor]]) -> list[TargetTensor]:
        """The requested tensors, under their names in the target."""
        checkpoint, options = self.checkpoint, self.options
        names = Names(options)
        kept: list[tuple[str, Tensor, str | None, str]] = []
        firsts: dict[str, Tensor] = {}
        self.moved = False
        for name, tensor in chosen:
            place = name.removesuffix(str(tensor.path[-1])) if tensor.path else ""
            place = name[: name.rfind("/") + 1] if place == name else place
            # The names that inspect shows: those of a composed checkpoint are joined with dots.
            shown = name if self.input.names or not checkpoint.traits.composed else dotted(name)
            new = names.stripped(name)
            if not names.is_chosen(other := names.stripped(shown)):
                self.others += tensor.path not in self.arrays
                continue
            step = None
            if options.rename is not None:
                renamed = options.rename(other)
                if renamed is None:
                    self.others += tensor.path not in self.arrays
                    continue
                if renamed != other:
                    inside = renamed.startswith(shown[: len(place)])  # it stays in its dictionary
                    self.moved |= not inside
                    step = renamed[len(place) :] if inside else None
                    new = f"{place}{step}" if inside else renamed
            if self.input.names and (first := firsts.setdefault(new, tensor)).path[0] != tensor.path[0]:
                self._refuse_different(new, first, tensor)
                continue
            kept.append((new, tensor, step, name))
        names.refuse_unused(checkpoint.path)
        if chosen and not kept:
            raise ConvertError("no tensor is left to convert", where=checkpoint.path)
        self.unmatched = names.unmatched
        distinct = _Distinct(name for name, *_ in kept)
        selected = []
        owners: dict[str, Tensor] = {}
        for name, tensor, step, old in kept:
            writable = name.encode("utf-8", "backslashreplace").decode()  # UTF-8 has no half of a surrogate pair
            writable = writable or "tensor"
            writable = f"{writable}#2" if writable == self.target.metadata else writable
            unique = distinct(writable, invented=writable != name)
            owner = owners.setdefault(writable, tensor)
            if unique != writable and options.rename is not None and owner.name != tensor.name:
                what = f"{owner.name} and {tensor.name} would both be called {writable!r}"
                raise ConvertError(what, where=checkpoint.path, fix="Rename one of them to something else, or drop it.")
            if unique != writable and options.strip:
                what = f"two tensors would be called {writable!r} without the prefix"
                raise ConvertError(what, fix="Strip another prefix.")
            if unique != name:
                self.renamed.append((name, unique))
            dtype = options.dtype or (self.lora.dtypes.get(old, "") if self.lora else "")
            entry = TargetTensor(unique, tensor, cast_dtype(tensor.dtype, dtype))
            entry.key, entry.delta = step, self.lora.deltas.get(old) if self.lora else None
            selected.append(entry)
        return selected

    def _refuse_different(self, name: str, one: Tensor, other: Tensor) -> None:
        """Raise if two inputs have different tensors of the same name."""
        why = difference(self.reader, one, other)
        if why:
            what = f"{name} is in {one.path[0]} and in {other.path[0]}, {why}"
            fix = "Convert one of them by itself first, with --drop or --rename."
            raise ConvertError(what, where=self.checkpoint.path, fix=fix)
        self.repeated.append(name)

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
            if tie is not None and names_by_tie.setdefault((tie, entry.delta), name) != name:
                self.aliases.append((name, names_by_tie[tie, entry.delta]))
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
        root, start = self.input.part()
        stored = set(self.entries)
        kept = [entry for entry in selected if entry.call is not None or entry in stored]
        structure = None
        form = checkpoint.traits
        has_object = root is not None and not form.program and (form.composed or not form.several)
        if has_object and distinct and not self.in_parts and not self.moved:
            stripped, modules = bool(self.options.strip), self.input.modules
            structure = Structure(root, start, kept, tensors=paths, modules=modules, stripped=stripped)
        if structure is not None and len(structure.placed) == len(kept):
            self.root, self.placed, self.dropped = structure.root, structure.placed, structure.dropped
            self.numbers = structure.numbers
            self.renamed = self.renamed if self.options.strip or self.input.modules else []
        else:
            self.placed = [*self.entries, *(entry for entry in selected if entry.call is not None)]
            for entry in self.placed:
                entry.state = True
            self.root = Dict([part for entry in self.placed for part in (entry.name, entry)])
            self.dropped += self.input.rest()
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
        tensors = () if plan.options.key or plan.input.names else plan.checkpoint.tensors
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
    for problem in plan.checkpoint.problems:
        if problem.code == "legacy-more-objects":
            yield f"only the first object is converted, and another follows: {problem.detail}"
    if any(problem.code == "ranks-unmerged" for problem in plan.checkpoint.problems):
        yield "the tensors of each rank are stored as they are: parts of one tensor are not joined"
    if any(problem.code == "dcp-shape-inferred" for problem in plan.checkpoint.problems):
        yield "the shapes are inferred from the pieces: if files of the last ranks are missing, tensors are too small"
    yield from plan.lora.notes if plan.lora else ()
    if plan.repeated:
        yield f"in more than one input, with equal values: {join_names(plan.repeated, _SHOWN)}"
    if plan.moved and not form.several and plan.target.is_object:
        yield "--rename moves tensors out of their dictionaries: the target has no others, only names"
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
