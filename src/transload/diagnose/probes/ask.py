"""How a child reports its findings. ``children`` runs the scripts called ``ask_...``, in any Python since 3.7.

They import next to nothing: start-up time counts, and a file of the user's may shadow what we import. If we imported a
module first, we might also hide such a file from torch.
"""

from __future__ import annotations

import os
import sys


class Report:
    """Reports facts to the parent, one per line, on a copy of standard output that nothing else closes or redirects.

    It also makes this process end if its parent is killed: by the lifeline, or as a backstop by an alarm. The first two
    arguments are the seconds until the alarm, and the file descriptor of the lifeline: a pipe. When its other end is
    closed, the kernel ends this process by SIGIO, even while it hangs in C.
    """

    def __init__(self) -> None:
        self.out = os.dup(1)
        try:
            from _signal import alarm  # type: ignore[import-not-found]  # signal itself would import enum

            alarm(int(sys.argv[1]))
            from fcntl import F_SETFL, F_SETOWN, fcntl

            lifeline = int(sys.argv[2])
            fcntl(lifeline, F_SETOWN, os.getpid())
            fcntl(lifeline, F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
            if not os.read(lifeline, 1):  # it was closed before we asked for the signal
                os._exit(1)
        except Exception:  # noqa: BLE001, S110  it is open; Windows; run by hand; the user has a file named fcntl.py
            pass

    def say(self, **facts: object) -> None:
        """Report facts as Python literals. ``doing`` is the next step, which may never return."""
        os.write(self.out, b"\x1e" + ascii(facts).encode() + b"\n")

    def done(self) -> None:
        """Report the end, and exit without the clean-up of libraries, which may hang or crash as well."""
        self.say(done=True)
        os._exit(0)


def mapped() -> list[tuple[int, int, str]]:
    """Start, end and path of every file mapped into this process; empty if unknown."""
    if os.name == "nt":
        return _modules()
    try:
        with open("/proc/self/maps", "rb") as stream:
            lines = [line.split(None, 5) for line in stream.read().splitlines()]
    except OSError:
        return []
    ranges = [(line[0].split(b"-"), line[5]) for line in lines if len(line) == 6 and line[5].startswith(b"/")]
    return [(int(at[0], 16), int(at[1], 16), os.fsdecode(path.split(b" (deleted)")[0])) for at, path in ranges]


def _modules() -> list[tuple[int, int, str]]:
    """The same on Windows: its modules, of which only the start is asked for."""
    import ctypes

    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    handles, size, name = (ctypes.c_void_p * 4096)(), ctypes.c_ulong(), ctypes.create_unicode_buffer(1 << 15)
    process = ctypes.c_void_p(-1)  # this one
    if not kernel.K32EnumProcessModules(process, handles, ctypes.sizeof(handles), ctypes.byref(size)):
        return []
    started = handles[: size.value // ctypes.sizeof(ctypes.c_void_p)]
    ask = kernel.GetModuleFileNameW
    return [(at, at, name.value) for at in started if at and ask(ctypes.c_void_p(at), name, len(name))]
