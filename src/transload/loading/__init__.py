"""``transload.load``: any checkpoint onto what this machine has, with the result that ``torch.load`` would give."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transload.errors import (
    BrokenFileError,
    CannotReadError,
    DoesNotFitError,
    FileWarning,
    LandingWarning,
    LoadError,
    NoDeviceError,
    NoTorchError,
    UsageError,
    os_error,
)
from transload.formats import no_collecting
from transload.io.progress import telling
from transload.loading.build import Wrong
from transload.loading.engine import SLOT_PAIR, Settings
from transload.loading.placement import Arrival, wanted_devices
from transload.loading.storages import How
from transload.tensors.files import Files

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.io.sources import SourceLike
    from transload.loading.placement import Plan
    from transload.tensors.files import Piece

__all__ = ["Progressing", "Task", "check_arguments", "check_mmap", "check_settings", "is_weights_only", "load"]


Progressing = bool | Callable[[int, int], object] | None

_PICKLE_ARGUMENTS = frozenset({"encoding", "errors", "fix_imports", "buffers"})
_TRUE = ("1", "y", "yes", "true")


def is_weights_only(asked: bool | None, pickle_module: Any) -> bool:
    """torch's rule, with its two variables of the environment."""
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE:
        return True
    if asked is None:
        forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
        return pickle_module is None and not forced
    return bool(asked)


def check_arguments(given: Mapping[str, Any], pickle_module: Any, *, trusted: bool) -> None:
    """Raise for arguments that the way of loading does not take."""
    known = _PICKLE_ARGUMENTS if trusted else {"encoding"}
    odd = next((name for name in given if name not in known), None)
    if odd is not None:
        hint = " with weights_only=True" if odd in _PICKLE_ARGUMENTS else ""
        raise TypeError(f"load() got an unexpected keyword argument {odd!r}{hint}")
    if not trusted and pickle_module is not None:
        raise UsageError(
            "a pickle_module is used only with weights_only=False",
            fix="Leave it out; or pass weights_only=False, if you trust the file.",
        )
    _check_encoding(given.get("encoding", "utf-8"))


def _check_encoding(encoding: Any) -> None:
    import codecs

    try:
        if encoding != "bytes":
            codecs.lookup(encoding)
    except (LookupError, TypeError) as error:
        fix = "'utf-8', 'latin1' and 'bytes' are usual."
        raise UsageError(f"there is no encoding {encoding!r}", fix=fix) from error


def check_mmap(f: object, mmap: bool | None) -> bool:
    """Whether the file is mapped: as asked, else as the program has told torch; never what has no path."""
    is_path = isinstance(f, str | os.PathLike)
    if mmap and not is_path:
        raise UsageError("mmap=True needs a path", fix="Pass the path of the file instead of a file object or bytes.")
    return bool(mmap) if mmap is not None else is_path and _mapped_by_default()


def check_settings(threads: Any, pinned_mb: Any, direct: bool | None) -> Settings:
    """How bytes are moved, as far as the caller says."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"threads={threads!r} is no number of threads", fix="Pass 1 or more, or leave it out.")
    least = SLOT_PAIR >> 20
    if pinned_mb is not None and (not isinstance(pinned_mb, int) or pinned_mb < least):
        what = f"pinned_mb={pinned_mb!r} is too little to read into"
        raise UsageError(what, fix=f"Each thread takes {least} MiB: pass at least {least}, or leave it out.")
    return Settings(threads, None if pinned_mb is None else pinned_mb << 20, direct)


def _mapped_by_default() -> bool:
    """``torch.utils.serialization.config.load.mmap``, from torch 2.5 on."""
    import sys

    config = getattr(sys.modules.get("torch.utils.serialization"), "config", None)  # nobody can have set it before
    return bool(config is not None and config.load.mmap)


class Task:
    """Loads what ``files`` hold to where ``arrival`` puts it."""

    def __init__(self, files: Files, arrival: Arrival, how: How) -> None:
        self._files = files
        self._arrival = arrival
        self._how = how

    def build(self, encoding: str) -> Any:
        """The object, through the fixed table: nothing in the file is run."""
        from transload.loading.build import build

        def built(piece: Piece, storages: Any) -> Any:
            main = next((pickle for pickle in piece.checkpoint.pickles if pickle.main), None)
            if main is None:
                raise LoadError("there is no object in it", where=piece.checkpoint.path)
            return build(piece, main, storages, self._arrival, encoding)

        return self._each(built)

    def trust(self, pickle_module: Any, arguments: dict[str, Any]) -> Any:
        """The object, by the file's own pickle, or as the program it is."""
        kind = self._files.checkpoint.format
        if kind in ("torchscript", "torch-export"):
            return self._program()
        from transload.loading.trusted import load_trusted

        def unpickled(piece: Piece, storages: Any) -> Any:
            source = piece.open(piece.index)
            named = {"device_of": self._arrival.device, "pickle_module": pickle_module, **arguments}
            return load_trusted(source, piece.checkpoint, storages.__getitem__, **named)

        return self._each(unpickled)

    def _program(self) -> Any:
        from transload.loading.trusted import load_exported, load_script

        (piece,) = self._files.pieces
        if piece.index:
            fix = "Zip the folder itself, stored, and load that."
            raise LoadError("this program is unpacked", where=piece.checkpoint.path, fix=fix)
        load = load_script if piece.checkpoint.format == "torchscript" else load_exported
        return load(piece.open(""), piece.checkpoint, self._arrival.device, path=piece.path)

    def _each(self, make: Any) -> Any:
        """What all pieces hold: one object, or the dictionaries of shards put together."""
        from transload.loading.build import plain_tensors
        from transload.loading.storages import read_storages

        made = []
        with _told(self._arrival):
            for piece in self._files.pieces:
                storages = read_storages(piece, self._arrival, self._how)
                plain = piece.checkpoint.format == "safetensors"
                made.append(plain_tensors(piece, storages, self._arrival) if plain else make(piece, storages))
        whole = self._files.checkpoint
        if whole.format == "sharded":
            return _joined(made, whole.path)
        if not made:
            raise LoadError("there is nothing in it to load", where=whole.path)
        return made[0]


def _joined(shards: list[Any], path: str) -> dict[Any, Any]:
    """The dictionaries of all shards as one."""
    out: dict[Any, Any] = {}
    for shard in shards:
        if not isinstance(shard, Mapping):
            what = f"a shard holds {type(shard).__name__}, not a dictionary of tensors"
            raise LoadError(what, where=path, fix="Load the shards one by one.")
        out.update(shard)
    return out


@contextmanager
def _told(arrival: Arrival) -> Iterator[None]:
    """Tell torch where things go while a file is loaded: functions of torch and of programs ask it."""
    import torch

    told: Any = getattr(torch.serialization, "_serialization_tls", None)
    if not hasattr(told, "map_location"):
        yield
        return
    before = told.map_location
    try:
        told.map_location = arrival.locations or None
        yield
    finally:
        told.map_location = before


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
    from transload.loading.refusal import Allowed, refuse_broken, refuse_program, refuse_unsafe

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
    from transload.loading.placement import devices_here, place, tags_of

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
