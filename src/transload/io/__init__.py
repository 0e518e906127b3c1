"""Bytes and what moves them: sources, folders, atomic files, memory, threads; and when the process collects garbage."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["gc_paused"]

_has_frozen = not hasattr(gc, "freeze")
"""Whether the program has ever frozen objects: counting them takes long, so it is done only until there are some."""

_paused: list[None] = []  # one for each thread that has paused the garbage collector


@contextmanager
def gc_paused(*, user_objects: bool = False) -> Iterator[None]:
    """Pause the garbage collector while a graph is built.

    The graph of a large checkpoint has half a million objects, none of which is garbage until we return: collecting
    meanwhile takes as long as the reading itself. Nor is it worth examining them right afterwards, so young objects are
    moved to the oldest generation: ``gc.freeze`` and ``gc.unfreeze`` do that without examining them (not if the program
    itself uses ``gc.freeze``). Objects moved this way are not counted, and garbage among them may never be collected.
    So the program's own garbage is collected before; and with ``user_objects``, which may be cyclic, nothing is moved.
    """
    global _has_frozen  # noqa: PLW0603 - one answer for the process
    collecting = gc.isenabled()
    if collecting:
        gc.collect(1)
        _paused.append(None)
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            if not user_objects:
                _has_frozen = _has_frozen or gc.get_freeze_count() > 0
                if not _has_frozen:
                    gc.freeze()
                    gc.unfreeze()
            gc.enable()
            del _paused[-1:]


def _resume_in_child() -> None:
    """Enable the collector in a forked child, which has none of the threads that would do so."""
    if _paused:
        _paused.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)
