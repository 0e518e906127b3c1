"""Folders of rank files: every rank of a run called ``torch.save`` with its own pieces of the tensors.

FSDP with sharded state dicts, FSDP2 and tensor parallelism leave such folders, and programs built on them (verl, SkyRL,
accelerate, dinov2) name the files as they like. Each file says which pieces it has; ``formats.pieces`` reads that. The
object is that of the first rank, with whole tensors in place of its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from transload.checkpoint import Checkpoint, Key, Tensor, Value
from transload.findings import join_names
from transload.formats.graph import call_items, node_at, short_key
from transload.formats.nested import joined
from transload.formats.sets.merger import MAX_RANKS, Merger
from transload.formats.sets.pieces import Composition, MixedError, RankFile, UnmergedError
from transload.frozen import NamedTuple
from transload.io.folder import Listing
from transload.nodes import Call, Dict, called
from transload.render.words import plural

# model_world_size_8_rank_3.pt, pytorch_model_fsdp_0_rank3.bin, model_final.rank_3.pth, rank3.pt; or model_3.pt, which
# may just as well be the third epoch.
_NAME = re.compile(
    r"(?P<family>.*?)(?:[._-]?world_size[._-]?(?P<world>\d{1,6}))?"
    r"(?:(?:^|[._-])(?P<word>rank)[._-]?|[._-])(?P<rank>\d{1,6})\.(?:pt|pth|bin|ckpt|pkl)"
)
_USUAL = re.compile(r"(?:pytorch_)?(model|optimizer)(?:_fsdp)?(?:_0)?")  # how accelerate numbers models and optimizers
# Values that all ranks of one save agree about; others may be a rank's own, such as the state of its random generator.
_PROGRESS = frozenset({"step", "steps", "global_step", "global_steps", "epoch", "iteration", "iter"})
_FLAT = "_flat_param"
_KINDS = ("DTensor", "ShardedTensor")
# Of a tensor. Finding out what they leave open takes the longer the more there are, and ten thousand ranks are many.
_MOST_PIECES = 10_000
_TRIED = 4
_SHOWN = 3


class RankName(NamedTuple):
    """The name of a rank file, and what it says; ``world`` is 0 if it does not say that."""

    file: str
    family: str
    world: int
    rank: int


Adapt = Callable[[RankName, RankFile], RankFile]


def matches(listing: Listing) -> bool:
    """Whether files are named after ranks."""
    return bool(_families(listing, numbered=False))


def read(merger: Merger) -> Checkpoint | None:
    """Put the files of all ranks together; ``None`` if they are not the files of ranks."""
    families = _families(merger.listing, numbered=False)
    # One is enough, since others may be damaged.
    if not any(_is_of_rank(merger, name) for names in families.values() for name in names[:_TRIED]):
        return None
    return merged(merger, families)


class Numbered:
    """Rank files that are only numbered, as epochs are, too."""

    def matches(self, listing: Listing) -> bool:
        """Whether files are numbered from 0 on."""
        return bool(_families(listing, numbered=True))

    def read(self, merger: Merger) -> Checkpoint | None:
        """As ``read``."""
        families = _families(merger.listing, numbered=True)
        found = any(all(_is_of_rank(merger, name) for name in names[:2]) for names in families.values())
        return merged(merger, families) if found else None


def _families(listing: Listing, *, numbered: bool) -> dict[str, list[RankName]]:
    """The files that may be those of ranks: by the rest of their names, then by rank."""
    families: dict[str, list[RankName]] = {}
    for file in listing.files:
        match = _NAME.fullmatch(file)
        if match and numbered == (match["word"] is None):
            name = RankName(file, family_of(file), int(match["world"] or 0), int(match["rank"]))
            families.setdefault(name.family, []).append(name)
    if numbered:
        families = {key: names for key, names in families.items() if {0, 1} <= {name.rank for name in names}}
    return {family: sorted(names, key=lambda name: name.rank) for family, names in sorted(families.items())}


def family_of(file: str) -> str:
    """What a rank file is named after, besides its rank, such as ``model``; any other name stays as it is."""
    match = _NAME.fullmatch(file)
    family = match["family"].rstrip("._-") if match else file
    usual = _USUAL.fullmatch(family)
    return usual[1] if usual else family


def merged(merger: Merger, families: dict[str, list[RankName]], adapt: Adapt | None = None) -> Checkpoint:
    """Put the files of all ranks together; ``adapt`` changes a file after it was read, with what is known from others.

    A family has a key of the object for itself, unless it is the only one and nothing says its name.
    """
    merger.format, merger.ranked = "rank-files", True
    whole = Composition(merger)
    try:
        parts = {family: _Family(whole, family, names, adapt) for family, names in families.items()}
        worlds = sorted({part.world for part in parts.values() if part.world})
        if len(worlds) > 1:
            raise MixedError(f"they are of runs with {' and '.join(f'{world:,}' for world in worlds)} ranks")
        for family, part in parts.items():
            part.merge((family,) if len(parts) > 1 or adapt else ())
        whole.finish()
    except UnmergedError as reason:
        whole.keep_apart(reason)
    return merger.merged()


def _is_of_rank(merger: Merger, name: RankName) -> bool:
    """Whether a file is one of a rank: its name says so, or it has distributed tensors."""
    if name.world:
        return True
    checkpoint = merger.open(name.file)
    facts = dict(checkpoint.facts) if checkpoint else {}
    return "world size" in facts and facts.get("rank", facts.get("place in the mesh")) == str(name.rank)


class _Family:
    """The files of all ranks with the same kind of content: the model, the optimizer, or everything."""

    def __init__(self, whole: Composition, family: str, names: list[RankName], adapt: Adapt | None) -> None:
        self._whole = whole
        self._merger = whole.merger
        worlds = {name.world for name in names if name.world}
        files = [(name, whole.read(name.file, "rank file")) for name in names]
        self._files = [(name.rank, adapt(name, file) if adapt else file) for name, file in files if file is not None]
        for rank, file in self._files:
            facts = dict(file.checkpoint.facts)
            # A mesh may have fewer ranks than the run, but never more.
            if "world size" in facts and (not worlds or int(facts["world size"]) > max(worlds)):
                worlds.add(int(facts["world size"]))
            if "rank" in facts and facts["rank"] != str(rank):
                raise MixedError(f"{file.name} was saved by rank {facts['rank']}")
        if len(worlds) > 1:
            counts = " and ".join(f"{world:,}" for world in sorted(worlds))
            raise MixedError(f"the files of {family or 'the ranks'} are of runs with {counts} ranks")
        self._compare_worlds()
        ranks = [name.rank for name in names]
        self.world = max([*worlds, max(ranks) + 1]) if worlds else 0  # a mesh may be a part of all ranks
        if len(set(ranks)) < len(ranks):
            raise MixedError(f"several files of {family or 'the ranks'} are of the same rank")
        self._missing = [rank for rank in range(min(self.world, MAX_RANKS)) if rank not in ranks]
        self._family = family
        self._steps: tuple[Key, ...] = ()
        self._differing: list[str] = []
        if not self._files:
            raise UnmergedError(f"none of the files of {family or 'the ranks'} can be read")

    def _compare_worlds(self) -> None:
        """Compare the meshes of ranks that have pieces of the same tensors; those of a pipeline have different ones."""
        worlds: dict[frozenset[tuple[Key, ...]], set[int]] = {}
        for _, file in self._files:
            if world := dict(file.checkpoint.facts).get("world size"):
                paths = frozenset(path for path, tensor in file.tensors.items() if tensor.is_sharded)
                worlds.setdefault(paths, set()).add(int(world))
        for found in worlds.values():
            if len(found) > 1:
                counts = " and ".join(f"{world:,}" for world in sorted(found))
                raise MixedError(f"ranks with pieces of the same tensors are of runs with {counts} ranks")

    def merge(self, steps: tuple[Key, ...]) -> None:
        """Put the object of the first rank at a path of the whole, with whole tensors."""
        self._steps = steps
        first = self._files[0][1]
        held: dict[tuple[Key, ...], list[tuple[int, RankFile]]] = {}
        for rank, file in self._files:
            for path in file.tensors:
                held.setdefault(path, []).append((rank, file))
        if any(path and str(path[-1]).endswith(_FLAT) for path in held):
            why = "FSDP saved flat parameters (LOCAL_STATE_DICT), and the shapes of the weights are not in the files"
            raise UnmergedError(f"{why}: only the model that saved them can load them")
        root, members = _Grafted(first.checkpoint.root), dict[int, dict[Key, object]]()
        bare = not first.checkpoint.pickles  # as in safetensors
        position, gaps = len(self._whole.tensors), len(self._whole.gaps)
        for path, files in held.items():
            tensor = self._merged(path, [(rank, file.tensors[path]) for rank, file in files])._replace(cls="")
            if bare or node_at(first.checkpoint.root, path, members) is not None:
                self._whole.put((*steps, *path), tensor)
            else:  # a rank of a pipeline has layers that the first one has not
                root.add(path, files[0][1].checkpoint.root)
                self._whole.put_copy((*steps, *path), tensor)
        self._compare_values()
        if not bare:
            self._whole.put_value(Value(steps, root.node, first.name, position), first.checkpoint.leaves)
        self._note([name for name, _ in self._whole.gaps[gaps:]])

    def _name(self, path: tuple[Key, ...]) -> str:
        """The name in the whole of what the files have at a path."""
        return joined((*self._steps, *path))

    def _merged(self, path: tuple[Key, ...], held: list[tuple[int, Tensor]]) -> Tensor:
        """A tensor of which the ranks have pieces, or each has all of it."""
        name = self._name(path)
        rank, first = held[0]
        for other, tensor in held[1:]:
            here, there = (f"{each.dtype} {list(each.shape)}" for each in (first, tensor))
            if here == there:
                here, there = (f"a {each.cls if each.cls in _KINDS else 'Tensor'}" for each in (first, tensor))
            if here != there:
                raise MixedError(f"{name} is {here} on rank {rank}, {there} on rank {other}")
        if any(tensor.kind == "subclass" and tensor.cls in _KINDS for _, tensor in held):
            raise UnmergedError(f"how {name} is divided among the ranks is not clear")
        if not any(tensor.is_sharded for _, tensor in held):
            self._compare_copies(path, held)
            return first
        # The parts of replicas are the same; empty ones say nothing.
        copies: dict[tuple[object, ...], list[tuple[int, Tensor]]] = {}
        for number, tensor in held:
            whole = (tensor._replace(start=(0,) * len(tensor.shape)),)
            for part in tensor.parts if tensor.is_sharded else whole:
                if part.numel:
                    copies.setdefault((part.start, part.shape), []).append((number, part))
        for replicas in copies.values():
            self._compare_copies(path, replicas)
        parts = [replicas[0][1] for replicas in copies.values()]
        if len(parts) > _MOST_PIECES:
            raise UnmergedError(f"{name} is in {len(parts):,} pieces")
        return self._whole.assembled((*self._steps, *path), first.shape, parts)

    def _compare_copies(self, path: tuple[Key, ...], held: list[tuple[int, Tensor]]) -> None:
        """Compare what several ranks have, as far as the checksums of the files tell."""
        storages = self._whole.storages
        sums: dict[tuple[object, ...], int] = {}
        for rank, tensor in held:
            storage = storages.get(tensor.storage or "")
            if storage is not None and storage.crc32 is not None and tensor.kind == "strided":
                sums.setdefault((storage.crc32, storage.nbytes, tensor.offset, tensor.stride), rank)
        if len(sums) > 1:
            self._differ(path, "", [*sums.values()])

    def _compare_values(self) -> None:
        """Compare what is no tensor: the first rank's is used."""
        (first, file), *others = self._files
        known = {leaf.path: leaf for leaf in file.checkpoint.leaves}
        for rank, other in others:
            for leaf in other.checkpoint.leaves:
                same = known.get(leaf.path)
                if same is None or (same.kind, same.text) != (leaf.kind, leaf.text):
                    texts = f": {same.text[:40] if same else 'absent'} and {leaf.text[:40]}"
                    self._differ(leaf.path, texts, [first, rank])

    def _differ(self, path: tuple[Key, ...], texts: str, ranks: list[int]) -> None:
        name = self._name(path)
        if path and path[-1] in _PROGRESS:
            raise MixedError(f"{name} differs between rank {ranks[0]} and rank {ranks[1]}{texts}")
        if name not in self._differing:
            self._differing.append(name)

    def _note(self, incomplete: list[str]) -> None:
        """Note what is missing and what differs; ``incomplete`` are the names of tensors."""
        merger, words = self._merger, self._family or "the ranks"
        in_pieces = any(tensor.is_sharded for _, file in self._files for tensor in file.tensors.values())
        if self._missing and (incomplete or not in_pieces):
            listed = join_names([str(rank) for rank in self._missing], 8)
            detail = f"{'' if self._family else 'the ranks: '}{len(self._missing):,} of {self.world:,} ranks: {listed}"
            if incomplete:
                detail += f"; {plural(len(incomplete), 'tensor')} not complete: {join_names(incomplete, _SHOWN)}"
            merger.note("rank-missing", detail, self._family)
        if self._differing:
            names = join_names(self._differing, _SHOWN)
            merger.note("rank-values", f"{words}: {plural(len(self._differing), 'value')}: {names}")
        found = f"{len(self._files):,} of {self.world:,}" if self.world else f"{len(self._files):,}"
        merger.facts.append((f"ranks of {self._family}" if self._family else "ranks", found))


class _Grafted:
    """An object with branches of others: a copy of it, as far as it is changed."""

    def __init__(self, root: object) -> None:
        self.node = root
        # The containers that were copied, by path: their keys and values, and where the value of each key is.
        self._copies: dict[tuple[Key, ...], tuple[list[object], dict[Key, int]]] = {}

    def add(self, path: tuple[Key, ...], other: object) -> None:
        """Add what another object has at a path; ``UnmergedError`` if there is no dictionary to put it into."""
        for depth, step in enumerate(path):
            items, places = self._copied(path[:depth])
            if step not in places:
                places[step] = len(items) + 1
                items += [step, node_at(other, path[: depth + 1])]
                return

    def _copied(self, path: tuple[Key, ...]) -> tuple[list[object], dict[Key, int]]:
        """The keys and values of a dictionary in the copy."""
        if path in self._copies:
            return self._copies[path]
        above = self._copies[path[:-1]] if path else None
        node = above[0][above[1][path[-1]]] if above else self.node
        items = call_items(node) if type(node) is Call else node.items if type(node) is Dict else []
        copy: Dict | Call = Dict([*items])
        if type(node) is Call and called(node) == "collections.OrderedDict":
            copy = Call(node.callee, (), node.kind, node.position)
            copy.items, copy.states = [*items], node.states
        elif type(node) is not Dict:
            raise UnmergedError(f"the objects of the ranks have different structures at {joined(path) or 'the root'}")
        if above:
            above[0][above[1][path[-1]]] = copy
        else:
            self.node = copy
        own = copy.items or []
        self._copies[path] = own, {short_key(own[at]): at + 1 for at in range(0, len(own) - 1, 2)}
        return self._copies[path]
