"""Frozen dataclasses and named tuples that are much faster to define.

The rule: a frozen class derives from ``Frozen`` and is copied by ``replace`` of this module, a named tuple derives from
this ``NamedTuple``. ``dataclasses.dataclass`` is for the rest: mutable classes, slots, fields added in a subclass.

Importing ``dataclasses`` takes a sixth of the time of ``transload inspect``, and it compiles six methods for each
class: for the thirty classes of ``machine`` that takes longer than examining a machine. ``typing.NamedTuple`` compiles
every annotation, and ``__new__``. Here nothing is compiled: all methods are inherited, also the constructor, which
takes a microsecond longer for each object. What ``fields``, ``is_dataclass`` and ``inspect.signature`` read is
computed on demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Frozen", "NamedTuple", "Plain", "replace"]


class _Fields:
    """``__dataclass_fields__`` of a class: when first read, it is replaced by that of a real dataclass."""

    def __init__(self, annotations: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.annotations, self.defaults = annotations, defaults

    def __get__(self, instance: object, cls: Any) -> Any:
        from dataclasses import dataclass

        named = {"__module__": cls.__module__, "__doc__": "Not empty, else dataclass() adds a signature."}
        namespace = {**named, "__annotations__": self.annotations, **self.defaults}
        twin: Any = dataclass(init=False, repr=False, eq=False)(type(cls.__name__, (), namespace))
        cls.__dataclass_fields__ = twin.__dataclass_fields__
        return twin.__dataclass_fields__


class _Signature(_Fields):
    """``__signature__`` of a class: what its constructor takes."""

    def __get__(self, instance: object, cls: Any) -> Any:
        from inspect import Parameter, Signature

        defaults = {name: getattr(default, "default_factory", default) for name, default in self.defaults.items()}
        kind, empty = Parameter.POSITIONAL_OR_KEYWORD, Parameter.empty
        return Signature(
            [
                Parameter(name, kind, default=defaults.get(name, empty), annotation=annotation)
                for name, annotation in self.annotations.items()
            ]
        )


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

    def _complete(cls: Any, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The values of all fields, in their order."""
        names, defaults, count = cls.__match_args__, cls._field_defaults, len(values)
        if not named and 0 < len(names) - count <= len(defaults):
            return values + tuple(defaults.values())[count - len(names) :]
        try:
            values += tuple([named.pop(name) if name in named else defaults[name] for name in names[count:]])
        except KeyError as error:
            raise TypeError(f"{cls.__name__}(): {error} is missing") from None
        if named or count > len(names):
            wrong = f"{next(iter(named))!r} is unexpected" if named else f"{count} arguments for {len(names)} fields"
            raise TypeError(f"{cls.__name__}(): {wrong}")
        return values

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
                cls.__dataclass_fields__ = _Fields(annotations, defaults)
                cls.__signature__ = _Signature(annotations, defaults)
                cls.__match_args__ = tuple(annotations)
                cls._field_defaults = defaults
                cls._factories = [name for name in defaults if hasattr(defaults[name], "default_factory")]
                for name in cls._factories:
                    delattr(cls, name)

        def __init__(self, /, *values: object, **named: object) -> None:
            names = self.__match_args__
            if len(values) != len(names) or named:
                for name in self._factories:
                    if name not in named and names.index(name) >= len(values):
                        named[name] = self._field_defaults[name].default_factory()
                values = _complete(type(self), values, named)
            self.__dict__.update(zip(names, values, strict=True))

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

    class _Tuple(tuple):
        """What all named tuples inherit; their documentation is that of ``collections.namedtuple``."""

        __slots__ = ()

        def __new__(cls, /, *values: object, **named: object) -> Any:
            if len(values) != len(cls.__match_args__) or named:
                values = _complete(cls, values, named)
            return tuple.__new__(cls, values)

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
            named["__signature__"] = _Signature(annotations, defaults)
            return type(name, (_Tuple,), {**namespace, **fields, **named, "__slots__": ()})

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
