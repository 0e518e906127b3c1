"""What could happen if a loader read this: the names a file asks for, how it uses them, and the verdict.

``judge_pickles`` takes every global and every call of the pickles. ``classify`` of ``names`` judges a name;
``check_call`` judges how an allowed name is called; ``Nested`` runs the pickles that are given to a loader inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from transload.checkpoint import GlobalUse
from transload.findings import Finding, Safety, Severity, worst_safety
from transload.formats import pickle_machine
from transload.formats.tensors import READERS
from transload.judge.names import TORCH_DEFAULT, canonical, classify, is_class_path, is_loader, torch_spelling
from transload.nodes import Call, Dict, Extension, Global, Persistent, Pickle, module_class

__all__ = ["MAX_DEPTH", "check_call", "judge_pickles", "safe_globals_lines"]


# One shared object of a million items behind a million calls is a small file: what a rule looks through has an end.
_MAX_ITEMS = 100

Complaint = tuple[Safety, str] | None
Rule = Callable[[str, tuple[Any, ...], Call], Complaint]


def full_name(node: object) -> str:
    """The canonical dotted name of a global node; empty for anything else."""
    if type(node) is not Global:
        return ""
    return ".".join(canonical(node.module, node.name))


def check_call(name: str, call: Call) -> Complaint:
    r"""What is wrong with a call of an allowed name, if anything.

    >>> from transload.formats.pickle_machine import run
    >>> check_call("builtins.bytearray", run(b"cbuiltins\nbytearray\nJ\0\0\0\1\x85R.").root)[0]
    'dangerous'
    """
    args = call.args
    if type(args) is not tuple:
        return "unknown", f"{name} is called with arguments that are no tuple"
    if call.kwargs is not None and not (type(call.kwargs) is Dict and not call.kwargs.items):
        return "needs-trust", f"{name} is called with keyword arguments"
    rule = _RULES.get(name) or _by_family(name)
    complaint = rule(name, args, call)
    if complaint is None and (call.items or call.appended):
        complaint = _check_items(name, call)
    if complaint is None and call.states:
        complaint = _check_states(name, call.states)
    return complaint


def _by_family(name: str) -> Rule:
    if name.endswith("Storage"):
        return _storage
    if name in _TENSOR_CLASSES:
        return _tensor_class
    if name.startswith("torch.") and name.count(".") == 1:
        return _not_callable
    return _anything


_TENSOR_CLASSES = frozenset(name for name in TORCH_DEFAULT if name.endswith("Tensor") and "nested" not in name)


def _check_items(name: str, call: Call) -> Complaint:
    """SETITEM(S), APPEND(S) and ADDITEMS on the result."""
    if name in _MAPPINGS and not call.appended:
        return None
    if name.startswith("torch."):  # CVE-2026-24747: torch before 2.10 wrote wherever the key of a tensor said
        return "dangerous", f"items are put into the result of {name}"
    return "unknown", f"items are put into the result of {name}, which takes none"


_MAPPINGS = frozenset({"collections.OrderedDict", "collections.Counter"})


def _check_states(name: str, states: list[object]) -> Complaint:
    """BUILD on the result: what state may be put into it."""
    for state in states:
        if name == "collections.OrderedDict":
            keys = state.items[: 2 * _MAX_ITEMS : 2] if type(state) is Dict else [None]
            odd = [key for key in keys if key != "_metadata"]
            if odd:  # a key such as "items" shadows the method of that name
                return "needs-trust", f"an OrderedDict is given the attribute {str(odd[0])[:60]!r}"
            if len(keys) == _MAX_ITEMS:
                return "needs-trust", "an OrderedDict is given more attributes than it can have"
        # Flags and hooks, as torch up to 0.3 wrote them. The other state there is would make it another tensor.
        elif name not in _BUILDABLE or not (type(state) is tuple and len(state) == 3 and _no_hooks(state[2])):
            return "needs-trust", f"the result of {name} is given a state"
    return None


_BUILDABLE = frozenset({"torch.nn.parameter.Parameter", *_TENSOR_CLASSES})


def _encode(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        fine = args[0].isascii() or max(args[0]) <= "\xff"
        return None if fine else ("unknown", "_codecs.encode is given text that latin1 does not have")
    return "dangerous", "_codecs.encode is asked for a codec other than latin1, which imports code"


def _bytearray(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    if not args or (len(args) == 1 and _is_bytes(args[0])):
        return None
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return None
    return "dangerous", f"a byte array is made from {_kinds(args)}: a number here allocates that many bytes"


def _is_bytes(node: object) -> bool:
    """Bytes, or the call that protocol 2 writes for them."""
    return type(node) is bytes or (type(node) is Call and full_name(node.callee) == "_codecs.encode")


def _set(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    return None if len(args) <= 1 and all(type(a) in (list, tuple) for a in args) else ("needs-trust", "an odd set")


def _complex(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = len(args) <= 2 and all(type(a) in (float, int) for a in args)
    return None if fine else ("needs-trust", "an odd complex number")


def _mapping(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    if not args or (len(args) == 1 and (type(args[0]) is Dict or _are_pairs(args[0]))):
        return None
    return "needs-trust", f"a dictionary is made from {_kinds(args)}"


def _are_pairs(node: object) -> bool:
    """``[[key, value], …]``: how Python 2 writes an ordered dictionary."""
    # Loaders refuse a later one that is no pair; nothing else depends on it.
    return type(node) is list and all(type(pair) in (list, tuple) and len(pair) == 2 for pair in node[:_MAX_ITEMS])


def _device(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = 1 <= len(args) <= 2 and type(args[0]) in (str, int) and all(type(a) is int for a in args[1:])
    if fine and type(args[0]) is str:
        fine = args[0].partition(":")[0].isidentifier()
    return None if fine else ("needs-trust", "an odd torch.device")


def _size(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = not args or (len(args) == 1 and type(args[0]) is tuple and len(args[0]) <= _MAX_ITEMS)
    fine = fine and all(type(a) is int for a in (args[0] if args else ()))
    return None if fine else ("needs-trust", "an odd torch.Size")


def _layout(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    return None if len(args) == 1 and args[0] in _LAYOUTS else ("needs-trust", "an odd tensor layout")


_SPARSE = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_LAYOUTS = ("torch.strided", *(f"torch.{name}" for name in _SPARSE))


def _storage(name: str, _: tuple[Any, ...], __: Call) -> Complaint:
    # A file's storages come through persistent ids; a number here is a size that nothing bounds.
    return "dangerous", f"{name} is called: unbounded, uninitialised memory"


def _tensor_class(name: str, args: tuple[Any, ...], _: Call) -> Complaint:
    if not args:
        return None
    # a number, a torch.Size, a tensor of one number
    if len(args) > _MAX_ITEMS or any(type(a) in (int, Call, Global, Persistent) for a in args):
        return "dangerous", f"{name} is called with a size: unbounded, uninitialised memory"
    return "needs-trust", f"{name} is called with {_kinds(args)}"


def _parameter(_: str, args: tuple[Any, ...], __: Call) -> Complaint:
    fine = len(args) <= 2 and all(type(a) is Call for a in args[:1]) and all(type(a) is bool for a in args[1:])
    return None if fine else ("needs-trust", "an odd parameter")


class _Carriers(NamedTuple):
    """Which arguments of a rebuild function could carry more than numbers, by their position."""

    flag: int = 99
    hooks: int = 99
    metadata: int = 99
    state: int = 99


_CARRIERS = {
    "torch._utils._rebuild_tensor": _Carriers(),
    "torch._utils._rebuild_tensor_v2": _Carriers(4, 5, 6),
    "torch._utils._rebuild_tensor_v3": _Carriers(4, 5, 7),
    "torch._utils._rebuild_parameter": _Carriers(1, 2),
    "torch._utils._rebuild_parameter_with_state": _Carriers(1, 2, state=3),
    "torch._utils._rebuild_qtensor": _Carriers(5, 6),
    "torch._utils._rebuild_sparse_tensor": _Carriers(),
    "torch._utils._rebuild_nested_tensor": _Carriers(),
    "torch._utils._rebuild_meta_tensor_no_storage": _Carriers(3),
    "torch._utils._rebuild_wrapper_subclass": _Carriers(7),
    "torch._utils._rebuild_device_tensor_from_numpy": _Carriers(3),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Carriers(3),
}


def _rebuild(name: str, args: tuple[Any, ...], _: Call) -> Complaint:
    least, most = READERS[name][1:]
    flag, hooks, metadata, state = _CARRIERS[name]
    count = len(args)
    if not least <= count <= most:
        return "unknown", f"{name} is called with {count} arguments"
    if hooks < count and not _no_hooks(args[hooks]):
        return "needs-trust", "a tensor carries backward hooks, which run code"
    if flag < count and type(args[flag]) is not bool:
        return "needs-trust", f"{name} is given {_kinds(args[flag : flag + 1])} for requires_grad"
    if metadata < count and not _are_flags(args[metadata]):
        return "needs-trust", "a tensor carries metadata that is no flag"
    return _check_attributes(args[state]) if state < count else None


def _no_hooks(hooks: object) -> bool:
    if type(hooks) is Call:
        empty = not hooks.items and not hooks.states and not hooks.appended and (not hooks.args or hooks.args == ([],))
        return empty and type(hooks.callee) is Global and hooks.callee.full_name == "collections.OrderedDict"
    return hooks is None or (type(hooks) is Dict and not hooks.items)


def _are_flags(metadata: object) -> bool:
    """``{"conj": True}``, or nothing."""
    if type(metadata) is not Dict:
        return metadata is None
    return len(metadata.items) <= _MAX_ITEMS and all(type(flag) is bool for flag in metadata.items[1::2])


def _from_type(_: str, args: tuple[Any, ...], call: Call) -> Complaint:
    if len(args) != 4:
        return "unknown", "_rebuild_from_type_v2 has the wrong number of arguments"
    function, kind, inner, state = args
    name = full_name(function)
    if not name:
        return "dangerous", "_rebuild_from_type_v2 is given a computed function to call"
    if name not in _REBUILDERS:
        return "needs-trust", f"_rebuild_from_type_v2 is given {name} to call"
    if full_name(kind) not in _PLAIN_KINDS:
        return "needs-trust", f"a tensor of the class {full_name(kind) or 'nobody can name'}"
    return check_call(name, Call(function, inner, "reduce", call.position)) or _check_attributes(state)


_NJT = "torch.nested._internal.nested_tensor"
_REBUILDERS = frozenset({*_CARRIERS, f"{_NJT}._rebuild_njt"})
_PLAIN_KINDS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", f"{_NJT}.NestedTensor"})


def _check_attributes(state: object) -> Complaint:
    """Attributes that are set on a tensor: a dictionary, or a pair of them where the class has slots."""
    parts = state if type(state) is tuple else (state,)
    if len(parts) > 2 or any(type(part) is Dict and len(part.items) > _MAX_ITEMS for part in parts):
        return "unknown", "a tensor is given a state of a size no tensor has"
    keys = [key for part in parts if type(part) is Dict for key in part.items[::2]]
    for key in keys:
        if type(key) is not str:
            return "unknown", "a tensor is given an attribute without a name"
        if key.startswith("__"):
            return "dangerous", f"a tensor is given the attribute {key[:60]}"
        if key in _SHADOWED:
            return "needs-trust", f"a tensor is given the attribute {key}, which it has already"
    if not all(type(part) is Dict or part is None for part in parts):
        return "needs-trust", "a tensor is given a state that names no attributes"
    return None


# Attributes of a tensor that loading code asks for; those of the file would stand in their place.
_SHADOWED = frozenset(
    {
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_grad", "_version", "clone", "copy_"),
        *("cpu", "cuda"),
        *("data", "detach", "device", "dim", "dtype", "grad", "grad_fn", "is_cuda", "is_leaf", "is_meta"),
        *("item", "layout"),
        *("nbytes", "numel", "numpy", "register_hook", "requires_grad", "requires_grad_", "retain_grad", "set_"),
        *("shape", "size", "storage", "storage_offset", "stride", "to", "tolist", "type", "untyped_storage", "view"),
    }
)


def _not_callable(name: str, _: tuple[Any, ...], __: Call) -> Complaint:
    return "unknown", f"{name} is called, and is nothing that can be"


def _anything(_: str, __: tuple[Any, ...], ___: Call) -> Complaint:
    return None


_RULES: dict[str, Rule] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "builtins.set": _set,
    "collections.Counter": _mapping,
    "collections.OrderedDict": _mapping,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.serialization._get_layout": _layout,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    **dict.fromkeys(_CARRIERS, _rebuild),
}


def _kinds(args: tuple[Any, ...]) -> str:
    return ", ".join(type(a).__name__ for a in args[:8]) or "nothing"


MAX_DEPTH = 3
"""Pickles in pickles in pickles; each level costs a run over the bytes of the one outside."""

_BUFFERS = frozenset({"_io.BytesIO", "io.BytesIO"})


class Nested:
    """Runs the bytes that loaders are given, each once, and no more of them than the streams outside have a level.

    Without that bound a megabyte of text named a thousand times would be read a thousand times.
    """

    def __init__(self) -> None:
        self.left = 0
        self.skipped = False
        self._seen: set[int] = set()
        self._found: dict[int, tuple[int, Pickle]] = {}

    def run(self, call: Call, outside: Pickle) -> list[Pickle]:
        """The pickles in the bytes a loader is called with."""
        depth = self._found[id(outside)][0] + 1 if id(outside) in self._found else 1
        found: list[Pickle] = []
        for node in _arguments(call):
            data = self._take(node)
            if data and depth > MAX_DEPTH:
                self.skipped = True
            elif data:
                found += _streams(data, f"{outside.name} › nested".removeprefix(" › "))
        self._found.update((id(pickle), (depth, pickle)) for pickle in found)
        return found

    def _take(self, node: object) -> bytes:
        if type(node) is Call and full_name(node.callee) == "_codecs.encode" and type(node.args) is tuple and node.args:
            node = node.args[0]
        if type(node) not in (bytes, bytearray, str) or id(node) in self._seen or not node:
            return b""
        self._seen.add(id(node))
        if len(node) > self.left:  # type: ignore[arg-type]
            self.skipped = True
            return b""
        self.left -= len(node)  # type: ignore[arg-type]
        return node.encode("latin-1", "replace") if type(node) is str else bytes(node)  # type: ignore[call-overload]


def _arguments(call: Call) -> Iterator[object]:
    """What a loader is called with, and what lies in a buffer it is called with."""
    for node in _first(call.args):
        if type(node) is Call and full_name(node.callee) in _BUFFERS:
            yield from _first(node.args)
            for state in (node.states or ())[:1]:  # BytesIO keeps its bytes in its state
                yield from _first(state)
        else:
            yield node


def _first(args: object) -> tuple[object, ...]:
    """Few arguments are enough for any loader; a million, shared by a million calls, would be too many."""
    return args[:8] if type(args) is tuple else ()


def _streams(data: bytes, name: str) -> list[Pickle]:
    from transload.formats.torch_zip import Archive
    from transload.formats.zip import read_index, starts_like_zip
    from transload.io.sources import BytesSource

    source = BytesSource(data)
    if not starts_like_zip(source):
        return pickle_machine.run_all(data, name)
    archive = Archive.of_zip(source, read_index(source))
    left, found = 2 * len(data), []
    for record in archive.records.values():
        if record.name.startswith(("data/", "tensors/")):
            continue
        payload = archive.read(record, left).data
        left -= len(payload)
        streams = pickle_machine.run_all(payload, f"{name} › {record.name}")
        found += [pickle for pickle in streams if pickle.globals or pickle.extensions]
    return found


_MAX_EVIDENCE = 20
_MAX_WORDING = 300  # a name in it may be a megabyte


class Judgement(NamedTuple):
    """The safety verdict on some pickles, every global they name, and why."""

    safety: Safety
    globals: tuple[GlobalUse, ...]
    findings: tuple[Finding, ...]


def judge_pickles(pickles: Iterable[Pickle]) -> Judgement:
    """Judge streams by what a loader would import, call and set: nothing that any of them asks for is left out."""
    judge = _Judge()
    for pickle in pickles:
        judge.stream(pickle)
    return judge.result()


class _Judge:
    """Collects names, uses and complaints over several streams."""

    def __init__(self) -> None:
        self.uses: dict[tuple[str, str], dict[str, int]] = {}
        self.spelling: dict[tuple[str, str], str] = {}
        self.streams: dict[tuple[str, str], str] = {}
        self.verdicts: dict[tuple[str, str], tuple[str, str]] = {}
        self.complaints: dict[str, tuple[Safety, str]] = {}
        self.reached: set[tuple[str, str]] = set()
        self.slots: dict[int, bool] = {}
        self.unloadable = ""
        self.nested = Nested()

    def complain(self, safety: Safety, text: str, pickle: Pickle, position: int) -> None:
        """Note a use that is not data, once for each wording."""
        where = f"{pickle.name} › byte {position}" if pickle.name else f"byte {position}"
        self.complaints.setdefault(text[:_MAX_WORDING], (safety, where))

    def stream(self, pickle: Pickle) -> None:
        """Take in one pickle, and those inside it."""
        self.nested.left += MAX_DEPTH * (pickle.end - pickle.start)
        waiting = [pickle]
        while waiting:
            waiting += self._one(waiting.pop())

    def _one(self, pickle: Pickle) -> list[Pickle]:
        keys = {id(node): self._name(node, pickle) for node in pickle.globals.values()}
        inside: list[Pickle] = []
        for call in self._count_ordinary(pickle, keys):
            callee = call.callee
            if type(callee) is Persistent:
                callee = _class_of(callee)
            if type(callee) is Global:
                key = keys.get(id(callee)) or canonical(callee.module, callee.name)
                inside += self._known_call(key, call, pickle)
            else:
                self._odd_call(callee, call, pickle)
        for target, _ in pickle.built:
            self._built(target, pickle)
        if _holds_module(pickle):
            self.unloadable = self.unloadable or "keeps modules with their source, as the older format does"
        for extension in pickle.extensions:
            text = f"it asks for extension {extension.code}: a name that is not in the file"
            self.complain("dangerous", text, pickle, pickle.start)
        return inside

    def _count_ordinary(self, pickle: Pickle, keys: dict[int, tuple[str, str]]) -> list[Call]:
        """Count the two calls that every tensor makes, as ``_known_call`` would; those that are left."""
        ordered, tensor = (self._data(pickle, keys, key) for key in (_ORDERED_DICT, _TENSOR))
        if ordered is None or tensor is None:
            return pickle.calls
        left: list[Call] = []
        empty = tensors = 0
        for call in pickle.calls:
            callee = call.callee
            if callee is ordered and call.args == () and not call.states and not call.appended:  # as _is_empty
                empty += 1
            elif callee is tensor and _is_ordinary(call, ordered):
                tensors += 1
            else:
                left.append(call)
        self.uses[_ORDERED_DICT]["called"] += empty
        self.uses[_TENSOR]["called"] += tensors
        return left

    def _data(self, pickle: Pickle, keys: dict[int, tuple[str, str]], key: tuple[str, str]) -> Global | None:
        """The node of a name that is plain data, if a pickle has it."""
        node = pickle.globals.get(key)
        return node if node is not None and keys[id(node)] == key and self.verdicts[key][0] == "data" else None

    def _name(self, node: Global, pickle: Pickle) -> tuple[str, str]:
        """Take in a name; under the older protocols also as Python 3 spells it, else as it stands beside that."""
        key = canonical(node.module, node.name)
        self._count(key, node, pickle)
        if key != (node.module, node.name):
            self.spelling[key] = f"{node.module}.{node.name}"
            if pickle.protocol > 2 or node.module == "torch.tensor":
                # From protocol 3 on Python translates nothing: it would import the old name, whatever has that name
                # today. And torch.load translates torch.tensor only with weights_only=False.
                self._count((node.module, node.name), node, pickle)
        return key

    def _count(self, key: tuple[str, str], node: Global, pickle: Pickle) -> None:
        self.uses.setdefault(key, {"imported": 0, "called": 0, "built": 0})["imported"] += node.count
        self.streams.setdefault(key, pickle.name)
        if key not in self.verdicts:
            self.verdicts[key] = classify(*key)

    def _built(self, target: object, pickle: Pickle) -> None:
        """BUILD, or items, on something that the stream did not make: N11 of the known tricks."""
        node = _class_of(target) if type(target) is Persistent else target
        if type(node) is Global:
            # Attributes set on a class or function outlive the load, and a dotted name reads them back.
            text = f"it changes {full_name(node)} itself, for the whole process"
            self.complain("dangerous", text, pickle, pickle.start)
            self.uses[canonical(node.module, node.name)]["built"] += 1
        elif type(node) is Extension:
            self.complain("dangerous", "it changes an object it names only by number", pickle, pickle.start)
        elif type(node) is Call:
            self.complain("dangerous", "it changes something it has computed", pickle, pickle.start)
        else:
            text = f"it sets attributes on a {type(target).__name__.lower()}, which has none"
            self.complain("unknown", text, pickle, pickle.start)

    def _known_call(self, key: tuple[str, str], call: Call, pickle: Pickle) -> list[Pickle]:
        uses = self.uses[key]
        uses["called"] += 1
        if call.states:
            uses["built"] += 1
        verdict = self.verdicts[key][0]
        if verdict == "data":
            if key == _ORDERED_DICT and _is_empty(call):
                return []
            complaint = check_call(".".join(key), call)
            if complaint:
                self.complain(*complaint, pickle, call.position)
            return []
        if call.items or call.appended:
            self.unloadable = self.unloadable or "puts items into something that is no plain dictionary or list"
        if key == _GETATTR and not _plain_getattr(call):
            self.complain("dangerous", "it reaches into objects by name", pickle, call.position)
        elif key == _TYPE and not (type(call.args) is tuple and len(call.args) == 1):
            self.complain("dangerous", "it makes a class", pickle, call.position)
        elif call.states and any(self._slot_dunder(state) for state in call.states):
            self.complain("dangerous", "it sets a double-underscore attribute on an object", pickle, call.position)
        return self._inside(call, pickle) if verdict == "dangerous" and is_loader(*key) else []

    def _slot_dunder(self, state: object) -> bool:
        """A two-tuple state is set attribute by attribute, so that ``__class__`` in it replaces the class.

        Each is looked through once, since a million objects may share it.
        """
        if type(state) is not tuple or len(state) != 2 or type(state[1]) is not Dict:
            return False
        items = state[1].items
        if id(items) not in self.slots:
            self.slots[id(items)] = any(type(key) is str and key.startswith("__") for key in items[::2])
        return self.slots[id(items)]

    def _inside(self, call: Call, pickle: Pickle) -> list[Pickle]:
        """The pickles a re-entrant loader is given; that it is one is an alarm already, this tells what for."""
        found = self.nested.run(call, pickle)
        for inner in found:
            if inner.ambiguous:
                at, text = inner.ambiguous[0]
                self.complain("dangerous", text, inner, at)
        if self.nested.skipped:
            self.complain("unknown", "it holds more pickles inside pickles than are read", pickle, call.position)
        return found

    def _odd_call(self, callee: object, call: Call, pickle: Pickle) -> None:
        """A call of something that is not a name in the file."""
        if _is_newobj_ex(callee):
            self.unloadable = self.unloadable or "makes objects with keyword arguments"
        elif _is_nested_class(callee) and call.kind in ("newobj", "newobj_ex"):
            owner, name = callee.args  # type: ignore[attr-defined]
            self.reached.add((owner.module, f"{owner.name}.{name}"))
        elif call.kind == "stack_global":
            self.complain("dangerous", "it asks for a name that it computes", pickle, call.position)
        elif type(callee) in (Call, Extension):
            self.complain("dangerous", "it calls something it has computed", pickle, call.position)
        else:
            self.complain("unknown", "it calls something that is no function", pickle, call.position)

    def result(self) -> Judgement:
        """The verdict over everything taken in."""
        self._excuse_enums()
        globals_ = tuple(self._use(key) for key in self.uses)
        verdicts: list[Safety] = [_MEANING[use.verdict] for use in globals_]
        verdicts += [safety for safety, _ in self.complaints.values()]
        return Judgement(worst_safety(*verdicts), globals_, tuple(self._findings(globals_)))

    def _excuse_enums(self) -> None:
        """``getattr(SomeEnum, "MEMBER")`` is how Python 3.11 pickles an enumeration, and any Python a bound method.

        It stays a matter of trust, but it is no alarm while nobody calls what it returns.
        """
        alarmed = any(safety == "dangerous" for safety, _ in self.complaints.values())
        if _GETATTR in self.verdicts and not alarmed:
            self.verdicts[_GETATTR] = (
                "unknown",
                "an enumeration member or a method, found by name on something named beside it",
            )

    def _use(self, key: tuple[str, str]) -> GlobalUse:
        verdict, purpose = self.verdicts[key]
        counts = self.uses[key]
        return GlobalUse(
            *key, verdict, purpose, counts["imported"], counts["called"], counts["built"],
            self.spelling.get(key, ""), self.streams[key],
        )  # fmt: skip

    def _findings(self, globals_: tuple[GlobalUse, ...]) -> Iterable[Finding]:
        dangerous = [use for use in globals_ if use.verdict == "dangerous"]
        if dangerous:
            evidence = [f"{use.full_name}: {use.purpose} ({_used(use)})" for use in dangerous]
            fix = "Do not load this file. Ask its author for a state dict saved with torch.save, or for safetensors."
            title = f"loading it would run {_some(len(dangerous), 'dangerous function')}"
            yield Finding("dangerous-globals", "error", title, _cut(evidence), (fix,))
        for safety in ("dangerous", "unknown", "needs-trust"):
            texts = [f"{text} ({where})" for text, (level, where) in self.complaints.items() if level == safety]
            if texts:
                yield Finding(*_COMPLAINTS[safety], _cut(texts))
        trust = [use for use in globals_ if use.verdict in ("unknown", "harmless")]
        if trust:
            evidence = _by_purpose(trust)
            title = f"torch.load refuses {_some(len(trust), 'name')} in it unless you allow them"
            fixes = () if dangerous else self._fixes(trust)
            yield Finding("needs-trust", "warning", title, _cut(evidence), fixes)

    def _fixes(self, trust: list[GlobalUse]) -> tuple[str, ...]:
        """The lines that allow the names; or why that is not enough."""
        if self.unloadable:
            text = f"Allowing the names is not enough: it {self.unloadable}, which weights_only=True never loads."
            return (text, "If you trust its author, load it with weights_only=False and save it again as a state dict.")
        return safe_globals_lines(trust, sorted(self.reached))


_ORDERED_DICT = ("collections", "OrderedDict")
_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_GETATTR = ("builtins", "getattr")
_TYPE = ("builtins", "type")
_MEANING: dict[str, Safety] = {
    "data": "data-only",
    "harmless": "needs-trust",
    "unknown": "needs-trust",
    "dangerous": "dangerous",
}
_COMPLAINTS: dict[str, tuple[str, Severity, str]] = {
    "dangerous": ("dangerous-use", "error", "it uses the loader in a way no checkpoint does"),
    "unknown": ("odd-use", "warning", "it holds calls no loader would accept"),
    "needs-trust": ("trusted-use", "warning", "it uses allowed names in unusual ways"),
}


def _plain_getattr(call: Call) -> bool:
    """``getattr(Colour, "RED")`` or ``getattr(thing, "method")``: one step from something the file names."""
    if type(call.args) is not tuple or len(call.args) != 2 or call.states:
        return False
    owner, name = call.args
    if type(owner) is Call and full_name(owner.callee) == "builtins.getattr":
        return False
    if type(name) is not str or type(owner) not in (Global, Call):
        return False
    return not name.startswith("__") or (name == "__new__" and type(owner) is Global)


def _is_empty(call: Call) -> bool:
    """``OrderedDict()``: the hooks of every tensor, or a dictionary to be filled with items."""
    return call.args == () and not call.states and not call.appended


def _is_ordinary(call: Call, ordered: Global) -> bool:
    """A tensor with a flag and empty hooks, and nothing else: what ``check_call`` has nothing to say about."""
    args = call.args
    if type(args) is not tuple or len(args) != 6 or type(args[4]) is not bool or type(args[5]) is not Call:
        return False
    hooks = args[5]
    if hooks.callee is not ordered or hooks.items or not _is_empty(hooks):
        return False
    return not (call.items or call.appended or call.states or call.kwargs)


def _holds_module(pickle: Pickle) -> bool:
    """Whether a persistent id is that of a module; all storages' ids begin with one and the same text."""
    cleared: object = None
    for node in pickle.persistent:
        pid = node.id
        if type(pid) is tuple and pid and pid[0] is not cleared:
            if _is_module(pid):
                return True
            cleared = pid[0] if type(pid[0]) is str and pid[0] != "module" else cleared
    return False


def _is_module(pid: object) -> bool:
    return type(pid) is tuple and len(pid) > 1 and (pid[0] == "module" or pid[0] == b"module" or type(pid[0]) is Global)


def _class_of(node: Persistent) -> object:
    """The class in a persistent id of the older formats: a name, or one found inside a named class."""
    if type(node.id) is not tuple or node.id[:1] in (("storage",), (b"storage",)):
        return None
    return module_class(node) or next((part for part in node.id[:2] if _is_nested_class(part)), None)


def _is_nested_class(node: object) -> bool:
    """``getattr(Net, "Block")``: how protocol 2 writes a class that stands in another."""
    return _is_attribute(node) and node.args[1] != "__new__"  # type: ignore[attr-defined]


def _is_attribute(node: Any) -> bool:
    """``getattr(cls, "name")`` of something the file names."""
    if type(node) is not Call or full_name(node.callee) != "builtins.getattr" or not _plain_getattr(node):
        return False
    return type(node.args[0]) is Global  # type: ignore[index]


def _is_newobj_ex(callee: object) -> bool:
    """``partial(cls.__new__, cls, …)()``: how protocol 2 writes an object with keyword arguments."""
    if type(callee) is not Call or full_name(callee.callee) != "functools.partial":
        return False
    states = callee.states or []
    if type(callee.args) is not tuple or len(callee.args) != 1 or len(states) != 1 or type(states[0]) is not tuple:
        return False
    # partial(f) with the state (f, args, keywords, attributes): f must be the same in both, since the state wins.
    new, state = callee.args[0], states[0]
    if len(state) != 4 or state[0] is not new or type(state[1]) is not tuple:
        return False
    return _is_attribute(new) and new.args[1] == "__new__" and state[1][:1] == (new.args[0],)


def _by_purpose(uses: list[GlobalUse]) -> list[str]:
    """A line for each purpose, with the names it is that of."""
    groups: dict[str, list[str]] = {}
    for use in uses:
        groups.setdefault(use.purpose, []).append(use.full_name)
    return [f"{', '.join(names)}: {purpose}" for purpose, names in groups.items()]


def _used(use: GlobalUse) -> str:
    parts = [f"called {use.called}×" if use.called else "", f"built {use.built}×" if use.built else ""]
    return ", ".join(part for part in parts if part) or "imported only"


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _cut(lines: list[str]) -> tuple[str, ...]:
    if len(lines) <= _MAX_EVIDENCE:
        return tuple(lines)
    return (*lines[:_MAX_EVIDENCE], f"… and {len(lines) - _MAX_EVIDENCE} more")


def safe_globals_lines(uses: Iterable[GlobalUse], inside: Iterable[tuple[str, str]] = ()) -> tuple[str, ...]:
    """The lines that make ``torch.load`` accept these names, all at once; for people who trust the file.

    ``inside`` are classes within classes, which a file reaches through the outer one. No lines are given for names that
    are no identifiers: somebody may paste them. Nor for those that lead through something that is no class: nobody can
    tell from the name what would be allowed.

    >>> safe_globals_lines([GlobalUse("argparse", "Namespace", "harmless", "")])[1:]
    ('from argparse import Namespace', 'torch.serialization.add_safe_globals([Namespace])')
    """
    spelled = {(use.module, use.name): _torch_says(use) for use in uses if use.module != "torch.tensor"}
    spelled |= {(module, name): f"{module}.{name}" for module, name in inside}
    if len(spelled) > _MAX_LINES or not all(map(_can_be_told, spelled)):
        return ()
    lines = _Lines(name.partition(".")[0] for module, name in spelled if module == "builtins")
    for (module, name), spelling in spelled.items():
        lines.add(module, name, spelling)
    if ("numpy", "dtype") in spelled:
        lines.imports.append("import numpy")
        lines.entries.append("*{type(numpy.dtype(code)) for code in numpy.typecodes['All']}")
    return ("import torch", *lines.imports, f"torch.serialization.add_safe_globals([{', '.join(lines.entries)}])")


_MAX_LINES = 500  # names nobody will read one by one


def _torch_says(use: GlobalUse) -> str:
    """The name torch will look up for a use, which is not always the one it has today."""
    if not use.spelling:
        return use.full_name
    tail = f".{use.name}"
    if use.spelling.endswith(tail):
        return torch_spelling(use.spelling.removesuffix(tail), use.name)
    module, _, name = use.spelling.rpartition(".")
    return torch_spelling(module, name)


def _can_be_told(key: tuple[str, str]) -> bool:
    return all(map(_is_path, key)) and is_class_path(key[1])


def _is_path(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


class _Lines:
    """Imports, each under a name of its own, and the entries of the list that is made of them."""

    def __init__(self, builtin: Iterable[str]) -> None:
        self.imports: list[str] = []
        self.entries: list[str] = []
        self._taken = {name: f"builtins.{name}" for name in builtin}

    def add(self, module: str, name: str, spelling: str) -> None:
        """Allow one name."""
        head, dot, tail = name.partition(".")
        alias = head if module == "builtins" else self._imported(module, head)
        entry = f"{alias}{dot}{tail}"
        # torch goes by what an object says of itself. Where that is nothing, or where the file knows the object by an
        # older name, the name has to stand beside it.
        if spelling != f"{_module_now(module)}.{name}" or (module, name) in _NAMELESS:
            entry = f'({entry}, "{spelling}")'
        self.entries.append(entry)

    def _imported(self, module: str, head: str) -> str:
        alias = head
        while self._taken.get(alias, f"{module}.{head}") != f"{module}.{head}" or alias in _KEPT:
            alias += "_"
        if alias not in self._taken:
            self._taken[alias] = f"{module}.{head}"
            self.imports.append(f"from {_module_now(module)} import {head}" + (f" as {alias}" if alias != head else ""))
        return alias


_KEPT = frozenset({"torch", "numpy", "type"})  # what the lines themselves need
_NAMELESS = frozenset({("builtins", "Ellipsis"), ("builtins", "NotImplemented")})


def _module_now(module: str) -> str:
    """Where a module is today: numpy 2 moved ``numpy.core``."""
    return module.replace("numpy.core.", "numpy._core.", 1) if module.startswith("numpy.core.") else module
