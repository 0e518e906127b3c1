"""What each problem a reader can meet means: for safety, for integrity, and for the person who has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from transload.checkpoint import Checkpoint
from transload.errors import BrokenFileError, NotACheckpointDirectoryError, NotACheckpointError
from transload.findings import (
    Finding,
    Integrity,
    Problem,
    Safety,
    Severity,
    is_named,
    quoted,
    rescue_command,
    worst_safety,
)
from transload.frozen import replace

RESCUE = "$ transload rescue FILE NEW.pt"
CONVERT = "$ transload convert FILE NEW.safetensors"
WITHOUT_CODE = "This takes its tensors alone, without its code, so that no trust is needed."
"""What leads to the command that takes them out."""

_SEVERITIES = ("error", "warning", "note")
SETS = frozenset({"sharded", "dcp", "deepspeed", "megatron"})
"""The formats of several files."""

_ARCHIVES = frozenset({"torch-zip", "torchscript", "torch-export"})
RESCUED = SETS | _ARCHIVES | {"torch-legacy", "safetensors"}
"""The formats that a rescue takes."""

_CONVERTED = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torch-directory", "torchscript", "pickle"})


def with_commands(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """The findings with real commands in their advice. What was advised once, in the order of reading, is not repeated.

    A command that would find nothing to do is left out, with the sentence before it.
    """
    found = list(checkpoint.findings)
    told: set[str] = set()
    for index in sorted(range(len(found)), key=lambda index: _SEVERITIES.index(found[index].severity)):
        finding = found[index]
        fix = finding.fix
        if fix and finding.code == "needs-trust" and (command := convert_command(checkpoint)):
            fix = (*fix, WITHOUT_CODE, command)  # the way that needs no trust
        fix = tuple(_advice(fix, checkpoint, told))
        if fix != finding.fix:
            found[index] = replace(finding, fix=fix)
    return tuple(found)


def _advice(fix: tuple[str, ...], checkpoint: Checkpoint, told: set[str]) -> Iterator[str]:
    lines = iter(zip(fix, (*fix[1:], ""), strict=False))
    for line, following in lines:
        if following in _COMMANDS:
            command = _COMMANDS[following](checkpoint)
            next(lines)
            if command and command not in told:
                told.add(command)
                yield from (line, command)
        elif line not in told or not line.endswith("."):
            told.add(line)
            yield line


def command_lines(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The first command advised, with the sentence that leads to it."""
    for finding in findings:
        for at, line in enumerate(finding.fix):
            if line.startswith("$ "):
                return finding.fix[max(0, at - 1) : at + 1]
    return ()


def convert_command(checkpoint: Checkpoint) -> str:
    """The command that takes the tensors out of a pickle; empty for attacks, and where none is whole."""
    sound = checkpoint.integrity not in ("damaged", "not-a-checkpoint") and checkpoint.safety != "dangerous"
    return _convert(checkpoint) if sound and checkpoint.format in _CONVERTED and checkpoint.storages else ""


def _rescue(checkpoint: Checkpoint) -> str:
    """Empty for what a rescue does not take, for attacks, and where nothing is left to save."""
    if checkpoint.format not in RESCUED or checkpoint.safety == "dangerous":
        return ""
    whole = any(storage.nbytes and storage.stored >= storage.nbytes for storage in checkpoint.storages)
    if not checkpoint.storages:  # the index of an archive may be hurt, which has a checksum to repair it by
        whole = checkpoint.format in _ARCHIVES and any(record.name.endswith(".pkl") for record in checkpoint.records)
    formats = {checkpoint.format, *(dict(part.facts).get("format") for part in checkpoint.parts)}
    return rescue_command(checkpoint.path, ".safetensors" if "safetensors" in formats else ".pt") if whole else ""


def _convert(checkpoint: Checkpoint) -> str:
    """Into a file of the same name and the other ending."""
    if not is_named(checkpoint.path):
        return CONVERT
    stem, ending = os.path.splitext(checkpoint.path.rstrip("/"))  # noqa: PTH122 - pathlib is slow to import
    new = "NEW.safetensors" if ending == ".safetensors" else f"{stem}.safetensors"
    return f"$ transload convert {quoted(checkpoint.path)} {quoted(new)}"


_COMMANDS: dict[str, Callable[[Checkpoint], str]] = {RESCUE: _rescue, CONVERT: _convert}
_SHOWN = 10


class Rule(NamedTuple):
    """How a problem is judged: a title for a person, its severity, and the verdict it forces on each scale."""

    title: str
    severity: Severity
    safety: Safety = "data-only"
    integrity: Integrity = "whole"
    fix: tuple[str, ...] = ()


_REFUSE = ("Do not load it. No known program writes such a file by accident; get it again from its author.",)
_LEFT = ("If there is no other copy, this saves what is whole of it.", RESCUE)
_AGAIN = ("Download or copy the file again and compare its size and checksum with the original's.", *_LEFT)
_RESAVE = ("It loads as it is; saving it again with torch.save puts it right.",)
_RIGHT = ("This puts it right, in a new file.", RESCUE)
_LOADS = ("It loads as it is.", *_RIGHT)
_ANEW = ("This writes its tensors into a new file, as safetensors wants them.", CONVERT)
_SHARDS = ("Download the whole repository again: hf download REPOSITORY --local-dir DIR",)
_RANKS = ("Copy the missing files from the machine that wrote them, or use an earlier step.",)
_LEFT_OF_SHARDS = (*_SHARDS, *_LEFT)
_LEFT_OF_RANKS = (*_RANKS, *_LEFT)


def _attack(title: str) -> Rule:
    """Two readers would see two things; no program writes that by accident."""
    return Rule(title, "error", "dangerous", "damaged", _REFUSE)


def _damage(title: str, *fix: str) -> Rule:
    """Something is lost, and what it was is known to be data."""
    return Rule(title, "error", "data-only", "damaged", fix or _AGAIN)


def _loss(title: str, *fix: str) -> Rule:
    """Something is lost that may have been anything."""
    return Rule(title, "error", "unknown", "damaged", fix or _AGAIN)


def _flaw(title: str, *fix: str) -> Rule:
    """Nothing is lost that could not be put right."""
    return Rule(title, "error", "data-only", "repairable", fix or _AGAIN)


RULES: dict[str, Rule] = {
    # -- the container: two readers would see two files
    "zip-shifted": _attack("torch and zipfile would read different records"),
    "zip-two-ends": _attack("it has two ends, so two readings"),
    "zip-two-sizes": _attack("its end records contradict each other"),
    "zip-names-differ": _attack("a record has two names"),
    "zip-headers-differ": _attack("a record is described in two ways"),
    "zip-duplicate-name": _attack("a record name is used twice"),
    "zip-nul-name": _attack("a record name holds a NUL byte"),
    "zip-overlap": _attack("records share bytes"),
    "zip-directory-record": _attack("a record pretends to be a folder"),
    "zip-inside": Rule("it is two files in one", "error", "dangerous", fix=_REFUSE),
    "zip-odd-name": Rule("a record name leads outside its folder", "error", "dangerous", fix=_REFUSE),
    # -- the container: damage
    "zip-no-directory": _flaw("the archive's directory is missing"),
    "zip-misplaced": _loss("the archive's directory is not where it should be"),
    "zip-head-lost": _loss("its beginning is gone"),
    "zip-found-twice": _loss("a record was found twice"),
    "zip-walked": Rule("records were found without the directory", "note"),
    "zip-directory-broken": _loss("the archive's directory is damaged"),
    "zip-count": _loss("the archive miscounts its records"),
    "zip-multi-disk": _loss("the archive claims to be split"),
    "zip-unreadable-entry": _loss("a record is encrypted, or in another part of a split archive"),
    "zip-no-local-header": _loss("a record's header is gone"),
    "zip-no-descriptor": _damage("the end of a record is overwritten"),
    "zip-record-cut": _damage("a record is cut off"),
    "zip-one-reader": Rule("one of two zip readers refuses it", "warning", "data-only", "repairable", _LOADS),
    "zip-name-encoding": _flaw("a record name is not text", *_RESAVE),
    "zip-crc-differs": Rule("a record has two checksums", "warning", "data-only", "damaged", _AGAIN),
    "zip-trailing-bytes": Rule("bytes follow the archive's end", "warning", "data-only", "repairable", _LOADS),
    "zeros-at-end": _flaw(
        "the file ends in zeros", "The disk ran full, or a copy was interrupted: free space and copy it again.", *_LEFT
    ),
    "zip-no-folder": _flaw(
        "the archive lacks its top folder",
        "It was unpacked and zipped again without the folder that torch wants.",
        *_RIGHT,
    ),
    "zip-two-folders": _flaw(
        "the archive has records outside its folder",
        "It was zipped again by another program (macOS adds __MACOSX).",
        *_RIGHT,
    ),
    "zip-no-version": _flaw("the record `version` is missing"),
    "zip-bad-version": _flaw(
        "its format version is not one torch reads",
        "If a newer torch wrote it, upgrade torch; otherwise the file is damaged.",
    ),
    "zip-bad-byteorder": _damage("its byte order is not one there is"),
    "zip-bad-note": _flaw("a small record is not as torch writes it"),
    "zip-no-pickle": _loss("the index `data.pkl` is missing"),
    "zip-name-case": Rule("the index has its name in other letters", "warning", "needs-trust", "repairable", _RESAVE),
    "zip-compressed": Rule(
        "it was zipped again with compression",
        "warning",
        "data-only",
        "repairable",
        ("torch.load(..., mmap=True) would return wrong numbers: load it without mmap.", *_RIGHT),
    ),
    "record-unreadable": _loss("a record cannot be read"),
    "record-unseen": Rule("it holds more than was looked at", "warning", "unknown"),
    "record-unused": Rule("it holds storages nobody uses", "note"),
    "record-foreign": Rule("it holds records that torch.load does not read", "note"),
    # -- the pickle
    "pickle-unreadable": _loss("a pickle in it cannot be read whole"),
    "pickle-broken": _loss("a pickle in it breaks off"),
    "pickle-trailing-bytes": Rule("there are bytes after a pickle's end", "warning", "unknown", "repairable", _AGAIN),
    "pickle-ambiguous": _attack("loaders would read a pickle in it differently"),
    "pickle-irregular": _loss("a pickle in it is as no program writes one"),
    "pickle-python2-bytes": Rule(
        "it holds bytes that Python 2 wrote as text",
        "warning",
        fix=("Load it with torch.load(path, encoding='latin1').",),
    ),
    "pickle-odd-id": _loss("a pickle in it refers to what no torch file has"),
    # -- tensors and storages
    "storage-missing": _damage("the bytes of a storage are not in the file"),
    "storage-empty-missing": _flaw("an empty storage is missing"),
    "storage-size": _damage("a storage is not as long as the index says"),
    "storage-cut": _damage("a storage is cut off"),
    "storage-size-absurd": _loss("a storage claims an impossible size"),
    "storage-malformed": _loss("a storage is described wrongly"),
    "storage-conflict": _loss("a storage is described in two ways"),
    "tensor-broken": _loss("a tensor cannot be what it says it is"),
    "sparse-outside": _loss(
        "a sparse tensor has indices outside of itself",
        "No release of torch writes that, not all look for it, and using it crashes. Get the file again.",
    ),
    "tensor-unloadable": _flaw(
        "torch wrote a tensor that it cannot load",
        "Save it without gradients (tensor.detach()), or as a torch.nn.Parameter.",
    ),
    "storage-skipped": _damage(
        "the numbers of a storage were never written",
        "It was saved under torch.serialization.skip_data: fill the tensors yourself, or save it again without.",
    ),
    "tree-too-deep": Rule("its objects are nested too deeply", "error", "unknown"),
    "tree-too-large": Rule("it names more objects than its size can justify", "error", "unknown"),
    "leaves-uncounted": Rule("not every value is listed", "note"),
    "crc-mismatch": _damage(
        "the bytes are not those that were saved",
        "torch loads it without a word, with wrong numbers. Copy the file again from its source.",
        "If there is no other copy, this undoes what the checksums prove, and saves what is whole.",
        RESCUE,
    ),
    # -- the older formats
    "legacy-odd-magic": _attack("its magic number is spelt oddly"),
    "legacy-cut": _loss("the file is cut off before its storages"),
    "legacy-bad-protocol": _damage("its protocol version is not one torch reads"),
    "legacy-unknown-key": _damage("its storage list names a storage nobody uses"),
    "legacy-unlisted": _loss(
        "a storage is missing, and torch would invent its content",
        "torch.load fills it with whatever lies in memory, without an error. Get the file again.",
        *_LEFT,
    ),
    "legacy-untyped": _flaw(
        "it holds dtypes that torch cannot read in this format",
        "torch.save wrote it with _use_new_zipfile_serialization=False: save it again without.",
    ),
    "legacy-trailing-bytes": Rule("bytes follow the last storage", "warning", "data-only", "repairable", _LOADS),
    "tar-cut": _damage("the archive is cut off"),
    "tar-ambiguous": _attack("readers would find other members in it"),
    "tar-broken": _loss("a part of the archive is damaged"),
    # -- safetensors
    "safetensors-header-too-large": _damage("its header claims more than safetensors allows"),
    "safetensors-header-cut": _damage("the file ends inside its header"),
    "safetensors-header-invalid": _damage("its header cannot be read"),
    "safetensors-entry-invalid": _damage("a tensor's entry in the header makes no sense"),
    "safetensors-size-mismatch": _damage("a tensor's bytes do not fit its shape"),
    "safetensors-dtype-unknown": _damage(
        "a tensor has a dtype safetensors does not know", "A newer safetensors may know it: pip install -U safetensors"
    ),
    "safetensors-dtype-not-in-torch": Rule(
        "torch has no dtype for some tensors", "warning", fix=("Read them with the library that wrote them.",)
    ),
    "safetensors-metadata-invalid": _flaw("its __metadata__ is not text", *_ANEW),
    "safetensors-duplicate-key": _loss("a name stands twice in its header: readers may differ"),
    "safetensors-overlap": _damage("tensors share bytes, which safetensors forbids"),
    "safetensors-hole": _flaw("some bytes belong to no tensor; safetensors refuses the file", *_ANEW),
    "safetensors-trailing": _flaw("there are bytes after the last tensor; safetensors refuses the file", *_RIGHT),
    "safetensors-truncated": _damage("the file is cut short"),
    "safetensors-odd-header": Rule("its header is written as no known program does", "note"),
    # -- shards and directories
    "index-invalid": _loss("the index of the shards cannot be used", *_SHARDS),
    "index-missing": Rule("the shards have no index to compare with", "warning", fix=_SHARDS),
    "index-total-size": Rule("the index gives another total size", "warning"),
    "shard-missing": _damage("a shard is missing", *_LEFT_OF_SHARDS),
    "shard-outside": _attack("the index names a file outside the directory"),
    "shard-tensor-missing": _damage("tensors are missing from their shard", *_LEFT_OF_SHARDS),
    "shard-tensor-unlisted": Rule("shards hold tensors that the index does not know", "warning"),
    "shard-tensor-twice": Rule("a tensor stands in two shards", "warning", "data-only", "damaged", _SHARDS),
    "shard-stray": Rule(
        "shards of another save lie beside it", "warning", fix=("Remove the files of the older save.",)
    ),
    "part-unreadable": _loss("a file of the checkpoint cannot be read", *_LEFT_OF_SHARDS),
    "dcp-metadata-missing": _loss(
        ".metadata is missing: the save never finished",
        "Use an earlier checkpoint, or copy .metadata from where it was saved.",
    ),
    "dcp-metadata-too-large": Rule(
        ".metadata is too large to read", "error", "unknown", fix=("Check where the directory comes from.",)
    ),
    "dcp-metadata-invalid": _loss(".metadata does not describe a checkpoint", *_RANKS),
    "dcp-path-outside": _attack(".metadata names a file outside the directory"),
    "dcp-file-missing": _loss("a rank's file is missing", *_LEFT_OF_RANKS),
    "dcp-file-cut": _loss("a rank's file is cut short", *_LEFT_OF_RANKS),
    "dcp-items-overlap": _loss("entries of a rank's file share bytes; they were not read", *_REFUSE),
    "dcp-items-unread": Rule("there are too many entries to read them all", "warning", "unknown"),
    "dcp-transformed": Rule("entries are packed in a form that is not read here", "warning", "unknown"),
    "dcp-piece-missing": _damage("a tensor lacks some of its pieces", *_LEFT_OF_RANKS),
    "dcp-piece-mismatch": _damage("a piece is not what .metadata says", *_LEFT_OF_RANKS),
    "rank-missing": _damage("some ranks' files are missing", *_RANKS),
    "latest-missing": _damage("the step it calls the latest is not here", *_RANKS),
    "directory-unknown": Rule(
        "not a checkpoint directory of any known kind",
        "error",
        "unknown",
        "not-a-checkpoint",
        ("Name one of the files in it.",),
    ),
    "directory-others": Rule("other checkpoints lie beside it; what they would run is judged with it", "note"),
    "directory-others-unread": Rule(
        "too many other checkpoints lie beside it to read them all",
        "warning",
        "unknown",
        fix=("Inspect the files themselves before anything loads them.",),
    ),
    "directory-too-long": Rule("the directory has too many entries to look at them all", "warning", "unknown"),
    "directory-unreadable": Rule(
        "a folder cannot be listed", "warning", "unknown", fix=("Ask its owner for read permission.",)
    ),
    "link-dangling": Rule("links in the directory lead nowhere", "warning", fix=_SHARDS),
    # -- programs
    "script-device": Rule(
        "its code names devices, which map_location does not change",
        "note",
        fix=("Trace or script the model again on the device you want; map_location moves only its tensors.",),
    ),
    "script-dangerous-op": Rule(
        "its program reaches for files or other machines",
        "error",
        "dangerous",
        fix=("Do not load it: torch.jit.load can already run this. Ask its author for a state dict.",),
    ),
    "script-no-code": Rule(
        "torch takes it for a TorchScript program, and it holds no code",
        "error",
        "unknown",
        "repairable",
        ("Remove the record constants.pkl with `zip -d` if it was a torch.save file.",),
    ),
    "export-device": Rule(
        "its graph names devices, which .to() does not change",
        "note",
        fix=("Use torch.export.passes.move_to_device_pass(program, device).",),
    ),
    "export-dangerous-op": Rule("its graph calls what no exporter writes", "error", "dangerous", fix=_REFUSE),
    "export-no-bytes": Rule(
        "some of its tensors have no bytes, and load as zeros",
        "warning",
        fix=("It was exported without its weights: load a state dict into it.",),
    ),
    "export-no-program": _loss("a program or its weights are missing"),
    "json-broken": _loss("a table in it cannot be read"),
    "aoti-architecture": Rule(
        "it runs only on GPUs of one architecture", "note", fix=("Compile it again on the GPU that it must run on.",)
    ),
    "link-outside": Rule(
        "a link in the directory leads elsewhere and was not followed",
        "warning",
        "unknown",
        "damaged",
        ("Copy the files themselves: cp -rL.",),
    ),
    # -- no checkpoint of torch.save, and none at all
    "plain-pickle": Rule(
        "a plain pickle with tensors in it, which torch.load does not read",
        "note",
        fix=("transload.load reads it. This writes its tensors into a file that other programs read.", CONVERT),
    ),
    "not-a-checkpoint": Rule("this is not a checkpoint", "error", "unknown", "not-a-checkpoint"),
    "no-checksums": Rule("it carries no checksums", "note"),
}


# Problems that say nothing once another is told.
_EXPLAINS = {
    "zip-unreadable-entry": frozenset(
        {
            *("crc-mismatch", "pickle-broken", "pickle-unreadable", "record-unreadable", "record-unseen"),
            *(
                "record-unused",
                "zip-bad-byteorder",
                "zip-bad-note",
                "zip-bad-version",
                "zip-compressed",
                "zip-no-version",
            ),
        }
    ),
    "zip-no-directory": frozenset({"zip-no-version", "zip-walked"}),
    "not-a-checkpoint": frozenset({"zip-no-folder", "zip-two-folders"}),
}


def judge_problems(problems: tuple[Problem, ...]) -> tuple[Safety, tuple[Finding, ...]]:
    """The worst safety that the problems force, and one finding for each kind of problem."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.code, []).append(problem)
    rules = {code: rule_of(code) for code in groups}
    # One accident, one finding; the verdict counts all.
    told = {effect for cause, effects in _EXPLAINS.items() if cause in groups for effect in effects}
    findings = []
    for code, group in groups.items():
        if code in told:
            continue
        evidence = []
        for problem in group[:_SHOWN]:
            where = f"{problem.where}: " if problem.where else ""
            evidence += [f"{where}{line}" for line in problem.detail.split("\n") if line]
        if len(group) > _SHOWN:
            evidence.append(f"… and {len(group) - _SHOWN} more")
        title, fix = group[0].title or rules[code].title, group[0].fix or rules[code].fix
        findings.append(Finding(code, rules[code].severity, title, tuple(evidence), fix))
    return worst_safety(*(rule.safety for rule in rules.values())), tuple(findings)


def rule_of(code: str) -> Rule:
    """The rule for a code. A problem nobody has judged yet is never a good sign."""
    return RULES.get(code) or Rule(code.replace("-", " "), "error", "unknown", "damaged")


# -- whether a file is too damaged to be loaded or converted

# Damage that torch.load does not notice either, and that leaves every tensor what it is, or is told in a warning.
_TOLD = frozenset({"storage-skipped"})
_HARMLESS = frozenset({"link-outside"})
# What could be repaired and is not whole as it is.
_NOT_WHOLE = frozenset({"zip-no-directory", "zeros-at-end", "zip-bad-version"})


def refuse_broken(checkpoint: Checkpoint) -> None:
    """Raise if the file is not a checkpoint, or so damaged that tensors would be lost or wrong."""
    if checkpoint.integrity == "not-a-checkpoint":
        finding = _worst(checkpoint, {"not-a-checkpoint"})
        folder = os.path.isdir(checkpoint.path)  # noqa: PTH112 - pathlib costs ten milliseconds to import
        raise (NotACheckpointDirectoryError if folder else NotACheckpointError)(
            sentence_of(finding, "this is not a checkpoint"), where=checkpoint.path, fix=_fix(checkpoint, finding)
        )
    broken = set()
    for code in codes_of(checkpoint) - _TOLD:
        rule = rule_of(code)
        damaged = rule.severity == "error" and rule.integrity in ("damaged", "not-a-checkpoint")
        if code in _NOT_WHOLE or (damaged and code not in _HARMLESS):
            broken.add(code)
    if broken:
        finding = _worst(checkpoint, broken)
        raise BrokenFileError(
            sentence_of(finding, "it is damaged"), where=checkpoint.path, fix=_fix(checkpoint, finding)
        )


def codes_of(checkpoint: Checkpoint) -> set[str]:
    """The problems that count. torch writes the magic number in the protocol it was asked for."""
    codes = {problem.code for problem in checkpoint.problems}
    first = checkpoint.pickles[0] if checkpoint.pickles else None
    if first and not (first.globals or first.calls or first.persistent or first.irregular or first.ambiguous):
        codes.discard("legacy-odd-magic")  # a number, and nothing that is called
    return codes


def worth_a_warning(checkpoint: Checkpoint) -> str:
    """What is wrong with a file that is loaded all the same; empty if nothing is."""
    found = [finding for finding in checkpoint.findings if finding.code in _TOLD]
    return "; ".join(sentence_of(finding) for finding in found)


def _worst(checkpoint: Checkpoint, codes: set[str]) -> Finding | None:
    """The finding to tell: one of these codes, else the first error there is."""
    named = [finding for finding in checkpoint.findings if finding.code in codes]
    return next(iter([*named, *(f for f in checkpoint.findings if f.severity == "error")]), None)


def sentence_of(finding: Finding | None, otherwise: str = "") -> str:
    """A finding in one sentence."""
    if finding is None:
        return otherwise
    return f"{finding.title}: {'; '.join(finding.evidence)}" if finding.evidence else finding.title


def _fix(checkpoint: Checkpoint, finding: Finding | None) -> str:
    """What the finding advises, and the command for the file, which another one may have told already."""
    own = finding.fix if finding else ()
    if any(line.startswith("$ ") for line in own):
        return "\n".join(own)
    errors = tuple(f for f in checkpoint.findings if f.severity == "error")
    first = own or next((f.fix for f in errors if f.fix), ())
    return "\n".join(dict.fromkeys((*first, *command_lines(errors))))
