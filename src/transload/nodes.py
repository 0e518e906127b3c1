"""Inert nodes: what a pickle would build, without building it.

The pickle machine turns a stream into a graph of nodes and plain Python values (``None``, ``bool``, ``int``, ``float``,
``str``, ``bytes``, ``bytearray``, ``tuple``, ``list``). No node imports, calls or compares anything; nodes are equal
only to themselves. The graph may share nodes and contain cycles: everything that walks it must expect both.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from operator import attrgetter
from typing import Any

from transload.dtypes import STORAGES
from transload.frozen import NamedTuple


class Global:
    """A name to import, as the file spells it; one node for each distinct ``(module, name)`` of a stream."""

    __slots__ = ("count", "full_name", "module", "name", "position")

    def __init__(self, module: str, name: str, position: int) -> None:
        self.module = module
        self.name = name
        self.full_name = f"{module}.{name}"
        self.position = position
        self.count = 1

    def __repr__(self) -> str:
        return f"Global({self.full_name})"


class Extension:
    """A global given by its number in the copyreg registry (EXT1, EXT2, EXT4): its name is not in the file."""

    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


class Call:
    """An object that a call would build: callee and arguments, then what is put into the result.

    ``kind`` is the opcode: ``reduce``, ``newobj``, ``newobj_ex``, ``obj`` or ``inst`` (or ``stack_global``, for a
    global whose name is computed). ``states`` are the arguments of BUILD, ``items`` the alternating keys and values of
    SETITEM(S), ``appended`` what APPEND(S) and ADDITEMS add; each is ``None`` until there is one.
    """

    __slots__ = ("appended", "args", "callee", "items", "kind", "kwargs", "position", "states")

    def __init__(self, callee: object, args: object, kind: str, position: int) -> None:
        self.callee = callee
        self.args = args
        self.kind = kind
        self.position = position
        self.kwargs: object = None
        self.states: list[object] | None = None
        self.items: list[object] | None = None
        self.appended: list[object] | None = None

    def __repr__(self) -> str:
        return f"Call({self.callee!r}, {self.kind})"


class Unread(Call):
    """What could not be read of a damaged pickle. It is written as ``None``, and so is a call of it."""

    __slots__ = ()


def is_unread(node: object) -> bool:
    """Whether a node, or what a call would call, could not be read."""
    return type(node) is Unread or (type(node) is Call and type(node.callee) is Unread)


def is_empty_call(node: object, callee: object) -> bool:
    """Whether a node is a call of ``callee`` without arguments, whose result does not change later."""
    if type(node) is not Call or node.callee is not callee or node.args != () or node.kwargs is not None:
        return False
    return not (node.states or node.items or node.appended)


def is_ordinary_call(call: Call, ordered_dict: object, tensor: object, parameter: object) -> bool:
    """Whether a call is one that every state dict has, and makes plain data; the last three are the nodes of its names.

    That is an ``OrderedDict``, with the attribute that ``state_dict`` gives it, a tensor or a parameter.
    """
    callee, args = call.callee, call.args
    if type(args) is not tuple or callee is None or call.kwargs is not None or call.appended:
        return False
    if callee is ordered_dict:
        plain = (type(state) is Dict and state.items[::2] == ["_metadata"] for state in call.states or ())
        return not args and all(plain)
    # The last two arguments are requires_grad and the hooks.
    if call.items or call.states or len(args) != (6 if callee is tensor else 3 if callee is parameter else -1):
        return False
    return type(args[-2]) is bool and is_empty_call(args[-1], ordered_dict)


class Dict:
    """A dictionary as written: alternating keys and values, with repeated keys.

    Not a ``dict``, because a hostile file can make hashing of its integers quadratic, and a key may be any node.
    """

    __slots__ = ("items",)

    def __init__(self, items: list[object]) -> None:
        self.items = items

    def pairs(self) -> list[tuple[object, object]]:
        """``(key, value)`` in order."""
        return list(zip(self.items[::2], self.items[1::2], strict=False))

    @classmethod
    def of(cls, pairs: Iterable[tuple[object, object]]) -> Dict:
        """A dictionary of keys and values."""
        return cls([part for pair in pairs for part in pair])

    def get(self, key: str) -> object:
        """The value of a string key (the last one, as in a real dictionary), or ``None``."""
        for index in range(len(self.items) // 2 * 2 - 2, -1, -2):
            if self.items[index] == key:
                return self.items[index + 1]
        return None


class Set:
    """A set or frozen set, with members in the order of the file."""

    __slots__ = ("frozen", "items")

    def __init__(self, items: list[object], *, frozen: bool = False) -> None:
        self.items = items
        self.frozen = frozen


class Persistent:
    """A persistent id: something outside the pickle, in torch files a storage."""

    __slots__ = ("id", "position")

    def __init__(self, id: object, position: int) -> None:
        self.id = id
        self.position = position


def storage_id(node: object) -> tuple[Any, ...]:
    """The id of a storage: ("storage", class, key, device, elements), perhaps with a view; empty for other nodes."""
    pid = node.id if type(node) is Persistent else None
    return pid if type(pid) is tuple and len(pid) in (5, 6) and pid[0] in ("storage", b"storage") else ()


def module_class(node: object) -> object:
    """The class in a persistent id of older formats, which store the class of a module there, with its source."""
    if type(node) is Persistent and type(node.id) is tuple:
        return next((part for part in node.id[:2] if type(part) is Global), None)
    return None


class Big:
    """An integer that is too long to compute: that would take quadratic time."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class OutOfBand:
    """An out-of-band buffer of protocol 5; no checkpoint has one."""

    __slots__ = ()


_MAX_HOLES = 1_000_000  # a hostile file can give every list an index of 2**62


class _Branch(dict[Any, Any]):
    """Entries at a level of ``nested``."""


def nested(leaves: Iterable[tuple[tuple[str | int, ...], Any]], mapping: Callable[..., Any] = dict) -> Any:
    """The dictionaries and lists of an object, from what is in it, by path; ``mapping`` makes the dictionaries.

    Where all keys are integers they are the indices of a list; ``None`` is at those that are missing.

    >>> nested([(("a", 0), 1), (("a", 2), 3), (("b", "c"), 4)])
    {'a': [1, None, 3], 'b': {'c': 4}}
    """
    root: Any = _Branch()
    for path, leaf in leaves:
        if not path:
            return leaf
        here = root
        for step in path[:-1]:
            inner = here.get(step)
            if type(inner) is not _Branch:
                inner = here[step] = _Branch()
            here = inner
        here[path[-1]] = leaf
    holes = _MAX_HOLES

    def made(branch: _Branch, *, top: bool = False) -> Any:
        nonlocal holes
        children = {key: made(value) if type(value) is _Branch else value for key, value in branch.items()}
        if not top and all(type(key) is int for key in children):
            size = max(children) + 1
            if min(children) >= 0 and size - len(children) <= holes:
                holes -= size - len(children)
                return [children.get(index) for index in range(size)]
        return mapping(children.items())

    return made(root, top=True)


def walk_nodes(
    roots: Iterable[object], enter: Callable[[Call], Iterable[object] | None] | None = None
) -> Iterator[Any]:
    """All nodes and values in some graphs, in no particular order; each container is entered once.

    ``enter`` may return the nodes to go on with for a call, instead of all of it.
    """
    waiting: list[Any] = [*roots]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        yield node
        kind = type(node)
        if kind in _HOLDERS and id(node) not in seen:
            seen.add(id(node))
            if kind is Persistent:
                waiting.append(node.id)
            elif kind is Call:
                if enter is not None and (inner := enter(node)) is not None:
                    waiting += inner
                    continue
                waiting += (node.callee, node.args, node.kwargs, node.states, node.items, node.appended)
            else:
                waiting += node if kind is list or kind is tuple else node.items


_HOLDERS = frozenset({Call, Dict, Persistent, Set, list, tuple})


class Pickle:
    """A pickle that was read to its end, or to where it breaks.

    ``start`` and ``end`` are its bounds in the data. ``broken`` says why reading stopped early, empty if it did not;
    everything before that is here. ``cut`` is whether the data ended early. ``irregular`` are things that some
    unpicklers refuse; ``ambiguous`` are things that make unpicklers read the same bytes differently. ``calls`` are
    all calls in the order in which an unpickler makes them, including those whose result is discarded; ``built`` are
    targets of BUILD that are not calls. ``rare`` are the opcodes that ``weights_only`` does not know, and where
    each occurs first; ``python2_texts`` are the ids of Python 2 strings, which may be meant as bytes, and ``undecoded``
    counts those that are not UTF-8. ``path`` leads to the root of this pickle in a checkpoint of several pickles.
    ``loader`` is the function that loads storages from bytes in the pickle, if that is its only use: then it is not in
    ``globals``, and the storages are in ``persistent``. ``wrapper`` is the same for the class that announces arrays in
    joblib files; ``raw`` are the bounds of their bytes.
    """

    def __init__(self, name: str, start: int = 0) -> None:
        self.name = name
        self.start = start
        self.end = start
        self.main = False
        self.path: tuple[str | int, ...] = ()
        self.protocol = 0
        self.python2 = False
        self.python2_texts: set[int] = set()
        self.undecoded = 0
        self.root: object = None
        self.globals: dict[tuple[str, str], Global] = {}
        self.loader: Global | None = None
        self.wrapper: Global | None = None
        self.raw: list[tuple[int, int]] = []
        self.calls: list[Call] = []
        self.built: list[tuple[object, object]] = []
        self.extensions: list[Extension] = []
        self.persistent: list[Persistent] = []
        self.rare: dict[str, int] = {}
        self.irregular: list[tuple[int, str]] = []
        self.ambiguous: list[tuple[int, str]] = []
        self.broken = ""
        self.cut = False

    @property
    def data(self) -> bool:
        """Whether it is a plain pickle with tensors or joblib arrays that were read."""
        return self.loader is not None or self.wrapper is not None


_ABSENT = 99  # a position beyond all arguments


class Rebuild(NamedTuple):
    """A function of torch that rebuilds a tensor: how many arguments it takes, and the positions of some of them.

    ``metadata`` are flags such as ``{"conj": True}``, ``state`` the attributes of the tensor.
    """

    least: int
    most: int
    requires_grad: int = _ABSENT
    backward_hooks: int = _ABSENT
    metadata: int = _ABSENT
    state: int = _ABSENT
    device: int = _ABSENT


# The torch functions that rebuild tensors.
REBUILDS: dict[str, Rebuild] = {
    "torch._utils._rebuild_tensor": Rebuild(4, 4),
    "torch._utils._rebuild_tensor_v2": Rebuild(6, 7, 4, 5, 6),
    "torch._utils._rebuild_tensor_v3": Rebuild(7, 8, 4, 5, 7),
    "torch.nn.parameter.Parameter": Rebuild(1, 2, 1),
    "torch._utils._rebuild_parameter": Rebuild(3, 3, 1, 2),
    "torch._utils._rebuild_parameter_with_state": Rebuild(4, 4, 1, 2, state=3),
    "torch._utils._rebuild_qtensor": Rebuild(7, 7, 5, 6),
    "torch._utils._rebuild_sparse_tensor": Rebuild(2, 2),
    "torch._utils._rebuild_sparse_csr_tensor": Rebuild(2, 2),
    "torch._utils._rebuild_nested_tensor": Rebuild(4, 4),
    "torch._utils._rebuild_meta_tensor_no_storage": Rebuild(4, 4, 3),
    "torch._utils._rebuild_wrapper_subclass": Rebuild(8, 8, 7, device=6),
    "torch._utils._rebuild_device_tensor_from_numpy": Rebuild(4, 4, 3, device=2),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": Rebuild(4, 4, 3, device=2),
    "torch._utils._rebuild_xla_tensor": Rebuild(4, 4, 3, device=2),
    "torch._utils._rebuild_mlc_tensor": Rebuild(4, 4, 3, device=2),
    "torch._tensor._rebuild_from_type": Rebuild(4, 4, state=3),
    "torch._tensor._rebuild_from_type_v2": Rebuild(4, 4, state=3),
    "torch.tensor._rebuild_from_type": Rebuild(4, 4, state=3),
    "torch.nested._internal.nested_tensor._rebuild_njt": Rebuild(1, 1),
}
# The names that a state dict consists of, and what each is for. It calls the first three.
PURPOSES = {
    ("collections", "OrderedDict"): "an ordered dictionary, as state_dict() returns",
    ("torch._utils", "_rebuild_tensor_v2"): "rebuilds a tensor",
    ("torch._utils", "_rebuild_parameter"): "rebuilds a tensor",
    **{("torch", name): "the dtype of a storage" for name in STORAGES if "Untyped" not in name},
}


ORDINARY_CALLS = (*PURPOSES,)[:3]


def ordinary_names(pickle: Pickle) -> tuple[Global | None, ...]:
    """The nodes of the three names that a state dict calls, for ``is_ordinary_call``."""
    return tuple(pickle.globals.get(key) for key in ORDINARY_CALLS)


# -- nodes in words

_MAX_TEXT = 200


def called(node: Call) -> str:
    """The dotted name of the callee; empty if that has no name."""
    callee = node.callee
    return callee.full_name if type(callee) is Global else dotted(module_class(callee))


def calls_of(pickle: Pickle, names: Container[str], name_of: Callable[[Call], str] = called) -> Iterator[Call]:
    """The calls whose callee has one of some names. A million calls have few callees, each of which is named once."""
    callees = dict(zip(map(id, map(attrgetter("callee"), pickle.calls)), pickle.calls, strict=True))
    chosen = {key for key, call in callees.items() if name_of(call) in names}
    return (call for call in pickle.calls if id(call.callee) in chosen) if chosen else iter(())


def dotted(node: object) -> str:
    """The dotted name of a global; empty for anything else."""
    return node.full_name if type(node) is Global else ""


def device_text(node: object) -> str:
    """``torch.device("cuda", 1)`` as ``cuda:1``."""
    if type(node) is Call and called(node) == "torch.device" and type(node.args) is tuple:
        return ":".join(str(part) for part in node.args if type(part) in (str, int)) or "unknown"
    return text_of(node)


def text_of(node: object) -> str:
    """The node if it is text, else ``unknown``."""
    return node if type(node) is str else "unknown"


def short(node: object) -> str:
    """A value in at most a few hundred characters, never deeper than one call and its plain arguments."""
    if type(node) is str:
        return node if len(node) <= _MAX_TEXT else f"{node[:_MAX_TEXT]}… ({len(node)} characters)"
    if type(node) is Global:
        return node.full_name[:_MAX_TEXT]
    if type(node) is Call:
        if called(node) == "torch.device":
            return device_text(node)
        args = node.args if type(node.args) is tuple else ()
        inner = ", ".join(scalar(a) for a in args[:4])
        return f"{called(node) or 'call'}({inner})"[:_MAX_TEXT]
    if type(node) is tuple or type(node) is list:
        inner = ", ".join(scalar(a) for a in node[:8]) + (", …" if len(node) > 8 else "")
        return f"({inner})" if type(node) is tuple else f"[{inner}]"
    return scalar(node)


def scalar(node: object) -> str:
    """A plain value in a few dozen characters."""
    if type(node) is str:
        return repr(node[:40])
    if type(node) is bytes or type(node) is bytearray:
        return f"{len(node)} bytes"
    if (type(node) is int and node.bit_length() > 128) or type(node) is Big:
        return "a huge integer"
    if node is None or type(node) in (bool, int, float):
        return repr(node)
    if type(node) is Global:
        return node.full_name[:80]
    return f"<{type(node).__name__.lower()}>"
