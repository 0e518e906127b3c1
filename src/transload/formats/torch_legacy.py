"""The formats of torch before 1.6: streams of pickles (0.1.10 to 1.5), and tar archives (0.1.1 to 0.1.9).

A stream is five pickles (the magic number, the protocol version, facts about the machine, the object, the list of
storage keys), then for each key an 8-byte element count and the bytes. There is no index: the offset of a storage
follows from the sizes of all before it. ``torch.save`` can still write this format.

A tar archive has four members; three of them are streams of pickles mixed with raw numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from struct import Struct
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint, Draft, Record
from transload.dtypes import ITEMSIZE, STORAGES
from transload.findings import Problem
from transload.formats.graph import find_tensors
from transload.formats.pickle_streams import run_at
from transload.formats.tensors import StorageTable, declared_storages
from transload.formats.torch_zip import needed_by, pickle_problems, read_tree
from transload.formats.zip import ends_like_zip
from transload.io.sources import ObjectSource, Slice, Source
from transload.nodes import Dict, Global, Persistent, Pickle, short

if TYPE_CHECKING:
    from transload.formats.zip_writer import NewRecord, Sink

MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
BEGINNINGS = (MAGIC_PICKLE, b"PK\x03\x04")
"""How what ``torch.save`` writes begins."""
PROTOCOL = 1001
_COUNT = Struct("<q")
_TOGETHER = 1000  # small storages and their counts in one write
# How many bytes are read of what may not be a pickle: random bytes soon announce a text of gigabytes.
MAX_DOUBT = 1 << 24
_STAGES = ("magic number", "protocol version", "machine facts", "object", "storage keys")
_SMALL_WINDOW = 1 << 12


def looks_like_legacy(source: Source) -> bool:
    """Whether the first pickle is the magic number, which is torch's test, or the beginning of it."""
    if 4 <= source.size < len(MAGIC_PICKLE):
        return MAGIC_PICKLE.startswith(source.read(0, source.size))
    return run_at(source, 0, _STAGES[0], _SMALL_WINDOW, MAX_DOUBT)[0].root == MAGIC


def read(source: Source) -> Checkpoint | None:
    """Read a tar archive or a stream; ``None`` if it is neither."""
    return read_tar(source) or (read_legacy(source) if looks_like_legacy(source) else None)


def read_legacy(source: Source) -> Checkpoint:
    """Read all five pickles, and find every storage by adding up sizes."""
    out = Draft(source.name, "torch-legacy", source.size)
    problems, pickles = out.problems, out.pickles
    head = source.read(0, 32)
    if not MAGIC_PICKLE.startswith(head[: len(MAGIC_PICKLE)]):
        from pickle import dumps

        if not head.startswith(tuple(dumps(MAGIC, protocol) for protocol in (3, 4, 5))):
            problems.add("legacy-odd-magic", _STAGES[0], "the magic number is not written as torch writes it")
    position = 0
    for stage, name in enumerate(_STAGES):
        pickle, position = run_at(source, position, name, 1 << 20 if stage == 3 else _SMALL_WINDOW)
        pickles.append(pickle)
        problems += pickle_problems(pickle, pickle.end, {"storage": (6,), "module": (4,)})
        if pickle.broken:
            detail = f"part {stage + 1} of 5 breaks off; lost: {', '.join(_STAGES[stage:])} and all storages"
            problems.add("legacy-cut", name, detail)
            break
    if len(pickles) > 1 and pickles[1].root != PROTOCOL and not pickles[1].broken:
        problems.add("legacy-bad-protocol", _STAGES[1], f"torch reads protocol version {PROTOCOL} only")
    main = pickles[3] if len(pickles) > 3 else Pickle(_STAGES[3])
    main.main = True
    pids = [node.id for node in main.persistent if type(node.id) is tuple and node.id]
    untyped = sum(type(pid[1]) is Global and pid[1].name.endswith("UntypedStorage") for pid in pids if len(pid) > 1)
    if untyped:  # those of newer dtypes: torch also writes them in this format, but cannot read them
        problems.add("legacy-untyped", main.name, f"{untyped} storages have no type, and torch requires one")
    listed = pickles[4].root if len(pickles) > 4 and not pickles[4].broken else []
    keys = []
    for key in listed if type(listed) is list else ():
        text = key.decode("latin-1") if type(key) is bytes else key
        keys.append(str(text) if type(text) in (str, int) else "")  # a key that nothing uses
    # Find each storage as torch does: the count before the bytes must agree with the object.
    declared, places, end = declared_storages(main.persistent), dict[str, Record](), position
    sizes = [declared[key].nbytes if key in declared else 0 for key in keys] if source.far else []
    source.prepare([(position + 8 * index + before, 8) for index, before in enumerate(accumulate(sizes, initial=0))])
    for key in keys:
        storage, raw = declared.get(key), source.read(end, 8)
        count = int.from_bytes(raw, "little", signed=True)
        numel = storage.nbytes // ITEMSIZE[storage.dtype] if storage else 0
        if storage is None:
            problems.add("legacy-unknown-key", f"storage {key[:40]}", "in the list of keys, but nothing uses it")
        elif len(raw) < 8:
            problems.add("storage-cut", f"storage {key}", "the file ends before its element count")
        elif count != numel:
            problems.add("storage-size", f"storage {key}", f"there are {count} elements, the object needs {numel}")
        else:
            start = end + 8
            present = max(0, min(storage.nbytes, source.size - start))
            places[key] = Record(f"storage {key}", start if start <= source.size else None, present, present)
            end = start + storage.nbytes
            continue
        end = source.size
        break
    # In a file object, more objects may follow, the last of which may be an archive; a file is one object.
    more = source.read(end, 32).startswith(BEGINNINGS)
    if not (more and isinstance(source, ObjectSource)) and ends_like_zip(source):
        problems.add("zip-inside", detail="zipfile reads the archive at its end, torch the stream before it")
    tree = read_tree(main, StorageTable(lambda key, _: places.get(key)))
    out.add_tree(*tree)
    if not any(pickle.broken for pickle in pickles):
        listed_keys = set(keys)
        for storage in tree.storages:
            where = f"storage {storage.key}"
            if storage.key not in listed_keys:
                # torch 2.13 makes the tensor anyway, from uninitialized memory.
                problems.add("legacy-unlisted", where, f"its bytes are not in the file; {needed_by(storage)}")
            elif storage.stored < storage.nbytes:
                detail = f"{storage.stored} of {storage.nbytes} bytes are in the file; {needed_by(storage)}"
                problems.add("storage-cut", where, detail)
        if more:
            problems.add("legacy-more-objects", detail=f"it begins at byte {end:,}")
        elif end < source.size:
            problems.add("legacy-trailing-bytes", detail=f"{source.size - end} bytes after the last storage")
    if len(pickles) > 1:
        out.facts.append(("protocol version", short(pickles[1].root)[:40]))
    system = pickles[2].root if len(pickles) > 2 else None
    if type(system) is Dict:
        order = "little" if system.get("little_endian") is True else "big"
        out.facts.append(("saved on", f"a {order}-endian machine"))
    sources = sum(pid[0] == "module" for pid in pids)
    if sources:
        out.facts.append(("module sources", f"the Python source of {sources} classes is stored in the file"))
    return out.checkpoint()


def write_legacy(
    sink: Sink,
    pickled: bytes,
    protocol: int,
    numels: Sequence[int],
    storages: Iterable[NewRecord],
    report_progress: Callable[[int], None] | None = None,
) -> None:
    """Write a stream; the keys of the storages count from 0, and ``numels`` are their element counts."""
    import pickle

    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": PROTOCOL, "little_endian": sys.byteorder == "little", "type_sizes": sizes}
    keys = [str(index) for index in range(len(numels))]
    before = [pickle.dumps(value, protocol) for value in (MAGIC, PROTOCOL, system)]
    waiting = [*before, pickled, pickle.dumps(keys, protocol)]
    for numel, (_, size, content) in zip(numels, storages, strict=True):
        waiting.append(_COUNT.pack(numel))
        if isinstance(content, bytes):
            waiting.append(content)
        if len(waiting) >= _TOGETHER or not isinstance(content, bytes):
            sink.write([b"".join(waiting)])
            waiting = []
        for chunk in () if isinstance(content, bytes) else content():
            if chunk.ready:
                chunk.ready()
            sink.write([chunk.view])
        if report_progress:
            report_progress(size)
    sink.write([b"".join(waiting)])


# -- tar archives

_BLOCK = 512
_MAX_MEMBERS = 10_000
_MAX_DIMS = 1024
_MAX_PAX = 1 << 16
_EXTENDED = frozenset({b"x", b"g", b"X", b"L", b"K"})
_WANTED = frozenset({"sys_info", "pickle", "tensors", "storages"})

# What Python's tarfile writes into an extended header of a plain file: its time in nanoseconds, its owner's name.
_PLAIN_PAX = frozenset({b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname", b"comment"})


def members(source: Source, most: int = _MAX_MEMBERS) -> tuple[list[tuple[str, int, int, str]], list[Problem]]:
    """The members of a tar archive until its end or its first bad header, and the problem with that header.

    A member is a name, an offset, a size, and why another reader may read it differently, or an empty text.
    """
    out: list[tuple[str, int, int, str]] = []
    position, doubt, always = 0, "", ""
    for _ in range(most):
        block = source.read(position, _BLOCK)
        size, stated, kind = _octal(block[124:136]), _octal(block[148:156]), block[156:157]
        summed = block[:148] + b" " * 8 + block[156:]
        signed = sum(summed) - 256 * sum(byte > 127 for byte in summed)  # of some writers; tarfile accepts both
        sound = len(block) == _BLOCK and any(block) and stated in (sum(summed), signed)
        if not sound or size is None or size < 0:
            broken = Problem("tar-broken", f"byte {position}", "the header of a member is not valid")
            return out, [broken] if any(block) else []
        start = position + _BLOCK
        if kind in _EXTENDED:
            data = source.read(start, min(size, _MAX_PAX))
            plain = kind in (b"x", b"g") and size <= _MAX_PAX and data[-1:] == b"\n"
            for line in data[:-1].split(b"\n"):  # length, key and value; a wrong length hides another record
                length, _, record = line.partition(b" ")
                plain = plain and length == b"%d" % (len(line) + 1) and record.partition(b"=")[0] in _PLAIN_PAX
            if not plain:
                doubt = doubt or "an extended header changes what it is"
            always = doubt if kind == b"g" else always
        else:
            prefix, name = block[345:500].split(b"\0")[0], block[:100].split(b"\0")[0]
            path = (prefix + b"/" + name if prefix else name).decode("utf-8", "backslashreplace")
            doubt = doubt or always or ("" if kind in (b"0", b"\0") else "it is not a plain file")
            out.append((path, start, size, doubt))
            doubt = ""
        position = start + -(-size // _BLOCK) * _BLOCK
    return out, [Problem("tar-broken", f"byte {position}", f"more than {most} members")]


def _octal(field: bytes) -> int | None:
    """A number of a header, exactly as tarfile reads it: torch uses tarfile, and a difference would allow an attack."""
    if field[:1] in (b"\x80", b"\xff"):  # sizes from 8 GiB on are binary
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    try:
        return int(field.split(b"\0")[0].decode("ascii", "strict").strip() or "0", 8)
    except ValueError:
        return None


def read_tar(source: Source) -> Checkpoint | None:
    """The checkpoint in a tar archive; ``None`` if there is none, or it is not a tar archive."""
    reader = TarReader(source)
    if not {"pickle", "tensors", "storages"} <= reader.members.keys():
        return None
    # Note what could make tarfile, inside torch, read other members; and members that torch does not read.
    problems = reader.problems
    seen: set[str] = set()
    for path, offset, size, doubt in reader.listed:
        name = path.removeprefix("./")
        if (name in _WANTED and (doubt or name in seen)) or doubt.startswith("an extended header"):
            problems.add("tar-ambiguous", name, doubt or "there are two of this name")
        if offset + size > source.size:
            problems.add("tar-cut", name[:80], "the archive ends inside this member")
        seen.add(name)
    extra = sorted(seen - _WANTED)
    if extra:
        problems.add("record-foreign", extra[0], f"{len(extra)} members that torch.load does not read")
    if ends_like_zip(source):
        problems.add("zip-inside", detail="zipfile reads the archive at its end, torch the tar before it")
    reader.read_storages()
    reader.read_tensors()
    for name in ("sys_info", "pickle"):  # only old readers load sys_info; pickle is the object
        if name in reader.members:
            main, _ = run_at(reader.members[name], 0, name)
            main.main = name == "pickle"
            reader.add_pickle(main)
    # torch reads the file as a pickle where tarfile fails, and a tar header can be a valid pickle.
    pickle, _ = run_at(source, 0, "beginning of the file", _SMALL_WINDOW)
    if pickle.globals or pickle.extensions or not pickle.broken:
        reader.add_pickle(pickle)
        reader.problems.add("tar-ambiguous", pickle.name, "it is a pickle as well as a tar header")
    table = StorageTable(lambda key, _: reader.places.get(key))
    table.enter(reader.storage_ids.values())
    reader.add_tree(*find_tensors(main.root, table, outside=reader.tensor_args))
    return reader.checkpoint(pickles=(main, *(p for p in reader.pickles if p is not main)))


class TarReader(Draft):
    """Reads ``storages`` and ``tensors``, alternating pickles and raw numbers; stops at an error, and notes it."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.name, "torch-tar", source.size)
        self._position = 0  # in the member that is read
        self.listed, problems = members(source)
        self.problems += problems
        named = ((path.removeprefix("./"), offset, size) for path, offset, size, _ in self.listed)
        self.members = {name: Slice(source, offset, size, name) for name, offset, size in named}
        self.places: dict[str, Record] = {}
        self.storage_ids: dict[str, Persistent] = {}
        self.tensor_args: dict[str, tuple[Any, ...]] = {}

    def add_pickle(self, pickle: Pickle) -> None:
        """Keep a pickle if it imports anything, and note its problems. Persistent ids are numbers here."""
        self.problems += [p for p in pickle_problems(pickle, pickle.end) if p.code != "pickle-odd-id"]
        if pickle.main or pickle.globals or pickle.extensions:
            self.pickles.append(pickle)

    def _next(self, part: Slice) -> Any:
        """The value of the next pickle; ``None`` if it is broken."""
        pickle, self._position = run_at(part, self._position, part.name, _SMALL_WINDOW)
        self.add_pickle(pickle)
        return None if pickle.broken else pickle.root

    def _entries(self, part: Slice) -> Iterator[Any]:
        """The pickles of a member after its first, which counts them. The caller moves past the numbers after each."""
        self._position = 0
        count = self._next(part)
        if type(count) is not int:
            self.problems.add("tar-broken", part.name, "it does not state how many entries it has")
            return
        for _ in range(count):
            yield self._next(part)

    def read_storages(self) -> None:
        """Read ``storages``: for each its id, element count and bytes; then the list of views."""
        part = self.members["storages"]
        for entry in self._entries(part):
            is_entry = type(entry) is tuple and len(entry) == 3 and type(entry[1]) is str and type(entry[2]) is Global
            key = _key(entry[0]) if is_entry else ""
            if not key or entry[2].name not in STORAGES:
                self.problems.add("tar-broken", "storages", f"entry {len(self.places)} is not a storage")
                return
            _, location, kind = entry
            count = part.read(self._position, 8)
            numel, start = int.from_bytes(count, "little", signed=True), self._position + 8
            nbytes = numel * ITEMSIZE[STORAGES[kind.name]]
            if len(count) < 8 or numel < 0 or start + nbytes > part.size:
                detail = f"{nbytes} bytes do not fit into what is left of the member"
                self.problems.add("storage-cut", f"storage {key}", detail)
                return
            self.places[key] = Record("storages", part.offset + start, nbytes, nbytes)
            self.storage_ids[key] = Persistent(("storage", kind, key, location, numel), self._position)
            self._position = start + nbytes
        views = self._next(part)
        for view in views if type(views) is list else ():
            key, base = (_key(view[0]), _key(view[1])) if type(view) is tuple and len(view) == 4 else ("", "")
            if key and base in self.storage_ids:
                root: Any = self.storage_ids[base].id
                self.storage_ids[key] = Persistent((*root, (key, view[2], view[3])), 0)
            else:
                self.problems.add("tar-broken", "storages", "a view of no storage")

    def read_tensors(self) -> None:
        """Read ``tensors``: for each its id and storage, its rank, sizes, strides and offset."""
        part = self.members["tensors"]
        for entry in self._entries(part):
            key = _key(entry[0]) if type(entry) is tuple and len(entry) == 3 else ""
            if not key:
                self.problems.add("tar-broken", "tensors", f"entry {len(self.tensor_args)} is not a tensor")
                return
            rank = int.from_bytes(part.read(self._position, 4), "little", signed=True)
            raw = part.read(self._position + 8, 16 * rank + 8) if 0 <= rank <= _MAX_DIMS else b""
            if len(raw) != 16 * rank + 8:
                self.problems.add("tar-broken", "tensors", f"tensor {key[:40]} is not a tensor")
                return
            numbers = Struct(f"<{2 * rank + 1}q").unpack(raw)
            self._position += 16 + 16 * rank
            storage = self.storage_ids.get(_key(entry[1]))
            self.tensor_args[key] = (storage, numbers[-1], numbers[:rank], numbers[rank : 2 * rank])


def _key(node: object) -> str:
    """The id of a storage or tensor as text; empty if it is not one: ``str()`` of nested tuples is recursive."""
    return str(node) if type(node) in (str, int) else ""
