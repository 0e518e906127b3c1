"""Merging the files of a folder into one checkpoint: what every kind of checkpoint of several files does."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing

from transload.checkpoint import Checkpoint, Draft, Key, Leaf, Origin, Part, Tensor
from transload.contents import Role
from transload.errors import CannotReadError
from transload.findings import LimitedProblems, Problem, join_names
from transload.formats.nested import joined, moved_storage, moved_tensor
from transload.formats.pickle_machine import run
from transload.formats.torch_zip import pickle_problems
from transload.io.folder import MAX_ENTRIES, MAX_MEMBERS, Folder, Listing, relative_path
from transload.io.sources import Source, refuse_fault
from transload.nodes import Pickle

ReadFile = Callable[[str], Checkpoint]
"""Reads a file of a folder, by its name. Bad content is a problem of the checkpoint, never an error."""

OpenFile = Callable[[str], Source]
"""Opens a file of a folder, by its name, and closes it when the checkpoint is closed; may raise ``CannotReadError``."""

ReadItem = Callable[[Source], Checkpoint]
"""Reads a checkpoint inside a file. The name of the source is what ``Value.file`` calls it."""

INDEX_SUFFIX = ".index.json"
# Of a pickled index. Enough for a million tensors.
MAX_METADATA = 512 << 20
# A file named after rank one million would make a million files missing; nobody trains on that many GPUs.
MAX_RANKS = 100_000
STEP = re.compile(r"(?:global_step|iter_)(\d{1,12})")


class Merger(Draft):
    """Reads files of a folder, and merges their checkpoints into one.

    Storages of part ``a.bin`` get ids ``a.bin:…`` and ``file="a.bin"``. If it is ``ranked``, the names of its tensors
    begin with ``a.bin``, too: the ranks of a parallel run use the same names. ``listing`` is the folder being read, the
    top or one below. ``read_file`` reads a file, ``open_file`` opens one, and ``read_item`` reads an archive inside it.
    ``lazy`` is whether archives with tensors may be left unopened.
    """

    def __init__(
        self, listing: Listing, read_file: ReadFile, open_file: OpenFile, read_item: ReadItem, *, lazy: bool = False
    ) -> None:
        super().__init__(listing.folder.name, "sharded", 0)
        self.listing = listing
        self.read_file = read_file
        self.open_file = open_file
        self.read_item = read_item
        self.lazy = lazy
        self.noted = LimitedProblems()
        self.ranked = False
        self.origins: list[Origin] = []
        self.checksummed = True
        self.flavour = ""

    def note(self, code: str, detail: str, name: str = "") -> None:
        """Note a problem with a file of the folder, or with the folder itself."""
        self.noted.add(code, (self.listing.prefix + name).rstrip("/"), detail)

    def enter_latest(self, wanted: str, file: str, fact: str) -> str:
        """Enter the folder of the latest step, and note it as a fact: the one ``file`` names, else the highest number.

        Returns its name, which is empty if there is none.
        """
        listing = self.listing
        steps = steps_in(listing)
        tag = relative_path(wanted)
        if tag not in listing.folders:
            if wanted:
                here = f"; there are {join_names(sorted(steps))}" if steps else ""
                self.note("latest-missing", f"it names {wanted[:80]!r}, which is not here{here}", file)
            tag = max(steps, key=lambda name: (steps[name], name), default="")
        if tag:
            self.listing = listed(listing.folder, tag, self.noted, MAX_MEMBERS)
            self.facts.append((fact, tag))
        return tag

    def open(self, name: str) -> Checkpoint | None:
        """The checkpoint in a file of the folder; ``None``, with a problem, if it cannot be read.

        Only plain files are read: with directories as shards, or an index that names itself, this might never end.
        """
        path = self.listing.prefix + name
        kind = self.listing.folder.kind(path)
        if kind != "file" or name.endswith(INDEX_SUFFIX):
            missing = kind in ("", "link")
            self.note("part-unreadable", "it does not exist" if missing else "it is not a plain file", name)
            return None
        try:
            return self.read_file(path)
        except CannotReadError as error:
            refuse_fault(error, self.listing.folder.name)
            self.note("part-unreadable", error.what, name)
            return None

    def read(
        self, name: str, kind: str, *, role: Role = "", steps: tuple[Key, ...] = (), required: bool = True
    ) -> Checkpoint | None:
        """Merge a file of the folder as a part; if it cannot be read and is ``required``, as a missing part."""
        checkpoint = self.open(name)
        part = self.listing.prefix + name
        if checkpoint is None:
            if required:
                self.add_missing(name, kind)
            return None
        self.merge(part, checkpoint, steps=(part, *steps) if self.ranked else steps)
        facts = (("format", checkpoint.format), ("tensors", f"{len(checkpoint.tensors):,}"))
        self.parts.append(Part(part, kind, checkpoint.nbytes, facts, role))
        return checkpoint

    def read_index(self, name: str) -> Pickle | None:
        """Read the pickle that says what is where in the files; ``None``, with a problem, if it is too large."""
        size = self.listing.files[name]
        if size > MAX_METADATA:
            self.note("dcp-metadata-too-large", f"{size:,} bytes; the limit is {MAX_METADATA:,}", name)
            return None
        data = b""
        try:
            with closing(self.listing.folder.open(self.listing.prefix + name)) as source:
                data = source.read(0, source.size)
        except CannotReadError as error:
            refuse_fault(error, self.listing.folder.name)
            self.note("part-unreadable", error.what, name)
        pickle = run(data, name=self.listing.prefix + name)
        pickle.main = True
        self.pickles.append(pickle)
        self.parts.append(Part(self.listing.prefix + name, "index", size, role="index"))
        self.noted.extend(pickle_problems(pickle, len(data)))
        return pickle

    def merge(
        self,
        part: str,
        checkpoint: Checkpoint,
        *,
        steps: tuple[Key, ...] = (),
        shift: int = 0,
        label: str = "",
        named: tuple[Key, ...] = (),
    ) -> list[Tensor]:
        """Merge a checkpoint whose bytes begin ``shift`` bytes into the file ``part``; return the new tensors.

        ``label`` replaces ``part`` in the ids of storages and in problems; ``named`` replaces ``steps`` in names.
        """
        prefix, before = label or part, named or steps
        tensors = [moved_tensor(tensor, f"{prefix}:", steps, shift, named) for tensor in checkpoint.tensors]
        self.tensors += tensors
        self.storages += [moved_storage(s, f"{prefix}:", before, shift, part) for s in checkpoint.storages]
        self.leaves += [
            Leaf((*steps, *leaf.path), joined(before, leaf.name), leaf.kind, leaf.text) for leaf in checkpoint.leaves
        ]
        for pickle in checkpoint.pickles:
            pickle.path = (*steps, *pickle.path)
        self.pickles += checkpoint.pickles
        self.origins.append(checkpoint.written_by)
        self.checksummed &= checkpoint.checksummed
        # That a rank has only pieces is no problem of the set.
        self.noted.extend(problem.within(prefix) for problem in checkpoint.problems if problem.code != "rank-file")
        return tensors

    def add_missing(self, name: str, kind: str) -> None:
        """Add a part that should exist and does not."""
        self.parts.append(Part(self.listing.prefix + name, f"missing {kind}", 0))

    def merged(self) -> Checkpoint:
        """The merged checkpoint."""
        same = bool(self.origins) and all(origin == self.origins[0] for origin in self.origins)
        return self.checkpoint(
            nbytes=sum(part.nbytes for part in self.parts),
            written_by=self.origins[0] if same else Origin(),
            problems=tuple(map(self._of_the_set, self.noted.problems())),
            checksummed=self.checksummed and bool(self.origins),
        )

    def _of_the_set(self, problem: Problem) -> Problem:
        """The same problem; that a file is no checkpoint is damage of the set, if there is anything in the others."""
        if problem.code != "not-a-checkpoint" or not (self.tensors or self.values):
            return problem
        detail = "\n".join(filter(None, (problem.title, problem.detail)))
        return Problem("part-unreadable", problem.where, detail, fix=() if "@" in problem.where else problem.fix)


def steps_in(listing: Listing, prefix: str = "") -> dict[str, int]:
    """The folders of training steps (DeepSpeed's ``global_step20``, Megatron's ``iter_0000020``), and the numbers."""
    matches = (STEP.fullmatch(name) for name in listing.folders if name.startswith(prefix))
    return {match[0]: int(match[1]) for match in matches if match}


def listed(folder: Folder, below: str, noted: LimitedProblems, most: int = MAX_ENTRIES) -> Listing:
    """List a folder; if that fails, or it has more than ``most`` entries, add a problem."""
    try:
        listing = folder.list(below, most)
    except CannotReadError as error:
        refuse_fault(error, folder.name)
        noted.add("directory-unreadable", below, error.what)
        return Listing(folder, f"{below}/" if below else "", {}, cut=True)
    if listing.cut:
        noted.add("directory-too-long", below, f"only its first {most:,} entries were looked at")
    return listing
