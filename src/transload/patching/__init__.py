"""``transload.patch`` and ``transload run``: run a program that names devices which this machine does not have.

``devices`` chooses the substitute, ``changes`` has what was changed, ``install`` applies the patches of
``torch_patches`` and removes them again, and ``explained`` explains the exception that ends the program. ``script``
runs a program as ``python`` would; ``isolated`` patches one test.
"""

from __future__ import annotations

import os
import sys
from functools import wraps

from transload.patching import changes, devices

TYPE_CHECKING = False  # `transload run` of a script without torch must cost nothing, not even importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Any

    from typing_extensions import Self

__all__ = ["checked", "load_ipython_extension", "patch", "unload_ipython_extension", "unpatch"]

_HERE = os.path.dirname(__file__) + os.sep
_RUNNER = f"{_HERE}script.py"  # what is called from there is the program
HOME = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # what is on sys.path


class Patch:
    """The result of ``patch``; a context manager that restores the previous state."""

    def __init__(self, device: str, before: str) -> None:
        self.device = device
        self._before = before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        install(self._before)

    def __repr__(self) -> str:
        return f"transload.patch(device={self.device!r})"


def patch(device: str = "auto") -> Patch:
    """Use another device where a program names one that is missing.

    It applies to ``torch.load``, ``.to``, ``.cuda``, ``torch.zeros`` and everything else that takes a device.

    Devices that work here are left alone. Missing ones are replaced by ``device``; ``auto`` is the GPU of this process,
    or the CPU where there is none, and ``spread`` uses cuda:(N mod count) for cuda:N where there are fewer GPUs. One
    ``LandingWarning`` says so. Where there is no GPU, ``torch.cuda`` answers for the CPU, and NCCL becomes gloo. An
    exception that nobody catches is explained below its traceback. Children of ``multiprocessing`` are patched, too.

    torch may be imported before or after. ``unpatch()`` undoes it; so does the end of a ``with`` block.

    >>> with patch():  # doctest: +SKIP
    ...     state = torch.load("model.pt")
    ...     model.to("cuda:1")
    """
    before = devices.requested
    install(checked(device))
    return Patch(device, before)


def unpatch() -> None:
    """Restore everything as it was before the first ``patch``."""
    install("")


def checked(device: object) -> str:
    """The name of a device, or ``auto`` or ``spread``; ``UsageError`` if it is neither."""
    name = str(device)
    if name in ("auto", "spread"):
        return name
    from transload.devices import refuse_unknown

    refuse_unknown(name, "auto, spread")
    if "torch" in sys.modules:  # else _patch_torch does this
        devices.refuse_missing(name)
    return name


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext transload``: ``patch`` for a notebook, with the explanation below the traceback of a cell."""

    def show(shell: Any, kind: Any, error: BaseException, _: Any, tb_offset: int | None = None) -> None:
        remove_our_frames(error)
        shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)
        print_explanation(error)

    install("auto", explain=False)
    shell.set_custom_exc((Exception,), show)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext transload``."""
    unpatch()
    shell.set_custom_exc((), None)


# -- the patches

_ABSENT = object()
_undo: list[Callable[[], None]] = []
_waiting: dict[str, Callable[[ModuleType], None]] = {}


def install(device: str, *, explain: bool = True) -> None:
    """Use ``device`` instead of missing devices; remove the patches if it is empty."""
    before, devices.requested = devices.requested, device
    if device and not before:
        when_imported("torch", _patch_torch)
        when_imported("multiprocessing.spawn", _patch_spawn)
        if explain:
            replace(sys, "excepthook", explained(sys.excepthook))
    elif before and not device:
        undo()


def replace(owner: object, name: str, value: object) -> None:
    """Set an attribute of a module or class that is not ours, until ``undo``; an inherited one is shadowed.

    >>> class Theirs:
    ...     size = 1
    >>> replace(Theirs, "size", 2)
    >>> replace(Theirs, "colour", "red")
    >>> undo()
    >>> Theirs.size, hasattr(Theirs, "colour")
    (1, False)
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def restore() -> None:
        if vars(owner).get(name) is not value:
            return  # somebody has replaced it since then, perhaps by a wrapper around ours, which now does nothing
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    _undo.append(restore)


def undo() -> None:
    """Restore everything that was replaced, in reverse order, and stop waiting for imports."""
    _waiting.clear()
    if _Watch in sys.meta_path:
        sys.meta_path.remove(_Watch)
    while _undo:
        _undo.pop()()


def _patch_torch(torch: Any) -> None:
    from transload.patching.torch_patches import patch_torch

    devices.refuse_missing(devices.requested)
    patch_torch(torch, replace, _undo.append, when_imported)


# -- children of multiprocessing


def _patch_spawn(spawn: Any) -> None:
    """Patch children of ``multiprocessing``, through the data that it prepares for them.

    A forked child inherits the patches. One that is spawned, or forked from the server, first unpickles the data of its
    parent and only then imports the main module, so an entry that patches when it is unpickled is in time. The server
    itself, which imports the main module since Python 3.14, gets the module's path in its command line.
    """
    real = spawn.get_preparation_data

    @wraps(real)
    def get_preparation_data(*args: Any, **kwargs: Any) -> Any:
        data = real(*args, **kwargs)
        if devices.requested:
            data = {**data, "transload": _PatchInChild()}
            if "init_main_from_path" in data:
                data["init_main_from_path"] = _PatchInServer(data["init_main_from_path"])
        return data

    replace(spawn, "get_preparation_data", get_preparation_data)


class _PatchInChild:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_child_code(), {})


class _PatchInServer(str):
    """A path that patches when its ``repr`` is evaluated; it unpickles as a plain ``str``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"[exec({_child_code()!r}, {{}}), {str(self)!r}][1]"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def _child_code() -> str:
    state = {"device": devices.requested, "warned": sorted(devices.warned), "pretending": devices.pretending}
    return _CHILD_CODE.format(home=HOME, state={**state, "record": changes.record})


# The child may not have transload on its path yet, and must not fail if it never has.
_CHILD_CODE = """
import sys
sys.path.append({home!r})
try:
    from transload.patching import install_in_child
    install_in_child(**{state!r})
except ImportError:
    pass
finally:
    if {home!r} in sys.path:
        sys.path.pop(len(sys.path) - 1 - sys.path[::-1].index({home!r}))
"""


def install_in_child(device: str, warned: list[str], pretending: bool, record: str) -> None:
    """Patch as the parent did, without repeating its warnings."""
    changes.record = record
    devices.warned.update(warned)
    devices.pretending = pretending
    install(device, explain=False)


# -- modules that are not imported yet


class _Watch:
    """A meta path finder that delegates to the others, and calls a function when a module has been executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not _Watch and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        loader = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                if name in _waiting:
                    _waiting.pop(name)(module)

            # On this one loader, and only until it has run: the module keeps its usual loader.
            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with the module, now or right after it has been imported."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    _waiting[name] = action
    if _Watch not in sys.meta_path:
        sys.meta_path.insert(0, _Watch)


# -- an exception that nobody catches: its traceback without our frames, and the explanation below it


def explained(hook: Callable[..., object]) -> Callable[..., None]:
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
        from transload.explaining import explain, report
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
        for entry in reversed(entries):
            if not entry.tb_frame.f_code.co_filename.startswith(_HERE):
                linked = type(entry)(linked, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        this.__traceback__ = linked
        members = getattr(this, "exceptions", ())  # of a group
        others = (this.__cause__, this.__context__, *(members if isinstance(members, tuple) else ()))
        waiting += [other for other in others if isinstance(other, BaseException)]
