"""The device tags of a checkpoint, changed in place.

No tensor is touched, torch is not needed, the time it takes does not depend on the size of the file, and a crash at
any moment loses nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from transload.errors import UsageError
from transload.retagging.names import has_journal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transload.io.sources import FileSource
    from transload.retagging.result import Retag
    from transload.retagging.wish import Wish

__all__ = ["has_journal", "recover", "retag", "undo"]


def retag(  # noqa: PLR0913 - what a user may ask for
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
    from dataclasses import replace

    from transload.io.sources import FileSource
    from transload.retagging.guard import refuse_written_by_others
    from transload.retagging.wish import wish_of

    wish, path = wish_of(to), _path(path)
    target = _target(out)
    recovered = _ready(path, target, keep_undo=keep_undo, hard_links=hard_links)
    source = FileSource(path)
    try:
        if not target:
            refuse_written_by_others(source.descriptor, path)
        made = _retagged(source, wish, target, dry_run=dry_run, keep=keep_undo)
    finally:
        source.close()
    return replace(made, recovered=recovered)


def undo(path: str | os.PathLike[str], *, dry_run: bool = False) -> Retag:
    """Take back the last retag of a file: one that was interrupted, or for which ``keep_undo`` was asked.

    An error if nothing was kept, or the file was changed since.
    """
    from transload.retagging import applying
    from transload.retagging.guard import refuse_in_place
    from transload.retagging.result import Retag

    path = _path(path)
    refuse_in_place(path, hard_links=True)
    recovered = applying.recover(path, anywhere=True)
    if recovered == "stale":
        raise applying.stale_journal(path, tried=True)
    if recovered == "restored":
        return Retag(path, "", "", "undo", (), 0, 0, done=True, recovered=recovered)
    changes, seen = applying.undo_changes(path)
    if changes.runs and not dry_run:
        applying.apply(path, changes, seen)
    written, grown = sum(len(run.new) for run in changes.runs), changes.new_size - changes.old_size
    return Retag(path, "", "", "undo", (), written, grown, not dry_run, recovered=recovered)


def recover(path: str | os.PathLike[str]) -> str:
    """Put right what an interrupted retag has left of a file. Where nothing is wrong it costs a look at one name.

    ``restored``: the file is as it was before. ``finished``: it was changed already. ``stale``: beside it lies a
    journal that is not that of this file, and both are left alone. Empty: there was nothing to do.
    """
    if not has_journal(path):
        return ""
    from transload.retagging import applying

    return applying.recover(path)


def _path(path: object) -> str:
    if not isinstance(path, str | os.PathLike) or isinstance(name := os.fspath(path), bytes):
        raise UsageError(f"expected the path of a file, not {type(path).__name__}", fix="Save it to a file first.")
    return name


def _target(out: str | os.PathLike[str] | None) -> str:
    """Where a copy goes; nothing for a change in place, which nobody asks for by an empty name."""
    name = "" if out is None else _path(out)
    if out is not None and (not name or "\0" in name):
        raise UsageError(f"no file can have the name {name!r}", fix="Name the copy, or leave -o out.")
    return name


def _ready(path: str, out: str, *, keep_undo: bool, hard_links: bool) -> str:
    """Refuse what cannot be done, and put right what an earlier retag has left; what that was."""
    from transload.retagging.guard import refuse_in_place

    several = os.path.isdir(path) or path.endswith(".index.json")  # noqa: PTH112 - pathlib is slow to import
    if out:
        from transload.retagging.copying import refuse_target

        refuse_target(path, out)
        if keep_undo:
            raise UsageError("a copy needs no undo: the file itself stays as it is")
    elif not several:
        refuse_in_place(path, hard_links=hard_links)
    if several:
        from transload.formats import inspect
        from transload.retagging.refusals import refuse_file

        refuse_file(inspect(path))
    return _recovered(path)


def _recovered(path: str) -> str:
    outcome = recover(path)
    if outcome == "stale":
        from transload.retagging.applying import stale_journal

        raise stale_journal(path)
    return outcome


def _retagged(source: FileSource, wish: Wish, out: str, *, dry_run: bool, keep: bool) -> Retag:
    from transload.formats import no_collecting
    from transload.retagging.applying import apply
    from transload.retagging.plan import plan_of
    from transload.retagging.result import Retag

    with no_collecting():
        plan = plan_of(source, wish, copy=bool(out))
    changes, how = plan.changes, ""
    if out and not dry_run:
        from transload.retagging.copying import copy_changed

        how = copy_changed(source.descriptor, out, changes, plan.seen)
    elif changes.runs and not dry_run:
        apply(source.name, changes, plan.seen, keep=keep)
    return Retag(
        source.name,
        out,
        plan.format,
        plan.method,
        plan.tags,
        sum(len(run.new) for run in changes.runs),
        changes.new_size - changes.old_size,
        not dry_run,
        undo=keep and bool(changes.runs),
        how=how,
        warnings=plan.warnings,
    )
