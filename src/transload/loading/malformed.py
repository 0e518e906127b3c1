"""The error for an object that no checkpoint has: in a light module, since every way to build objects raises it."""

from __future__ import annotations

from transload.errors import BrokenFileError


class Malformed(BrokenFileError):  # noqa: N818 - short, since it is raised in many places
    """Something that no checkpoint has; ``position`` is its byte in the pickle, if that is known."""

    position: int | None = None

    def __init__(self, what: str) -> None:
        super().__init__(f"it holds {what}", fix="No release of torch writes that. Get the file again from its author.")
