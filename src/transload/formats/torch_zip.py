"""The zip format of ``torch.save``: ``data.pkl``, the storages ``data/0``, ``data/1`` … and a few small records.

An ``Archive`` is the records of a zip file or of an unpacked directory. ``read`` runs the pickle, finds its
tensors, and compares every storage with its record. It also reads the origin that ``transload.save`` records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint, Draft, Origin, Record, Storage
from transload.dtypes import ITEMSIZE, STORAGES
from transload.findings import Problem, Problems, join_names
from transload.formats import pickle_machine
from transload.formats.zip import Payload, ZipIndex, read_payload
from transload.frozen import replace
from transload.io.sources import Source
from transload.nodes import ORDINARY_CALLS, Global, Pickle

if TYPE_CHECKING:
    from transload.formats.graph import Tree
    from transload.formats.tensors import StorageTable

RECORD = ".transload/origin.json"
MAX_TEXT_RECORD = 4096  # records such as ``version`` have a few bytes; a deflated one can unpack to gigabytes
_NOTES = (".format_version", ".storage_alignment", ".data/serialization_id", ".data/version")
_TEXT_RECORDS = ("version", "byteorder", *_NOTES)
_NEWEST_VERSION = 10
_STRAY_WINDOWS = (1 << 16, 1 << 20, 16 << 20)  # how much is run of a record that torch.load does not read, in steps
_MAX_STRAY = 256 << 20  # the limit for all such records together: an archive may contain a whole data set
# A compressed index may unpack to this, or to 16 times its size. Half a megabyte can unpack to half a gigabyte, which
# can be a pickle of half a billion dictionaries; the index of 160,000 tensors takes 16 MiB.
_MAX_PACKED = 16 << 20
_PACKED = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")  # nested archives
_FORMS = (("data/", ""), ("tensors/", ""))
_ZIP_IDS: Mapping[str, tuple[int, ...]] = {"storage": (5,)}
_ANY_IDS = {"storage": (5, 6), "module": (4,)}


def _list_plain_storages(
    records: Mapping[str, Record], small: Collection[str], pickle: Pickle
) -> tuple[tuple[Storage, ...], tuple[tuple[str, int], ...]] | None:
    """The storages, and how many tensors have each device tag, of an archive that contains only plain tensors.

    ``None`` if anything is unusual: every record must be used, or be one of the ``small`` ones. Without this, ``load``
    of 20,000 tensors takes 29 % longer, and ``verify`` 46 %.
    """
    kinds: dict[object, tuple[str, int]] = {}  # dtype and element size of each storage class
    for (module, name), global_ in pickle.globals.items():
        if module == "torch" and name in STORAGES:
            kinds[global_] = STORAGES[name], ITEMSIZE[STORAGES[name]]
        elif (module, name) not in ORDINARY_CALLS:
            return None
    storages: dict[str, Storage] = {}
    ids: dict[str, Any] = {}
    tags: list[str] = []
    for node in pickle.persistent:
        pid: Any = node.id
        if type(pid) is not tuple or len(pid) != 5:
            return None
        mark, kind, key, tag, numel = pid
        layout = kinds.get(kind) if type(kind) is Global else None
        if layout is None or mark != "storage" or not (type(key) is type(tag) is str and type(numel) is int):
            return None
        tags.append(tag)
        if key in storages:
            if ids[key] != pid:  # the same key with other values
                return None
            continue
        record = records.get(f"data/{key}")
        if record is None:
            return None
        name, offset, size, stored, crc, method = record
        dtype, width = layout
        if offset is None or method or numel * width != size or size != stored or (not crc and size):
            return None
        ids[key] = pid
        fields = (key, key, tag, dtype, size, size, offset, name, "", crc, False, False, None, ())
        storages[key] = tuple.__new__(Storage, fields)
    others = 1 + sum(name in records for name in small)  # the index, and the small records
    return (tuple(storages.values()), tuple(Counter(tags).items())) if len(records) == len(storages) + others else None


class Archive:
    """The records of a zip file (``source``) or of an unpacked directory by name, and how to read them.

    ``problems`` are those of the container.
    """

    def __init__(self, path: str, nbytes: int, index: ZipIndex, read: Callable[[Record, int], Payload]) -> None:
        self.path, self.nbytes = path, nbytes
        self.root, self.records, self.unread = index.root, index.records, index.unread
        self.problems = Problems(index.problems)
        self.read = read
        self.source: Source | None = None
        self._folded: dict[str, Record] | None = None

    @classmethod
    def of_zip(cls, source: Source, index: ZipIndex) -> Archive:
        """The records of a zip file."""
        archive = cls(source.name, source.size, index, lambda record, limit: read_payload(source, record, limit))
        archive.source = source
        return archive

    def find(self, name: str) -> Record | None:
        """The record that torch would read for a name: it ignores case."""
        record = self.records.get(name)
        if record is None:
            if self._folded is None:
                names = "\n".join(self.records)
                plain = names == names.lower()  # as nearly always
                self._folded = self.records if plain else {key.lower(): value for key, value in self.records.items()}
            record = self._folded.get(name.lower())
        return record

    def get(self, name: str, limit: int) -> Payload | None:
        """The bytes of a record; ``None`` if it does not exist."""
        record = self.find(name)
        return None if record is None else self.read(record, limit)

    def head(self, record: Record, count: int) -> bytes:
        """The first bytes of a record, without unpacking the rest."""
        spare = 4096 if record.method else 0  # compressed bytes can take more room
        size = min(count, record.size) if record.method else min(count, record.size, record.stored)
        return self.read(record._replace(size=size, stored=min(record.stored, size + spare)), count + spare).data

    def read_pickled(self, record: Record) -> Payload:
        """The bytes of a record with a pickle, which is small and hardly ever packed."""
        limit = max(_MAX_PACKED, 16 * record.stored) if record.method else pickle_machine.MAX_STREAM
        return self.read(record, min(limit, pickle_machine.MAX_STREAM))


def read(archive: Archive, *, tree: bool = True) -> Checkpoint:
    """Read the records ``data.pkl`` and ``data/<key>``. Without ``tree``: see ``read_source``."""
    out = Draft(archive.path, "torch-zip", archive.nbytes, archive.problems)
    problems = out.problems
    out.records = tuple(archive.records.values())
    out.facts += container_facts(archive, _TEXT_RECORDS, problems)
    # The small records that torch.load checks before it reads anything else.
    texts = dict(out.facts)
    if "version" not in texts:
        problems.add("zip-no-version", detail="torch.load refuses an archive without the record `version`")
    elif not 1 <= _number(texts["version"]) <= _NEWEST_VERSION:
        detail = f"it says {texts['version'][:40]!r}; torch reads 1 to {_NEWEST_VERSION}"
        problems.add("zip-bad-version", "version", detail)
    order = archive.get("byteorder", MAX_TEXT_RECORD)
    if order is not None and order.data not in (b"little", b"big"):  # torch does not strip it, either
        problems.add("zip-bad-byteorder", "byteorder", f"it says {order.data[:40]!r}")
    if _number(texts.get("storage_alignment", "64")) < 0:
        detail = f"it says {texts['storage_alignment'][:40]!r}, which is not a number"
        problems.add("zip-bad-note", ".storage_alignment", detail)
    if "\\" in texts.get("serialization_id", ""):  # bytes that are not text
        problems.add("zip-bad-note", ".data/serialization_id", "it is not text")
    big_endian = texts.get("byteorder") == "big"
    pickle = read_pickle(archive, "data.pkl", problems)
    pickle.main = True
    out.pickles.append(pickle)
    # What ``transload.save`` has recorded; any other record of that name stays a foreign one.
    recorded: tuple[tuple[str, str], ...] = ()
    if archive.find(RECORD) is not None:
        from transload.formats.origin_record import MAX_RECORD, read_recorded

        payload = archive.get(RECORD, MAX_RECORD)
        recorded = read_recorded(payload.data) if payload is not None and not payload.problem else ()
    expected = (*_TEXT_RECORDS, RECORD) if recorded else _TEXT_RECORDS
    written_by = Origin(recorded=recorded)
    if not (tree or problems or big_endian):
        plain = _list_plain_storages(archive.records, expected, pickle)
        if plain is not None:
            return out.checkpoint(storages=plain[0], counted=plain[1], written_by=written_by)
    whole = read_tree(pickle, storage_table(archive, big_endian=big_endian))
    if problems:  # add which tensors need the storage that a problem is about
        users = {storage.record: needed_by(storage) for storage in whole.storages if storage.record}
        for index, problem in enumerate(problems):
            if problem.where in users:
                problems[index] = replace(problem, detail=f"{problem.detail}; {users[problem.where]}")
    out.add_tree(*whole)
    problems += check_storages(whole.storages, archive)
    strays, pickles = stray_records(archive, whole.storages, expected)
    problems += strays
    out.pickles += pickles
    return out.checkpoint(written_by=written_by)


def read_tree(pickle: Pickle, table: StorageTable, *, separator: str = "/") -> Tree:
    """Find the tensors and values of a pickle, and every storage it names, including unused ones."""
    from transload.formats.graph import find_tensors

    table.enter(pickle.persistent)
    # An empty or broken stream is not the value None.
    root = () if pickle.root is None and (pickle.broken or pickle.end == pickle.start) else pickle.root
    return find_tensors(root, table, separator=separator)


def container_facts(archive: Archive, names: Iterable[str], problems: Problems) -> list[tuple[str, str]]:
    """The folder of an archive, and the text of its small records, stripped."""
    facts = [("folder", archive.root)]
    if archive.unread:
        facts.append(("headers of records", f"{archive.unread:,} are compared with the directory when they are read"))
    for name in names:
        payload = archive.get(name, MAX_TEXT_RECORD)
        if payload is not None and payload.problem:
            problems.add("record-unreadable", name, payload.problem)
        elif payload is not None:
            text = payload.data.decode("utf-8", "backslashreplace").strip()
            facts.append((name.rpartition("/")[2].strip("."), text))
    return facts


def _number(text: str) -> int:
    """A decimal number; -1 for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1


def read_pickle(
    archive: Archive, name: str, problems: Problems, ids: Mapping[str, tuple[int, ...]] = _ZIP_IDS
) -> Pickle:
    """Run the pickle in a record, and note problems of the record and of the pickle (``pickle_problems``)."""
    record = archive.find(name)
    if record is None:
        title = f"the record {name}, which describes the content, is missing"
        problems += [Problem("zip-no-pickle", name, title=title)]
        return Pickle(name)
    if record.name.rpartition("/")[2] != name.rpartition("/")[2]:
        problems.add("zip-name-case", record.name, f"torch takes it for {name}")
    payload = archive.read_pickled(record)
    if payload.problem:
        problems.add("pickle-unreadable", name, payload.problem)
    elif not payload.intact:
        problems.add("crc-mismatch", name, "the index of the file does not have the checksum it was saved with")
    pickle = pickle_machine.run(payload.data, name=name)
    problems += pickle_problems(pickle, len(payload.data), ids)
    return pickle


def pickle_problems(pickle: Pickle, size: int, ids: Mapping[str, tuple[int, ...]] = _ANY_IDS) -> list[Problem]:
    """The problems of a pickle that should end after ``size`` bytes. ``ids`` are valid lengths of persistent ids."""
    out = Problems()
    if pickle.broken:
        out.add("pickle-broken", pickle.name, pickle.broken)
    elif pickle.end < size:
        out.add("pickle-trailing-bytes", pickle.name, f"{size - pickle.end} bytes after its end")
    for code, places in (("pickle-ambiguous", pickle.ambiguous), ("pickle-irregular", pickle.irregular)):
        for at, text in places[:1]:
            out.add(code, f"{pickle.name} › byte {at}", text)
    if pickle.undecoded:
        detail = f"{pickle.undecoded} texts that Python 2 wrote are not UTF-8: torch.load(path) fails on them"
        out.add("pickle-python2-bytes", pickle.name, detail)
    for node in pickle.persistent:
        pid = node.id if type(node.id) is tuple else ()
        kind = pid[0] if pid else None
        if kind == "storage" and len(pid) == 5:
            continue
        if type(kind) is bytes:
            kind = kind.decode("latin-1")
        if type(kind) is not str or len(pid) not in ids.get(kind, ()):
            where = f"{pickle.name} › byte {node.position}"
            detail = "torch.package does not write" if "reduce_package" in ids else "does not name a storage"
            out.add("pickle-odd-id", where, f"a persistent id that {detail}")
            break
    return out


def storage_table(
    archive: Archive, *, forms: tuple[tuple[str, str], ...] = _FORMS, big_endian: bool = False
) -> StorageTable:
    """A table that finds storages among the records of an archive. ``forms`` are prefixes and suffixes around a key."""
    from transload.formats.tensors import StorageTable

    def locate(key: str, nbytes: int) -> Record | None:  # noqa: ARG001 - other containers need the size
        for prefix, suffix in forms:
            if (record := archive.find(f"{prefix}{key}{suffix}")) is not None:
                return record
        return None

    return StorageTable(locate, big_endian=big_endian)


def check_storages(storages: Iterable[Storage], archive: Archive) -> list[Problem]:
    """Compare each storage with its record: it must exist, and have the size that the index states."""
    out = Problems()
    packed = 0
    records = archive.records
    for storage in storages:
        _, key, _, _, nbytes, stored, _, name, _, crc, compressed, _, _, _ = storage
        packed += compressed
        detail = ""
        if not name:
            code = "storage-missing" if nbytes else "storage-empty-missing"
        elif records[name].size != nbytes:
            code, detail = "storage-size", f"its record has {records[name].size} bytes, the index needs {nbytes}; "
        elif stored < nbytes and not compressed:
            code, detail = "storage-cut", f"{stored} of {nbytes} bytes are in the file; "
        elif crc == 0 and nbytes:  # only one real checksum in four billion is zero
            code, detail = "storage-skipped", "its checksum is zero; "
        else:
            continue
        out.add(code, f"storage {key}", detail + needed_by(storage))
    if packed:
        out.add("zip-compressed", detail=f"{packed} storages are compressed; torch never does that")
    return out


def needed_by(storage: Storage) -> str:
    """Which tensors need a storage."""
    return f"needed by {join_names([name or 'the root' for name in storage.tensors], 4) or 'no tensor'}"


def stray_records(
    archive: Archive, storages: Iterable[Storage], expected: Iterable[str]
) -> tuple[list[Problem], list[Pickle]]:
    """The problems and pickles of records that ``torch.load`` does not read: unused storages, and foreign records."""
    used = {storage.record for storage in storages} | {*expected, *_TEXT_RECORDS}
    names = (name for name in archive.records if name not in used and not name.endswith("/"))
    strays = [archive.records[name] for name in names if name.lower() != "data.pkl"]
    foreign = [record for record in strays if not record.name.startswith(("data/", "tensors/"))]
    # Other loaders may read those that are pickles.
    out = Problems()
    pickles: list[Pickle] = []
    unseen: list[str] = []
    left = _MAX_STRAY
    if strays:
        from transload.formats.pickle_streams import run_all
    for record in strays:
        if left <= 0:
            unseen.append(record.name)
            continue
        for window in _STRAY_WINDOWS:
            part = record._replace(size=window, stored=window, crc32=None) if window < record.size else record
            payload = archive.read(part if not record.method else record, _STRAY_WINDOWS[-1])
            packed = payload.data.startswith(_PACKED)
            contents = [] if packed else run_all(payload.data, record.name)
            whole = not packed and (len(payload.data) >= record.size or (bool(contents) and not contents[-1].cut))
            if whole or packed or payload.problem:
                break
        left -= len(payload.data)
        pickles += [pickle for pickle in contents if pickle.globals or pickle.extensions]
        unseen += [] if whole else [record.name]
    if unseen:
        out.add("record-unseen", unseen[0][:80], f"{len(unseen)} records are packed, or too large to read")
    if unused := len(strays) - len(foreign):
        out.add("record-unused", detail=f"{unused} storages are in the file, but nothing uses them")
    if foreign:
        shown = ", ".join(record.name[:80] for record in foreign[:4]) + (" …" if len(foreign) > 4 else "")
        out.add("record-foreign", shown, f"{len(foreign)} records that torch.load does not read")
    return out, pickles
