"""Questions that a driver in trouble may never answer, asked in a child process which can be left behind.

A process that waits inside a kernel driver cannot be killed, and a thread that does keeps its process from ending.
"""

from __future__ import annotations

import gc
import os
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from transload.machine import Unknown

__all__ = ["apart"]

_LENGTH = struct.Struct("=I")
_PIECE = 1 << 16
_FILES = 1 << 12


def apart(questions: Sequence[Callable[[], str]], seconds: float) -> tuple[str | Unknown, ...]:
    """What each question answers, asked one after the other; ``Unknown`` for those that had not by the deadline.

    >>> apart([lambda: "yes", lambda: "no"], 5.0)
    ('yes', 'no')
    """
    if not questions:
        return ()
    if not hasattr(os, "fork"):  # Windows, where nothing is asked this way
        return tuple(question() for question in questions)
    try:
        answers = _fork(questions, time.monotonic() + seconds)
    except OSError as error:  # no process or no pipe is left
        return (Unknown(f"could not be asked: {error.strerror}"),) * len(questions)
    late = Unknown(f"no answer within {seconds:g} s")
    return (*answers, *(late for _ in questions[len(answers) :]))


def _fork(questions: Sequence[Callable[[], str]], deadline: float) -> list[str]:
    ours, theirs = os.pipe()
    with warnings.catch_warnings():  # of forking beside threads: the child takes none of their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _ask(questions, theirs)
    os.close(theirs)
    try:
        data, ended = _received(ours, deadline)
    finally:
        os.close(ours)
    _dismiss(child, ended=ended)
    return list(_split(data))


def _ask(questions: Sequence[Callable[[], str]], pipe: int) -> None:
    """The child's whole life. It must not return: the caller's code above is not its own."""
    try:
        os.closerange(0, pipe)  # or whoever reads what we print would wait for a child that hangs
        os.closerange(pipe + 1, _FILES)
        gc.disable()  # what has become garbage is the parent's to clear
        for question in questions:
            answer = question().encode("utf-8", "surrogateescape")
            os.write(pipe, _LENGTH.pack(len(answer)) + answer)
    finally:
        os._exit(0)


def _received(pipe: int, deadline: float) -> tuple[bytes, bool]:
    import select

    data = b""
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(pipe, _PIECE)
        if not piece:
            return data, True
        data += piece
    return data, False


def _dismiss(child: int, *, ended: bool) -> None:
    """Take leave of the child, without waiting for one that hangs in the kernel."""
    import signal

    try:
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0 if ended else os.WNOHANG)
    except OSError:  # somebody else has reaped it
        pass


def _split(data: bytes) -> Iterator[str]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            return
        yield data[at : at + length].decode("utf-8", "surrogateescape")
        at += length
