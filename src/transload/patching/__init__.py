"""``transload.patch``: a program that names devices, brought together with a machine that has others."""

from __future__ import annotations

TYPE_CHECKING = False  # `transload run` of a script that needs no torch shall cost nothing
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

__all__ = ["Patch", "load_ipython_extension", "patch", "unload_ipython_extension", "unpatch"]


class Patch:
    """What ``patch`` returns. As a context manager it puts back, at its end, what was so before."""

    def __init__(self, device: str, before: str) -> None:
        self.device = device
        self._before = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from transload.patching import switch

        switch.turn(self._before)

    def __repr__(self) -> str:
        return f"transload.patch(device={self.device!r})"


def patch(device: str = "auto") -> Patch:
    """Land what is sent to devices that are not here: by ``torch.load``, ``.to``, ``.cuda``, ``torch.zeros`` and so on.

    What is meant for a device that works here is left alone, whatever it is. What is not goes to ``device``; ``auto``
    is the GPU of this process, or the CPU where there is none. One ``LandingWarning`` says so.
    An exception that nobody catches is explained below its traceback. Children of ``multiprocessing`` do the same.

    torch may be imported before or after. ``unpatch()`` undoes it; in a ``with`` statement the end of the block does.

    >>> with patch():  # doctest: +SKIP
    ...     state = torch.load("model.pt")
    ...     model.to("cuda:1")
    """
    from transload.patching import switch

    before = switch.state()
    switch.turn(checked(device))
    return Patch(device, before)


def unpatch() -> None:
    """Put everything back as it was before the first ``patch``; nothing happens where there was none."""
    from transload.patching import switch

    switch.turn("")


def checked(device: object) -> str:
    """The name of a device, or ``auto``; ``UsageError`` if it is neither."""
    name = str(device)
    if name == "auto":
        return name
    from transload.devices import KINDS

    kind, _, index = name.partition(":")
    if kind not in KINDS or (index and not index.isdecimal()) or name.endswith(":"):
        from transload.errors import UsageError

        raise UsageError(f"{name!r} is no device", fix="It is auto, cpu, cuda:0, mps and so on.")
    return name


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext transload``: ``patch`` for a notebook, with the explanation below the traceback of a cell."""
    from transload.patching import notebook

    notebook.begin(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext transload``."""
    from transload.patching import notebook

    notebook.end(shell)
