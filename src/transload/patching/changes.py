"""What was changed for a program, and where: the list at its end, and the report of ``transload run --json``.

Each process notes its own changes. Those of children reach the process that started the program through a file to which
each appends a line: a child may end in any way, and its parent may not wait for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    Change = tuple[str, str, str]  # the kind, what the program named, and what took its place, or ""

noted: dict[Change, str] = {}
"""The changes in order, and where the program caused each first: ``/home/me/infer.py:3``.

The kinds: ``device``, one used instead of another; ``feature``, something else replaced or left out; ``answered``, a
function of torch that answered for the CPU; ``pretended``, one that pretended there is a GPU.
"""

record = ""
"""The file of the children's changes; empty if nobody reads it."""


def note(kind: str, what: str, instead: str = "") -> None:
    """Note a change, once."""
    if (kind, what, instead) not in noted:
        noted[kind, what, instead] = place = _place()
        if record:
            import json

            line = json.dumps([kind, what, instead, place]).encode() + b"\n"
            try:
                file = os.open(record, os.O_WRONLY | os.O_APPEND)
            except OSError:  # the program has ended, and this child goes on
                return
            os.write(file, line)  # at once, so that lines of several processes do not mix
            os.close(file)


def _place() -> str:
    """The line of the program that is running: the first outside torch and transload, as for warnings."""
    frame, package = sys._getframe(), "transload"
    while frame.f_back is not None and package in ("importlib", "torch", "transload"):
        frame = frame.f_back
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def sentence(change: Change) -> str:
    """A change where it stands alone.

    >>> sentence(("answered", "torch.cuda.Stream", ""))
    'torch.cuda.Stream answered for the CPU'
    """
    how = {"answered": " answered for the CPU", "pretended": " pretended that there is a GPU"}
    return text_of(change) + how.get(change[0], "")


def collect() -> None:
    """From here on, children report to this process."""
    global record
    from tempfile import mkstemp

    file, record = mkstemp(prefix="transload-", suffix=".jsonl")
    os.close(file)


def read_record() -> None:
    """Add the changes of the children to those of this process, and remove the file."""
    global record
    if record:
        import json
        from contextlib import suppress

        path, record = record, ""
        with suppress(OSError):  # something has cleaned up the folder for temporary files
            with open(path, encoding="ascii") as file:
                for line in file:
                    try:
                        kind, what, instead, place = json.loads(line)
                    except ValueError:  # as a full disk leaves it
                        kind, what, instead = "feature", "something whose record is cut off", ""
                        place = "a child process"
                    noted.setdefault((kind, what, instead), place)
            os.unlink(path)


def text_of(change: Change) -> str:
    """A change in a list of its kind.

    >>> text_of(("device", "cuda:0", "cpu")), text_of(("feature", "no mixed precision", ""))
    ('cuda:0 → cpu', 'no mixed precision')
    """
    _, what, instead = change
    return f"{what} → {instead}" if instead else what
