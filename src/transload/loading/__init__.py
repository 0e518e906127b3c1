"""``transload.load``: loads any checkpoint onto the devices of this machine, with the result ``torch.load`` would give.

A load takes these steps: open and judge the file (``opening``), refuse what must not be loaded (``refusal``), plan
where everything goes (``placement``), read the storages (``storages``), and build the objects over them (``build``;
``trusted`` with ``weights_only=False``). What several files form together is ``composed``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from transload.checkpoint import Checkpoint
from transload.errors import (
    DoesNotFitError,
    FileWarning,
    LandingWarning,
    LoadError,
    Malformed,
    NoTorchError,
    UsageError,
)
from transload.io import gc_paused
from transload.io.paths import place_of
from transload.io.sources import Progress, SourceLike, is_url, shown
from transload.loading.build import build_object, plain_tensors
from transload.loading.placement import DeviceMap, plan_here
from transload.loading.storages import ReadOptions, read_storages
from transload.opening import OpenCheckpoint
from transload.opening.jobs import SLOT_PAIR, Settings

if TYPE_CHECKING:
    from transload.loading.handles import TensorReader

__all__ = ["load"]

_PICKLE_ARGUMENTS = frozenset({"encoding", "errors", "fix_imports", "buffers"})


def load(
    f: SourceLike,
    map_location: Any = "auto",
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool = False,
    progress: Progress = None,
    threads: int | None = None,
    pinned_mb: int | None = None,
    direct: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a checkpoint onto the devices of this machine: ``torch.load`` for every file format.

    ``f`` is a path (of a file, a directory or the index of shards), a URL, a binary file object, or bytes.
    ``map_location`` takes what ``torch.load`` takes; or ``"auto"``: each tensor goes to the device it was saved on if
    this machine has it, else to the GPU of this process, else to the CPU, and one ``LandingWarning`` says what was
    moved; or a list of devices, ``["cuda:1", "cpu"]``: everything goes to the first one that this machine has.

    A file object is read from its position on, and left where ``torch.load`` leaves it, so that objects saved one after
    the other, in the format before torch 1.6, can be read until ``EOFError``; if the load fails, its position does not
    change.

    With ``weights_only`` nothing in the file is run: it is read into a tree, from which tensors and plain objects are
    built through a fixed table. One error lists all other names, unless the program has allowed them with
    ``torch.serialization.add_safe_globals``. ``weights_only=False`` unpickles the file, which may run any code: use it
    only for files from people you trust. ``None`` means ``True`` unless a ``pickle_module`` is given. The environment
    variables ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` and ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` work as in torch.

    ``mmap`` maps the file instead of reading it, where its bytes are the same as in memory. ``verify`` compares every
    checksum while reading, which torch never does. ``progress`` is ``True`` for a line on the terminal, or a function
    that gets the bytes done and the total. ``encoding`` is for text that Python 2 wrote.

    How bytes are read depends on this machine and on where the file is; ``transload check`` says how. ``threads`` sets
    how many threads read, ``pinned_mb`` how much pinned memory they may use for a GPU, ``direct`` whether they bypass
    the page cache.

    The classes of all errors are subclasses of those that torch users already catch: ``RuntimeError``,
    ``pickle.UnpicklingError``, ``OSError``.

    >>> import transload
    >>> transload.load("model.pt")                        # doctest: +SKIP
    """
    if isinstance(weights_only, str):  # "False" is true, and "" would trust the file
        raise UsageError(f"weights_only is a string: {weights_only!r}", fix="Pass True or False, without quotes.")
    # torch's rule, with its two environment variables.
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    forced_on, forced_off = (os.environ.get(name, "0").lower() in ("1", "y", "yes", "true") for name in names)
    if forced_on and forced_off:
        raise LoadError(f"{' and '.join(names)} are both set", fix="Unset one of them.")
    if weights_only is None:
        weights_only = pickle_module is None and not forced_off
        if forced_off:
            warnings.warn("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set: the file may run code", stacklevel=2)
    trusted = not (weights_only or forced_on)
    encoding = _check_pickle_arguments(pickle_load_args, pickle_module, trusted=trusted)
    is_path = isinstance(f, str | os.PathLike)
    if mmap and not is_path:
        raise UsageError("mmap=True needs a path", fix="Pass the path of the file instead of a file object or bytes.")
    if mmap and is_url(f):
        fix = "Leave mmap out: the file is read straight into place. To read a few tensors, use transload.open."
        raise UsageError("mmap=True needs a file on this machine", where=shown(f), fix=fix)
    mapped = bool(mmap)
    if mmap is None and is_path and not is_url(f):
        # torch.utils.serialization.config.load.mmap, from torch 2.5 on; it cannot have been set before it is imported.
        config = getattr(sys.modules.get("torch.utils.serialization"), "config", None)
        mapped = config is not None and bool(config.load.mmap)
    settings = check_settings(threads, pinned_mb, direct)

    def load_opened(opened: OpenCheckpoint) -> Any:
        # 2. Refuse what must not be loaded, and leave out what torch cannot represent.
        _refuse(opened.checkpoint, trusted=trusted)
        if opened.checkpoint.findings:
            from transload.loading.refusal import leave_out

            leave_out(opened)
        checkpoint = opened.checkpoint
        # 3. Plan where everything goes.
        plan = plan_here(checkpoint, map_location, checkpoint.tensor_nbytes)
        composed = checkpoint.traits.composed  # its tensors are in pieces, which cannot be mapped
        short = [each for each in plan.shortages if not (mapped and not composed and each.device == "cpu")]
        if short:
            fix = "\n".join(f"Instead: {hint}" for each in short for hint in each.instead)
            raise DoesNotFitError("; ".join(map(str, short)), where=checkpoint.path, fix=fix)
        device_map = DeviceMap(plan, map_location, checkpoint.path)
        report_progress = None
        if progress is not None:
            from transload.io.pool import progress_counter

            report_progress = progress_counter(progress, checkpoint.tensor_nbytes)
        options = ReadOptions(verify, mapped, report_progress, settings)
        # 4. Read the storages, and build the objects over them.
        make = partial(build_object, encoding=encoding)
        if trusted:
            from transload.loading.trusted import load_program, load_trusted

            make = partial(load_trusted, pickle_module=pickle_module, **pickle_load_args)
        try:
            if trusted and checkpoint.traits.runs:
                loaded = load_program(opened.files[0], device_map.device)
            elif composed:
                from transload.loading.composed import load_composed

                arguments = {"pickle_module": pickle_module, **pickle_load_args} if trusted else None
                with _telling_torch(device_map):
                    loaded = load_composed(cast("TensorReader", opened), device_map, options, arguments)
            else:
                loaded = _each_file(opened, device_map, options, make)
        except Malformed:
            opened.list_tensors()
            _refuse(opened.checkpoint, trusted=trusted)  # which names the tensor, if it knows it
            raise
        opened.check_unchanged()
        opened.seek_past_content()
        if plan.warning:
            warnings.warn(f"{checkpoint.path}: {plan.warning}", LandingWarning, stacklevel=3)
        if checkpoint.findings:
            from transload.judge.problems import load_warning

            if wrong := load_warning(checkpoint):
                warnings.warn(f"{checkpoint.path}: {wrong}", FileWarning, stacklevel=3)
        return loaded

    # 1. Open and judge it. Ordinary tensors are only counted: they are named if something is wrong.
    with gc_paused(user_objects=trusted):
        with _opened(f, map_location, tree=trusted, verify=verify) as opened:
            try:
                loaded = load_opened(opened)
                if opened.claims_hold():
                    return loaded
            except LoadError:
                if opened.claims_hold():
                    raise
        # The headers in it contradict what was worked out from its directory: read them first.
        with OpenCheckpoint(f, tree=trusted, headers=True) as opened:
            return load_opened(opened)


def _opened(f: SourceLike, map_location: Any, *, tree: bool, verify: bool) -> OpenCheckpoint:
    """Open a checkpoint; one of several files so that its tensors can be read, too."""
    place = place_of(f)
    if place.folder is None:
        return OpenCheckpoint(place, tree=tree)
    from transload.loading.handles import TensorReader

    return TensorReader(place, map_location, verify=verify)


def _check_pickle_arguments(given: Mapping[str, Any], pickle_module: Any, *, trusted: bool) -> str:
    """Return the encoding; raise if an argument is unknown, or has no effect on a file that is not trusted."""
    for name in given:
        if name not in (_PICKLE_ARGUMENTS if trusted else {"encoding"}):
            hint = " with weights_only=True" if name in _PICKLE_ARGUMENTS else ""
            raise TypeError(f"load() got an unexpected keyword argument {name!r}{hint}")
    if not trusted and pickle_module is not None:
        fix = "Leave it out; or pass weights_only=False, if you trust the file."
        raise UsageError("a pickle_module is used only with weights_only=False", fix=fix)
    encoding: str = given.get("encoding", "utf-8")
    if encoding not in ("utf-8", "bytes"):
        try:
            bytes(4).decode(encoding)  # also fails for codecs such as hex, which do not make text
        except (LookupError, TypeError) as error:
            fix = "'utf-8', 'latin1' and 'bytes' are usual."
            raise UsageError(f"there is no encoding {encoding!r}", fix=fix) from error
    return encoding


def _refuse(checkpoint: Checkpoint, *, trusted: bool) -> None:
    """Raise if the file must not be loaded. Damage comes first: what is not a checkpoint is never called unsafe."""
    # A sound file with nothing but tensors needs no further checks.
    plain = checkpoint.counted or checkpoint.traits.named
    plain = plain and not checkpoint.problems and checkpoint.safety == "data-only"
    if not plain:
        from transload.judge.problems import refuse_broken
        from transload.loading.refusal import refuse_program, refuse_unsafe

        refuse_broken(checkpoint)
        refuse_program(checkpoint, trusted=trusted)
    try:
        import torch  # noqa: F401 - from here on it is needed
    except ImportError as error:
        what = f"torch cannot be imported: {error}"
        raise NoTorchError(what, where=checkpoint.path, fix="`transload doctor` says why.") from error
    if not (plain or trusted):
        refuse_unsafe(checkpoint)


def check_settings(threads: Any, pinned_mb: Any, direct: bool | None) -> Settings:
    """Check the caller's settings, and return them."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(f"threads must be a positive integer, not {threads!r}", fix="Pass 1 or more, or leave it out.")
    least = SLOT_PAIR >> 20
    if pinned_mb is not None and (not isinstance(pinned_mb, int) or pinned_mb < least):
        what = f"pinned_mb={pinned_mb!r} is too small"
        raise UsageError(what, fix=f"Each thread takes {least} MiB: pass at least {least}, or leave it out.")
    return Settings(threads, None if pinned_mb is None else pinned_mb << 20, direct)


class _telling_torch:  # noqa: N801 - used like a function; contextlib's decorator would cost each load a generator
    """Rebuild functions, of torch and of programs, ask torch for the map_location of the load in progress."""

    def __init__(self, device_map: DeviceMap) -> None:
        import torch

        self._state: Any = getattr(torch.serialization, "_serialization_tls", None)
        self._has_state = hasattr(self._state, "map_location")
        self._locations = device_map.locations or None

    def __enter__(self) -> None:
        if self._has_state:
            self._before, self._state.map_location = self._state.map_location, self._locations

    def __exit__(self, *_: object) -> None:
        if self._has_state:
            self._state.map_location = self._before


def _each_file(opened: OpenCheckpoint, device_map: DeviceMap, options: ReadOptions, make: Callable[..., Any]) -> Any:
    """The object of the only piece, or the dictionaries of all shards merged."""
    objects = []
    with _telling_torch(device_map):
        for file, storages in zip(opened.files, read_storages(opened.files, device_map, options), strict=True):
            plain = file.checkpoint.traits.named
            objects.append(plain_tensors(file, storages, device_map) if plain else make(file, storages, device_map))
    path, form = opened.checkpoint.path, opened.checkpoint.traits
    if not form.several:
        if not objects:
            raise LoadError("there is nothing in it to load", where=path)
        return objects[0][""] if form.nameless else objects[0]
    joined: dict[Any, Any] = {}
    for shard in objects:
        if not isinstance(shard, Mapping):
            what = f"a shard holds {type(shard).__name__}, not a dictionary of tensors"
            raise LoadError(what, where=path, fix="Load the shards one by one.")
        joined.update(shard)
    return joined
