"""What each problem a reader can meet means: for safety, for integrity, and for the person who has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from transload.checkpoint import Checkpoint
from transload.errors import BrokenFileError, NotACheckpointError
from transload.findings import Finding, Integrity, Problem, Safety, Severity

__all__ = [
    "CONVERT",
    "RESCUE",
    "RESCUED",
    "RULES",
    "SETS",
    "WITHOUT_CODE",
    "Rule",
    "codes_of",
    "command_lines",
    "convert_command",
    "judge_problems",
    "refuse_broken",
    "rule_of",
    "sentence_of",
    "with_commands",
    "worth_a_warning",
]


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

_CONVERTED = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torch-directory", "torchscript"})


def with_commands(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """The findings with real commands in their advice. What was advised once, in the order of reading, is not repeated.

    A command that would find nothing to do is left out, with the sentence before it.
    """
    found = tuple(_without_code(checkpoint, f) if f.code == "needs-trust" else f for f in checkpoint.findings)
    told: set[str] = set()
    advice = {
        index: tuple(_advice(found[index].fix, checkpoint, told))
        for index in sorted(range(len(found)), key=lambda index: _SEVERITIES.index(found[index].severity))
    }
    return tuple(f if f.fix == advice[index] else replace(f, fix=advice[index]) for index, f in enumerate(found))


def _without_code(checkpoint: Checkpoint, finding: Finding) -> Finding:
    """With the way that needs no trust: the tensors, without what the names stand for."""
    command = convert_command(checkpoint) if finding.fix else ""
    return replace(finding, fix=(*finding.fix, WITHOUT_CODE, command)) if command else finding


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
    if checkpoint.format not in RESCUED or checkpoint.safety == "dangerous" or not _is_something_left(checkpoint):
        return ""
    from transload.findings import rescue_command

    formats = {checkpoint.format, *(dict(part.facts).get("format") for part in checkpoint.parts)}
    return rescue_command(checkpoint.path, ".safetensors" if "safetensors" in formats else ".pt")


def _is_something_left(checkpoint: Checkpoint) -> bool:
    """Whether a storage is whole; or the index of an archive is hurt, which has a checksum to repair it by."""
    if not checkpoint.storages:
        return checkpoint.format in _ARCHIVES and any(record.name.endswith(".pkl") for record in checkpoint.records)
    return any(storage.nbytes and storage.stored >= storage.nbytes for storage in checkpoint.storages)


def _convert(checkpoint: Checkpoint) -> str:
    """Into a file of the same name and the other ending."""
    from transload.findings import is_named, quoted

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

RULES: dict[str, Rule] = {
    # -- the container: two readers would see two files
    "zip-shifted": Rule("torch and zipfile would read different records", "error", "dangerous", "damaged", _REFUSE),
    "zip-two-ends": Rule("it has two ends, so two readings", "error", "dangerous", "damaged", _REFUSE),
    "zip-two-sizes": Rule("its end records contradict each other", "error", "dangerous", "damaged", _REFUSE),
    "zip-names-differ": Rule("a record has two names", "error", "dangerous", "damaged", _REFUSE),
    "zip-headers-differ": Rule("a record is described in two ways", "error", "dangerous", "damaged", _REFUSE),
    "zip-duplicate-name": Rule("a record name is used twice", "error", "dangerous", "damaged", _REFUSE),
    "zip-nul-name": Rule("a record name holds a NUL byte", "error", "dangerous", "damaged", _REFUSE),
    "zip-overlap": Rule("records share bytes", "error", "dangerous", "damaged", _REFUSE),
    "zip-directory-record": Rule("a record pretends to be a folder", "error", "dangerous", "damaged", _REFUSE),
    "zip-inside": Rule("it is two files in one", "error", "dangerous", "whole", _REFUSE),
    "zip-odd-name": Rule("a record name leads outside its folder", "error", "dangerous", "whole", _REFUSE),
    # -- the container: damage
    "zip-no-directory": Rule("the archive's directory is missing", "error", "data-only", "repairable", _AGAIN),
    "zip-misplaced": Rule("the archive's directory is not where it should be", "error", "unknown", "damaged", _AGAIN),
    "zip-head-lost": Rule("its beginning is gone", "error", "unknown", "damaged", _AGAIN),
    "zip-found-twice": Rule("a record was found twice", "error", "unknown", "damaged", _AGAIN),
    "zip-walked": Rule("records were found without the directory", "note"),
    "zip-directory-broken": Rule("the archive's directory is damaged", "error", "unknown", "damaged", _AGAIN),
    "zip-count": Rule("the archive miscounts its records", "error", "unknown", "damaged", _AGAIN),
    "zip-multi-disk": Rule("the archive claims to be split", "error", "unknown", "damaged", _AGAIN),
    "zip-unreadable-entry": Rule("a record is encrypted", "error", "unknown", "damaged", _AGAIN),
    "zip-no-local-header": Rule("a record's header is gone", "error", "unknown", "damaged", _AGAIN),
    "zip-no-descriptor": Rule("the end of a record is overwritten", "error", "data-only", "damaged", _AGAIN),
    "zip-record-cut": Rule("a record is cut off", "error", "data-only", "damaged", _AGAIN),
    "zip-one-reader": Rule("one of two zip readers refuses it", "warning", "data-only", "repairable", _LOADS),
    "zip-name-encoding": Rule("a record name is not text", "error", "data-only", "repairable", _RESAVE),
    "zip-crc-differs": Rule("a record has two checksums", "warning", "data-only", "damaged", _AGAIN),
    "zip-trailing-bytes": Rule("bytes follow the archive's end", "warning", "data-only", "repairable", _LOADS),
    "zeros-at-end": Rule(
        "the file ends in zeros",
        "error",
        "data-only",
        "repairable",
        ("The disk ran full, or a copy was interrupted: free space and copy it again.", *_LEFT),
    ),
    "zip-no-folder": Rule(
        "the archive lacks its top folder",
        "error",
        "data-only",
        "repairable",
        ("It was unpacked and zipped again without the folder that torch wants.", *_RIGHT),
    ),
    "zip-two-folders": Rule(
        "the archive has records outside its folder",
        "error",
        "data-only",
        "repairable",
        ("It was zipped again by another program (macOS adds __MACOSX).", *_RIGHT),
    ),
    "zip-no-version": Rule("the record `version` is missing", "error", "data-only", "repairable", _AGAIN),
    "zip-bad-version": Rule(
        "its format version is not one torch reads",
        "error",
        "data-only",
        "repairable",
        ("If a newer torch wrote it, upgrade torch; otherwise the file is damaged.",),
    ),
    "zip-bad-byteorder": Rule("its byte order is not one there is", "error", "data-only", "damaged", _AGAIN),
    "zip-bad-note": Rule("a small record is not as torch writes it", "error", "data-only", "repairable", _AGAIN),
    "zip-no-pickle": Rule("the index `data.pkl` is missing", "error", "unknown", "damaged", _AGAIN),
    "zip-name-case": Rule("the index has its name in other letters", "warning", "needs-trust", "repairable", _RESAVE),
    "zip-compressed": Rule(
        "it was zipped again with compression",
        "warning",
        "data-only",
        "repairable",
        ("torch.load(..., mmap=True) would return wrong numbers: load it without mmap.", *_RIGHT),
    ),
    "record-unreadable": Rule("a record cannot be read", "error", "unknown", "damaged", _AGAIN),
    "record-unseen": Rule("it holds more than was looked at", "warning", "unknown", "whole"),
    "record-unused": Rule("it holds storages nobody uses", "note"),
    "record-foreign": Rule("it holds records that torch.load does not read", "note"),
    # -- the pickle
    "pickle-unreadable": Rule("a pickle in it cannot be read whole", "error", "unknown", "damaged", _AGAIN),
    "pickle-broken": Rule("a pickle in it breaks off", "error", "unknown", "damaged", _AGAIN),
    "pickle-trailing-bytes": Rule("there are bytes after a pickle's end", "warning", "unknown", "repairable", _AGAIN),
    "pickle-ambiguous": Rule("loaders would read a pickle in it differently", "error", "dangerous", "damaged", _REFUSE),
    "pickle-irregular": Rule("a pickle in it is as no program writes one", "error", "unknown", "damaged", _AGAIN),
    "pickle-python2-bytes": Rule(
        "it holds bytes that Python 2 wrote as text",
        "warning",
        "data-only",
        "whole",
        ("Load it with torch.load(path, encoding='latin1').",),
    ),
    "pickle-odd-id": Rule("a pickle in it refers to what no torch file has", "error", "unknown", "damaged", _AGAIN),
    # -- tensors and storages
    "storage-missing": Rule("the bytes of a storage are not in the file", "error", "data-only", "damaged", _AGAIN),
    "storage-empty-missing": Rule("an empty storage is missing", "error", "data-only", "repairable", _AGAIN),
    "storage-size": Rule("a storage is not as long as the index says", "error", "data-only", "damaged", _AGAIN),
    "storage-cut": Rule("a storage is cut off", "error", "data-only", "damaged", _AGAIN),
    "storage-size-absurd": Rule("a storage claims an impossible size", "error", "unknown", "damaged", _AGAIN),
    "storage-malformed": Rule("a storage is described wrongly", "error", "unknown", "damaged", _AGAIN),
    "storage-conflict": Rule("a storage is described in two ways", "error", "unknown", "damaged", _AGAIN),
    "tensor-broken": Rule("a tensor cannot be what it says it is", "error", "unknown", "damaged", _AGAIN),
    "sparse-outside": Rule(
        "a sparse tensor has indices outside of itself",
        "error",
        "unknown",
        "damaged",
        ("No release of torch writes that, not all look for it, and using it crashes. Get the file again.",),
    ),
    "tensor-unloadable": Rule(
        "torch wrote a tensor that it cannot load",
        "error",
        "data-only",
        "repairable",
        ("Save it without gradients (tensor.detach()), or as a torch.nn.Parameter.",),
    ),
    "storage-skipped": Rule(
        "the numbers of a storage were never written",
        "error",
        "data-only",
        "damaged",
        ("It was saved under torch.serialization.skip_data: fill the tensors yourself, or save it again without.",),
    ),
    "tree-too-deep": Rule("its objects are nested too deeply", "error", "unknown", "whole"),
    "tree-too-large": Rule("it names more objects than its size can justify", "error", "unknown", "whole"),
    "leaves-uncounted": Rule("not every value is listed", "note"),
    "crc-mismatch": Rule(
        "the bytes are not those that were saved",
        "error",
        "data-only",
        "damaged",
        (
            "torch loads it without a word, with wrong numbers. Copy the file again from its source.",
            "If there is no other copy, this undoes what the checksums prove, and saves what is whole.",
            RESCUE,
        ),
    ),
    # -- the older formats
    "legacy-odd-magic": Rule("its magic number is spelt oddly", "error", "dangerous", "damaged", _REFUSE),
    "legacy-cut": Rule("the file is cut off before its storages", "error", "unknown", "damaged", _AGAIN),
    "legacy-bad-protocol": Rule("its protocol version is not one torch reads", "error", "data-only", "damaged", _AGAIN),
    "legacy-unknown-key": Rule("its storage list names a storage nobody uses", "error", "data-only", "damaged", _AGAIN),
    "legacy-unlisted": Rule(
        "a storage is missing, and torch would invent its content",
        "error",
        "unknown",
        "damaged",
        ("torch.load fills it with whatever lies in memory, without an error. Get the file again.", *_LEFT),
    ),
    "legacy-untyped": Rule(
        "it holds dtypes that torch cannot read in this format",
        "error",
        "data-only",
        "repairable",
        ("torch.save wrote it with _use_new_zipfile_serialization=False: save it again without.",),
    ),
    "legacy-trailing-bytes": Rule("bytes follow the last storage", "warning", "data-only", "repairable", _LOADS),
    "tar-cut": Rule("the archive is cut off", "error", "data-only", "damaged", _AGAIN),
    "tar-ambiguous": Rule("readers would find other members in it", "error", "dangerous", "damaged", _REFUSE),
    "tar-broken": Rule("a part of the archive is damaged", "error", "unknown", "damaged", _AGAIN),
    # -- safetensors
    "safetensors-header-too-large": Rule(
        "its header claims more than safetensors allows", "error", "data-only", "damaged", _AGAIN
    ),
    "safetensors-header-cut": Rule("the file ends inside its header", "error", "data-only", "damaged", _AGAIN),
    "safetensors-header-invalid": Rule("its header cannot be read", "error", "data-only", "damaged", _AGAIN),
    "safetensors-entry-invalid": Rule(
        "a tensor's entry in the header makes no sense", "error", "data-only", "damaged", _AGAIN
    ),
    "safetensors-size-mismatch": Rule("a tensor's bytes do not fit its shape", "error", "data-only", "damaged", _AGAIN),
    "safetensors-dtype-unknown": Rule(
        "a tensor has a dtype safetensors does not know",
        "error",
        "data-only",
        "damaged",
        ("A newer safetensors may know it: pip install -U safetensors",),
    ),
    "safetensors-dtype-not-in-torch": Rule(
        "torch has no dtype for some tensors",
        "warning",
        "data-only",
        "whole",
        ("Read them with the library that wrote them.",),
    ),
    "safetensors-metadata-invalid": Rule("its __metadata__ is not text", "error", "data-only", "repairable", _ANEW),
    "safetensors-duplicate-key": Rule(
        "a name stands twice in its header: readers may differ", "error", "unknown", "damaged", _AGAIN
    ),
    "safetensors-overlap": Rule(
        "tensors share bytes, which safetensors forbids", "error", "data-only", "damaged", _AGAIN
    ),
    "safetensors-hole": Rule(
        "some bytes belong to no tensor; safetensors refuses the file", "error", "data-only", "repairable", _ANEW
    ),
    "safetensors-trailing": Rule(
        "there are bytes after the last tensor; safetensors refuses the file",
        "error",
        "data-only",
        "repairable",
        _RIGHT,
    ),
    "safetensors-truncated": Rule("the file is cut short", "error", "data-only", "damaged", _AGAIN),
    "safetensors-odd-header": Rule("its header is written as no known program does", "note"),
    # -- shards and directories
    "index-invalid": Rule("the index of the shards cannot be used", "error", "unknown", "damaged", _SHARDS),
    "index-missing": Rule("the shards have no index to compare with", "warning", "data-only", "whole", _SHARDS),
    "index-total-size": Rule("the index gives another total size", "warning"),
    "shard-missing": Rule("a shard is missing", "error", "data-only", "damaged", _LEFT_OF_SHARDS),
    "shard-outside": Rule("the index names a file outside the directory", "error", "dangerous", "damaged", _REFUSE),
    "shard-tensor-missing": Rule(
        "tensors are missing from their shard", "error", "data-only", "damaged", _LEFT_OF_SHARDS
    ),
    "shard-tensor-unlisted": Rule("shards hold tensors that the index does not know", "warning"),
    "shard-tensor-twice": Rule("a tensor stands in two shards", "warning", "data-only", "damaged", _SHARDS),
    "shard-stray": Rule(
        "shards of another save lie beside it",
        "warning",
        "data-only",
        "whole",
        ("Remove the files of the older save.",),
    ),
    "part-unreadable": Rule("a file of the checkpoint cannot be read", "error", "unknown", "damaged", _LEFT_OF_SHARDS),
    "dcp-metadata-missing": Rule(
        ".metadata is missing: the save never finished",
        "error",
        "unknown",
        "damaged",
        ("Use an earlier checkpoint, or copy .metadata from where it was saved.",),
    ),
    "dcp-metadata-too-large": Rule(
        ".metadata is too large to read", "error", "unknown", "whole", ("Check where the directory comes from.",)
    ),
    "dcp-metadata-invalid": Rule(".metadata does not describe a checkpoint", "error", "unknown", "damaged", _RANKS),
    "dcp-path-outside": Rule(".metadata names a file outside the directory", "error", "dangerous", "damaged", _REFUSE),
    "dcp-file-missing": Rule("a rank's file is missing", "error", "unknown", "damaged", _LEFT_OF_RANKS),
    "dcp-file-cut": Rule("a rank's file is cut short", "error", "unknown", "damaged", _LEFT_OF_RANKS),
    "dcp-items-overlap": Rule(
        "entries of a rank's file share bytes; they were not read", "error", "unknown", "damaged", _REFUSE
    ),
    "dcp-items-unread": Rule("there are too many entries to read them all", "warning", "unknown"),
    "dcp-transformed": Rule("entries are packed in a form that is not read here", "warning", "unknown"),
    "dcp-piece-missing": Rule("a tensor lacks some of its pieces", "error", "data-only", "damaged", _LEFT_OF_RANKS),
    "dcp-piece-mismatch": Rule("a piece is not what .metadata says", "error", "data-only", "damaged", _LEFT_OF_RANKS),
    "rank-missing": Rule("some ranks' files are missing", "error", "data-only", "damaged", _RANKS),
    "latest-missing": Rule("the step it calls the latest is not here", "error", "data-only", "damaged", _RANKS),
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
        "whole",
        ("Inspect the files themselves before anything loads them.",),
    ),
    "directory-too-long": Rule("the directory has too many entries to look at them all", "warning", "unknown"),
    "directory-unreadable": Rule(
        "a folder cannot be listed", "warning", "unknown", "whole", ("Ask its owner for read permission.",)
    ),
    "link-dangling": Rule("links in the directory lead nowhere", "warning", "data-only", "whole", _SHARDS),
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
        "whole",
        ("Do not load it: torch.jit.load can already run this. Ask its author for a state dict.",),
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
    "export-dangerous-op": Rule("its graph calls what no exporter writes", "error", "dangerous", "whole", _REFUSE),
    "export-no-bytes": Rule(
        "some of its tensors have no bytes, and load as zeros",
        "warning",
        fix=("It was exported without its weights: load a state dict into it.",),
    ),
    "export-no-program": Rule("a program or its weights are missing", "error", "unknown", "damaged", _AGAIN),
    "json-broken": Rule("a table in it cannot be read", "error", "unknown", "damaged", _AGAIN),
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
    # -- no checkpoint at all
    "not-a-checkpoint": Rule("this is not a checkpoint", "error", "unknown", "not-a-checkpoint"),
    "no-checksums": Rule("it carries no checksums", "note"),
}


# Problems that say nothing once another is told.
_EXPLAINS = {
    "zip-no-directory": frozenset({"zip-no-version", "zip-walked"}),
    "not-a-checkpoint": frozenset({"zip-no-folder", "zip-two-folders"}),
}


def judge_problems(problems: tuple[Problem, ...]) -> tuple[Safety, Integrity, tuple[Finding, ...]]:
    """The worst verdicts the problems force, and one finding for each kind of problem."""
    from transload.findings import worst_integrity, worst_safety

    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.code, []).append(problem)
    rules = {code: rule_of(code) for code in groups}
    for cause, effects in _EXPLAINS.items():  # one accident, one finding; the verdicts count all
        if cause in groups:
            groups = {code: group for code, group in groups.items() if code not in effects}
    findings = tuple(_finding(code, rules[code], group) for code, group in groups.items())
    safety = worst_safety(*(rule.safety for rule in rules.values()))
    return safety, worst_integrity(*(rule.integrity for rule in rules.values())), findings


def rule_of(code: str) -> Rule:
    """The rule for a code. A problem nobody has judged yet is never a good sign."""
    return RULES.get(code) or Rule(code.replace("-", " "), "error", "unknown", "damaged")


def _finding(code: str, rule: Rule, group: list[Problem]) -> Finding:
    lines = [line for problem in group[:_SHOWN] for line in _lines(problem)]
    if len(group) > _SHOWN:
        lines.append(f"… and {len(group) - _SHOWN} more")
    return Finding(code, rule.severity, group[0].title or rule.title, tuple(lines), group[0].fix or rule.fix)


def _lines(problem: Problem) -> list[str]:
    where = f"{problem.where}: " if problem.where else ""
    return [f"{where}{line}" for line in problem.detail.split("\n") if line]


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
        raise NotACheckpointError(
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
