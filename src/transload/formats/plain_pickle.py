"""A pickle that is no torch file: named as such, and judged all the same, since something may load it."""

from __future__ import annotations

from transload.checkpoint import Checkpoint
from transload.findings import Problem
from transload.formats.tensors import Place, StorageTable, find_tensors
from transload.formats.torch_legacy import MAX_DOUBT, run_at
from transload.formats.torch_zip import pickle_problems
from transload.formats.zip import ends_like_zip
from transload.io.sources import Source
from transload.nodes import Call, Dict, Pickle, Set

__all__ = ["read_plain_pickle"]


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
