"""What could happen if a loader read a file: the names it imports, how it uses them, and the verdict.

``judge_pickles`` goes through every global and every call of the pickles. ``classify`` of ``names`` judges a name;
``check_call`` judges how an allowed name is called. Pickles that a pickle passes to a loader are judged, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

from transload.contents import Contents, GlobalUse, Judgement
from transload.findings import Finding, Safety, Severity, first_lines, worst_safety
from transload.formats import pickle_streams
from transload.formats.arrays import are_plain
from transload.formats.pieces import class_of, local_tensors, names_outside
from transload.formats.torch_zip import Archive
from transload.formats.zip import read_index, starts_like_zip
from transload.io.sources import BytesSource
from transload.judge import names
from transload.nodes import (
    REBUILDS,
    Call,
    Dict,
    Extension,
    Global,
    Persistent,
    Pickle,
    calls_of,
    is_ordinary_call,
    module_class,
    ordinary_names,
    short,
    walk_nodes,
)

Complaint = tuple[Safety, str] | None


def full_name(node: object) -> str:
    """The canonical dotted name of a global node; empty for anything else."""
    return ".".join(names.canonical(node.module, node.name)) if type(node) is Global else ""


def _called(call: Call) -> str:
    return full_name(call.callee)


# -- how an allowed name is called

# A small file can pass one shared object of a million items to a million calls: only this many items are checked.
_MAX_ITEMS = 100
_NJT = "torch.nested._internal.nested_tensor"
_PARAMETER = "torch.nn.parameter.Parameter"
_TENSOR_CLASSES = frozenset(name for name in names.TORCH_DEFAULT if name.endswith("Tensor") and "nested" not in name)
_LAYOUTS = ("torch.strided", *(f"torch.sparse_{kind}" for kind in ("coo", "csr", "csc", "bsr", "bsc")))
_REBUILDS = {name: REBUILDS[name] for name in names.TORCH_DEFAULT & REBUILDS.keys() if name.startswith("torch._utils.")}


def check_call(name: str, call: Call) -> Complaint:
    r"""What is wrong with a call of an allowed name, if anything.

    >>> from transload.formats.pickle_machine import run
    >>> check_call("builtins.bytearray", run(b"cbuiltins\nbytearray\nJ\0\0\0\1\x85R.").root)[0]
    'dangerous'
    """
    args: Any = call.args
    if type(args) is not tuple:
        return "unknown", f"{name} is called with arguments that are not a tuple"
    if call.kwargs is not None and not (type(call.kwargs) is Dict and not call.kwargs.items):
        return "needs-trust", f"{name} is called with keyword arguments"
    if name in _REBUILDS:
        count = len(args)
        least, most, flag, hooks, metadata, attributes, _ = _REBUILDS[name]
        if not least <= count <= most:
            return "unknown", f"{name} is called with {count} arguments"
        if hooks < count and not _no_hooks(args[hooks]):
            return "needs-trust", "a tensor carries backward hooks, which run code"
        if flag < count and type(args[flag]) is not bool:
            return "needs-trust", f"{name} is given {type(args[flag]).__name__} for requires_grad"
        if metadata < count and args[metadata] is not None:  # {"conj": True}
            flags = args[metadata].items if type(args[metadata]) is Dict else (None, None)
            if len(flags) > _MAX_ITEMS or not all(type(value) is bool for value in flags[1::2]):
                return "needs-trust", "a tensor carries metadata that is not a flag"
        complaint = _check_attributes(args[attributes]) if attributes < count else None
    else:
        complaint = _check_arguments(name, args)
    if complaint:
        return complaint
    if call.items or call.appended:  # SETITEM(S), APPEND(S) and ADDITEMS on the result
        if name.startswith("torch."):  # CVE-2026-24747: torch before 2.10 wrote wherever the key of a tensor said
            return "dangerous", f"items are put into the result of {name}"
        if name not in ("collections.OrderedDict", "collections.Counter") or call.appended:
            return "unknown", f"items are put into the result of {name}, which takes none"
    for state in call.states or ():  # BUILD on the result
        if name == "collections.OrderedDict":
            keys = state.items[: 2 * _MAX_ITEMS : 2] if type(state) is Dict else [None]
            others = [key for key in keys if key != "_metadata"]
            if others:  # a key such as "items" shadows the method of that name
                return "needs-trust", f"an OrderedDict is given the attribute {short(others[0])[:60]!r}"
            if len(keys) == _MAX_ITEMS:
                return "needs-trust", "an OrderedDict is given more attributes than it can have"
            continue
        # Flags and hooks, as torch up to 0.3 wrote them. Any other state would replace the tensor.
        plain = type(state) is tuple and len(state) == 3 and _no_hooks(state[2])
        if name.startswith("torch.distributed._mesh_layout.") and type(state) is Dict:
            continue
        if not plain or (name != _PARAMETER and name not in _TENSOR_CLASSES):
            return "needs-trust", f"the result of {name} is given a state"
    return None


def _check_arguments(name: str, args: tuple[Any, ...]) -> Complaint:
    count = len(args)
    first: Any = args[0] if args else None
    kinds = ", ".join(type(a).__name__ for a in args[:8]) or "nothing"
    as_latin1 = count == 2 and type(first) is str and args[1] in ("latin1", "latin-1")
    if name in ("collections.OrderedDict", "collections.Counter"):
        if not args or (count == 1 and type(first) is Dict):
            return None
        # Python 2 writes [[key, value], …]. Every loader refuses items that are not pairs, also those not checked here.
        pairs: list[Any] = first[:_MAX_ITEMS] if count == 1 and type(first) is list else [None]
        fine = all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs)
        return None if fine else ("needs-trust", f"a dictionary is made from {kinds}")
    if name == "_codecs.encode":
        if not as_latin1:
            return "dangerous", "_codecs.encode is asked for a codec other than latin1, which imports code"
        fine = first.isascii() or max(first) <= "\xff"
        return None if fine else ("unknown", "_codecs.encode is given text that latin1 cannot encode")
    if name == "builtins.bytearray":
        # bytes, or the call that protocol 2 writes for them
        encoded = type(first) is Call and full_name(first.callee) == "_codecs.encode"
        if not args or as_latin1 or (count == 1 and (type(first) is bytes or encoded)):
            return None
        return "dangerous", f"a byte array is made from {kinds}: a number here allocates that many bytes"
    if name == "builtins.set":
        fine = count <= 1 and all(type(a) in (list, tuple) for a in args)
        return None if fine else ("needs-trust", f"a set is made from {kinds}")
    if name == "builtins.complex":
        fine = count <= 2 and all(type(a) in (float, int) for a in args)
        return None if fine else ("needs-trust", f"a complex number is made from {kinds}")
    if name == "torch.Size":
        fine = not args or (count == 1 and _are_sizes(first))
        wanted = f"up to {_MAX_ITEMS} integers"
        return None if fine else ("needs-trust", f"a torch.Size is made from something other than {wanted}")
    if name == "torch.device":
        fine = 1 <= count <= 2 and type(first) in (str, int) and all(type(a) is int for a in args[1:])
        fine = fine and (type(first) is int or first.partition(":")[0].isidentifier())
        wanted = "a device type and an index"
        return None if fine else ("needs-trust", f"a torch.device is made from something other than {wanted}")
    if name == "torch.serialization._get_layout":
        fine = count == 1 and first in _LAYOUTS
        return None if fine else ("needs-trust", "a tensor layout that torch does not have")
    if name == _PARAMETER:
        fine = count <= 2 and all(type(a) is Call for a in args[:1]) and all(type(a) is bool for a in args[1:])
        return None if fine else ("needs-trust", f"a parameter is made from {kinds}, not from a tensor and a flag")
    if name == "torch._tensor._rebuild_from_type_v2":
        if count != 4:
            return "unknown", "_rebuild_from_type_v2 has the wrong number of arguments"
        function, kind, inner, state = args
        inside = full_name(function)
        if not inside:
            return "dangerous", "_rebuild_from_type_v2 is given a computed function to call"
        if inside not in _REBUILDS and inside != f"{_NJT}._rebuild_njt":
            return "needs-trust", f"_rebuild_from_type_v2 is given {inside} to call"
        if class_of(kind):  # which torch refuses, or allows with all it consists of
            return check_call(inside, Call(function, inner, "reduce", 0))
        if full_name(kind) not in ("torch.Tensor", _PARAMETER, f"{_NJT}.NestedTensor"):
            return "needs-trust", f"the class of a tensor is {full_name(kind) or 'computed'}"
        return check_call(inside, Call(function, inner, "reduce", 0)) or _check_attributes(state)
    if name.endswith("Storage"):
        # Checkpoints refer to storages by persistent ids. A number here is an unbounded size.
        return "dangerous", f"{name} is called: unbounded, uninitialised memory"
    if name in _TENSOR_CLASSES:
        # a size can be a number, a torch.Size or a tensor
        if count > _MAX_ITEMS or any(type(a) in (int, Call, Global, Persistent) for a in args):
            return "dangerous", f"{name} is called with a size: unbounded, uninitialised memory"
        return ("needs-trust", f"{name} is called with {kinds}") if args else None
    if name.startswith("torch.") and name.count(".") == 1:
        return "unknown", f"{name} is called, but is not callable"
    return None


def _no_hooks(hooks: object) -> bool:
    if type(hooks) is Call:
        empty = not hooks.items and not hooks.states and not hooks.appended and (not hooks.args or hooks.args == ([],))
        return empty and type(hooks.callee) is Global and hooks.callee.full_name == "collections.OrderedDict"
    return hooks is None or (type(hooks) is Dict and not hooks.items)


def _check_attributes(state: object) -> Complaint:
    """Check the attributes that are set on a tensor: a dictionary, or a pair of them if the class has slots."""
    parts = state if type(state) is tuple else (state,)
    if len(parts) > 2 or any(type(part) is Dict and len(part.items) > _MAX_ITEMS for part in parts):
        return "unknown", "a tensor is given a larger state than any tensor has"
    for key in (key for part in parts if type(part) is Dict for key in part.items[::2]):
        if type(key) is not str:
            return "unknown", "a tensor is given an attribute without a name"
        if key.startswith("__"):
            return "dangerous", f"a tensor is given the attribute {key[:60]}"
        if key in names.SHADOWED:
            return "needs-trust", f"the file overwrites a tensor's attribute `{key}`"
    if not all(type(part) is Dict or part is None for part in parts):
        return "needs-trust", "a tensor is given a state that names no attributes"
    return None


# -- all names and calls of some pickles

MAX_DEPTH = 3
"""The most levels of pickles nested in pickles; each level costs another run over the same bytes."""

_GETATTR = ("builtins", "getattr")
_MAX_NESTED = 10  # classes within classes
_MAX_ARGUMENTS = 8  # of a call to a loader: a million calls may share a million arguments
_MAX_EVIDENCE = 20
DO_NOT_LOAD = "Do not load this file. Ask its author for a state dict saved with torch.save, or for safetensors."
_MAX_WORDING = 300  # a text may contain a name of a megabyte
_NEEDS_IMPORT = "From torch 2.6 on, import torch.distributed.tensor first: it allows these names."
_NEEDS_GROUP = (
    "Allowing the names is not enough: torch loads a ShardedTensor only with weights_only=False, and only in a process "
    "group of as many ranks as saved it."
)
_COMPLAINTS: dict[Safety, tuple[str, Severity, str]] = {
    "dangerous": ("dangerous-use", "error", "it uses the loader in a way no checkpoint does"),
    "unknown": ("odd-use", "warning", "it contains calls that no loader would accept"),
    "needs-trust": ("trusted-use", "warning", "it uses permitted classes in unusual ways"),
}


def judge_pickles(pickles: Iterable[Pickle], *, getattr_allowed: bool = False, load: str = "torch.load") -> Judgement:
    """Judge pickles by everything that a loader would import, call and set.

    ``load`` is the function that the advice names. A call of what ``getattr`` returns is accepted if that may be part
    of a model: a method of a third-party class. With ``getattr_allowed`` every such call is accepted, because the
    loader then checks what ``getattr`` returns.
    """
    judge = _Judge(getattr_allowed)
    for pickle in pickles:
        judge.nested_left += MAX_DEPTH * (pickle.end - pickle.start)
        judge.read(pickle)
    return judge.result(load)


class _Use:
    """A ``GlobalUse`` while it is counted, with the same attributes."""

    def __init__(self, module: str, name: str, stream: str) -> None:
        self.module, self.name = module, name
        self.verdict, self.purpose = names.classify(module, name)
        self.imported = self.called = self.built = 0
        self.spelling, self.stream = "", stream


def _usual_call(use: _Use) -> Callable[[Call], bool] | None:
    """What accepts the calls that are as good as all there are of a name in an index, which may have a million."""
    full = f"{use.module}.{use.name}"
    if use.verdict == "data":
        return _is_size if full == "torch.Size" else None
    return _is_record if use.verdict != "dangerous" and full not in ("builtins.getattr", "builtins.type") else None


def _is_record(call: Call) -> bool:
    """Whether a call makes an object without arguments, and gives it at most attributes."""
    states = call.states
    if call.args != () or call.kwargs is not None or call.items or call.appended:
        return False
    return not states or (len(states) == 1 and type(states[0]) is Dict)


def _is_size(call: Call) -> bool:
    """Whether a call makes a ``torch.Size`` from a tuple of integers."""
    args = call.args
    if call.kwargs is not None or call.items or call.appended or call.states:
        return False
    return type(args) is tuple and len(args) == 1 and _are_sizes(args[0])


def _are_sizes(node: object) -> bool:
    return type(node) is tuple and len(node) <= _MAX_ITEMS and {int}.issuperset(map(type, node))


class _Judge:
    """Collects names, uses and complaints over several streams."""

    def __init__(self, getattr_allowed: bool) -> None:
        self.getattr_allowed = getattr_allowed
        self.uses: dict[tuple[str, str], _Use] = {}
        self.excused: dict[tuple[str, str], _Use] = {}
        self.complaints: dict[str, tuple[Safety, str]] = {}
        self.inner_names: set[tuple[str, str]] = set()
        self.unloadable = ""
        self.kept: list[Pickle] = []  # keeps the objects alive whose ids are stored below
        self.checked_items: dict[int, bool] = {}
        self.nested_seen: set[int] = set()
        # Bytes that are passed to loaders are read once, and at each level no more of them than the outer pickles have:
        # otherwise a megabyte that is named a thousand times would be read a thousand times.
        self.nested_left = 0

    def complain(self, safety: Safety, text: str, pickle: Pickle, position: int) -> None:
        """Note a use that is not plain data, once for each text."""
        where = f"{pickle.name} › byte {position}" if pickle.name else f"byte {position}"
        self.complaints.setdefault(text[:_MAX_WORDING], (safety, where))

    def count(self, module: str, name: str, pickle: Pickle, times: int) -> _Use:
        """Add ``times`` imports of a name."""
        use = self.uses.get((module, name))
        if use is None:
            use = self.uses[module, name] = _Use(module, name, pickle.name)
        use.imported += times
        return use

    def read(self, pickle: Pickle, depth: int = 0) -> None:
        """Go through one pickle, and those inside it."""
        self.kept.append(pickle)
        uses = self.count_names(pickle)
        inside: list[Pickle] = []
        ordinary = ordinary_names(pickle)
        usual = {key: accepts for key, use in uses.items() if (accepts := _usual_call(use))}
        for call in pickle.calls:
            callee = call.callee
            if type(callee) is Persistent:
                callee = _class_of(callee)
            if type(callee) is not Global:
                self.judge_unnamed(callee, call, pickle)
                continue
            use = uses.get(id(callee)) or self.count(*names.canonical(callee.module, callee.name), pickle, 0)
            use.called += 1
            if call.states:
                use.built += 1
            accepts = usual.get(id(callee))
            if accepts(call) if accepts else is_ordinary_call(call, *ordinary):
                continue
            full = f"{use.module}.{use.name}"
            complaint = check_call(full, call) if use.verdict == "data" else self.check_other(full, call)
            if complaint:
                self.complain(*complaint, pickle, call.position)
            if use.verdict == "dangerous" and use.purpose.startswith("loads another"):
                inside += self.nested(call, pickle, depth)
        self.judge_changes(pickle)
        ids = [node.id for node in pickle.persistent if type(node.id) is tuple and len(node.id) > 1]
        if any(pid[0] in ("module", b"module") or type(pid[0]) is Global for pid in ids):
            self.unloadable = self.unloadable or "keeps modules with their source, as the older format does"
        for extension in pickle.extensions:
            text = f"it asks for extension {extension.code}: a name that is not in the file"
            self.complain("dangerous", text, pickle, pickle.start)
        for stream in reversed(inside):
            self.read(stream, depth + 1)

    def count_names(self, pickle: Pickle) -> dict[int, _Use]:
        """Count the names in a pickle; the uses, by the ids of their nodes."""
        uses: dict[int, _Use] = {}
        for node in pickle.globals.values():
            key = names.canonical(node.module, node.name)
            uses[id(node)] = use = self.count(*key, pickle, node.count)
            if key != (node.module, node.name):
                use.spelling = node.full_name
                # From protocol 3 on Python does not translate old names, and would import whatever has that name today.
                # And torch.load translates torch.tensor only with weights_only=False.
                if pickle.protocol > 2 or node.module == "torch.tensor":
                    self.count(node.module, node.name, pickle, node.count)
        for excused, called, purpose in (  # the reader has checked each of their calls
            (pickle.loader, len(pickle.persistent), "makes the storage of a tensor from bytes in the pickle"),
            (pickle.wrapper, len(pickle.raw), "announces a numpy array, whose bytes follow in the joblib file"),
        ):
            if excused is not None:
                key = (excused.module, excused.name)
                use = self.excused.setdefault(key, _Use(*key, pickle.name))
                use.verdict, use.purpose = "data", purpose
                use.imported += excused.count
                use.called += called
        return uses

    def judge_unnamed(self, callee: object, call: Call, pickle: Pickle) -> None:
        """Judge a call of something that is not a name in the file."""
        if _is_newobj_ex(callee):
            self.unloadable = self.unloadable or "makes objects with keyword arguments"
        elif (inner := _inner_name(callee)) and (
            call.kind in ("newobj", "newobj_ex")
            or self.getattr_allowed
            or (call.kind == "reduce" and names.can_be_allowed(*inner))
        ):
            self.inner_names.add(inner)
        elif call.kind == "stack_global":
            self.complain("dangerous", "it asks for a name that it computes", pickle, call.position)
        elif type(callee) in (Call, Extension):
            self.complain("dangerous", "it calls something it has computed", pickle, call.position)
        else:
            self.complain("unknown", "it calls something that is not a function", pickle, call.position)

    def check_other(self, name: str, call: Call) -> Complaint:
        """What is wrong with a call of a name that is not data, besides the name."""
        if call.items or call.appended:
            self.unloadable = self.unloadable or "puts items into something that is not a plain dictionary or list"
        if name == "builtins.getattr" and not _plain_getattr(call):
            return "dangerous", "it reaches into objects by name"
        if name == "builtins.type" and not (type(call.args) is tuple and len(call.args) == 1):
            return "dangerous", "it makes a class"
        if any(map(self.sets_dunder, call.states or ())):
            return "dangerous", "it sets a double-underscore attribute on an object"
        return None

    def judge_changes(self, pickle: Pickle) -> None:
        """Judge BUILD, and items, on something that the pickle did not make."""
        for target, _ in pickle.built:
            changed = _class_of(target) if type(target) is Persistent else target
            level: Safety = "dangerous"
            if type(changed) is Global:
                # Attributes of a class or function outlive the load, and a dotted name can read them.
                text = f"it changes {full_name(changed)} itself, for the whole process"
                self.count(*names.canonical(changed.module, changed.name), pickle, 0).built += 1
            elif type(changed) is Extension:
                text = "it changes an object it names only by number"
            elif type(changed) is Call:
                text = "it changes something it has computed"
            else:
                level, text = "unknown", f"it sets attributes on a {type(target).__name__.lower()}, which has none"
            self.complain(level, text, pickle, pickle.start)

    def sets_dunder(self, state: object) -> bool:
        """Whether a state sets dunder attributes, such as ``__class__``, which replaces the class.

        Only the second half of a pair can do so. It is checked once, since a million objects may share it.
        """
        if type(state) is not tuple or len(state) != 2 or type(state[1]) is not Dict:
            return False
        items = state[1].items
        if id(items) not in self.checked_items:
            self.checked_items[id(items)] = any(type(key) is str and key.startswith("__") for key in items[::2])
        return self.checked_items[id(items)]

    def nested(self, call: Call, pickle: Pickle, depth: int) -> list[Pickle]:
        """The pickles that a call passes to a loader. The call is dangerous anyway; they show what it would do."""
        pickles: list[Pickle] = []
        skipped = False
        arguments: list[Any] = []
        for node in call.args[:_MAX_ARGUMENTS] if type(call.args) is tuple else ():
            if type(node) is Call and full_name(node.callee) in ("_io.BytesIO", "io.BytesIO"):
                # BytesIO keeps its bytes in its state
                for given in (node.args, *(node.states or ())[:1]):
                    arguments += given[:_MAX_ARGUMENTS] if type(given) is tuple else ()
            else:
                arguments.append(node)
        for payload in arguments:
            if type(payload) is Call and full_name(payload.callee) == "_codecs.encode" and type(payload.args) is tuple:
                payload = payload.args[0] if payload.args else None  # noqa: PLW2901 - the text that it encodes
            if not isinstance(payload, bytes | bytearray | str) or not payload or id(payload) in self.nested_seen:
                continue
            self.nested_seen.add(id(payload))
            if len(payload) > self.nested_left:
                skipped = True
                continue
            self.nested_left -= len(payload)
            if depth >= MAX_DEPTH:
                skipped = True
                continue
            data = payload.encode("latin-1", "replace") if isinstance(payload, str) else bytes(payload)
            pickles += _streams(data, f"{pickle.name} › nested".removeprefix(" › "))
        for inner in pickles:
            if inner.ambiguous:
                at, text = inner.ambiguous[0]
                self.complain("dangerous", text, inner, at)
        if skipped:
            self.complain("unknown", "it contains more nested pickles than are read", pickle, call.position)
        return pickles

    def result(self, load: str) -> Judgement:
        """The verdict on all pickles."""
        levels: list[Safety] = [safety for safety, _ in self.complaints.values()]
        if _GETATTR in self.uses and "dangerous" not in levels:
            # Python 3.11 pickles an enumeration as getattr(SomeEnum, "MEMBER"), and every Python a bound method. This
            # needs trust, but is not dangerous as long as nothing calls the result.
            excused = self.uses[_GETATTR]
            excused.verdict = "unknown"
            excused.purpose = "an enumeration member or a method, looked up by name on another object in the file"
        uses = tuple(GlobalUse(**vars(use)) for use in {**self.excused, **self.uses}.values())
        dangerous = [use for use in uses if use.verdict == "dangerous"]
        refused = [use for use in uses if use.verdict in ("unknown", "harmless")]
        levels += ["dangerous"] if dangerous else []
        levels += ["needs-trust"] if refused else []
        plain = bool(refused) and are_plain(self.kept)
        as_data = plain and not dangerous and not self.complaints
        if as_data:  # these names only make plain values, which ``transload.load`` makes without importing them
            with_getattr = [p for p in self.kept if "builtins.getattr" in map(full_name, p.globals.values())]
            getattr_name = {"builtins.getattr"} if all(map(finds_plain_values, with_getattr)) else set[str]()
            known = {*names.PLAIN_VALUES, *names.ALSO_DATA, *getattr_name, *self.names_of_pieces()}
            as_data = {use.full_name for use in refused} <= known
        findings = []
        if dangerous:
            evidence = []
            for use in dangerous:
                counts = [f"called {use.called}×"] if use.called else []
                counts += [f"built {use.built}×"] if use.built else []
                evidence.append(f"{use.full_name}: {use.purpose} ({', '.join(counts) or 'imported only'})")
            title = f"loading it would run {len(dangerous)} dangerous function{'s' if len(dangerous) > 1 else ''}"
            shown = first_lines(evidence, _MAX_EVIDENCE)
            findings.append(Finding("dangerous-globals", "error", title, shown, (DO_NOT_LOAD,)))
        for level, (code, severity, title) in _COMPLAINTS.items():
            texts = [f"{text} ({where})" for text, (safety, where) in self.complaints.items() if safety == level]
            if texts:
                findings.append(Finding(code, severity, title, first_lines(texts, _MAX_EVIDENCE)))
        if refused:
            numbered, them = ("1 name", "it") if len(refused) == 1 else (f"{len(refused)} names", "them")
            title = f"{load} refuses {numbered} in it unless you allow {them}"
            fix: tuple[str, ...] = ()
            if as_data and load == "transload.load":
                title = f"it asks for {numbered} beyond those of plain checkpoints"
            elif not dangerous:
                fix = self.trust_fix(refused, load, plain=plain)
            shown = self.refused_evidence(refused, as_data=as_data)
            findings.append(Finding("needs-trust", "warning", title, shown, fix))
        return Judgement(worst_safety(*levels), uses, tuple(findings), tuple(sorted(self.inner_names)), as_data)

    def names_of_pieces(self) -> set[str]:
        """The names that only distributed tensors use."""
        if names.PIECES.keys().isdisjoint(".".join(key) for key in self.uses):
            return set()
        outside = {full_name(node) for pickle in self.kept for node in names_outside(pickle)}
        return names.PIECES.keys() - outside

    def refused_evidence(self, refused: list[GlobalUse], *, as_data: bool) -> tuple[str, ...]:
        """The names that torch refuses, by purpose."""
        groups: dict[str, list[str]] = {}
        for use in refused:
            groups.setdefault(use.purpose, []).append(use.full_name)
        evidence = [f"{', '.join(same)}: {purpose}" for purpose, same in groups.items()]
        if self.inner_names:
            inside = [f"{module}.{name}" for module, name in sorted(self.inner_names)[:_MAX_EVIDENCE]]
            evidence.append(f"{', '.join(inside)}: called, found inside a class named above"[:_MAX_WORDING])
        if as_data:
            evidence.append("transload.load needs no trust for them: it makes them itself, as data")
        return first_lines(evidence, _MAX_EVIDENCE)

    def trust_fix(self, refused: list[GlobalUse], load: str, *, plain: bool) -> tuple[str, ...]:
        """What to do for those who trust the file: allow the names, or load it without restrictions and save it."""
        unloadable = self.unloadable
        if load == "transload.load" and not plain:
            unloadable = "holds a numpy array of objects or records"
        if unloadable:
            why = f"Allowing the names is not enough: it {unloadable}, which weights_only=True never loads."
        else:
            pieces = {use.full_name for use in refused} - {"builtins.getattr"} <= self.names_of_pieces()
            if pieces and any(".sharded_tensor." in use.full_name for use in refused):
                return (_NEEDS_GROUP,)
            if pieces and not any("._tensor." in use.full_name for use in refused):
                return (_NEEDS_IMPORT,)
            lines = safe_globals_lines(refused, sorted(self.inner_names), load)
            others = [use.full_name for use in refused if not _is_allowed(use.module, use.name)]
            named = bool(others) and all(map(str.isidentifier, others[0].split(".")))
            if lines or not named or any(pickle.broken for pickle in self.kept):
                return lines
            first = others[0][:_MAX_WORDING] + (f" and {len(others) - 1} more" if len(others) > 1 else "")
            why = f"There is no line to allow {first}: it is not known to be data or part of a model."
        return why, "If you trust its author, load it with weights_only=False and save it again as a state dict."


def _streams(data: bytes, name: str) -> list[Pickle]:
    """The pickles in some bytes, which may be an archive."""
    source = BytesSource(data)
    if not starts_like_zip(source):
        return pickle_streams.run_all(data, name)
    archive = Archive.of_zip(source, read_index(source))
    left, pickles = 2 * len(data), []
    for record in archive.records.values():
        if record.name.startswith(("data/", "tensors/")):
            continue
        payload = archive.read(record, left).data
        left -= len(payload)
        streams = pickle_streams.run_all(payload, f"{name} › {record.name}")
        pickles += [pickle for pickle in streams if pickle.globals or pickle.extensions]
    return pickles


def _class_of(node: Persistent) -> object:
    """The class in a persistent id of the older formats: a global, or a class nested in one."""
    if type(node.id) is not tuple or node.id[:1] in (("storage",), (b"storage",)):
        return None
    return module_class(node) or next((part for part in node.id[:2] if _inner_name(part)), None)


def _plain_getattr(call: Call) -> bool:
    """Whether a call is ``getattr(Colour, "RED")`` or ``getattr(thing, "method")``, on what the file names or makes.

    Several steps may lead through nested classes.
    """
    if type(call.args) is not tuple or len(call.args) != 2 or call.states:
        return False
    owner, name = call.args
    if type(name) is not str or type(owner) not in (Global, Call):
        return False
    if type(owner) is Call and full_name(owner.callee) == "builtins.getattr":
        return _attribute(call) is not None
    return not name.startswith("__") or (name == "__new__" and type(owner) is Global)


def _attribute(node: object) -> tuple[Global, str] | None:
    """The class and the name in ``getattr(cls, "name")``, if the file names the class; ``A.b`` for nested calls."""
    steps: list[str] = []
    while type(node) is Call and full_name(node.callee) == "builtins.getattr" and len(steps) < _MAX_NESTED:
        args: Any = node.args
        if type(args) is not tuple or len(args) != 2 or type(args[1]) is not str or node.states:
            return None
        node = args[0]
        steps.insert(0, args[1])
    if type(node) is not Global or not steps:
        return None
    path = ".".join(steps)
    plain = path == "__new__" or not any("." in step or step.startswith("__") for step in steps)
    return (node, path) if plain and names.is_class_path(path) else None


def _inner_name(node: object) -> tuple[str, str] | None:
    """The module and qualified name of ``getattr(Net, "Block")``: how protocol 2 writes a nested class.

    Also of a method, ``getattr(ZoneInfo, "_unpickle")``, which a class may use to pickle its objects. ``None`` for what
    is dangerous, and for an attribute of something that is not a class.
    """
    attribute = _attribute(node)
    if not attribute or attribute[1] == "__new__":
        return None
    module, name = names.canonical(attribute[0].module, attribute[0].name)
    inner = f"{name}.{attribute[1]}"
    return (module, inner) if names.classify(module, inner)[0] != "dangerous" and names.is_class_path(inner) else None


def plain_value(node: object) -> str:
    """The name of a plain value that is made by ``getattr`` on a class, such as the zone of a date; else empty."""
    inner = ".".join(_inner_name(node) or ())
    return inner if inner in names.PLAIN_VALUES else ""


def finds_plain_values(pickle: Pickle) -> bool:
    """Whether a pickle uses ``getattr``, and only for plain values."""
    calls = list(calls_of(pickle, ("builtins.getattr",), _called))
    return bool(calls) and all(plain_value(call) or ".".join(_inner_name(call) or ()) in names.PIECES for call in calls)


def holds_records(pickles: Sequence[Pickle], judged: Judgement) -> bool:
    """Whether pickles contain only data and objects of classes that only hold values, made without running them.

    Such an object is made without arguments, or from one value, as a member of an enumeration is. ``judged`` is the
    judgement of these and others: what it does not find in all of them is in none.
    """
    if not _names_records(judged) and not _names_records(judge_pickles(pickles)):
        return False
    if not are_plain(pickles) or not all(map(_finds_members, pickles)):
        return False
    calls = (call for pickle in pickles for call in calls_of(pickle, names.RECORDS, _called))
    return all(
        not call.items
        and not call.appended
        and call.kwargs is None
        and (call.args == () or (type(call.args) is tuple and [type(a) in (str, int) for a in call.args] == [True]))
        for call in calls
    )


def _finds_members(pickle: Pickle) -> bool:
    """Whether a pickle uses ``getattr`` only for members of enumerations that are records, as Python 3.11.2 does."""
    found = (_attribute(call) for call in calls_of(pickle, ("builtins.getattr",), _called))
    return all(member is not None and full_name(member[0]) in names.RECORDS for member in found)


def _names_records(judgement: Judgement) -> bool:
    """Whether a judgement has no names but those of data and of classes that only hold values."""
    allowed = {*names.PLAIN_VALUES, *names.ALSO_DATA, *names.RECORDS, "builtins.getattr"}
    if any(finding.code != "needs-trust" for finding in judgement.findings):
        return False
    return all(use.verdict == "data" or use.full_name in allowed for use in judgement.globals)


def _is_newobj_ex(callee: object) -> bool:
    """Whether a callee is ``partial(cls.__new__, cls, …)``, with which protocol 2 passes keyword arguments."""
    if type(callee) is not Call or full_name(callee.callee) != "functools.partial":
        return False
    states = callee.states or []
    if type(callee.args) is not tuple or len(callee.args) != 1 or len(states) != 1 or type(states[0]) is not tuple:
        return False
    # partial(f) with the state (f, args, keywords, attributes): f must be the same in both, since the state wins.
    new, state = callee.args[0], states[0]
    if len(state) != 4 or state[0] is not new or type(state[1]) is not tuple:
        return False
    attribute = _attribute(new)
    return attribute is not None and attribute[1] == "__new__" and state[1][:1] == (attribute[0],)


# -- the lines for people who trust a file

_MAX_LINES = 500  # nobody reads more names one by one


def _is_allowed(module: str, name: str) -> bool:
    """Whether a line may allow a name. Odd uses of ``getattr`` are dangerous, and get no lines at all."""
    return (module, name) == _GETATTR or names.can_be_allowed(module, name)


def safe_globals_lines(
    uses: Iterable[GlobalUse], inside: Iterable[tuple[str, str]] = (), load: str = "torch.load"
) -> tuple[str, ...]:
    """The lines of code with which users who trust a file can load it, allowing these names only during the load.

    They need torch 2.5. ``inside`` are nested classes, which a file reaches through the outer one. No lines are given
    for names that are not identifiers, because somebody may paste them; nor for those that lead through something that
    is not a class, because the name does not show what would be allowed.

    >>> safe_globals_lines([GlobalUse("argparse", "Namespace", "harmless", "")])[2:]
    ('with torch.serialization.safe_globals([Namespace]):', '    obj = torch.load(path)')
    """
    spelled: dict[tuple[str, str], str] = {}  # what torch will look up for each name, which may be an older one
    for use in uses:
        if use.module == "torch.tensor":
            continue
        module, name = use.module, use.name
        if use.spelling.endswith(f".{name}"):
            module = use.spelling.removesuffix(f".{name}")
        elif use.spelling:
            module, _, name = use.spelling.rpartition(".")
        spelled[use.module, use.name] = names.torch_spelling(module, name) if use.spelling else use.full_name
    spelled |= {(module, name): f"{module}.{name}" for module, name in inside}
    parts = [part for key in spelled for text in key for part in text.split(".")]
    if len(spelled) > _MAX_LINES or not all(map(str.isidentifier, parts)):
        return ()
    if not all(_is_allowed(*key) for key in spelled):
        return ()
    loader = load.partition(".")[0]
    imports = [f"import {name}" for name in dict.fromkeys(("torch", loader))]
    entries: list[str] = []
    # The names that the lines themselves use, and builtins.
    taken = dict.fromkeys(("torch", loader, "numpy", "type"), "")
    taken |= {name.partition(".")[0]: "" for module, name in spelled if module == "builtins"}
    for (module, name), spelling in spelled.items():
        head, dot, tail = name.partition(".")
        home = module.replace("numpy.core.", "numpy._core.", 1) if module.startswith("numpy.core.") else module
        alias = head
        if module != "builtins":
            while taken.get(alias, f"{module}.{head}") != f"{module}.{head}":
                alias += "_"
            if alias not in taken:
                taken[alias] = f"{module}.{head}"
                imports.append(f"from {home} import {head}" + (f" as {alias}" if alias != head else ""))
        entry = f"{alias}{dot}{tail}"
        # torch looks at the object's __module__ and __qualname__. For an object without them, or with an older name in
        # the file, the name must be given, too.
        if spelling != f"{home}.{name}" or (module == "builtins" and name in ("Ellipsis", "NotImplemented")):
            entry = f'({entry}, "{spelling}")'
        entries.append(entry)
    if ("numpy", "dtype") in spelled:
        imports.append("import numpy")
        entries.append("*{type(numpy.dtype(code)) for code in numpy.typecodes['All']}")
    functions = [".".join(key) for key in spelled if names.may_be_function(*key)]
    if functions:
        imports.append(f"# This trusts code that transload does not know, with any arguments: {', '.join(functions)}")
    allowed = f"with torch.serialization.safe_globals([{', '.join(entries)}]):"
    return (*imports, allowed, f"    obj = {load}(path)")


def loaded_pickles(checkpoint: Contents) -> tuple[Pickle, ...]:
    """The pickles that loading reads; others are in records and files that it ignores."""
    if checkpoint.traits.container in ("stream", "tar"):
        return checkpoint.pickles
    main = [pickle for pickle in checkpoint.pickles if pickle.main]
    if not checkpoint.traits.composed:
        return tuple(main)
    # Of the files of a composed checkpoint, only its values are built, and nothing if they do not form one object.
    if any(problem.code == "ranks-unmerged" for problem in checkpoint.problems):
        return ()
    nodes = walk_nodes((value.node for value in checkpoint.values), local_tensors)
    needed = {id(node) for node in nodes if type(node) is Global}
    built = [copy(pickle) for pickle in main]
    for pickle in built:
        pickle.globals = {key: node for key, node in pickle.globals.items() if id(node) in needed}
    return tuple(built)
