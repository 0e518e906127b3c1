"""Plain pickles, which torch.save did not write: those of ``pickle.dump``, cloudpickle, dill and joblib.

A tensor in one is the call that also stands in a checkpoint, but its storage is a call, too:
``torch.storage._load_from_bytes(b"…")``, whose bytes are a stream of ``torch.save`` with that one storage. ``_Held``
reads these streams, so that a pickle of tensors is the checkpoint it is. Bytes that are anything else stay what the
call makes of them for every loader: code that runs. A pickle without tensors is judged all the same, since something
may load it.
"""

from __future__ import annotations

from typing import Any

from transload.checkpoint import Checkpoint, Draft, Record
from transload.contents import AS_TEXT
from transload.dtypes import ITEMSIZE, STORAGES
from transload.findings import Problem
from transload.formats.pickle_machine import LOADER, MAX_STREAM, Held, Machine, run, run_at
from transload.formats.tensors import MAX_SIZE, Place, StorageTable, called, find_tensors
from transload.formats.torch_legacy import MAGIC_PICKLE, MAX_DOUBT, PROTOCOL, looks_like_legacy
from transload.formats.torch_zip import needed_by, pickle_problems, read_tree
from transload.formats.zip import ends_like_zip
from transload.frozen import NamedTuple
from transload.io.sources import Source
from transload.nodes import Call, Dict, Global, Persistent, Pickle, Set

_MAX_PICKLES = 1000
_WINDOW = 1 << 16
_ARRAYS = ("joblib.numpy_pickle", "NumpyArrayWrapper")

_MAX_BEHIND = 64
"""From the end of the bytes of a storage to the end of the call that gets them: entries into the memo, the codec, a
tuple, perhaps the head of a frame."""


def read_plain_pickle(source: Source) -> Checkpoint | None:
    """The pickles in a file that begins with one; ``None`` if it does not.

    A stream that breaks counts only if it had asked for a global before: a text file can begin with a valid opcode by
    chance.
    """
    held = _Reader(0)
    first, end = run_at(source, 0, "pickle", _WINDOW, MAX_DOUBT, held.begin)
    if first.cut and (source.read(0, 1) == b"\x80" or _is_pickle(first, source.size)):
        # It is one, and a long one; where tensors lie in it, as long as they are.
        window, most = (source.size, source.size) if LOADER in first.globals else (1 << 20, MAX_STREAM)
        first, end = run_at(source, 0, "pickle", window, most, held.begin)
    if not _is_pickle(first, source.size):
        return None
    first.main = True
    _excuse(first, held.storages)
    pickles = [first]
    while end < source.size and len(pickles) <= _MAX_PICKLES and not pickles[-1].broken:
        other = _Reader(end)
        pickle, end = run_at(source, end, f"pickle {len(pickles) + 1}", _WINDOW, reader=other.begin)
        _excuse(pickle, other.storages)
        pickles.append(pickle)
    root = first.root
    kinds = {Dict: "a dictionary", Set: "a set", list: "a list", tuple: "a tuple"}
    kind = kinds.get(type(root), f"a value of type {type(root).__name__}")
    if type(root) is Call:
        kind = f"an object made by {getattr(root.callee, 'module', '?')}.{getattr(root.callee, 'name', '?')}"
    elif first.loader is not None and first.broken:
        kind = "tensors"
    joblib = any(module.startswith("joblib.") for module, _ in first.globals)
    readable = first.loader is not None and _ARRAYS not in first.globals
    out = Draft(source.name, "joblib" if joblib and not readable else "pickle", source.size)
    if readable and not first.broken:
        out.problems.add("plain-pickle", first.name, f"protocol {first.protocol}, holding {kind}")
    elif not readable:
        title = f"a plain pickle (protocol {first.protocol}, holding {kind}), not a torch checkpoint"
        fix = ("torch.load does not read it. Whoever wrote it used pickle.dump: ask for a file saved with torch.save.",)
        if first.loader is not None:
            title = "a joblib file with numpy arrays, whose bytes lie between its opcodes, where they are not read"
            fix = ("If you trust its author: torch.save(joblib.load(path), new) writes what is read here.",)
        out.problems.append(Problem("not-a-checkpoint", title=title, fix=fix))
    out.problems += [problem for pickle in pickles for problem in pickle_problems(pickle, pickle.end)]
    if ends_like_zip(source):
        out.problems.add("zip-inside", detail="zipfile reads the archive at its end, pickle what is before it")
    if first.loader is not None:
        places = {storage.key: storage.place for storage in held.storages}
        tree = read_tree(first, StorageTable(lambda key, _: places[key]))
        out.take(*tree)
        out.records = tuple(storage.record for storage in held.storages if storage.record)
        for storage in tree.storages:
            if storage.stored < storage.nbytes:
                detail = f"{storage.stored} of {storage.nbytes} bytes are in the file; {needed_by(storage)}"
                out.problems.add("storage-cut", f"storage {storage.key}", detail)
    else:
        tree = find_tensors(root, StorageTable(lambda _key, _nbytes: Place(None, 0)))
        out.take(tree.tensors, (), tree.leaves, tree.problems)
    out.facts += [("pickle protocol", str(first.protocol)), ("top object", kind)]
    return out.checkpoint(pickles=tuple(pickles))


def holds_tensors(source: Source) -> bool:
    """Whether a file is a plain pickle of tensors, and no checkpoint of torch.save."""
    checkpoint = None if source.read(0, 1) != b"\x80" or looks_like_legacy(source) else read_plain_pickle(source)
    return checkpoint is not None and checkpoint.pickles[0].loader is not None


def _is_pickle(pickle: Pickle, size: int) -> bool:
    if not pickle.broken:
        return pickle.protocol >= 2 or pickle.end == size or bool(pickle.globals)
    asked = pickle.calls or pickle.extensions or LOADER in pickle.globals
    return bool(asked) or (pickle.protocol >= 2 and bool(pickle.globals))


# -- storages in a pickle


class _Storage(NamedTuple):
    """A storage that a pickle holds, and its record where its bytes do not lie there as they are."""

    key: str
    place: Place
    record: Record | None


class _Reader:
    """Reads the storages of the pickle at an offset; each run of it begins anew, with more of the data."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self.storages: list[_Storage] = []

    def begin(self, vm: Machine) -> Held:
        """What a run asks for storages."""
        held = _Held(vm, self._offset)
        self.storages = held.storages
        return held.read


class _Stream(NamedTuple):
    """What a stream with one storage says of it; its bytes begin at ``start``."""

    kind: Global
    tag: str
    numel: int
    nbytes: int
    start: int


class _Held:
    """The storages that one run of a machine has met, as bytes given to ``LOADER``.

    The bytes must lie right before the call, and behind the call before: a pickler writes each of them once. So a file
    cannot have the same bytes read, or made into a storage, any number of times.
    """

    def __init__(self, vm: Machine, offset: int) -> None:
        self._vm = vm
        self._offset = offset
        self._behind = 0  # the last of them
        self._head = MAGIC_PICKLE  # the first three pickles of a stream that was read: they are nearly always the same
        self.storages: list[_Storage] = []

    def read(self, args: Any, end: int) -> Persistent | None:
        """The storage that a call gets whose opcode ends there; ``None`` if it gets anything else."""
        node: Any = args[0] if type(args) is tuple and len(args) == 1 else None
        text = _encoded_text(node)
        try:
            data: Any = text.encode("latin-1") if text else node
        except UnicodeEncodeError:
            return None
        stream = self._stream(data) if type(data) is bytes else None
        if stream is None:
            return None
        raw = text.encode() if text else data
        lowest = max(self._behind, end - len(raw) - _MAX_BEHIND)
        at = self._vm.data.rfind(raw, lowest, end)
        if at < 0:
            return None
        self._behind, self._vm.pos = end, end
        key = str(len(self.storages))
        name, stored, record = f"storage {key}", max(0, len(data) - stream.start), None
        if text and stored:
            before = len(text[: stream.start].encode())
            record = Record(name, self._offset + at + before, stored, len(raw) - before, None, AS_TEXT)
            place = Place(None, stored, name, compressed=True)
        else:
            place = Place(self._offset + at + stream.start, stored, name)
        self.storages.append(_Storage(key, place, record))
        kind = self._vm.find(stream.kind.module, stream.kind.name)
        storage = Persistent(("storage", kind, key, stream.tag, stream.numel), end)
        self._vm.out.persistent.append(storage)
        return storage

    def _stream(self, data: bytes) -> _Stream | None:
        """What a stream says that holds one storage and nothing else, the last bytes of which may be missing."""
        if not data.startswith(MAGIC_PICKLE):
            return None
        position = len(self._head)
        if position == len(MAGIC_PICKLE) or not data.startswith(self._head):
            version = run(data, len(MAGIC_PICKLE))
            facts = run(data, version.end)
            if (
                version.root != PROTOCOL
                or type(facts.root) is not Dict
                or not (_is_plain(version) and _is_plain(facts))
            ):
                return None
            position = facts.end
            self._head = data[:position]
        main = run(data, position)
        keys = run(data, main.end)
        pid: Any = main.root.id if type(main.root) is Persistent else None
        if type(pid) is not tuple or len(pid) != 6 or len(main.persistent) != 1 or not _is_plain(main, named=True):
            return None
        mark, kind, key, tag, numel, view = pid
        plain = mark == "storage" and type(key) is str and type(tag) is str and type(numel) is int and view is None
        if not plain or not _is_plain(keys) or keys.root != [key]:
            return None
        if type(kind) is not Global or list(main.globals.values()) != [kind] or kind.name not in STORAGES:
            return None
        nbytes, start = numel * ITEMSIZE[STORAGES[kind.name]], keys.end + 8
        count = int.from_bytes(data[keys.end : start], "little", signed=True)
        if not 0 <= nbytes < MAX_SIZE or len(data) > start + nbytes or (len(data) >= start and count != numel):
            return None
        return _Stream(kind, tag, numel, nbytes, start)


def _is_plain(pickle: Pickle, *, named: bool = False) -> bool:
    """Whether a pickle is read to its end and makes nothing; only one that is ``named`` may ask for a global."""
    odd = pickle.broken or pickle.irregular or pickle.ambiguous or pickle.calls or pickle.built or pickle.extensions
    return not odd and (named or not (pickle.globals or pickle.persistent))


def _encoded_text(node: object) -> str:
    """The text in ``_codecs.encode(text, "latin1")``, as which pickles up to protocol 2 hold bytes."""
    if type(node) is not Call or called(node) != "_codecs.encode" or node.kind != "reduce":
        return ""
    changed = node.states or node.items or node.appended or node.kwargs
    match node.args:
        case (str() as text, "latin1") if not changed:
            return text
    return ""


def _excuse(pickle: Pickle, storages: list[_Storage]) -> None:
    """Take ``LOADER`` from the names of a pickle if each use of it is a storage, which needs no loader here."""
    loader = pickle.globals.get(LOADER)
    # A persistent id that is not one of ours makes every reader of a plain pickle fail.
    if loader is None or len(pickle.persistent) != len(storages) or pickle.ambiguous:
        return
    waiting: list[Any] = [pickle.root, *pickle.calls]
    waiting += [part for pair in pickle.built for part in pair]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is loader:
            return
        kind = type(node)
        if kind not in _HOLDERS or id(node) in seen:
            continue
        seen.add(id(node))
        if kind is Call:
            waiting += (node.callee, node.args, node.kwargs, node.states, node.items, node.appended)
        else:
            waiting += node if kind is list or kind is tuple else node.items
    pickle.loader = pickle.globals.pop(LOADER)


_HOLDERS = frozenset({Call, Dict, Set, list, tuple})
