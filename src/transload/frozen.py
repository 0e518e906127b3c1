"""Frozen dataclasses and named tuples at a fraction of their price.

Importing ``dataclasses`` takes a sixth of the time of ``transload inspect``, and it compiles six methods for each
class: for the thirty of ``machine`` that takes longer than looking at a machine. Here only ``__init__`` is compiled and
the rest is shared. ``fields``, ``replace`` and ``is_dataclass`` work: what they look at is made when they ask.

``typing.NamedTuple`` compiles every annotation, which takes longer than everything else about such a class.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

__all__ = ["NamedTuple", "Plain", "Reported", "facts", "replace"]


class _Fields:
    """``__dataclass_fields__`` of a class: what ``dataclasses`` makes of another one with the same annotations."""

    def __init__(self, cls: type, annotations: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.cls, self.annotations, self.defaults = cls, annotations, defaults
        self.found: dict[str, Any] = {}

    def __get__(self, made: object, cls: type) -> dict[str, Any]:
        if not self.found:
            from dataclasses import dataclass

            named = {"__module__": self.cls.__module__, "__doc__": "Without one it would be given its signature."}
            held = {**named, "__annotations__": self.annotations, **self.defaults}
            twin: Any = dataclass(init=False, repr=False, eq=False)(type(self.cls.__name__, (), held))
            self.found = twin.__dataclass_fields__
        return self.found


class Plain:
    """What ``to_dict`` of facts gives: their fields by name, with lists for tuples."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: _plain(value) for name, value in vars(self).items()}


class Reported:
    """What a notebook shows as its text, which is a report."""

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.to_dict() if isinstance(value, Plain) else value


class _Shared:
    def __setattr__(self, name: str, value: object) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__qualname__}({told})"

    def __replace__(self, **changes: object) -> object:
        return type(self)(**{**self.__dict__, **changes})


if TYPE_CHECKING:
    from dataclasses import dataclass as facts
    from dataclasses import replace
    from typing import NamedTuple
else:

    class _NamedTupleMaker(type):
        def __new__(cls, name: str, bases: tuple[type, ...], held: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, held)
            names = held["__annotations__"]
            defaults = [held[each] for each in names if each in held]
            made = namedtuple(name, names, defaults=defaults)  # noqa: PYI024 - the types are for the type checker
            for each, value in held.items():
                if each not in names:
                    setattr(made, each, value)
            return made

    class NamedTuple(metaclass=_NamedTupleMaker):
        """A base class that is used, and works, as ``typing.NamedTuple``.

        >>> class Card(NamedTuple):
        ...     name: str
        ...     sizes: tuple[int, ...] = ()
        >>> Card("H200")
        Card(name='H200', sizes=())
        """

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
            for name, method in _Shared.__dict__.items():
                if callable(method) and name not in cls.__dict__:
                    setattr(cls, name, method)
            annotations = cls.__annotations__
            defaults = {name: cls.__dict__[name] for name in annotations if name in cls.__dict__}
            cls.__dataclass_fields__ = _Fields(cls, annotations, defaults)
            cls.__match_args__ = tuple(annotations)
            cls.__init__ = _init(cls, annotations, defaults)
            return cls

        return made

    def replace(made: Any, /, **changes: Any) -> Any:
        """``dataclasses.replace`` for such a class."""
        return made.__replace__(**changes)


def _init(cls: type, annotations: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """The ``__init__`` of a class: a function of its own, so that making an object takes one call."""
    names: dict[str, Any] = {"defaults": defaults}
    made = []
    for name, default in defaults.items():
        if hasattr(default, "default_factory"):  # ``dataclasses.field``
            made.append(f" {name} = {name}.default_factory() if {name} is defaults[{name!r}] else {name}\n")
            delattr(cls, name)
    # The shortest, since it is compiled each time. A debugger adds later variables to what locals() returned.
    told = " self.__dict__.update(locals())\n del self.__dict__['self']"
    exec(f"def __init__(self, {', '.join(annotations)}):\n{''.join(made)}{told}", names)  # noqa: S102
    init = names["__init__"]
    init.__defaults__ = tuple(defaults.values())
    init.__annotations__ = {**annotations, "return": "None"}
    return init
