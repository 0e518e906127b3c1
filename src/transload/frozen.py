"""Frozen dataclasses at a third of their price.

``dataclasses`` compiles six methods for each class when it is defined; for the thirty of ``machine`` that takes longer
than looking at a machine. Here only ``__init__`` is compiled and the rest is shared; ``fields`` and ``replace`` work.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any

__all__ = ["facts"]


class _Shared:
    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:  # set once, by __init__
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__qualname__}({told})"


if TYPE_CHECKING:
    from dataclasses import dataclass as facts
else:

    def facts(*, frozen: bool) -> Any:
        """A class decorator that is used, and works, as ``dataclass(frozen=True)``.

        >>> @facts(frozen=True)
        ... class Card:
        ...     name: str = ""
        >>> Card("H200") == Card("H200"), Card("H200")
        (True, Card(name='H200'))
        """
        assert frozen  # noqa: S101  said for the reader and the type checker: there is no other kind

        def made(cls: type) -> type:
            for name in ("__setattr__", "__delattr__", "__eq__", "__hash__", "__repr__"):
                if name not in cls.__dict__:
                    setattr(cls, name, _Shared.__dict__[name])
            return dataclass(repr=False, eq=False)(cls)

        return made
