"""``transload.retag``: change the device tags of a checkpoint in place.

No tensor is read or written, torch is not needed, the time does not depend on the size of the file, and a crash at any
moment loses nothing. ``plan`` reads the file and decides which bytes to change, with the places that ``tags`` finds in
its pickle; ``transload.io.journal`` changes the file, or ``copying`` writes a copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transload.devices import KINDS, near_kind
from transload.errors import ForbiddenWriteError, UsageError
from transload.frozen import facts
from transload.io.journal import has_journal

if TYPE_CHECKING:
    from transload.retagging.plan import TagChange

__all__ = ["OTHERS", "Retag", "TagMap", "has_journal", "recover", "retag", "tag_map_of", "undo"]


OTHERS = "*"
"""The key of a mapping that stands for every tag it does not name."""

_DEVICE = re.compile(r"[a-z][a-z_]*(?::(?:0|[1-9][0-9]{0,5}))?")
_SINGLE = ("cpu", "mps")
_NEVER = {
    "meta": "torch.load(path) would then give tensors without numbers",
    "xla": "torch restores no storage on xla: load with map_location='cpu' and move the tensors",
}


@facts(frozen=True)
class TagMap:
    """The new tags: ``named`` by old tag, and ``others`` for all that are not named, empty to keep those."""

    named: tuple[tuple[str, str], ...] = ()
    others: str = ""

    def new(self, tag: str) -> str:
        """The new tag for an old one. A storage on ``meta`` has no bytes, and stays there.

        >>> TagMap((("cuda:1", "cuda:0"),)).new("cuda:1"), TagMap(others="cpu").new("meta")
        ('cuda:0', 'meta')
        """
        for old, new in self.named:
            if tag == old:
                return new
        return self.others if self.others and tag != "meta" else tag


def tag_map_of(to: str | Mapping[str, str]) -> TagMap:
    """The new tags from a device, or from a mapping of tags to devices.

    >>> tag_map_of("cpu").new("cuda:3"), tag_map_of({"cuda:1": "cuda:0", "*": "cpu"}).new("cuda:2")
    ('cpu', 'cpu')
    """
    if isinstance(to, str):
        return TagMap(others=_device(to))
    if not isinstance(to, Mapping):
        raise UsageError(f"expected a device or a mapping of devices, not {type(to).__name__}")
    pairs = tuple((_tag(old), _device(new)) for old, new in to.items() if old != OTHERS)
    others = to.get(OTHERS, "")
    if not pairs and not others:
        raise UsageError("no device is named to change the tags to")
    return TagMap(pairs, _device(others) if others else "")


def _device(name: object) -> str:
    if not isinstance(name, str):
        name = str(name)  # a torch.device
    kind, colon, _ = name.partition(":")
    if kind in _NEVER:
        raise UsageError(f"{name!r} makes no sense as a tag: {_NEVER[kind]}")
    if kind in _SINGLE and colon:
        raise UsageError(f"torch does not read a tag {name!r}, only {kind!r}", fix=f"Write {kind}.")
    if not _DEVICE.fullmatch(name) or kind not in KINDS:
        near = near_kind(kind[:40])
        meant = f" Did you mean {near}{':0' if near == 'cuda' else ''}?" if near else ""
        raise UsageError(
            f"{name[:80]!r} is not a device", fix=f"Write it as torch does: cpu, cuda:0, mps, xpu:1.{meant}"
        )
    return name


def _tag(name: object) -> str:
    """A tag that a file may have: any text, since a wrong one may be the reason for the retag."""
    if not isinstance(name, str) or not name or name == "meta":
        raise UsageError(f"{name!r} is not a tag that can be changed")
    return name


@facts(frozen=True)
class Retag:
    """What was done to a file, or would be.

    ``method`` is ``none``, ``patch`` (as many bytes as before), ``append`` (a new index at the end of the archive),
    ``rewrite`` (into a copy) or ``undo``; ``tags`` are those in the file with what became of them. ``written`` counts
    bytes, ``grown`` by how many the file is longer. ``how`` is how a copy was made. ``recovered`` is what had to be
    done first about an earlier retag that was interrupted: ``restored`` or ``finished``.
    """

    path: str
    out: str
    format: str
    method: str
    tags: tuple[TagChange, ...]
    written: int
    grown: int
    done: bool
    undo: bool = False
    how: str = ""
    recovered: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any tag is another one than before."""
        return self.method != "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": 1,
            "path": self.path,
            "out": self.out or None,
            "format": self.format,
            "method": self.method,
            "done": self.done,
            "undo": self.undo,
            "written": self.written,
            "grown": self.grown,
            "how": self.how,
            "recovered": self.recovered,
            "tags": [tag.to_dict() for tag in self.tags],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        from transload.retagging.report import as_text

        return as_text(self)


def retag(
    path: str | os.PathLike[str],
    to: str | Mapping[str, str],
    *,
    out: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    keep_undo: bool = False,
    hard_links: bool = False,
) -> Retag:
    """Change the device tags of a checkpoint, so that plain ``torch.load(path)`` lands it elsewhere.

    ``to`` is the device for all tags, or a mapping from tags to devices, in which ``"*"`` stands for all that are not
    named. The file is changed in place, or copied to ``out`` with its new tags. ``dry_run`` only plans; ``keep_undo``
    keeps what ``undo`` needs; ``hard_links`` allows to change a file that has other names, too.

    >>> transload.retag("model.pt", "cpu")  # doctest: +SKIP
    >>> transload.retag("model.pt", {"cuda:1": "cuda:0"}, out="other.pt")  # doctest: +SKIP
    """
    from transload.formats import no_collecting
    from transload.io.journal import apply, refuse_written_by_others, stale_journal
    from transload.io.sources import FileSource
    from transload.retagging.copying import copy_changed
    from transload.retagging.plan import plan_of

    tags, path = tag_map_of(to), _path(path)
    target = "" if out is None else _path(out)
    if out is not None and (not target or "\0" in target):
        raise UsageError(f"no file can have the name {target!r}", fix="Name the copy, or leave -o out.")
    _refuse(path, target, keep_undo=keep_undo, hard_links=hard_links)
    recovered = recover(path)
    if recovered == "stale":
        raise stale_journal(path)
    source, how = FileSource(path), ""
    try:
        if not target:
            refuse_written_by_others(source.descriptor, path)
        with no_collecting():
            plan = plan_of(source, tags, copy=bool(target))
        changes = plan.changes
        if target and not dry_run:
            how = copy_changed(source.descriptor, target, changes, plan.seen)
        elif changes.runs and not dry_run:
            apply(source.name, changes, plan.seen, keep=keep_undo)
    except ForbiddenWriteError as error:
        if not target:
            error.fix = "Write a copy to a place where you may: -o COPY."
        raise
    finally:
        source.close()
    return Retag(
        source.name,
        target,
        plan.format,
        plan.method,
        plan.tags,
        sum(len(run.new) for run in changes.runs),
        changes.new_size - changes.old_size,
        not dry_run,
        undo=keep_undo and bool(changes.runs),
        how=how,
        recovered=recovered,
        warnings=plan.warnings,
    )


def _refuse(path: str, target: str, *, keep_undo: bool, hard_links: bool) -> None:
    """Refuse what cannot be done, as far as it is known before the file is read."""
    from transload.io.journal import refuse_in_place
    from transload.retagging.copying import refuse_target
    from transload.retagging.plan import refuse_file

    several = os.path.isdir(path) or path.endswith(".index.json")  # noqa: PTH112 - pathlib is slow to import
    if target:
        refuse_target(path, target)
        if keep_undo:
            raise UsageError("a copy needs no undo: the file itself stays as it is")
    elif not several:
        refuse_in_place(path, hard_links=hard_links)
    if several:
        from transload.judge import inspect

        refuse_file(inspect(path))


def undo(path: str | os.PathLike[str], *, dry_run: bool = False) -> Retag:
    """Take back the last retag of a file: one that was interrupted, or for which ``keep_undo`` was asked.

    An error if nothing was kept, or the file was changed since.
    """
    from transload.io import journal

    path = _path(path)
    journal.refuse_in_place(path, hard_links=True)
    recovered = journal.recover(path, anywhere=True)
    if recovered == "stale":
        raise journal.stale_journal(path, tried=True)
    if recovered == "restored":
        return Retag(path, "", "", "undo", (), 0, 0, done=True, recovered=recovered)
    changes, seen = journal.undo_changes(path)
    if changes.runs and not dry_run:
        journal.apply(path, changes, seen)
    written, grown = sum(len(run.new) for run in changes.runs), changes.new_size - changes.old_size
    return Retag(path, "", "", "undo", (), written, grown, not dry_run, recovered=recovered)


def recover(path: str | os.PathLike[str]) -> str:
    """Repair a file that an interrupted retag has left half changed. Otherwise it costs the look for one name.

    ``restored``: the file is as it was before. ``finished``: it was changed already. ``stale``: there is a journal, but
    of another file, and both are left alone. Empty: there was nothing to do.
    """
    if not has_journal(path):
        return ""
    from transload.io import journal

    return journal.recover(path)


def _path(path: object) -> str:
    if not isinstance(path, str | os.PathLike) or isinstance(name := os.fspath(path), bytes):
        raise UsageError(f"expected the path of a file, not {type(path).__name__}", fix="Save it to a file first.")
    return name
