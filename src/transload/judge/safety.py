"""What could happen if a loader read this: the names a file asks for, how it uses them, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transload.checkpoint import GlobalUse
from transload.findings import Finding, Safety, Severity, worst_safety
from transload.judge.names import canonical, classify
from transload.judge.shapes import check_call, full_name
from transload.read.nodes import Call, Dict, Extension, Global, Persistent, Pickle, module_class

__all__ = ["Judgement", "judge_pickles", "safe_globals_lines"]

_MAX_EVIDENCE = 20


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

    def complain(self, safety: Safety, text: str, pickle: Pickle, position: int) -> None:
        """Note a use that is not data, once for each wording."""
        where = f"{pickle.name} › byte {position}" if pickle.name else f"byte {position}"
        self.complaints.setdefault(text, (safety, where))

    def stream(self, pickle: Pickle) -> None:
        """Take in one pickle."""
        keys: dict[int, tuple[str, str]] = {}
        for node in pickle.globals.values():
            key = keys[id(node)] = canonical(node.module, node.name)
            if key != (node.module, node.name):
                self.spelling[key] = f"{node.module}.{node.name}"
            self.uses.setdefault(key, {"imported": 0, "called": 0, "built": 0})["imported"] += node.count
            self.streams.setdefault(key, pickle.name)
            if key not in self.verdicts:
                self.verdicts[key] = classify(*key)
        for call in pickle.calls:
            callee = call.callee
            if type(callee) is Persistent:
                callee = module_class(callee)
            if type(callee) is Global:
                self._known_call(keys[id(callee)], call, pickle)
            else:
                self._odd_call(call, pickle)
        for target, _ in pickle.built:
            if type(target) is Global:
                # Attributes set on a class or function outlive the load, and a dotted name reads them back.
                self.complain("dangerous", f"it changes {full_name(target)} itself, for the whole process", pickle, pickle.start)
                self.uses[keys[id(target)]]["built"] += 1
            elif type(target) is Extension:
                self.complain("dangerous", "it changes an object it names only by number", pickle, pickle.start)
        for extension in pickle.extensions:
            text = f"it asks for extension {extension.code}: a name that is not in the file"
            self.complain("dangerous", text, pickle, pickle.start)

    def _known_call(self, key: tuple[str, str], call: Call, pickle: Pickle) -> None:
        uses = self.uses[key]
        uses["called"] += 1
        if call.states:
            uses["built"] += 1
        verdict = self.verdicts[key][0]
        if key == ("builtins", "getattr") and not _plain_getattr(call):
            self.complain("dangerous", "it reaches into objects by name", pickle, call.position)
        if verdict == "data":
            if not call.args and not call.states and key == _ORDERED_DICT:
                return  # the empty hooks of every tensor: nearly half of all calls
            complaint = check_call(".".join(key), call)
            if complaint:
                self.complain(*complaint, pickle, call.position)
        elif call.states and any(_slot_dunder(state) for state in call.states):
            self.complain("dangerous", "it sets a double-underscore attribute on an object", pickle, call.position)

    def _odd_call(self, call: Call, pickle: Pickle) -> None:
        if _is_newobj_ex(call.callee):
            return
        if type(call.callee) in (Call, Extension):
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
        key = ("builtins", "getattr")
        alarmed = any(safety == "dangerous" for safety, _ in self.complaints.values())
        if key in self.verdicts and not alarmed:
            self.verdicts[key] = ("unknown", "an enumeration member or a method, found by name on something named beside it")

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
            evidence = [f"{use.full_name}: {use.purpose}" for use in trust]
            title = f"torch.load refuses {_some(len(trust), 'name')} in it unless you allow them"
            fixes = () if dangerous else safe_globals_lines(trust)
            yield Finding("needs-trust", "warning", title, _cut(evidence), fixes)


_ORDERED_DICT = ("collections", "OrderedDict")
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


def _slot_dunder(state: object) -> bool:
    """A two-tuple state is set attribute by attribute, so that ``__class__`` in it replaces the class."""
    if type(state) is not tuple or len(state) != 2 or type(state[1]) is not Dict:
        return False
    return any(type(key) is str and key.startswith("__") for key in state[1].items[::2])


def _plain_getattr(call: Call) -> bool:
    """``getattr(Colour, "RED")`` or ``getattr(thing, "method")``, one step from something the file names, not further."""
    if type(call.args) is not tuple or len(call.args) != 2 or call.states:
        return False
    owner, name = call.args
    if type(owner) is Call and full_name(owner.callee) == "builtins.getattr":
        return False
    if type(name) is not str or type(owner) not in (Global, Call):
        return False
    return not name.startswith("__") or (name == "__new__" and type(owner) is Global)


def _is_newobj_ex(callee: object) -> bool:
    """``partial(cls.__new__, cls, …)()``: how protocol 2 writes an object with keyword arguments."""
    if type(callee) is not Call or full_name(callee.callee) != "functools.partial" or type(callee.args) is not tuple:
        return False
    first = callee.args[0] if callee.args else None
    if type(first) is not Call or full_name(first.callee) != "builtins.getattr" or type(first.args) is not tuple:
        return False
    return len(first.args) == 2 and type(first.args[0]) is Global and first.args[1] == "__new__"


def _used(use: GlobalUse) -> str:
    parts = [f"called {use.called}×" if use.called else "", f"built {use.built}×" if use.built else ""]
    return ", ".join(part for part in parts if part) or "imported only"


def _some(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _cut(lines: list[str]) -> tuple[str, ...]:
    if len(lines) <= _MAX_EVIDENCE:
        return tuple(lines)
    return (*lines[:_MAX_EVIDENCE], f"… and {len(lines) - _MAX_EVIDENCE} more")


def safe_globals_lines(uses: Iterable[GlobalUse]) -> tuple[str, ...]:
    """The lines that make ``torch.load`` accept these names, all at once; for people who trust the file.

    >>> safe_globals_lines([GlobalUse("argparse", "Namespace", "harmless", "")])[1:]
    ('from argparse import Namespace', 'torch.serialization.add_safe_globals([Namespace])')
    """
    imports: list[str] = []
    entries: list[str] = []
    taken: dict[str, str] = {}
    wanted = [(use.module, use.name) for use in uses]
    for module, name in wanted:
        head, dot, tail = name.partition(".")
        if module == "builtins":
            entries.append(name)
            continue
        alias = head
        while taken.get(alias, f"{module}.{head}") != f"{module}.{head}":
            alias += "_"
        if alias not in taken:
            taken[alias] = f"{module}.{head}"
            imports.append(f"from {_module_now(module)} import {head}" + (f" as {alias}" if alias != head else ""))
        entry = f"{alias}{dot}{tail}"
        # numpy 2 moved numpy.core; the file still says the old name, so it has to be given beside the function.
        entries.append(f'({entry}, "{module}.{name}")' if module.startswith("numpy.core.") else entry)
    if ("numpy", "dtype") in wanted:
        imports.append("import numpy")
        entries.append("*{type(numpy.dtype(code)) for code in numpy.typecodes['All']}")
    return ("import torch", *imports, f"torch.serialization.add_safe_globals([{', '.join(entries)}])")


def _module_now(module: str) -> str:
    return module.replace("numpy.core.", "numpy._core.", 1) if module.startswith("numpy.core.") else module
