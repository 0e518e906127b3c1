"""Why building an object stops: raised and caught inside this room."""

from __future__ import annotations


class Malformed(Exception):  # noqa: N818 - a signal
    """Something that no checkpoint has: the message says what, ``node`` where."""

    node: object = None


class NeedsTrust(Exception):  # noqa: N818 - a signal
    """A value that may hold any object: the message says what it is, ``node`` where."""

    node: object = None
