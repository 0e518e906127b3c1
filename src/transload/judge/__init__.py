"""Judge the facts that a reader has found: pure functions that never touch a file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from transload.checkpoint import Checkpoint
from transload.contents import GlobalUse, Judgement
from transload.findings import INTEGRITY, Finding, Integrity, Safety, first_lines, quoted, worst_safety
from transload.frozen import replace
from transload.nodes import PURPOSES, Pickle, is_ordinary_call, ordinary_names

__all__ = ["integrity_of", "judge"]

_NEED_TRUST = frozenset({"needs-trust", "npy-objects", "rare-opcodes"})  # findings whose fix is to trust the file
_SHOWN = 8


def judge(checkpoint: Checkpoint, *, describe: bool = True) -> Checkpoint:
    """Add both verdicts, the findings, who wrote the file, and what torch.load will do with it.

    The last two are only added with ``describe``: they are for people.
    """
    form = checkpoint.traits
    # Allowing names does not help if torch.save did not write the file, or with another pickle protocol.
    foreign = any(problem.code == "plain-pickle" for problem in checkpoint.problems)
    foreign = foreign or any(pickle.rare for pickle in checkpoint.pickles if pickle.main)
    folder = bool(checkpoint.parts) or form.container == "folder"  # torch.load takes only files
    load = "transload.load" if foreign or folder else "torch.load"
    names = _judge_pickles(checkpoint.pickles, load)
    if names.safety == "needs-trust" and checkpoint.parts:
        names = _judge_apart(checkpoint, names, load)
        names = _without_unused(checkpoint, names) if checkpoint.values else names
    # Names need not be allowed in formats that torch.load does not read. That transload.load makes plain values without
    # trust is not true of a file that it does not read either.
    unread = names.as_data and any(problem.code == "not-a-checkpoint" for problem in checkpoint.problems)
    # Nor is anything built from files that do not form one object.
    unread = unread or any(problem.code == "ranks-unmerged" for problem in checkpoint.problems)
    trusted = unread or (form.named and not folder) or form.instead != ""
    findings = [f for f in names.findings if f.code != "needs-trust" or not trusted]
    forced: Safety = "data-only"
    if checkpoint.problems:
        from transload.judge.problems import judge_problems

        forced, caused = judge_problems(checkpoint.problems)
        findings += caused
    rare = sorted({name for pickle in checkpoint.pickles if pickle.main for name in pickle.rare})
    if rare and form.by_torch_save:
        # Even if it is harmless, it can only be loaded without weights_only.
        title = "torch.load refuses it: weights_only=True does not know its pickle protocol"
        evidence = (f"opcodes {', '.join(rare[:_SHOWN])}",)
        fix = "Save it again without pickle_protocol, or pass weights_only=False if you trust the file."
        findings.append(Finding("rare-opcodes", "warning", title, evidence, (fix,)))
    named = [f"{leaf.name}: {leaf.text}" for leaf in checkpoint.leaves if leaf.kind == "torch.device"]
    elsewhere = [text for text in named if not text.endswith(": cpu")]
    if elsewhere:
        title = "it contains torch.device values, which map_location does not change"
        fix = "Set them yourself after loading."
        findings.append(Finding("device-objects", "note", title, first_lines(elsewhere, _SHOWN), (fix,)))
    # The program that writes this layout.
    paths = [tensor.path for tensor in checkpoint.tensors]
    top = {path[0] for path in (*paths, *(leaf.path for leaf in checkpoint.leaves)) if path}
    flavour = "" if {"_parameters", "_buffers"}.isdisjoint(chain.from_iterable(paths)) else "pickled module"
    if "pytorch-lightning_version" in top:
        flavour = "Lightning checkpoint"
    elif {"ds_version", "module"} <= top:
        flavour = "DeepSpeed model states"
    elif any(problem.code == "rank-file" for problem in checkpoint.problems) and not form.several:
        facts = dict(checkpoint.facts)
        flavour = f"rank {facts['rank']} of {facts['world size']}" if "rank" in facts else "one rank's share"
    elif (
        describe and not (flavour or checkpoint.flavour) and any("lora" in tensor.name for tensor in checkpoint.tensors)
    ):
        from transload.formats.adapters import adapter_in, facts_of

        if adapter := adapter_in(checkpoint.tensors):
            flavour = "LoRA adapter"
            checkpoint = replace(checkpoint, facts=(*facts_of(adapter), *checkpoint.facts))
    base: Safety = "code" if form.program else "data-only"
    judged = replace(
        checkpoint,
        safety=worst_safety(base, names.safety, forced),
        integrity=integrity_of(checkpoint),
        globals=names.globals,
        flavour=checkpoint.flavour or flavour,
        findings=tuple(findings),
    )
    if judged.safety == "dangerous":  # nobody should allow anything in it
        cut = (replace(item, fix=()) if item.code in _NEED_TRUST else item for item in judged.findings)
        judged = replace(judged, findings=tuple(cut))
    if judged.findings:
        from transload.judge.problems import with_commands

        judged = replace(judged, findings=with_commands(judged))
    if not describe:
        return judged
    from transload.judge.torch_releases import origin, prediction

    # torch.load ignores other records of an archive, and the pickles in them.
    loaded = [pickle for pickle in checkpoint.pickles if pickle.main or form.container != "zip"]
    part = names if len(loaded) == len(checkpoint.pickles) else _judge_pickles(loaded)
    outcome = prediction(judged, worst_safety(part.safety, forced), as_data=part.as_data)
    return replace(judged, written_by=origin(checkpoint), prediction=f"torch.load {outcome}")


def _judge_pickles(pickles: Sequence[Pickle], load: str = "torch.load") -> Judgement:
    ordinary = judge_ordinary(pickles)
    if ordinary is not None:
        return ordinary
    from transload.judge.safety import judge_pickles

    return judge_pickles(pickles, load=load)


def _judge_apart(checkpoint: Checkpoint, names: Judgement, load: str) -> Judgement:
    """``names`` without trust for what only holds values, and that loading the checkpoint does not load.

    That is the index of a distributed checkpoint, and files beside the weights, such as ``training_args.bin``.
    """
    from transload.judge.safety import holds_records, judge_pickles

    kinds = {part.name: part.kind for part in checkpoint.parts}
    needed: list[Pickle] = []
    apart: dict[str, list[Pickle]] = {}
    for pickle in checkpoint.pickles:
        file = pickle.name.partition(" › ")[0]
        kind = kinds.get(file)
        is_apart = kind == "index" or (kind == "beside the checkpoint" and not pickle.main)
        (apart.setdefault(file, []) if is_apart else needed).append(pickle)
    untrusted = [file for file, pickles in apart.items() if not holds_records(pickles, names)]
    judged = _judge_pickles(needed, load)
    if not untrusted:
        return judged._replace(globals=names.globals)
    others = judge_pickles(pickle for file in untrusted for pickle in apart[file])
    title = "files beside the weights ask for names that torch.load refuses"
    command = f"$ transload inspect {quoted(os.path.join(checkpoint.path, untrusted[0]))}"
    fix = ("Loading the weights does not need them. To load such a file:", command)
    findings = [replace(f, title=title, fix=fix) if f.code == "needs-trust" else f for f in others.findings]
    worst = worst_safety(judged.safety, others.safety)
    return names._replace(safety=worst, findings=(*judged.findings, *findings))


def _without_unused(checkpoint: Checkpoint, names: Judgement) -> Judgement:
    """``names`` without trust for what loading a composed checkpoint does not build, such as the state of a rank."""
    from transload.judge.safety import holds_records, loaded_pickles

    built = {key for pickle in loaded_pickles(checkpoint) for key in pickle.globals}
    if any((use.module, use.name) in built for use in names.globals if use.verdict not in ("data", "dangerous")):
        return names
    # A class that is not known to hold only values may do anything in the program that the files are for.
    known = names.as_data or holds_records(checkpoint.pickles, names)
    title = "its files ask for names that torch refuses, and transload.load does not need"
    findings = (
        replace(f, severity="note", title=title, fix=()) if f.code == "needs-trust" else f for f in names.findings
    )
    return names._replace(safety="data-only" if known else names.safety, findings=tuple(findings))


def judge_ordinary(pickles: Iterable[Pickle]) -> Judgement | None:
    """What ``judge_pickles`` says of ordinary pickles, such as state dicts; ``None`` for any other.

    Both accept calls by ``is_ordinary_call``. Most files have no others, and need not wait for the tables of names.
    """
    uses: list[GlobalUse] = []
    for pickle in pickles:
        if pickle.built or pickle.extensions or pickle.data or (uses and pickle.globals):
            return None
        if not pickle.globals.keys() <= PURPOSES.keys():
            return None
        ordered_dict, tensor, parameter = ordinary_names(pickle)
        for call in pickle.calls:
            if not is_ordinary_call(call, ordered_dict, tensor, parameter):
                return None
        called = Counter([id(call.callee) for call in pickle.calls])
        built = sum([bool(call.states) for call in pickle.calls])  # only OrderedDicts
        for key, node in pickle.globals.items():
            times = built if node is ordered_dict else 0
            uses.append(GlobalUse(*key, "data", PURPOSES[key], node.count, called[id(node)], times, "", pickle.name))
    return Judgement("data-only", tuple(uses))


def integrity_of(checkpoint: Checkpoint) -> Integrity:
    """The verdict on the integrity of the bytes."""
    base: Integrity = "whole" if checkpoint.checksummed else "unchecked"
    if not checkpoint.problems:
        return base
    from transload.judge.problems import rule_of

    return max(base, *(rule_of(problem.code).integrity for problem in checkpoint.problems), key=INTEGRITY.index)
