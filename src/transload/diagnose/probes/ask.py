"""How a child reports its findings. ``children`` runs the scripts called ``ask_...``, in any Python since 3.7.

They import next to nothing: start-up counts, and in the examined interpreter whatever we import might be shadowed by
a file of the user's, or hide from torch that it is.
"""

from __future__ import annotations

import os
import sys


class Report:
    """Reports facts to the parent, a line each, on a copy of standard output that nothing else closes or redirects."""

    def __init__(self) -> None:
        self.out = os.dup(1)

    def doing(self, step: str) -> None:
        """Report what comes next, which may never return."""
        self.say(doing=step)

    def say(self, **facts: object) -> None:
        """Report facts: text, numbers, and collections of them, as Python writes them."""
        os.write(self.out, b"\x1e" + ascii(facts).encode() + b"\n")

    def done(self) -> None:
        """Report that this was all, and exit without the libraries' own clean-up, which may hang or crash as well."""
        self.say(done=True)
        os._exit(0)


def begin() -> Report:
    """Set what ends a child whose parent was killed: the leash, and a backstop, the seconds in the first argument."""
    try:
        from _signal import alarm  # type: ignore[import-not-found]  # signal itself would import enum

        alarm(int(sys.argv[1]))
        end_with(int(sys.argv[2]))
    except (ImportError, IndexError):  # Windows; by hand
        pass
    return Report()


def end_with(leash: int) -> None:
    """Have the kernel end this process by SIGIO when the other end of a pipe is closed, even while it hangs in C."""
    try:
        from fcntl import F_SETFL, F_SETOWN, fcntl

        fcntl(leash, F_SETOWN, os.getpid())
        fcntl(leash, F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        if not os.read(leash, 1):  # it was closed before we asked for the signal
            os._exit(1)
    except Exception:  # noqa: BLE001, S110  a system without it, or a file of the user's that is called fcntl.py
        pass


def mapped() -> list[tuple[int, int, str]]:
    """Start, end and path of every file in this process's memory; empty where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as stream:
            lines = [line.split(None, 5) for line in stream.read().splitlines()]
    except OSError:
        return []
    ranges = [(line[0].split(b"-"), line[5]) for line in lines if len(line) == 6 and line[5].startswith(b"/")]
    return [(int(at[0], 16), int(at[1], 16), os.fsdecode(path.split(b" (deleted)")[0])) for at, path in ranges]
