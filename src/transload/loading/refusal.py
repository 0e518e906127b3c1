"""Refuses what is not loaded: files of other kinds, and files that need names which are not allowed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from types import BuiltinMethodType, MethodType
from typing import Any

from transload.checkpoint import Checkpoint, Tensor
from transload.dtypes import ITEMSIZE
from transload.errors import LoadError, UnsafeError
from transload.findings import first_lines, is_named
from transload.formats.pieces import names_outside
from transload.frozen import replace
from transload.judge.names import ALSO_DATA, PIECES, PLAIN_VALUES, TORCH_DEFAULT, canonical, torch_spelling
from transload.judge.problems import (
    LEFT_OUT,
    UNMERGEABLE,
    UNMERGED,
    WITHOUT_CODE,
    codes_of,
    convert_command,
    rule_of,
    sentence_of,
)
from transload.judge.safety import (
    DO_NOT_LOAD,
    finds_plain_values,
    full_name,
    judge_pickles,
    loaded_pickles,
    safe_globals_lines,
)
from transload.nodes import Global, Pickle
from transload.opening import OpenCheckpoint

_BLOCKED = frozenset({"sys", "os", "posix", "nt", "builtins.eval", "builtins.exec"})
"""Never allowed, even if the program allows them (torch/_weights_only_unpickler.py, and two more)."""

_REGISTERED_BY = (
    ("torch.nested._internal.nested_tensor.", "torch.nested._internal.nested_tensor"),
    ("torch._dynamo.decorators._DimRange", "torch._dynamo"),
    ("torch.distributed._mesh_layout.", "torch.distributed"),
    ("torch.distributed.device_mesh.", "torch.distributed.tensor"),
    ("torch.distributed.tensor.", "torch.distributed.tensor"),
)
"""Modules of torch that allow some classes as soon as they are imported."""

_PLAIN = frozenset(name for name in TORCH_DEFAULT if not name.startswith(("torch.nested.", "torch.distributed.")))
_KNOWN = _PLAIN | ALSO_DATA


class Allowed:
    """Which names are allowed. Made for each load, since a program may change what it allows at any time."""

    @cached_property
    def _by_program(self) -> dict[str, Any]:
        """What was given to ``torch.serialization.add_safe_globals``, and dtypes newer than our list, by name."""
        from torch import _weights_only_unpickler as unpickler
        from torch import dtype

        of_torch: dict[str, Any] = getattr(unpickler, "_get_allowed_globals", dict)()
        user: dict[str, Any] = getattr(unpickler, "_get_user_allowed_globals", dict)()
        newer = {name: value for name, value in of_torch.items() if isinstance(value, dtype) and name not in _KNOWN}
        return {**newer, **user}

    def is_known(self, node: Global) -> bool:
        """Whether a name is on the fixed list."""
        name = name_of(node)
        return name in _KNOWN or name in PLAIN_VALUES

    def refused(self, pickles: Iterable[Pickle]) -> list[Global]:
        """The names in some pickles that are not allowed."""
        nodes = [
            node
            for pickle in pickles
            for node in _needed_names(pickle)
            if not (full_name(node) == "builtins.getattr" and finds_plain_values(pickle))
        ]
        return [node for node in nodes if not self.is_known(node) and self.user(node) is None]

    def user(self, node: Global) -> Any:
        """The object that the program has allowed under a name; ``None`` if there is none."""
        spellings = (torch_spelling(node.module, node.name), full_name(node))
        if spellings[0].partition(".")[0] in _BLOCKED or spellings[1] in _BLOCKED:
            return None
        module = registrar(spellings[0])
        if module and not self._by_program.keys() & {*spellings}:
            with suppress(ImportError, RuntimeError):  # a torch without this part
                import_module(module)
            del self._by_program  # computed again below
        return next((self._by_program[name] for name in spellings if name in self._by_program), None)

    def allows(self, target: object) -> bool:
        """Whether the program has allowed a class or function, under any name.

        A bound method is a new object each time it is looked up, so methods are compared by ``==``.
        """
        allowed = self._by_program.values()
        if isinstance(target, BuiltinMethodType | MethodType):
            return any(type(other) is type(target) and other == target for other in allowed)
        return any(other is target for other in allowed)

    def object_of(self, node: Global) -> Any:
        """The object of a name that a file refers to without calling it: a dtype, a class, a function."""
        full = name_of(node)
        if full not in _KNOWN and full != "numpy.ndarray":
            return self.user(node)
        module, _, name = full.rpartition(".")
        if name.endswith("Storage") and name not in ("TypedStorage", "UntypedStorage"):
            from torch.serialization import StorageType

            return StorageType(name)
        # Do not import modules that torch does not import itself.
        import_module("torch" if module.startswith("torch") else module)
        target = getattr(sys.modules.get(module), name, None)
        if target is None:
            raise LoadError(f"it holds {full}, which this torch does not have", fix="A newer torch may have it.")
        return target


def _needed_names(pickle: Pickle) -> list[Global]:
    """The names in a pickle, without those that only describe distributed tensors, unless torch makes these."""
    nodes = [*pickle.globals.values()]
    if not any(full_name(node) in PIECES for node in nodes) or in_process_group():
        return nodes
    outside = names_outside(pickle)
    return [node for node in nodes if full_name(node) not in PIECES or node in outside]


def in_process_group() -> bool:
    """Whether this process is a rank: then torch makes distributed tensors, which may communicate with other ranks."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def name_of(node: Global) -> str:
    """The name under which a global is looked up."""
    spelling = torch_spelling(node.module, node.name)
    return spelling if spelling in _KNOWN else full_name(node)


def registrar(full: str) -> str:
    """The module of torch that allows a name when it is imported; empty if there is none."""
    return next((module for prefix, module in _REGISTERED_BY if full.startswith(prefix)), "")


def is_plain(tensor: Tensor) -> bool:
    """Whether torch can represent a tensor."""
    return tensor.dtype in ITEMSIZE and tensor.kind == "strided"


def refuse_program(checkpoint: Checkpoint, *, trusted: bool) -> None:
    """Raise for directories of ranks, files without a dtype that torch has, and programs and pieces unless trusted."""
    if not trusted and not in_process_group():
        refuse_piece(checkpoint, "transload.load({})")
    left = next((finding for finding in checkpoint.findings if finding.code in LEFT_OUT), None)
    if left is not None and not any(map(is_plain, checkpoint.tensors)):
        what = f"nothing in it is a tensor to torch: {sentence_of(left)}"
        raise LoadError(what, where=checkpoint.path, fix="\n".join(left.fix))
    refuse_unmerged(checkpoint)
    form = checkpoint.traits
    what = f"this is {'an' if form.words[0] in 'AEIO' else 'a'} {form.words}"
    if form.instead and not form.program:
        raise LoadError(f"{what}, which is not loaded as one object", where=checkpoint.path, fix=form.instead)
    if form.program and not (trusted and form.runs):
        what += ", which is compiled code" if form.compiled else ""
        what += ", not a file of tensors" + ("" if trusted else ", and weights_only=True runs no program")
        raise UnsafeError(what, where=checkpoint.path, fix=form.instead + _without_code(checkpoint))


def refuse_unmerged(checkpoint: Checkpoint) -> None:
    """Raise for the files of ranks that do not form one object, and for one of several that cannot be read."""
    codes = {finding.code: finding for finding in checkpoint.findings}
    for code in ("part-unreadable", "directory-unreadable"):  # its keys would count as missing
        if code in codes and checkpoint.traits.several:
            raise LoadError(sentence_of(codes[code]), where=checkpoint.path, fix="\n".join(codes[code].fix))
    if UNMERGED in codes:
        why = next((finding for code, finding in codes.items() if code in UNMERGEABLE), codes[UNMERGED])
        raise LoadError(sentence_of(why), where=checkpoint.path, fix="\n".join(why.fix))


def refuse_piece(checkpoint: Checkpoint, call: str) -> None:
    """Raise for the file of a rank that has only pieces of some tensors; ``call`` loads the folder of all ranks."""
    share = next((finding for finding in checkpoint.findings if finding.code == "rank-file"), None)
    if share is None or checkpoint.traits.several:
        return
    folder = os.path.dirname(checkpoint.path) or "." if is_named(checkpoint.path) else "DIR"
    world = dict(checkpoint.facts).get("world size", "")
    fix = f"Load the folder with the files of all {world} ranks:".replace("  ", " ") + f" {call.format(repr(folder))}"
    fix += "\ntransload.open reads a piece of a tensor: open(path).slice(name)[rows]"
    raise LoadError(sentence_of(share), where=checkpoint.path, fix=fix)


def plain_part(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without tensors that torch cannot represent, if there are any; load warns of them."""
    if not any(finding.code in LEFT_OUT for finding in checkpoint.findings):
        return checkpoint
    tensors = tuple(tensor for tensor in checkpoint.tensors if is_plain(tensor))
    kept = {tensor.storage for tensor in tensors}
    storages = tuple(storage for storage in checkpoint.storages if storage.id in kept)
    return replace(checkpoint, tensors=tensors, storages=storages)


def leave_out(opened: OpenCheckpoint) -> None:
    """Leave out what ``plain_part`` leaves out."""
    checkpoint = plain_part(opened.checkpoint)
    if checkpoint is not opened.checkpoint:
        opened.checkpoint = checkpoint
        opened.files = tuple(replace(file, checkpoint=checkpoint) for file in opened.files)


def refuse_unsafe(checkpoint: Checkpoint) -> None:
    """Raise if the file needs names that are not allowed, naming all of them; or if it is an attack."""
    allowed, pickles = Allowed(), loaded_pickles(checkpoint)
    nodes = allowed.refused(pickles)
    refused = {canonical(node.module, node.name) for node in nodes}
    if not refused and checkpoint.safety != "dangerous":
        return
    judgement = judge_pickles(pickles, getattr_allowed=allowed.allows(getattr))
    uses = [use for use in judgement.globals if (use.module, use.name) in refused]
    attacks = [finding for finding in judgement.findings if finding.code == "dangerous-use"]
    dangerous_codes = {code for code in codes_of(checkpoint) if rule_of(code).safety == "dangerous"}
    attacks += [finding for finding in checkpoint.findings if finding.code in dangerous_codes]
    dangerous = [use for use in uses if use.verdict == "dangerous"]
    if dangerous or attacks:
        lines = [*(f"{use.full_name}: {use.purpose}" for use in dangerous), *map(sentence_of, attacks)]
        what = "it is built to deceive a loader"
        if dangerous:
            what = "loading it would run code that a checkpoint should not contain"
        raise UnsafeError(_listed(what, lines, nodes), where=checkpoint.path, fix=DO_NOT_LOAD)
    if uses:
        names = "1 name that is" if len(uses) == 1 else f"{len(uses)} names that are"
        what = f"it asks for {names} not allowed"
        lines = [f"{use.full_name}: {use.purpose}" for use in uses]
        from torch import serialization

        fix = "Only if you trust its author: "
        can_allow = hasattr(serialization, "safe_globals")
        if can_allow and (allowing := safe_globals_lines(uses, judgement.inside, "transload.load")):
            fix = "\n".join(["Only if you trust its author, allow them:", *(f"  {line}" for line in allowing), "or "])
        fix += "pass weights_only=False, which runs whatever the file says."
        if all(use.module.partition(".")[0] == "torchao" for use in uses) and "torchao" not in sys.modules:
            fix = f"Import torchao first: it allows its own classes.\n{fix}"
        raise UnsafeError(_listed(what, lines, nodes), where=checkpoint.path, fix=fix + _without_code(checkpoint))


def _listed(what: str, lines: list[str], refused: list[Global]) -> str:
    """The message with its list, and, as in torch's message, the first refused name."""
    shown = "\n  ".join((f"{what}:", *first_lines(lines, 50)))
    return weights_only_error(shown, refused[0] if refused else None)


def weights_only_error(what: str, refused: object = None) -> str:
    """A message with the phrases of torch's that programs look for; ``refused`` may be a name."""
    text = f"Weights only load failed: {what}"
    if type(refused) is not Global:
        return text
    name = torch_spelling(refused.module, refused.name).removeprefix("builtins.")
    return f"{text}\nUnsupported global: GLOBAL {name} was not an allowed global by default."


def _without_code(checkpoint: Checkpoint) -> str:
    """How to get the tensors without trusting the file, if it has any."""
    command = convert_command(checkpoint)
    return f"\n{WITHOUT_CODE}\n{command}" if command else ""
