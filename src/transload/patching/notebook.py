"""``%load_ext transload``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.patching import switch, uncaught

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["begin", "end"]


def begin(shell: Any) -> None:
    """Patch, and explain what a cell raises."""
    switch.turn("auto", explaining=False)
    shell.set_custom_exc((Exception,), _show)


def end(shell: Any) -> None:
    """Undo it."""
    switch.turn("")
    shell.set_custom_exc((), None)


def _show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    del trace  # of the error, as it is when ours is out of it
    uncaught.tidy(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)
    uncaught.tell(error)
