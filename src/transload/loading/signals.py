"""How building an object ends early: signals inside this room, never seen outside."""

from __future__ import annotations


class Unknown(Exception):  # noqa: N818 - a signal
    """A name that this torch does not have."""


class Wrong(Exception):  # noqa: N818 - a signal
    """A call that no checkpoint makes; the text says what is wrong with it, ``node`` where that was met."""

    node: object = None


class NeedsTrust(Exception):  # noqa: N818 - a signal
    """A value that may hold any object; the text says what it is, ``node`` where it was met."""

    node: object = None
