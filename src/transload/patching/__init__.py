"""``transload.patch`` and ``transload run``: run a program that names devices which this machine does not have.

``devices`` chooses the substitute, ``install`` applies the patches of ``torch_patches`` and removes them again,
``script`` runs a program as ``python`` would, and ``uncaught`` explains the exception that ends it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `transload run` of a script without torch must cost nothing, not even importing typing
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Self


class Patch:
    """The result of ``patch``; a context manager that restores the previous state."""

    def __init__(self, device: str, before: str) -> None:
        self.device = device
        self._before = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        from transload.patching.install import install

        install(self._before)

    def __repr__(self) -> str:
        return f"transload.patch(device={self.device!r})"


def patch(device: str = "auto") -> Patch:
    """Use another device where a program names one that is missing.

    It applies to ``torch.load``, ``.to``, ``.cuda``, ``torch.zeros`` and everything else that takes a device.

    Devices that work here are left alone. Missing ones are replaced by ``device``; ``auto`` is the GPU of this process,
    or the CPU where there is none, and ``spread`` takes cuda:(N mod count) for cuda:N where there are fewer GPUs. One
    ``LandingWarning`` says so. Where there is no GPU, ``torch.cuda`` answers for the CPU, and NCCL becomes gloo. An
    exception that nobody catches is explained below its traceback. Children of ``multiprocessing`` are patched, too.

    torch may be imported before or after. ``unpatch()`` undoes it; so does the end of a ``with`` block.

    >>> with patch():  # doctest: +SKIP
    ...     state = torch.load("model.pt")
    ...     model.to("cuda:1")
    """
    from transload.patching import devices
    from transload.patching.install import install

    before = devices.requested
    install(checked(device))
    return Patch(device, before)


def unpatch() -> None:
    """Restore everything as it was before the first ``patch``."""
    from transload.patching.install import install

    install("")


def checked(device: object) -> str:
    """The name of a device, or ``auto`` or ``spread``; ``UsageError`` if it is neither."""
    name = str(device)
    if name in ("auto", "spread"):
        return name
    from transload.devices import KINDS

    kind, _, index = name.partition(":")
    if kind not in KINDS or (index and not index.isdecimal()) or name.endswith(":"):
        from transload.errors import UsageError

        raise UsageError(f"{name!r} is not a device", fix="Use auto, cpu, cuda:0, mps or the like.")
    return name


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext transload``: ``patch`` for a notebook, with the explanation below the traceback of a cell."""
    from transload.patching import uncaught
    from transload.patching.install import install

    def show(shell: Any, kind: Any, error: BaseException, _: Any, tb_offset: int | None = None) -> None:
        uncaught.remove_our_frames(error)
        shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)
        uncaught.print_explanation(error)

    install("auto", explain=False)
    shell.set_custom_exc((Exception,), show)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext transload``."""
    unpatch()
    shell.set_custom_exc((), None)
