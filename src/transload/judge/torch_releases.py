"""Which torch releases can have written a file, and what torch.load does with it.

torch does not record its version in a checkpoint (pytorch/pytorch#44295 has asked for it since 2020), but changes of
the writer leave traces. Every clue narrows a range of releases, and is listed as evidence. The tables are in
``releases.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transload.checkpoint import Checkpoint, Origin
from transload.findings import Safety, rescue_command
from transload.nodes import Call, Dict, Global
from transload.steps import tables

# A trace of the writer: the first and last release that leave it, and what it is. An empty bound is open.
_Clue = tuple[str, str, str]

_TABLES = tables(__package__, "releases")
_MAX_VERSION = 80


def origin(checkpoint: Checkpoint) -> Origin:
    """The narrowest range of releases that all clues allow, with the clues; and versions recorded in the file."""
    recorded = dict(checkpoint.written_by.recorded)
    for pickle in checkpoint.pickles:  # under a well-known key, or as a ``TorchVersion``
        root = pickle.root
        items = root.items if type(root) is Dict else root.items or [] if type(root) is Call else []
        for key, value in zip(items[::2], items[1::2], strict=False):
            if type(key) is str and key in _TABLES["version keys"] and type(value) is str:
                recorded[_TABLES["version keys"][key]] = value[:_MAX_VERSION]
        versioned = any(name == "TorchVersion" for _, name in pickle.globals)
        for call in pickle.calls if versioned else ():
            match call:
                case Call(callee=Global(name="TorchVersion"), args=(str() as version, *_)):
                    recorded["torch"] = version[:_MAX_VERSION]
    form = checkpoint.traits
    names = {f"{module}.{name}" for pickle in checkpoint.pickles for module, name in pickle.globals}
    clues = [*_container(checkpoint)]
    for name, row in _TABLES["written"].items():
        if name in names:
            first, last, text = row.replace("…", "").split(" ", 2)
            clues.append((first, last, text))
    release = ".".join(dict(checkpoint.written_by.recorded).get("torch", "").partition("+")[0].split(".")[:2])
    if re.fullmatch(r"[0-9]{1,3}\.[0-9]{1,3}", release) and form.container == "zip":
        clues = [(release, release, "transload recorded it")]
    oldest = max((first for first, _, _ in clues if first), key=_order, default="")
    newest = min((last for _, last, _ in clues if last), key=_order, default="")
    note = " (or a later one that was asked to write the old format)" if form.container == "stream" else ""
    if oldest and newest and _order(oldest) > _order(newest):  # a later torch has written the old format
        newest = note = ""
    evidence = [text for _, _, text in clues]
    if any(name.startswith("numpy.core.") for name in names):
        evidence.append("numpy 1.x (numpy.core)")
    if any(name.startswith("numpy._core.") for name in names):
        evidence.append("numpy 2.x (numpy._core)")
    if any(pickle.python2 for pickle in checkpoint.pickles):
        evidence.append("Python 2 (its strings)")
    return Origin(oldest, newest, tuple(evidence), tuple(recorded.items()), note)


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _container(checkpoint: Checkpoint) -> Iterable[_Clue]:
    """The clues in the container."""
    form = checkpoint.traits
    names = [record.name for record in checkpoint.records]
    partial = any(problem.code in _TABLES["records may be hidden"] for problem in checkpoint.problems)
    byteorder = "byteorder" in names
    signed = byteorder or ".data/serialization_id" in names
    if form.container == "tar":
        yield ("0.1.1", "0.1.9", "a tar archive")
    elif form.container == "stream":
        yield ("0.1.10", "1.5", "the magic-number stream")
    elif form.runs == "torch.jit":
        if "model.json" in names:
            yield ("1.0", "1.2", "a TorchScript archive with `model.json`")
        elif signed:
            yield ("2.1", "", "the record `byteorder`")
        elif names[:1] == ["version"]:
            yield ("1.3", "1.5", "a TorchScript archive with `version` first")
        elif not partial:
            yield ("1.6", "2.0", "a TorchScript archive without `byteorder`")
    elif form.runs == "torch.export":
        if "serialized_state_dict.json" in names:
            yield ("2.1", "2.2", "the record `serialized_state_dict.json`")
        elif "serialized_state_dict.pt" in names:
            yield ("2.3", "2.7", "the record `serialized_state_dict.pt`")
        elif any(name.startswith("data/weights/") and name.endswith(".pt") for name in names):
            yield ("2.8", "2.8", "weights saved by torch.save")
        elif any(name.endswith("_weights_config.json") for name in names):
            yield ("2.9", "", "weights with a config file")
    # Without an index, the save was interrupted too early to leave clues.
    elif form.container in ("zip", "folder") and "data.pkl" in names:
        facts = dict(checkpoint.facts)
        if names[:1] == ["version"]:
            first = any(name.startswith("tensors/") for name in names) or facts.get("version") == "1"
            release = "1.4" if first else "1.5"
            yield (release, release, "the record `version` comes first")
        elif ".format_version" in names:
            yield ("2.7", "", "the record `.format_version`")
        elif any(len(name) > 13 and name.startswith("data/") for name in names):
            yield ("1.6", "1.8", "storages are named by memory address")
        elif partial:
            if byteorder:
                yield ("2.1", "", "the record `byteorder`")
        elif signed:
            yield ("2.1", "2.6", "the record `byteorder`, and no `.format_version`")
        elif facts.get("folder") == "archive":
            oldest = "1.9" if any(name.startswith("data/") for name in names) else "1.6"
            yield (oldest, "2.0", "storages are numbered, and there is no record `byteorder`")
        else:
            yield ("1.13", "2.0", "the top folder has the file's name, and there is no record `byteorder`")


# -- what plain torch.load(path) will do, in a sentence or two

NESTED = {
    "torch._utils._rebuild_nested_tensor",
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch.nested._internal.nested_tensor._rebuild_njt",
}
"""The names in nested tensors, which torch refuses from ``NESTED_REFUSED`` on."""

NESTED_REFUSED = (2, 15)


def needs_nested_of_2_15(checkpoint: Checkpoint) -> bool:
    """Whether it holds a jagged tensor that 2.15 saved: without the bounds of its lengths, which older ones need."""
    parts = (part for tensor in checkpoint.tensors for part in tensor.parts)
    bounds = any(use.full_name == "torch._dynamo.decorators._DimRange" for use in checkpoint.globals)
    return not bounds and any("_metadata_cache" in part.path for part in parts)


_REFUSES = "refuses it (weights_only=True, the default from 2.6 on)"


def prediction(checkpoint: Checkpoint, safety: Safety, *, as_data: bool) -> str:
    """The outcome with a current torch, on machines with and without the devices in the file.

    ``safety`` is that of the part that torch reads, which may be better than that of the whole file; ``as_data`` is as
    in a ``Judgement``. ``checking`` has the exact messages of one release on one machine.
    """
    unexplained = "fails, with an error that does not say why"
    codes = {problem.code for problem in checkpoint.problems}
    noticed = codes - _TABLES["unnoticed"].keys()
    unreadable = False
    if noticed:
        from transload.judge.problems import rule_of

        unreadable = any(rule_of(code).integrity in ("repairable", "damaged") for code in noticed)
    form = checkpoint.traits
    if form.other_loader and unreadable:
        return f"fails, and so does {form.other_loader}: the file is damaged"
    if form.composed and unreadable:
        return "fails on a directory, and transload.load refuses it: some of it is lost"
    if form.composed and "ranks-unmerged" in codes:
        return "fails on a directory, and transload.load refuses it: its files do not form one object"
    if form.torch_load:
        from transload.steps import step_of

        return form.torch_load.replace("{rescue}", step_of(rescue_command(checkpoint.path)).text)
    if checkpoint.path.endswith(".safetensors"):
        return "fails from torch 2.13 on: its name says safetensors, but it is another format; rename it"
    if checkpoint.integrity == "not-a-checkpoint":
        return unexplained
    if "plain-pickle" in codes and safety != "dangerous" and not unreadable:
        reads = " with weights_only=False, if you trust it" if safety == "needs-trust" and not as_data else ""
        return f"{unexplained}: torch.save did not write it; transload.load reads it{reads}"
    if "\ntensors/" in "\n".join(["", *[storage.record for storage in checkpoint.storages]]):  # testing each is slow
        return "fails: only torch 1.4 and 1.5 read this first form of the zip format"
    if _TABLES["two readings"].keys() & codes:
        return "may load it without a warning, but reads other contents from it than other programs do"
    if any(problem.code == "zip-unreadable-entry" and problem.title for problem in checkpoint.problems):
        return "fails: the archive is protected by a password, which torch does not support"
    if noticed == {"sparse-outside"}:
        outcome = "refuses it, or loads it and crashes when it is used, depending on the release"
        return f"{outcome} (2.6 and 2.15 refuse, 2.13 loads)"
    if unreadable:
        return "fails: the file is damaged"
    if safety == "dangerous":
        return f"{_REFUSES}; with weights_only=False it would run its code"
    rare = sorted({name for pickle in checkpoint.pickles[:5] for name in pickle.rare})
    first = ""
    if rare:
        first = (
            f"refuses it: weights_only=True does not know the opcode {rare[0]}, which torch.save writes only when asked"
        )
    elif safety == "needs-trust":
        from transload.judge.names import PIECES

        pieces = PIECES.keys() & {use.full_name for use in checkpoint.globals} if as_data else set()
        sharded = any(".sharded_tensor." in name for name in pieces)
        until = "you import torch.distributed.tensor" if pieces and not sharded else "you allow the names below"
        first = f"{_REFUSES} until {until}"
        if sharded:
            first = f"{_REFUSES}, and loads it with weights_only=False only in a process group of as many ranks"
        first += "; transload.load loads it as data" if as_data and "rank-file" not in codes else ""
    elif NESTED & {use.full_name for use in checkpoint.globals}:
        first = "loads it up to torch 2.14"
        if needs_nested_of_2_15(checkpoint):
            first = "fails up to torch 2.14, which cannot rebuild a jagged tensor that 2.15 saved"
        first += "; from 2.15 on it refuses nested tensors until you allow them"
    devices = [use.device for use in checkpoint.devices if use.device not in ("cpu", "meta")]
    if not devices:
        return first or "loads it anywhere"
    where = f"needs {', '.join(devices)}: elsewhere pass map_location='cpu' (or a device you have)"
    return f"{first}; it also {where}" if first else where
