"""What could happen if a loader read this: the names a file asks for, how it uses them, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transload.checkpoint import GlobalUse
from transload.findings import Finding, Safety, Severity, worst_safety
from transload.judge.names import canonical, classify, is_class_path, is_loader, torch_spelling
from transload.judge.nested import Nested
from transload.judge.shapes import check_call, full_name
from transload.nodes import Call, Dict, Extension, Global, Persistent, Pickle, module_class

__all__ = ["Judgement", "judge_pickles", "safe_globals_lines"]

_MAX_EVIDENCE = 20
_MAX_WORDING = 300  # a name in it may be a megabyte


@dataclass(frozen=True, slots=True)
class Judgement:
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
        self.nested.allow(pickle)
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
