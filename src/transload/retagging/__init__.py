"""``transload.retag``: change the device tags of a checkpoint in place.

No tensor is read or written, torch is not needed, the time does not depend on the size of the file, and a crash at any
moment loses nothing. ``plan`` reads the file and decides which bytes to change, using the tags that ``tags`` finds in
its pickle; ``transload.io.journal`` changes the file, or writes a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transload.errors import ForbiddenWriteError, UsageError
from transload.formats import gc_paused
from transload.frozen import Frozen, Reported
from transload.io import journal
from transload.io.sources import FileSource
from transload.judge import inspect
from transload.render.lines import Block, Prose, Table, Words, as_text, heading, row
from transload.render.words import plural, printable, size
from transload.retagging.plan import TagChange, plan_of, refuse_file, tag_map_of


class Retag(Frozen, Reported):
    """What was done to a file, or would be.

    ``method`` is ``none``, ``patch`` (as many bytes as before), ``append`` (a new index at the end of the archive),
    ``rewrite`` (into a copy) or ``undo``; ``tags`` are the tags of the file, old and new. ``written`` counts bytes;
    ``grown`` is how many bytes longer the file is. ``how`` is how a copy was made. ``recovered`` is what was done first
    about an earlier retag that was interrupted: ``restored`` or ``finished``.
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
        """Whether any tag changes."""
        return self.method != "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("path", "out", "format", "method", "done", "undo", "written", "grown", "how", "recovered")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in names},
            "out": self.out or None,
            "tags": [tag.to_dict() for tag in self.tags],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        """The report as the command line gives it."""
        return as_text(report(self))


def retag(
    path: str | os.PathLike[str],
    to: str | Mapping[str, str],
    *,
    out: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    keep_undo: bool = False,
    hard_links: bool = False,
) -> Retag:
    """Change the device tags of a checkpoint, so that plain ``torch.load(path)`` loads it to another device.

    ``to`` is the device for all tags, or a mapping from tags to devices, in which ``"*"`` stands for all other tags.
    The file is changed in place, or copied to ``out`` with the new tags. ``dry_run`` only plans; ``keep_undo`` keeps
    what ``undo`` needs; ``hard_links`` also changes a file that has several names.

    >>> transload.retag("model.pt", "cpu")  # doctest: +SKIP
    >>> transload.retag("model.pt", {"cuda:1": "cuda:0"}, out="other.pt")  # doctest: +SKIP
    """
    tags, path = tag_map_of(to), _path(path)
    target = "" if out is None else _path(out)
    if out is not None and (not target or "\0" in target):
        raise UsageError(f"no file can have the name {target!r}", fix="Name the copy, or leave -o out.")
    several = os.path.isdir(path) or path.endswith(".index.json")  # noqa: PTH112 - pathlib is slow to import
    if target:
        journal.refuse_target(path, target)
        if keep_undo:
            raise UsageError("a copy needs no undo: the file itself stays as it is")
    elif not several:
        journal.refuse_in_place(path, hard_links=hard_links)
    if several:
        refuse_file(inspect(path), to if isinstance(to, str) else "cpu")
    recovered = journal.recover(path)
    if recovered == "stale":
        raise journal.stale_journal(path)
    source, how = FileSource(path), ""
    try:
        if not target:
            journal.refuse_written_by_others(source.descriptor, path)
        with gc_paused():
            plan = plan_of(source, tags, copy=bool(target))
        changes = plan.changes
        if target and not dry_run:
            how = journal.copy_changed(source.descriptor, target, changes, plan.seen)
        elif changes.runs and not dry_run:
            journal.apply(source.name, changes, plan.seen, keep=keep_undo)
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


def undo(path: str | os.PathLike[str], *, dry_run: bool = False) -> Retag:
    """Undo the last retag of a file: one that was interrupted, or made with ``keep_undo``.

    Raises an error if nothing was kept, or the file has changed since.
    """
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


def _path(path: object) -> str:
    if not isinstance(path, str | os.PathLike) or isinstance(name := os.fspath(path), bytes):
        raise UsageError(f"expected the path of a file, not {type(path).__name__}", fix="Save it to a file first.")
    return name


# -- the report

_TAGS = 32
_METHODS = {
    "none": "nothing: all tags are already as requested",
    "patch": "over the old tags, in the same number of bytes",
    "append": "a new index at the end of the archive",
    "rewrite": "a copy with a new index",
    "undo": "what was there before the last retag",
}
_RECOVERED = {
    "restored": "an earlier retag was interrupted: the file was restored first",
    "finished": "an earlier retag was interrupted after its last byte: it is complete",
}


def report(retag: Retag) -> Iterator[Block]:
    """Everything ``transload retag`` says."""
    yield Prose(((printable(retag.out or retag.path, None), "strong"),))
    if retag.recovered:
        yield row("before", _RECOVERED[retag.recovered], "trust")
    if retag.tags:
        yield Table([_tag(tag) for tag in retag.tags[:_TAGS]], right=(3, 4), dim=(1, 3, 4))
    if len(retag.tags) > _TAGS:
        yield row("", f"… and {len(retag.tags) - _TAGS:,} more tags", "dim")
    words = _METHODS[retag.method]
    if retag.written:
        words = f"{size(retag.written)}, {words}"
        if retag.grown:
            words += f", the file is {size(abs(retag.grown))} {'longer' if retag.grown > 0 else 'shorter'}"
    yield row("written" if retag.done else "would write", words, "" if retag.done else "trust")
    if retag.out:
        yield row("copy of", printable(retag.path, None) + (f", {retag.how}" if retag.how else ""))
    if retag.undo and retag.done:
        yield row("undo", "transload retag FILE --undo undoes it")
    for warning in retag.warnings:
        yield Prose(((printable(warning, None), ""),), lead=(("! ", "trust"),))


def several(results: Sequence[Retag], total: int) -> Iterator[Block]:
    """A table of several files; ``total`` includes those that failed."""
    rows: list[tuple[Words, ...]] = []
    for each in results:
        tags = [f"{tag.old} → {tag.new}" for tag in each.tags if tag.old != tag.new]
        more = f" and {len(tags) - 3} more" if len(tags) > 3 else ""
        words = ", ".join(map(printable, tags[:3])) + more or _METHODS[each.method]
        written = size(each.written) if each.done else f"would be {size(each.written)}"
        rows.append((printable(each.path), ((words, "" if tags else "dim"),), written))
    if results:
        yield Table(rows, right=(2,), titles=("file", "tags", "written"), indent=0)
    failed = f", {total - len(results):,} not retagged" if len(results) < total else ""
    changed = sum(each.changed for each in results)
    verb = "changed" if all(each.done for each in results) else "would change"
    yield from heading(f"{plural(total, 'file')}, {changed:,} {verb}{failed}")


def _tag(tag: TagChange) -> tuple[Words, ...]:
    amount = plural(tag.storages, "storage"), size(tag.nbytes)
    if tag.old == tag.new:
        return ((printable(tag.old), "dim"),), "", (("stays", "dim"),), *amount
    return printable(tag.old), "→", ((printable(tag.new), "good"),), *amount
