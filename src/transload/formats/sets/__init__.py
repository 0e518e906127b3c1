"""Checkpoints of several files: one module per kind, each with ``matches(listing)`` and ``read(merger)``.

``read`` lists a folder, asks each kind whether the folder is one of it, and also reads the pickles of other files in
it. A kind reads files and merges their checkpoints with a ``Merger``, and opens them only through its ``Folder``.
"""

from __future__ import annotations

from typing import Protocol

from transload.checkpoint import Checkpoint, Draft, Part
from transload.errors import CannotReadError
from transload.findings import LimitedProblems, Problem, join_names
from transload.formats.sets import (
    dcp,
    deepspeed,
    hf_shards,
    megatron,
    ranks,
    sharded,
    single,
    torch_checkpointing,
    unpacked,
)
from transload.formats.sets.merger import Merger, OpenFile, ReadFile, ReadItem, listed
from transload.formats.sets.single import checkpoint_files, is_raw
from transload.frozen import replace
from transload.io.folder import MAX_ENTRIES, MAX_MEMBERS, Folder, Listing
from transload.io.sources import refuse_fault

__all__ = ["concerns", "read"]

# How far an unknown directory is searched for something to read.
MAX_DEPTH = 3
_MAX_OTHERS = 20
# The problems of a file beside the checkpoint that concern safety: whether its tensors are whole does not matter.
_SAFETY_PROBLEMS = {
    *("pickle-ambiguous", "pickle-broken", "pickle-unreadable", "tar-ambiguous", "zip-directory-record"),
    *("zip-duplicate-name", "zip-headers-differ", "zip-inside", "zip-names-differ", "zip-nul-name", "zip-odd-name"),
    *("zip-overlap", "zip-shifted", "zip-two-ends", "zip-two-sizes"),
}

# The index lists all that is lost: objects are problems of their own, and whoever reads a tensor gets an error.
_LISTED = frozenset({"dcp-file-cut", "dcp-file-missing", "dcp-piece-missing"})


class Kind(Protocol):
    """A kind of checkpoint of several files."""

    def matches(self, listing: Listing, /) -> bool:
        """Whether a folder is one, by the names in it."""

    def read(self, merger: Merger, /) -> Checkpoint | None:
        """Read the folder of the merger. Bad content is a problem, never an error; ``None`` if it is another kind."""


_KINDS: tuple[Kind, ...] = (megatron, dcp, torch_checkpointing, deepspeed, unpacked, hf_shards, sharded, ranks)
"""The order matters: Megatron's newer form contains a distributed checkpoint, and any kind may contain other files."""


def read(
    folder: Folder,
    read_file: ReadFile,
    open_file: OpenFile,
    read_item: ReadItem,
    *,
    index: str = "",
    lazy: bool = False,
) -> Checkpoint:
    """Read a folder, or only the shards of an ``index`` in it.

    ``read_file`` reads a file of the folder by its name, ``open_file`` opens one, ``read_item`` reads the archives
    inside ``.distcp`` files, with ``lazy`` not those of tensors if there are many. Bad content is a problem, never an
    error; ``CannotReadError`` only if the folder cannot be listed, or the index read.
    """
    if index:
        merger = Merger(listed(folder, "", LimitedProblems()), read_file, open_file, read_item)
        checkpoint = sharded.read_index(merger, index)
        return replace(checkpoint, path=folder.path(index))
    listing = folder.list()
    if listing.cut and any(kind.matches(listing) for kind in _KINDS):
        listing = folder.list(most=MAX_MEMBERS)
    kinds = (kind for kind in (*_KINDS, single, ranks.Numbered()) if kind.matches(listing))
    found = (kind.read(Merger(listing, read_file, open_file, read_item, lazy=lazy)) for kind in kinds)
    checkpoint = next(filter(None, found), None) or _describe_unknown(listing)
    # Add dangling links, and files that are not part of the checkpoint: a program that loads the directory may load
    # those, too, so their pickles are read.
    noted = LimitedProblems()
    noted.extend(checkpoint.problems)
    if listing.cut:
        noted.add("directory-too-long", "", f"only its first {listing.entries:,} entries were looked at")
    if listing.dangling:
        noted.add("link-dangling", "", f"{len(listing.dangling):,} links lead nowhere: {join_names(listing.dangling)}")
    members = {part.name for part in checkpoint.parts}
    beside = [] if checkpoint.index else [name for name in checkpoint_files(listing) if name not in members]
    pickles = [*checkpoint.pickles]
    for name in beside[:_MAX_OTHERS]:
        try:
            other = read_file(name)
        except CannotReadError as error:
            refuse_fault(error, folder.name)
            noted.add("part-unreadable", name, error.what)
            continue
        for pickle in other.pickles:
            pickle.main = False
            pickle.name = f"{name} › {pickle.name}"
        noted.extend(problem.within(name) for problem in other.problems if problem.code in _SAFETY_PROBLEMS)
        pickles += other.pickles
    if beside:
        noted.add("directory-others", "", f"{len(beside):,} files: {join_names(beside)}")
    if len(beside) > _MAX_OTHERS:
        noted.add("directory-others-unread", "", f"{len(beside) - _MAX_OTHERS:,} of them")
    others = (Part(name, "beside the checkpoint", listing.files[name], role="beside") for name in beside)
    parts = (*checkpoint.parts, *others)
    return replace(checkpoint, problems=noted.problems(), parts=parts, pickles=tuple(pickles))


def _describe_unknown(listing: Listing) -> Checkpoint:
    """A directory of no known kind: list what looks like a checkpoint in it, a few levels down."""
    noted = LimitedProblems()
    candidates: dict[str, int] = {}
    waiting = [listing]
    budget = MAX_ENTRIES
    while waiting and budget > 0:
        here = waiting.pop(0)
        budget -= len(here.files) + len(here.folders) + 1
        if here.prefix and any(kind.matches(here) for kind in _KINDS):
            candidates[here.prefix.rstrip("/")] = 0
            continue
        if is_raw(here):
            continue
        candidates |= {here.prefix + name: here.files[name] for name in checkpoint_files(here)}
        folders = here.folders if here.prefix.count("/") < MAX_DEPTH else ()
        real = [here.prefix + name for name in folders if name not in here.links]  # links may form circles
        waiting += [listed(listing.folder, name, noted) for name in real]
    names = [*(f"{name}/" for name in listing.folders), *listing.files]
    detail = f"it contains {join_names(names, 8)}" if names else "it is empty"
    if candidates:
        detail += f"; these look like checkpoints: {join_names([*candidates], 8)}"
    fix = f"Name one of these: {join_names([*candidates], 8)}." if candidates else "" if names else "Check the path."
    parts = [Part(name, "looks like a checkpoint", size, role="candidate") for name, size in candidates.items()]
    if is_raw(listing):
        detail = "it holds raw tensors, which transload convert writes and does not read"
        fix = "Name the checkpoint that they were converted from."
        parts = [Part(name, "raw tensor", listing.files[name]) for name in checkpoint_files(listing)]
    noted.extend([Problem("directory-unknown", "", detail, fix=(fix,) if fix else ())])
    out = Draft(listing.folder.name, "directory", sum(listing.files.values()), noted.problems())
    out.parts = parts
    return out.checkpoint()


# -- parts of a damaged one


def concerns(problem: Problem, checkpoint: Checkpoint, key: str) -> bool:
    """Whether a problem of one of several files may mean that something is missing below a key."""
    if problem.code in _LISTED:
        return False
    if not problem.where:
        return True
    place = problem.where.partition(" › ")[0]
    names = [problem.where] if problem.code == "dcp-object-missing" else []
    if checkpoint.format == "dcp" and "@" in place:
        names = dcp.names_at(checkpoint, place)
    if names:  # after those of folders, which may be a key, too
        steps = [name.split("/") for name in names]
        lost = ["/".join(each[at:]) for each in steps for at in range(len(each))]
        return any(_is_below(name, key) or _is_below(key, name) for name in lost)
    if checkpoint.format == "rank-files":
        families = {ranks.family_of(part.name) for part in checkpoint.parts if part.kind.endswith("rank file")}
        if problem.code == "rank-missing" and (len(families) > 1 or checkpoint.flavour):
            return _is_below(key, place)
        if len(families) > 1 and not checkpoint.flavour and ranks.family_of(place) in families:
            return _is_below(key, ranks.family_of(place))
    return True


def _is_below(name: str, key: str) -> bool:
    """Whether a name is a key, or that of something below it; some formats join keys with dots."""
    return f"{name}.".replace("/", ".").startswith(f"{key}.".replace("/", "."))
