"""The stream format of torch 0.1.10 to 1.5 (and of a flag ever since): five pickles, then the storages end to end.

Pickles: the magic number, the protocol version, facts on the machine, the object, the list of storage keys. For each
key follow an 8-byte element count and the bytes. There is no index: where a storage lies follows from the sizes of all
before it.

A plain pickle, which torch did not write, is read here, too: it is judged all the same, since something may load it.
"""

from __future__ import annotations

from collections.abc import Iterable

from transload.checkpoint import Checkpoint, Storage
from transload.dtypes import ITEMSIZE
from transload.findings import Problem
from transload.formats.pickle_machine import run_at
from transload.formats.tensors import Place, Slot, StorageTable, claimed, find_tensors
from transload.formats.torch_zip import needed_by, pickle_problems, read_tree
from transload.formats.zip import ends_like_zip
from transload.io.sources import Source
from transload.nodes import Call, Dict, Global, Pickle, Set

__all__ = ["MAGIC", "looks_like_legacy", "read_legacy", "read_plain_pickle"]


MAGIC = 0x1950A86A20F9469CFC6C
_MAGIC_PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# As torch.save writes it when it is given protocol 3, 4 or 5.
_OTHER_MAGIC = (
    _MAGIC_PICKLE.replace(b"\x80\x02", b"\x80\x03"),
    _MAGIC_PICKLE.replace(b"\x80\x02", b"\x80\x04\x95\r\0\0\0\0\0\0\0"),
    _MAGIC_PICKLE.replace(b"\x80\x02", b"\x80\x05\x95\r\0\0\0\0\0\0\0"),
)
_MAX_MAGIC_PICKLE = 32
MAX_DOUBT = 1 << 24
"""Bytes to read of what may be no pickle: random ones soon announce a text of gigabytes."""

_STAGES = ("magic number", "protocol version", "machine facts", "object", "storage keys")
_FIRST_WINDOW = 1 << 20
_SMALL_WINDOW = 1 << 12
_IDS = {"storage": (6,), "module": (4,)}


def looks_like_legacy(source: Source) -> bool:
    """torch's own test: the first pickle is the magic number, however it is spelt. Or what is left of it is."""
    if 4 <= source.size < len(_MAGIC_PICKLE):
        return _MAGIC_PICKLE.startswith(source.read(0, source.size))
    return run_at(source, 0, _STAGES[0], _SMALL_WINDOW, MAX_DOUBT)[0].root == MAGIC


def read_legacy(source: Source) -> Checkpoint:
    """Read all five pickles and find every storage by adding up sizes."""
    problems: list[Problem] = []
    head = source.read(0, _MAX_MAGIC_PICKLE)
    if not _MAGIC_PICKLE.startswith(head[: len(_MAGIC_PICKLE)]) and not head.startswith(_OTHER_MAGIC):
        problems.append(Problem("legacy-odd-magic", _STAGES[0], "the magic number is not written as torch writes it"))
    pickles, position = _run_stages(source, problems)
    main = pickles[3] if len(pickles) > 3 else Pickle(_STAGES[3])
    main.main = True
    listed = pickles[4].root if len(pickles) > 4 and not pickles[4].broken else []
    keys = [_key(key) for key in listed] if type(listed) is list else []
    if ends_like_zip(source):
        detail = "zipfile reads the archive at its end, torch the stream before it"
        problems.append(Problem("zip-inside", detail=detail))
    problems += _untyped(main)
    places, end = _places(source, position, keys, claimed(main), problems)
    table = StorageTable(lambda key, _: places.get(key, Place(None, 0)))
    tree = read_tree(main, table)
    problems += tree.problems
    if not any(pickle.broken for pickle in pickles):
        problems += _check(tree.storages, set(keys))
        if end < source.size:
            detail = f"{source.size - end} bytes after the last storage"
            problems.append(Problem("legacy-trailing-bytes", detail=detail))
    return Checkpoint(
        path=source.name,
        format="torch-legacy",
        nbytes=source.size,
        tensors=tree.tensors,
        storages=tree.storages,
        leaves=tree.leaves,
        facts=_facts(pickles),
        problems=tuple(problems),
        pickles=tuple(pickles),
    )


def _run_stages(source: Source, problems: list[Problem]) -> tuple[list[Pickle], int]:
    pickles: list[Pickle] = []
    position = 0
    for stage, name in enumerate(_STAGES):
        window = _FIRST_WINDOW if stage == 3 else _SMALL_WINDOW
        pickle, position = run_at(source, position, name, window)
        pickles.append(pickle)
        problems += pickle_problems(pickle, pickle.end, _IDS)
        if pickle.broken:
            lost = ", ".join(_STAGES[stage:])
            detail = f"part {stage + 1} of 5 breaks off; lost: {lost} and all storages"
            problems.append(Problem("legacy-cut", name, detail))
            break
    if len(pickles) > 1 and pickles[1].root != 1001 and not pickles[1].broken:
        problems.append(Problem("legacy-bad-protocol", _STAGES[1], "torch reads protocol version 1001 only"))
    return pickles, position


def _key(key: object) -> str:
    """A listed key as text; what can be no key is an empty one, which nothing uses."""
    if type(key) is bytes:
        return key.decode("latin-1")
    return str(key) if type(key) in (str, int) else ""


def _untyped(pickle: Pickle) -> list[Problem]:
    """Storages without a type, which newer dtypes have: torch writes them in this format, too, and cannot read them."""
    pids = [node.id for node in pickle.persistent if type(node.id) is tuple and len(node.id) > 1]
    untyped = [pid for pid in pids if type(pid[1]) is Global and pid[1].name.endswith("UntypedStorage")]
    detail = f"{len(untyped)} storages have no type, and torch asks for one"
    return [Problem("legacy-untyped", pickle.name, detail)] if untyped else []


def _places(
    source: Source, position: int, keys: list[str], slots: dict[str, Slot], problems: list[Problem]
) -> tuple[dict[str, Place], int]:
    """Where each storage lies, as torch finds it: the count before the bytes must agree with the object.

    Also where the last one ends; that is the end of the file where the rest of it cannot be told.
    """
    places: dict[str, Place] = {}
    for key in keys:
        slot = slots.get(key)
        if slot is None:
            detail = "in the list of keys, but nothing uses it"
            problems.append(Problem("legacy-unknown-key", f"storage {key[:40]}", detail))
            return places, source.size
        count = source.read(position, 8)
        numel = slot.nbytes // ITEMSIZE[slot.dtype]
        if len(count) < 8:
            problems.append(Problem("storage-cut", f"storage {key}", "the file ends before its element count"))
            return places, source.size
        if int.from_bytes(count, "little", signed=True) != numel:
            detail = f"{int.from_bytes(count, 'little', signed=True)} elements lie there, the object wants {numel}"
            problems.append(Problem("storage-size", f"storage {key}", detail))
            return places, source.size
        start = position + 8
        present = max(0, min(slot.nbytes, source.size - start))
        places[key] = Place(start if start <= source.size else None, present, f"storage {key}")
        position = start + slot.nbytes
    return places, position


def _check(storages: Iterable[Storage], keys: set[str]) -> list[Problem]:
    out: list[Problem] = []
    for storage in storages:
        where = f"storage {storage.key}"
        if storage.key not in keys:
            # torch 2.13 makes the tensor all the same, out of whatever was in memory.
            detail = f"its bytes are not in the file; {needed_by(storage)}"
            out.append(Problem("legacy-unlisted", where, detail))
        elif storage.stored < storage.nbytes:
            detail = f"{storage.stored} of {storage.nbytes} bytes are in the file; {needed_by(storage)}"
            out.append(Problem("storage-cut", where, detail))
    return out


def _facts(pickles: list[Pickle]) -> tuple[tuple[str, str], ...]:
    facts: list[tuple[str, str]] = []
    if len(pickles) > 1:
        facts.append(("protocol version", str(pickles[1].root)[:40]))
    system = pickles[2].root if len(pickles) > 2 else None
    if type(system) is Dict:
        order = "little" if system.get("little_endian") is True else "big"
        facts.append(("saved on", f"a {order}-endian machine"))
    if len(pickles) > 3:
        sources = [node for node in pickles[3].persistent if type(node.id) is tuple and node.id[:1] == ("module",)]
        if sources:
            facts.append(("module sources", f"the Python source of {len(sources)} classes is stored in the file"))
    return tuple(facts)


_MAX_PICKLES = 1000
_WINDOW = 1 << 16


def read_plain_pickle(source: Source) -> Checkpoint | None:
    """The pickles in a file that begins with one; ``None`` if it does not.

    A stream that breaks counts only if it had asked for a global before: a text file can begin with a valid opcode by
    chance.
    """
    first, end = run_at(source, 0, "pickle", _WINDOW, MAX_DOUBT)
    if first.cut and (source.read(0, 1) == b"\x80" or _is_pickle(first, source.size)):
        first, end = run_at(source, 0, "pickle")  # it is one, and a long one
    if not _is_pickle(first, source.size):
        return None
    first.main = True
    pickles = [first, *_others(source, end)] if not first.broken else [first]
    tree = find_tensors(first.root, StorageTable(lambda _key, _nbytes: Place(None, 0)))
    problems = [problem for pickle in pickles for problem in pickle_problems(pickle, pickle.end)]
    if ends_like_zip(source):
        problems.append(Problem("zip-inside", detail="zipfile reads the archive at its end, pickle what is before it"))
    return Checkpoint(
        path=source.name,
        format="joblib" if any(module.startswith("joblib.") for module, _ in first.globals) else "pickle",
        nbytes=source.size,
        tensors=tree.tensors,
        leaves=tree.leaves,
        facts=(("pickle protocol", str(first.protocol)), ("top object", _kind(first.root))),
        problems=(_what(first), *problems, *tree.problems),
        pickles=tuple(pickles),
    )


def _others(source: Source, position: int) -> list[Pickle]:
    """The pickles that follow one another after the first."""
    out: list[Pickle] = []
    while position < source.size and len(out) < _MAX_PICKLES:
        pickle, position = run_at(source, position, f"pickle {len(out) + 2}", _WINDOW)
        out.append(pickle)
        if pickle.broken:
            break
    return out


def _is_pickle(pickle: Pickle, size: int) -> bool:
    if not pickle.broken:
        return pickle.protocol >= 2 or pickle.end == size or bool(pickle.globals)
    return bool(pickle.calls or pickle.extensions) or (pickle.protocol >= 2 and bool(pickle.globals))


def _what(pickle: Pickle) -> Problem:
    title = f"a plain pickle (protocol {pickle.protocol}, holding {_kind(pickle.root)}), not a torch checkpoint"
    fix = ("torch.load does not read it. Whoever wrote it used pickle.dump: ask for a file saved with torch.save.",)
    return Problem("not-a-checkpoint", title=title, fix=fix)


def _kind(root: object) -> str:
    if type(root) is Call:
        callee = root.callee
        return f"an object made by {getattr(callee, 'module', '?')}.{getattr(callee, 'name', '?')}"
    names = {Dict: "a dictionary", Set: "a set", list: "a list", tuple: "a tuple"}
    return names.get(type(root), f"a value of type {type(root).__name__}")
