"""What a retag would do to a file: which tags change, and which bytes that takes. Made and proven before any write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transload.errors import RetagError
from transload.frozen import facts
from transload.retagging.archive import appended, overwritten
from transload.retagging.changes import Change, Changes
from transload.retagging.compare import same_but_tags
from transload.retagging.overlay import Overlay
from transload.retagging.quick_sites import find_quickly
from transload.retagging.refusals import data_pickle, refuse_file
from transload.retagging.sites import Found, find_sites, tag_of
from transload.retagging.stream import in_stream, patched, rewritten, spliced

if TYPE_CHECKING:
    from collections.abc import Callable

    from transload.checkpoint import Checkpoint, Storage
    from transload.io.sources import FileSource, Source
    from transload.nodes import Pickle
    from transload.retagging.wish import Wish

__all__ = ["Planned", "TagChange", "plan_of"]


@facts(frozen=True)
class TagChange:
    """One tag of a file, what becomes of it, and what bears it. The two are equal where it stays."""

    old: str
    new: str
    storages: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"old": self.old, "new": self.new, "storages": self.storages, "nbytes": self.nbytes}


@facts(frozen=True)
class Planned:
    """A plan.

    ``method`` is ``none`` (all tags are as wished), ``patch`` (the same number of bytes), ``append`` (a new index
    behind the records of an archive) or ``rewrite`` (only into a copy). ``seen`` is what the file was when it was read.
    """

    format: str
    method: str
    tags: tuple[TagChange, ...]
    changes: Changes
    warnings: tuple[str, ...]
    seen: os.stat_result


def plan_of(source: FileSource, wish: Wish, *, copy: bool) -> Planned:
    """Read a file and plan what to write, into a ``copy`` or in place; nothing is written.

    The plan is proven: the file as it would be is read by the same reader, and is the same but for the tags.
    """
    from transload.formats import read_source
    from transload.judge import judge

    seen = os.fstat(source.descriptor)
    checkpoint = judge(read_source(source))
    refuse_file(checkpoint)
    main = next(pickle for pickle in checkpoint.pickles if pickle.main)
    tags = _tags(checkpoint, main, wish)
    if all(tag.old == tag.new for tag in tags):
        method, changes = "none", Changes((), source.size, source.size)
    else:
        method, changes = _proven(_File(source, checkpoint, main, wish.new, copy))
    return Planned(checkpoint.format, method, tags, changes, (*_absent(wish, tags), *_warnings(checkpoint)), seen)


def _tags(checkpoint: Checkpoint, main: Pickle, wish: Wish) -> tuple[TagChange, ...]:
    """The tags in the file, most bytes first."""
    held: dict[str, list[int]] = {tag: [0, 0] for node in main.persistent if (tag := tag_of(node)) is not None}
    for storage in checkpoint.storages:
        count = held.setdefault(storage.device, [0, 0])
        count[0] += 1
        count[1] += storage.nbytes
    tags = (TagChange(tag, wish.new(tag), *count) for tag, count in held.items())
    return tuple(sorted(tags, key=lambda tag: (-tag.nbytes, tag.old)))


@facts(frozen=True)
class _File:
    """A file that was read, and what it shall become."""

    source: Source
    checkpoint: Checkpoint
    main: Pickle
    renamed: Callable[[str], str]
    copy: bool

    @property
    def is_zip(self) -> bool:
        return self.checkpoint.format == "torch-zip"


def _proven(file: _File) -> tuple[str, Changes]:
    """How to change the file, and what that changes; by the quick road to its tags if that is proven right."""
    offset, data = _stream(file)
    for find in (find_quickly, _found):
        found = find(file.main, data, file.renamed)
        if found is not None:
            method, changes = _changes(file, found, offset, data)
            if _is_right(file, changes):
                return method, changes
    what = "its storages are not named as torch names them"
    raise RetagError(what, where=file.source.name, fix="Load it with transload.load and save it again.")


def _found(main: Pickle, data: bytes, renamed: Callable[[str], str]) -> Found | None:
    found = find_sites(main, data)
    unclear = any(renamed(tag_of(node) or "") != tag_of(node) for node in found.unclear)
    return None if unclear else found


def _stream(file: _File) -> tuple[int, bytes]:
    """Where the pickle lies that names the storages, and its bytes."""
    if file.is_zip:
        record = data_pickle(file.checkpoint)
        offset, size = record.offset or 0, record.size
    else:
        magic, version, machine, main = file.checkpoint.pickles[:4]
        offset, size = magic.end + version.end + machine.end, main.end
    return offset, file.source.read(offset, size)


def _changes(file: _File, found: Found, offset: int, data: bytes) -> tuple[str, Changes]:
    source = file.source
    edits = patched(file.main, data, found, file.renamed)
    if edits is not None:
        if file.is_zip:
            return "patch", overwritten(source, data_pickle(file.checkpoint), data, edits)
        return "patch", Changes(tuple(in_stream(data, edits, offset)), source.size, source.size)
    new = spliced(data, rewritten(file.main, data, found, file.renamed))
    if file.is_zip:
        return "append", appended(source, data_pickle(file.checkpoint), new)
    if not file.copy:
        raise RetagError(
            "the new tags do not fit into the place of the old ones, and the legacy format has no other",
            where=source.name,
            fix="Write a copy: -o COPY.",
        )
    return "rewrite", Changes((Change(offset, data, new),), source.size, source.size - len(data) + len(new))


def _is_right(file: _File, changes: Changes) -> bool:
    """Read the file as it would be: the same pickle but for the tags, the same storages, and nothing wrong with it."""
    from transload.formats import read_source

    old, new = file.checkpoint, read_source(Overlay(file.source, changes))
    pickle = next((each for each in new.pickles if each.main), None)
    return (
        pickle is not None
        and new.format == old.format
        and [problem.code for problem in new.problems] == [problem.code for problem in old.problems]
        and list(new.storages) == _renamed_storages(file, changes)
        and same_but_tags(file.main, pickle, file.renamed)
    )


def _renamed_storages(file: _File, changes: Changes) -> list[Storage]:
    """The storages as they shall be: in a legacy stream they follow the pickle, and move with its end."""
    shift = 0 if file.is_zip else changes.new_size - changes.old_size
    return [
        storage._replace(
            device=file.renamed(storage.device), offset=None if storage.offset is None else storage.offset + shift
        )
        for storage in file.checkpoint.storages
    ]


def _absent(wish: Wish, tags: tuple[TagChange, ...]) -> Iterator[str]:
    """Tags that were named and that nothing bears."""
    held = [tag.old for tag in tags]
    missing = [old for old, _ in wish.named if old not in held]
    if missing:
        yield f"nothing is tagged {', '.join(missing)}; the file has {', '.join(held) or 'no tags'}"


def _warnings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What stays as it is although a device is in it, and what the user should know before the file is loaded."""
    out: list[str] = []
    objects = [leaf.name for leaf in checkpoint.leaves if leaf.kind == "torch.device" and leaf.text != "cpu"]
    if objects:
        out.append(f"torch.device values stay as they are: {', '.join(objects[:4])}" + (" …" if objects[4:] else ""))
    rebuilt = [tensor.name for tensor in checkpoint.tensors if tensor.kind == "device"]
    if rebuilt:
        out.append(f"tensors that name their device themselves stay there: {', '.join(rebuilt[:4])}")
    if checkpoint.safety == "dangerous":
        out.append("nothing of it was run, but loading it would run code that can do harm: see transload inspect")
    return tuple(out)
