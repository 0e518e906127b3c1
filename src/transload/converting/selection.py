"""Which tensors of a checkpoint are converted, under which names, and which are not and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from transload.errors import ConvertError

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Key, Tensor
    from transload.converting.wish import Wish

__all__ = ["Distinct", "Left", "Named", "Selection", "module_paths", "select"]

_WEIGHTS = ("_parameters", "_buffers")
_NO_STATE = "an attribute of a module, which state_dict() does not have"
_NOT_PERSISTENT = "a buffer registered with persistent=False"
_CONSTANT = "a constant of the program's code, no weight"


class Named(NamedTuple):
    """A tensor, and the name it gets."""

    name: str
    tensor: Tensor


class Left(NamedTuple):
    """Something that is not in the target, and why. ``lost``: not because it should not be, but because it cannot."""

    name: str
    why: str
    lost: bool = False


class Selection(NamedTuple):
    """What is converted, in the order of the file; ``others`` counts tensors that were not chosen.

    ``unmatched`` are prefixes to strip that no name has.
    """

    tensors: tuple[Named, ...]
    left: tuple[Left, ...]
    others: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    unmatched: tuple[str, ...] = ()


class Distinct:
    """Gives every name once: those that come again get a number, which none of all ``names`` has.

    >>> distinct = Distinct(["a", "a", "a#2"])
    >>> distinct("a"), distinct("a"), distinct.renamed
    ('a', 'a#3', [('a', 'a#3')])
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.renamed: list[tuple[str, str]] = []
        self._taken = set(names)
        self._used: set[str] = set()
        self._next: dict[str, int] = {}  # a file can have fifty thousand tensors of one name

    def __call__(self, name: str, *, made: bool = False) -> str:
        """The name, or another one; one that was ``made`` here gives way to the same as it stands in the file."""
        if name not in self._used and not (made and name in self._taken):
            self._used.add(name)
            return name
        number = self._next.get(name, 2)
        while (new := f"{name}#{number}") in self._used or new in self._taken:
            number += 1
        self._next[name] = number + 1
        self._used.add(new)
        self.renamed.append((name, new))
        return new


def select(checkpoint: Checkpoint, wish: Wish) -> Selection:
    """The tensors that are asked for, as ``state_dict()`` would name them."""
    chosen = [Named(_below(tensor.name, wish.key), tensor) for tensor in checkpoint.tensors if _is_below(tensor, wish)]
    if wish.key and not chosen:
        raise _no_such_key(checkpoint, wish.key)
    left = _unseen(checkpoint)
    modules = module_paths(checkpoint.tensors)
    kept = []
    unmatched = dict.fromkeys(wish.strip)
    for each in chosen:
        why = _why_not(checkpoint, each.tensor, modules, wish)
        if why:
            left.append(Left(each.tensor.name, why))
        else:
            name, prefix = _stripped(each.name, wish.strip)
            kept.append(each._replace(name=name))
            unmatched.pop(prefix, None)
    named, renamed = _apart(kept, wish)
    others = len(checkpoint.tensors) - len(chosen)
    return Selection(tuple(named), tuple(left), others, tuple(renamed), tuple(unmatched))


def _unseen(checkpoint: Checkpoint) -> list[Left]:
    """Where the reader has stopped, for there is more than it goes through: what lies there may be tensors."""
    stopped = [problem for problem in checkpoint.problems if problem.code in ("tree-too-deep", "tree-too-large")]
    return [Left(each.where or "…", f"not all of it was looked through: {each.detail}", lost=True) for each in stopped]


def _flat(text: str) -> str:
    """A path with one separator: ``model.state_dict`` and ``model/state_dict`` are the same."""
    return text.replace("/", ".")


def _is_below(tensor: Tensor, wish: Wish) -> bool:
    if not wish.key:
        return True
    name, key = _flat(tensor.name), _flat(wish.key)
    return name == key or name.startswith(f"{key}.")


def _below(name: str, key: str) -> str:
    """The name from a key on; the last part of it where it is all of the name."""
    if not key:
        return name
    return name[len(key) + 1 :] or name.rpartition("/")[2]


def _no_such_key(checkpoint: Checkpoint, key: str) -> ConvertError:
    from difflib import get_close_matches

    from transload.converting.candidates import candidates

    known = [found.key for found in candidates(checkpoint) if found.key]
    near = get_close_matches(key, known, 3) or known[:3]
    fix = f"There is {', '.join(near)}; --list shows all." if near else "--list shows what there is."
    return ConvertError(f"there is no tensor below the key {key!r}", where=checkpoint.path, fix=fix)


def module_paths(tensors: Iterable[Tensor]) -> set[tuple[Key, ...]]:
    """Where pickled modules are: the paths of those that hold parameters or buffers, and of all around them."""
    found: set[tuple[Key, ...]] = set()
    for tensor in tensors:
        path = tensor.path
        if path[-2:-1] and path[-2] in _WEIGHTS and not tensor.name.endswith("/".join(map(str, path[-2:]))):
            path = path[:-2]
            while path not in found:
                found.add(path)
                if path[-2:-1] == ("_modules",):
                    path = path[:-2]
    return found


def _why_not(checkpoint: Checkpoint, tensor: Tensor, modules: set[tuple[Key, ...]], wish: Wish) -> str:
    """Why a tensor is no part of the state dict; empty if it is."""
    if checkpoint.format == "torchscript" and tensor.name.startswith("CONSTANTS."):
        return "" if _flat(wish.key).startswith("CONSTANTS") else _CONSTANT
    if checkpoint.format == "torch-export" and "constants" in tensor.path[:2]:
        return "" if "constants" in _flat(wish.key).split(".") else _CONSTANT
    inside = next((path for path in _beginnings(tensor.path) if path in modules), None)
    if inside is None:
        return ""
    rest = tensor.path[len(inside) :]
    while rest[:1] == ("_modules",):
        rest = rest[2:]
    if len(rest) != 2 or rest[0] not in _WEIGHTS:
        return _NO_STATE
    hidden = rest[0] == "_buffers" and tensor.name.endswith(f"_buffers/{rest[1]}")
    return _NOT_PERSISTENT if hidden else ""


def _beginnings(path: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
    for length in range(len(path)):
        yield path[:length]


def _stripped(name: str, prefixes: tuple[str, ...]) -> tuple[str, str]:
    """A name without the first prefix that it, or the last part of a nested one, begins with; and that prefix."""
    lead, slash, last = name.rpartition("/")
    for prefix in prefixes:
        if name.startswith(prefix):
            return name[len(prefix) :], prefix
        if last.startswith(prefix):
            return f"{lead}{slash}{last[len(prefix) :]}", prefix
    return name, ""


def _apart(named: list[Named], wish: Wish) -> tuple[list[Named], list[tuple[str, str]]]:
    """Every name once, and not empty; with those that had to be changed."""
    out: list[Named] = []
    renamed: list[tuple[str, str]] = []
    distinct = Distinct(each.name for each in named)
    for each in named:
        wanted = _writable(each.name)
        name = distinct(wanted, made=wanted != each.name)
        if name != wanted and wish.strip:
            raise ConvertError(f"two tensors would be called {wanted!r} without the prefix", fix="Strip another one.")
        if name != each.name:
            renamed.append((each.name, name))
        out.append(each._replace(name=name))
    return out, renamed


def _writable(name: str) -> str:
    """A name that every format can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:  # half a letter, which UTF-8 does not have
        name = name.encode("utf-8", "backslashreplace").decode()
    return f"{name}#2" if name == "__metadata__" else name or "tensor"
