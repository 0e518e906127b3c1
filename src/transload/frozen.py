"""Frozen dataclasses and named tuples that are much faster to define.

The rule: a frozen class derives from ``Frozen`` and is copied by ``replace`` of this module, a named tuple derives from
this ``NamedTuple``. ``dataclasses.dataclass`` is for the rest: mutable classes, slots, fields added in a subclass.

Importing ``dataclasses`` takes a sixth of the time of ``transload inspect``, and it compiles six methods for each
class: for the thirty classes of ``machine`` that takes longer than examining a machine. Here only ``__init__`` is
compiled, when it is first needed, and the other methods are inherited. ``fields``, ``replace`` and ``is_dataclass``
work: the attribute they read is computed on demand.

``typing.NamedTuple`` compiles every annotation, which takes longer than everything else about the class, and
``collections.namedtuple`` compiles ``__new__``; here that, too, is compiled when it is first needed.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

__all__ = ["Frozen", "NamedTuple", "Plain", "replace"]


class _Fields:
    """``__dataclass_fields__`` of a class: when first read, it is replaced by that of a real dataclass."""

    def __init__(self, cls: Any, annotations: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.cls, self.annotations, self.defaults = cls, annotations, defaults

    def __get__(self, instance: object, cls: type) -> Any:
        from dataclasses import dataclass

        named = {"__module__": self.cls.__module__, "__doc__": "Not empty, else dataclass() adds a signature."}
        namespace = {**named, "__annotations__": self.annotations, **self.defaults}
        twin: Any = dataclass(init=False, repr=False, eq=False)(type(self.cls.__name__, (), namespace))
        self.cls.__dataclass_fields__ = twin.__dataclass_fields__
        return twin.__dataclass_fields__


class _Init(_Fields):
    """``__init__`` of a class: compiled when it is first read, since most classes of a module are seldom used."""

    def __get__(self, instance: object, cls: type) -> Any:
        init = self.cls.__init__ = _init(self.cls, self.annotations, self.defaults)
        return init if instance is None else init.__get__(instance)


if TYPE_CHECKING:
    from collections.abc import Iterable
    from dataclasses import field, replace
    from typing import NamedTuple

    from typing_extensions import dataclass_transform

    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    class Frozen:
        """A base class that makes a frozen dataclass."""
else:
    from _collections import _tuplegetter

    class Frozen:
        """A base class that works like ``dataclass(frozen=True)``.

        >>> class Card(Frozen):
        ...     name: str = ""
        >>> Card("H200") == Card("H200"), Card("H200")
        (True, Card(name='H200'))
        """

        def __init_subclass__(cls) -> None:
            if annotations := cls.__annotations__:  # else it has the fields of its base
                defaults = {name: cls.__dict__[name] for name in annotations if name in cls.__dict__}
                cls.__dataclass_fields__ = _Fields(cls, annotations, defaults)
                cls.__match_args__ = tuple(annotations)
                cls.__init__ = _Init(cls, annotations, defaults)

        def __setattr__(self, name: str, value: object = None) -> None:
            from dataclasses import FrozenInstanceError

            raise FrozenInstanceError(f"cannot assign to field {name!r}")

        __delattr__ = __setattr__

        def __eq__(self, other: object) -> bool:
            return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

        def __hash__(self) -> int:
            return hash(tuple(self.__dict__.values()))

        def __repr__(self) -> str:
            fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
            return f"{type(self).__qualname__}({fields})"

        def __replace__(self, **changes: object) -> object:
            return type(self)(**{**self.__dict__, **changes})

    class _New(_Fields):
        """``__new__`` of a named tuple: compiled when it is first read."""

        def __get__(self, instance: object, cls: type) -> Any:
            twin = namedtuple(self.cls.__name__, self.annotations, defaults=self.defaults.values())  # noqa: PYI024
            self.cls.__new__ = twin.__new__
            return twin.__new__

    class _Tuple(tuple):
        """What all named tuples inherit; their documentation is that of ``collections.namedtuple``."""

        __slots__ = ()

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Any:
            return cls(*values)

        def _replace(self, /, **changes: Any) -> Any:
            result = tuple.__new__(type(self), map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"Got unexpected field names: {list(changes)!r}")
            return result

        __replace__ = _replace

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            fields = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({fields})"

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

    class _NamedTupleMaker(type):
        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, namespace)
            annotations = namespace["__annotations__"]
            defaults = {field: namespace[field] for field in annotations if field in namespace}
            fields = {field: _tuplegetter(index, None) for index, field in enumerate(annotations)}
            named = {"_fields": tuple(fields), "_field_defaults": defaults, "__match_args__": tuple(fields)}
            result = type(name, (_Tuple,), {**namespace, **fields, **named, "__slots__": ()})
            result.__new__ = _New(result, annotations, defaults)
            return result

    class NamedTuple(metaclass=_NamedTupleMaker):
        """A base class that works like ``typing.NamedTuple``.

        >>> class Card(NamedTuple):
        ...     name: str
        ...     sizes: tuple[int, ...] = ()
        >>> Card("H200")
        Card(name='H200', sizes=())
        """

    def replace(instance: Any, /, **changes: Any) -> Any:
        """``dataclasses.replace``, which need not be imported for classes derived from ``Frozen``."""
        if isinstance(instance, Frozen):
            return instance.__replace__(**changes)
        from dataclasses import replace

        return replace(instance, **changes)


def _init(cls: type, annotations: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """The ``__init__`` of a class, compiled for it, so that creating an object takes one call."""
    names: dict[str, Any] = {"defaults": defaults}
    factories = []
    for name, default in defaults.items():
        if hasattr(default, "default_factory"):  # ``dataclasses.field``
            factories.append(f" {name} = {name}.default_factory() if {name} is defaults[{name!r}] else {name}\n")
            delattr(cls, name)
    # Short, since compiling takes time. ``update`` copies: a debugger adds variables to the dict of locals().
    body = " self.__dict__.update(locals())\n del self.__dict__['self']"
    exec(f"def __init__(self, {', '.join(annotations)}):\n{''.join(factories)}{body}", names)  # noqa: S102
    init = names["__init__"]
    init.__defaults__ = tuple(defaults.values())
    init.__annotations__ = {**annotations, "return": "None"}
    return init


class Plain(Frozen):
    """A frozen dataclass whose ``to_dict`` returns the fields by name, with lists for tuples."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.to_dict() if isinstance(value, Plain) else value
