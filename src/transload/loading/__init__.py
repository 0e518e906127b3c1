"""``transload.load``: loads any checkpoint onto the devices of this machine, with the result ``torch.load`` would give.

A load takes these steps, each in a module of its own: open and judge the file (``tensors.files``), refuse what must not
be loaded (``refusal``), plan where everything goes (``placement``), read the storages (``storages``, which leaves most
of that to ``engine``), and build the objects over them (``build``; ``trusted`` with ``weights_only=False``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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
from transload.loading.build import Wrong, build_object, plain_tensors
from transload.loading.engine import SLOT_PAIR, Settings
from transload.loading.placement import DeviceMap, Plan, devices_here, place, tags_of, wanted_devices
from transload.loading.storages import ReadOptions, read_storages
from transload.tensors.files import OpenCheckpoint

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.io.sources import SourceLike
    from transload.tensors.files import Piece

__all__ = ["Progressing", "check_settings", "load"]


Progressing = bool | Callable[[int, int], object] | None

_PICKLE_ARGUMENTS = frozenset({"encoding", "errors", "fix_imports", "buffers"})
_TRUE = ("1", "y", "yes", "true")


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

    How bytes are moved depends on this machine and on where the file lies; ``transload check`` says how. ``threads``
    sets how many threads read, ``pinned_mb`` how much pinned memory they may use on the way to a GPU, ``direct``
    whether they bypass the page cache.

    Errors are of our own classes, and of those torch users catch already: ``RuntimeError``, ``pickle.UnpicklingError``,
    ``OSError``.

    >>> import transload
    >>> transload.load("model.pt")                        # doctest: +SKIP
    """
    trusted = not _is_weights_only(weights_only, pickle_module)
    _check_arguments(pickle_load_args, pickle_module, trusted=trusted)
    mapped = _is_mapped(f, mmap)
    settings = check_settings(threads, pinned_mb, direct)
    # Ordinary tensors are counted first, without a tree of the pickle; what is wrong in it is found with the tree.
    for tree in (True,) if trusted else (False, True):
        with no_collecting(strangers=trusted), _open(f, tree=tree) as opened:
            checkpoint = opened.checkpoint
            _refuse(checkpoint, trusted=trusted)
            plan = _plan(checkpoint, map_location, mapped=mapped)
            device_map = DeviceMap(plan, map_location, checkpoint.path)
            tell = None
            if progress is not None:
                from transload.io.progress import telling

                tell = telling(progress, checkpoint.tensor_nbytes)
            options = ReadOptions(verify, mapped, tell, settings)
            try:
                if trusted:
                    made = _load_trusted(opened, device_map, options, pickle_module, pickle_load_args)
                else:
                    encoding = pickle_load_args.get("encoding", "utf-8")
                    make = partial(_build_piece, device_map=device_map, encoding=encoding)
                    made = _each_piece(opened, device_map, options, make)
            except BrokenFileError as error:
                if checkpoint.counted and isinstance(error.__cause__, Wrong):
                    continue  # once more, with the tree, which has the names to say what is wrong
                raise
            opened.check_unchanged()
            opened.stay_behind()
            break
    _warn(checkpoint, plan)
    return made


# -- arguments


def _is_weights_only(asked: bool | None, pickle_module: Any) -> bool:
    """torch's rule, with its two environment variables."""
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE:
        return True
    if asked is None:
        forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in _TRUE
        return pickle_module is None and not forced
    return bool(asked)


def _check_arguments(given: Mapping[str, Any], pickle_module: Any, *, trusted: bool) -> None:
    """Raise for arguments that this way of loading does not take."""
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
    encoding = given.get("encoding", "utf-8")
    if encoding in ("utf-8", "bytes"):
        return
    import codecs

    try:
        codecs.lookup(encoding)
    except (LookupError, TypeError) as error:
        fix = "'utf-8', 'latin1' and 'bytes' are usual."
        raise UsageError(f"there is no encoding {encoding!r}", fix=fix) from error


def _is_mapped(f: object, mmap: bool | None) -> bool:
    """Whether to map the file: as asked, else as the program has told torch; never what has no path."""
    is_path = isinstance(f, str | os.PathLike)
    if mmap and not is_path:
        raise UsageError("mmap=True needs a path", fix="Pass the path of the file instead of a file object or bytes.")
    if mmap is not None or not is_path:
        return bool(mmap)
    import sys

    # torch.utils.serialization.config.load.mmap, from torch 2.5 on; nobody can have set it before it is imported.
    config = getattr(sys.modules.get("torch.utils.serialization"), "config", None)
    return bool(config is not None and config.load.mmap)


def check_settings(threads: Any, pinned_mb: Any, direct: bool | None) -> Settings:
    """How bytes are moved, as far as the caller says."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"threads={threads!r} is not a number of threads", fix="Pass 1 or more, or leave it out.")
    least = SLOT_PAIR >> 20
    if pinned_mb is not None and (not isinstance(pinned_mb, int) or pinned_mb < least):
        what = f"pinned_mb={pinned_mb!r} is too little to read into"
        raise UsageError(what, fix=f"Each thread takes {least} MiB: pass at least {least}, or leave it out.")
    return Settings(threads, None if pinned_mb is None else pinned_mb << 20, direct)


# -- before bytes are read


def _open(f: SourceLike, *, tree: bool) -> OpenCheckpoint:
    try:
        return OpenCheckpoint(f, tree=tree)
    except CannotReadError as error:
        raise os_error(error) from error.__cause__


def _refuse(checkpoint: Checkpoint, *, trusted: bool) -> None:
    """Raise if the file must not be loaded: in this order, so that what is not a checkpoint is never called unsafe."""
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


def _plan(checkpoint: Checkpoint, map_location: Any, *, mapped: bool) -> Plan:
    """The plan, if it can be carried out."""
    wanted = wanted_devices(tags_of(checkpoint), map_location)
    plan = place(checkpoint, devices_here(wanted, checkpoint.tensor_nbytes), map_location)
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


# -- bytes and objects

Make = Callable[["Piece", Any], Any]


def _each_piece(opened: OpenCheckpoint, device_map: DeviceMap, options: ReadOptions, make: Make) -> Any:
    """What all pieces hold: one object, or the dictionaries of shards put together."""
    made = []
    with _torch_told(device_map):
        for piece in opened.pieces:
            storages = read_storages(piece, device_map, options)
            plain = piece.checkpoint.format == "safetensors"
            made.append(plain_tensors(piece, storages, device_map) if plain else make(piece, storages))
    path = opened.checkpoint.path
    if opened.checkpoint.format != "sharded":
        if not made:
            raise LoadError("there is nothing in it to load", where=path)
        return made[0]
    joined: dict[Any, Any] = {}
    for shard in made:
        if not isinstance(shard, Mapping):
            what = f"a shard holds {type(shard).__name__}, not a dictionary of tensors"
            raise LoadError(what, where=path, fix="Load the shards one by one.")
        joined.update(shard)
    return joined


@contextmanager
def _torch_told(device_map: DeviceMap) -> Iterator[None]:
    """Tell torch where things go while a file is loaded: functions of torch and of programs ask it."""
    import torch

    state: Any = getattr(torch.serialization, "_serialization_tls", None)
    if not hasattr(state, "map_location"):
        yield
        return
    before = state.map_location
    try:
        state.map_location = device_map.locations or None
        yield
    finally:
        state.map_location = before


def _build_piece(piece: Piece, storages: Any, device_map: DeviceMap, encoding: str) -> Any:
    """The object, through the fixed table: nothing in the file is run."""
    main = next((pickle for pickle in piece.checkpoint.pickles if pickle.main), None)
    if main is None:
        raise LoadError("there is no object in it", where=piece.checkpoint.path)
    return build_object(piece, main, storages, device_map, encoding)


def _load_trusted(
    opened: OpenCheckpoint, device_map: DeviceMap, options: ReadOptions, pickle_module: Any, arguments: dict[str, Any]
) -> Any:
    """The object, by the file's own pickle, or as the program it is."""
    from transload.loading.trusted import load_exported, load_script, load_trusted

    if opened.checkpoint.format in ("torchscript", "torch-export"):
        (piece,) = opened.pieces
        if piece.index:
            fix = "Zip the folder itself, stored, and load that."
            raise LoadError("this program is unpacked", where=piece.checkpoint.path, fix=fix)
        load_program = load_script if piece.checkpoint.format == "torchscript" else load_exported
        return load_program(piece.open(""), piece.checkpoint, device_map.device, path=piece.path)

    def unpickled(piece: Piece, storages: Any) -> Any:
        return load_trusted(
            piece.open(piece.index),
            piece.checkpoint,
            storages.__getitem__,
            device_of=device_map.device,
            pickle_module=pickle_module,
            **arguments,
        )

    return _each_piece(opened, device_map, options, unpickled)
