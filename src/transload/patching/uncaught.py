"""An exception that nobody catches: its traceback without our frames, and the explanation below it."""

from __future__ import annotations

import os
import sys

from transload.patching import devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_HERE = os.path.dirname(__file__) + os.sep  # noqa: PTH120 - pathlib costs more than all the rest
_RUNNER = f"{_HERE}script.py"  # what is called from there is the program


def explained(hook: Hook) -> Hook:
    """A ``sys.excepthook`` that calls the previous one, and then prints the explanation."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        del trace  # the error's own is used, after our frames are removed from it
        remove_our_frames(error)
        hook(kind, error, error.__traceback__)
        if devices.requested:
            print_explanation(error)

    return excepthook


def print_explanation(error: BaseException) -> None:
    """Explain an error on stderr, if it is a known one. This must not fail, or it would hide the traceback."""
    if not isinstance(error, Exception) or sys.stderr is None:
        return
    try:
        from transload.explaining import explain
        from transload.explaining.result import report
        from transload.render.lines import emit

        explanation = explain(error)
        if explanation.known:
            sys.stderr.write("\n")
            emit(report(explanation), sys.stderr)
            sys.stderr.flush()
    except Exception:  # noqa: BLE001 - see above
        return


def remove_our_frames(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an exception, of its causes and of the members of a group."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        this = waiting.pop()
        if id(this) in seen:
            continue
        seen.add(id(this))
        entries: list[TracebackType] = []
        trace = this.__traceback__
        while trace is not None:
            entries.append(trace)
            if trace.tb_frame.f_code.co_filename == _RUNNER:
                entries.clear()
            trace = trace.tb_next
        linked: TracebackType | None = None
        for each in reversed(entries):
            if not each.tb_frame.f_code.co_filename.startswith(_HERE):
                linked = type(each)(linked, each.tb_frame, each.tb_lasti, each.tb_lineno)
        this.__traceback__ = linked
        members = getattr(this, "exceptions", ())  # of a group
        others = (this.__cause__, this.__context__, *(members if isinstance(members, tuple) else ()))
        waiting += [each for each in others if isinstance(each, BaseException)]
