"""The names a file may use: torch's own list, and what the program has allowed through ``torch.serialization``.

Nothing is imported because a file names it, except three modules of torch which torch itself asks users to import.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from transload.judge.names import TORCH_DEFAULT, canonical, torch_spelling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transload.nodes import Global, Pickle

__all__ = ["Allowed", "Unknown", "registrar"]

_BLOCKED = frozenset({"sys", "os", "posix", "nt", "builtins.eval", "builtins.exec"})
"""Never allowed, whatever the program says (torch/_weights_only_unpickler.py, and two more)."""

_REGISTERED_BY = (
    ("torch.nested._internal.nested_tensor.", "torch.nested._internal.nested_tensor"),
    ("torch._dynamo.decorators._DimRange", "torch._dynamo"),
    ("torch.distributed._mesh_layout.", "torch.distributed"),
    ("torch.distributed.device_mesh.", "torch.distributed.tensor"),
    ("torch.distributed.tensor.", "torch.distributed.tensor"),
)
"""Modules of torch that allow their own classes as soon as they are imported."""

_OURS = frozenset(
    {
        "torch._tensor._rebuild_from_type",
        "torch._utils._rebuild_sparse_csr_tensor",
        "torch._utils._rebuild_xla_tensor",
        "torch._utils._rebuild_mlc_tensor",
        "torch.torch_version.TorchVersion",
        "collections.defaultdict",
        *(
            f"builtins.{name}"
            for name in ("bytes", "frozenset", "bool", "dict", "float", "int", "list", "str", "tuple")
        ),
    }
)
"""What torch refuses and need not: the same as today's functions under older names, and values that later protocols of
pickle write without any name. The plain classes are what a ``defaultdict`` makes."""

_PLAIN = frozenset(name for name in TORCH_DEFAULT if not name.startswith(("torch.nested.", "torch.distributed.")))
_KNOWN = _PLAIN | _OURS


class Unknown(Exception):  # noqa: N818 - a signal inside this room, never seen outside
    """A name that this torch does not have."""


class Allowed:
    """Looks names up. One is made for each load: a program may change what it allows at any time."""

    def __init__(self) -> None:
        self._user: dict[str, Any] | None = None

    def is_known(self, node: Global) -> bool:
        """Whether a name is on the fixed list."""
        return torch_spelling(node.module, node.name) in _KNOWN or _full(node) in _KNOWN

    def refused(self, pickles: Iterable[Pickle]) -> list[Global]:
        """The names in some pickles that nobody has allowed."""
        nodes = [node for pickle in pickles for node in pickle.globals.values()]
        return [node for node in nodes if not self.is_known(node) and self.user(node) is None]

    def user(self, node: Global) -> Any:
        """The object that the program has allowed under a name; ``None`` if it has not."""
        spellings = (torch_spelling(node.module, node.name), _full(node))
        if spellings[0].partition(".")[0] in _BLOCKED or spellings[1] in _BLOCKED:
            return None
        found = self._find(spellings)
        if found is None and (module := registrar(spellings[0])):
            _try_import(module)
            self._user = None
            found = self._find(spellings)
        return found

    def _find(self, spellings: tuple[str, ...]) -> Any:
        if self._user is None:
            self._user = _allowed_by_program()
        return next((self._user[name] for name in spellings if name in self._user), None)

    def allows(self, kind: type) -> bool:
        """Whether the program has allowed a class, under whatever name."""
        if self._user is None:
            self._user = _allowed_by_program()
        return any(kind is found for found in self._user.values())

    def object_of(self, node: Global) -> Any:
        """What a name stands for, where a file holds the name itself: a dtype, a class, a function."""
        full = name_of(node)
        if full not in _KNOWN:
            return self.user(node)
        return _known_object(full)


def name_of(node: Global) -> str:
    """The name under which a global is looked up."""
    spelling = torch_spelling(node.module, node.name)
    return spelling if spelling in _KNOWN else _full(node)


def _full(node: Global) -> str:
    return ".".join(canonical(node.module, node.name))


def _known_object(full: str) -> Any:
    """The object of a name on the fixed list."""
    from importlib import import_module

    module, _, name = full.rpartition(".")
    if name.endswith("Storage") and name not in ("TypedStorage", "UntypedStorage"):
        from torch.serialization import StorageType

        return StorageType(name)
    if module.startswith("torch"):
        import_module("torch")
    home = sys.modules.get(module) if module.startswith("torch") else import_module(module)
    found = getattr(home, name, None)
    if found is None:
        raise Unknown(full)
    return found


def registrar(full: str) -> str:
    """The part of torch that allows a name when it is imported; empty where none does."""
    return next((module for prefix, module in _REGISTERED_BY if full.startswith(prefix)), "")


def _try_import(module: str) -> None:
    from importlib import import_module

    try:
        import_module(module)
    except (ImportError, RuntimeError):  # a torch without this part
        return


def _allowed_by_program() -> dict[str, Any]:
    """What was given to ``torch.serialization.add_safe_globals``, by name; and dtypes newer than our list."""
    from importlib import import_module

    try:
        unpickler: Any = import_module("torch._weights_only_unpickler")
    except ImportError:
        return {}
    from torch import dtype

    own: dict[str, Any] = getattr(unpickler, "_get_allowed_globals", dict)()
    user: dict[str, Any] = getattr(unpickler, "_get_user_allowed_globals", dict)()
    newer = {name: found for name, found in own.items() if isinstance(found, dtype) and name not in _KNOWN}
    return {**newer, **user}
