"""What each problem a reader can meet means: for safety, for integrity, and for the person who has it."""

from __future__ import annotations

from typing import NamedTuple

from transload.findings import Finding, Integrity, Problem, Safety, Severity

__all__ = ["RULES", "Rule", "judge_problems"]

_SHOWN = 10


class Rule(NamedTuple):
    """How a problem is judged: a title for a person, its severity, and the verdict it forces on each scale."""

    title: str
    severity: Severity
    safety: Safety = "data-only"
    integrity: Integrity = "whole"
    fix: tuple[str, ...] = ()


_REFUSE = ("Do not load it. No known program writes such a file by accident; get it again from its author.",)
_AGAIN = ("Download or copy the file again and compare its size and checksum with the original's.",)
_RESAVE = ("It loads as it is; saving it again with torch.save puts it right.",)

RULES: dict[str, Rule] = {
    # -- the container: two readers would see two files
    "zip-shifted": Rule("torch and zipfile would read different records from it", "error", "dangerous", "damaged", _REFUSE),
    "zip-two-ends": Rule("it has two ends, so two readings", "error", "dangerous", "damaged", _REFUSE),
    "zip-two-sizes": Rule("its end records contradict each other", "error", "dangerous", "damaged", _REFUSE),
    "zip-names-differ": Rule("a record has two names", "error", "dangerous", "damaged", _REFUSE),
    "zip-headers-differ": Rule("a record is described in two ways", "error", "dangerous", "damaged", _REFUSE),
    "zip-duplicate-name": Rule("a record name is used twice", "error", "dangerous", "damaged", _REFUSE),
    "zip-nul-name": Rule("a record name holds a NUL byte", "error", "dangerous", "damaged", _REFUSE),
    "zip-overlap": Rule("records share bytes", "error", "dangerous", "damaged", _REFUSE),
    "zip-odd-name": Rule("a record name leads outside its folder", "error", "dangerous", "whole", _REFUSE),
    # -- the container: damage
    "zip-no-directory": Rule("the archive's directory is missing", "error", "data-only", "repairable", _AGAIN),
    "zip-walked": Rule("records were found without the directory", "note"),
    "zip-directory-broken": Rule("the archive's directory is damaged", "error", "unknown", "damaged", _AGAIN),
    "zip-count": Rule("the archive miscounts its records", "error", "unknown", "damaged", _AGAIN),
    "zip-multi-disk": Rule("the archive claims to be split", "error", "unknown", "damaged", _AGAIN),
    "zip-unreadable-entry": Rule("a record is encrypted", "error", "unknown", "damaged", _AGAIN),
    "zip-no-local-header": Rule("a record's header is gone", "error", "unknown", "damaged", _AGAIN),
    "zip-record-cut": Rule("a record is cut off", "error", "data-only", "damaged", _AGAIN),
    "zip-crc-differs": Rule("a record has two checksums", "warning", "data-only", "damaged", _AGAIN),
    "zip-trailing-bytes": Rule("there are bytes after the archive's end", "warning", "data-only", "repairable", _RESAVE),
    "zeros-at-end": Rule(
        "the file ends in zeros",
        "error",
        "data-only",
        "repairable",
        ("The disk ran full, or a copy was interrupted: free space and copy it again.",),
    ),
    "zip-no-folder": Rule(
        "the archive lacks its top folder",
        "error",
        "data-only",
        "repairable",
        ("It was unpacked and zipped again without the folder: zip the folder itself, stored, not its contents.",),
    ),
    "zip-two-folders": Rule(
        "the archive has records outside its folder",
        "error",
        "data-only",
        "repairable",
        ("It was zipped again by another program (macOS adds __MACOSX): remove the extra entries with `zip -d`.",),
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
    "zip-no-pickle": Rule("the index `data.pkl` is missing", "error", "unknown", "damaged", _AGAIN),
    "zip-name-case": Rule("the index has its name in other letters", "warning", "needs-trust", "repairable", _RESAVE),
    "zip-compressed": Rule(
        "it was zipped again with compression",
        "warning",
        "data-only",
        "repairable",
        ("torch.load(..., mmap=True) would return wrong numbers: load it without mmap, or save it again.",),
    ),
    "record-unreadable": Rule("a record cannot be read", "error", "unknown", "damaged", _AGAIN),
    "record-unused": Rule("it holds storages nobody uses", "note"),
    "record-foreign": Rule("it holds records that torch.load does not read", "note"),
    # -- the pickle
    "pickle-unreadable": Rule("a pickle in it cannot be read whole", "error", "unknown", "damaged", _AGAIN),
    "pickle-broken": Rule("a pickle in it breaks off", "error", "unknown", "damaged", _AGAIN),
    "pickle-trailing-bytes": Rule("there are bytes after a pickle's end", "warning", "unknown", "repairable", _AGAIN),
    "pickle-ambiguous": Rule("loaders would read a pickle in it differently", "error", "dangerous", "damaged", _REFUSE),
    "pickle-irregular": Rule("a pickle in it is written as no program writes one", "error", "unknown", "damaged", _AGAIN),
    "pickle-odd-id": Rule("a pickle in it refers to something no torch file has", "error", "unknown", "damaged", _AGAIN),
    # -- tensors and storages
    "storage-missing": Rule("the bytes of a storage are not in the file", "error", "data-only", "damaged", _AGAIN),
    "storage-size": Rule("a storage is not as long as the index says", "error", "data-only", "damaged", _AGAIN),
    "storage-cut": Rule("a storage is cut off", "error", "data-only", "damaged", _AGAIN),
    "storage-size-absurd": Rule("a storage claims an impossible size", "error", "unknown", "damaged", _AGAIN),
    "storage-malformed": Rule("a storage is described wrongly", "error", "unknown", "damaged", _AGAIN),
    "storage-conflict": Rule("a storage is described in two ways", "error", "unknown", "damaged", _AGAIN),
    "tensor-broken": Rule("a tensor cannot be what it says it is", "error", "unknown", "damaged", _AGAIN),
    "tree-too-deep": Rule("its objects are nested too deeply", "error", "unknown", "whole"),
    "tree-too-shared": Rule("its objects are shared without end", "error", "unknown", "whole"),
    "leaves-uncounted": Rule("not every value is listed", "note"),
    "crc-mismatch": Rule(
        "the bytes are not those that were saved",
        "error",
        "data-only",
        "damaged",
        ("torch loads it without a word, with wrong numbers. Copy the file again from its source.",),
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
        ("torch.load fills it with whatever lies in memory, without an error. Get the file again.",),
    ),
    "legacy-trailing-bytes": Rule("there are bytes after the last storage", "warning", "data-only", "repairable", _RESAVE),
    "tar-cut": Rule("the archive is cut off", "error", "data-only", "damaged", _AGAIN),
    "tar-broken": Rule("a part of the archive is damaged", "error", "unknown", "damaged", _AGAIN),
    # -- no checkpoint at all
    "not-a-checkpoint": Rule("this is no checkpoint", "error", "unknown", "not-a-checkpoint"),
    "no-checksums": Rule("it carries no checksums", "note"),
}


def judge_problems(problems: tuple[Problem, ...]) -> tuple[Safety, Integrity, tuple[Finding, ...]]:
    """The worst verdicts the problems force, and one finding for each kind of problem."""
    from transload.findings import worst_integrity, worst_safety

    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.code, []).append(problem)
    rules = [RULES[code] for code in groups]
    findings = tuple(_finding(code, RULES[code], group) for code, group in groups.items())
    safety = worst_safety(*(rule.safety for rule in rules))
    return safety, worst_integrity(*(rule.integrity for rule in rules)), findings


def _finding(code: str, rule: Rule, group: list[Problem]) -> Finding:
    lines = [line for problem in group[:_SHOWN] for line in _lines(problem)]
    if len(group) > _SHOWN:
        lines.append(f"… and {len(group) - _SHOWN} more")
    return Finding(code, rule.severity, group[0].title or rule.title, tuple(lines), group[0].fix or rule.fix)


def _lines(problem: Problem) -> list[str]:
    where = f"{problem.where}: " if problem.where else ""
    return [f"{where}{line}" for line in problem.detail.split("\n") if line]
