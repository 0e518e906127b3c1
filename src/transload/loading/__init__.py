"""``transload.load``: any checkpoint onto what this machine has, with the result that ``torch.load`` would give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transload.errors import CannotReadError
from transload.formats import no_collecting
from transload.loading.arguments import (
    Progressing,
    check_arguments,
    check_mmap,
    check_settings,
    is_weights_only,
)
from transload.loading.arrival import Arrival, wanted_devices
from transload.loading.errors import (
    BrokenFileError,
    DoesNotFitError,
    FileWarning,
    LandingWarning,
    NoDeviceError,
    NoTorchError,
    os_error,
)
from transload.loading.files import Files
from transload.loading.objects import Wrong
from transload.loading.progress import telling
from transload.loading.storages import How
from transload.loading.task import Task

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.io.sources import SourceLike
    from transload.place import Plan

__all__ = ["load"]


def load(  # noqa: PLR0913 - torch.load's signature, and what it lacks
    f: SourceLike,
    map_location: Any = "auto",
    pickle_module: Any = None,
    *,
    weights_only: bool | None = True,
    mmap: bool | None = None,
    verify: bool = False,
    progress: Progressing = None,
    threads: int | None = None,
    pinned_mb: int | None = None,
    direct: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """What a checkpoint holds, loaded onto the devices of this machine: ``torch.load`` for every format and any file.

    ``f`` is a path (of a file, a directory or the index of shards), a binary file object, or bytes. ``map_location``
    is what it is to ``torch.load``; or ``"auto"``: each tensor goes to the device it was saved on if that is here,
    else to the GPU of this process, else to the CPU, and one ``LandingWarning`` says what was moved.

    With ``weights_only`` nothing in the file is run: it is read into a tree, and the tree is built into tensors and
    plain objects through a fixed table. Other names are refused, all of them at once, unless the program has allowed
    them with ``torch.serialization.add_safe_globals``. ``weights_only=False`` gives the file to ``pickle``: only for
    files of people you trust. ``None`` is ``True`` unless a ``pickle_module`` is given, as in torch.

    ``mmap`` maps the file instead of reading it where its bytes lie as they will lie in memory. ``verify`` compares
    every checksum there is while reading, which torch never does. ``progress`` is ``True`` for a line on the terminal,
    or a function that gets the bytes done and the bytes in all. ``encoding`` is for texts that Python 2 wrote.

    How bytes are moved is chosen by what this machine is and where the file lies; ``transload check`` tells how.
    ``threads`` sets how many read, ``pinned_mb`` how much pinned memory they may use on the way to a GPU, ``direct``
    whether the page cache is passed by.

    Errors are of our own classes, and of those torch users catch already: ``RuntimeError``, ``pickle.UnpicklingError``,
    ``OSError``.

    >>> import transload
    >>> transload.load("model.pt")                        # doctest: +SKIP
    """
    trusted = not is_weights_only(weights_only, pickle_module)
    check_arguments(pickle_load_args, pickle_module, trusted=trusted)
    mapped = check_mmap(f, mmap)
    settings = check_settings(threads, pinned_mb, direct)
    encoding = pickle_load_args.get("encoding", "utf-8")
    for tree in (True,) if trusted else (False, True):
        with no_collecting(strangers=trusted), _open(f, tree=tree) as files:
            checkpoint = files.checkpoint
            _refuse(checkpoint, trusted=trusted)
            plan = _placed(checkpoint, map_location, checkpoint.tensor_nbytes, mapped=mapped)
            how = How(verify, mapped, telling(progress, checkpoint.tensor_nbytes), settings)
            task = Task(files, Arrival(plan, map_location, checkpoint.path), how)
            try:
                made = task.trust(pickle_module, pickle_load_args) if trusted else task.build(encoding)
            except BrokenFileError as error:
                if checkpoint.counted and isinstance(error.__cause__, Wrong):
                    continue  # once more, with the tree, which has the names to say what is wrong
                raise
            files.check_unchanged()
            files.stay_behind()
            break
    _warn(checkpoint, plan)
    return made


def _open(f: SourceLike, *, tree: bool) -> Files:
    try:
        return Files(f, tree=tree)
    except CannotReadError as error:
        raise os_error(error) from error.__cause__


def _refuse(checkpoint: Checkpoint, *, trusted: bool) -> None:
    """Raise if the file is not to be loaded: in this order, so that what is no checkpoint is never called unsafe."""
    from transload.loading.allowed import Allowed
    from transload.loading.refusal import refuse_broken, refuse_program, refuse_unsafe

    refuse_broken(checkpoint)
    refuse_program(checkpoint, trusted=trusted)
    try:
        import torch  # noqa: F401 - from here on it is needed
    except ImportError as error:
        what = f"torch cannot be imported: {error}"
        raise NoTorchError(what, where=checkpoint.path, fix="`transload doctor` says why.") from error
    if not trusted:
        refuse_unsafe(checkpoint, Allowed())


def _placed(checkpoint: Checkpoint, wish: Any, nbytes: int, *, mapped: bool) -> Plan:
    """The plan, if it can be carried out."""
    from transload.loading.here import devices_here
    from transload.place import place, tags_of

    plan = place(checkpoint, devices_here(wanted_devices(tags_of(checkpoint), wish), nbytes), wish)
    if plan.refused:
        raise NoDeviceError(plan.refused, where=checkpoint.path, fix="\n".join(plan.fix))
    short = [each for each in plan.shortages if not (mapped and each.device == "cpu")]
    if short:
        from transload.render.landing import shortage_words

        what = "; ".join(map(shortage_words, short))
        fix = "\n".join(f"Instead: {hint}" for each in short for hint in each.instead)
        raise DoesNotFitError(what, where=checkpoint.path, fix=fix)
    return plan


def _warn(checkpoint: Checkpoint, plan: Plan) -> None:
    import warnings

    from transload.loading.refusal import worth_a_warning

    if plan.warning:
        warnings.warn(f"{checkpoint.path}: {plan.warning}", LandingWarning, stacklevel=3)
    wrong = worth_a_warning(checkpoint)
    if wrong:
        warnings.warn(f"{checkpoint.path}: {wrong}", FileWarning, stacklevel=3)
