"""``transload.LightningCheckpointIO``: Lightning saves by ``transload.save`` and loads by ``transload.load``.

Lightning is two packages, ``lightning`` and ``pytorch_lightning``, each with an interface of its own. The class here is
registered as a subclass of those that are imported.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from transload.errors import UsageError
from transload.io.sources import is_url
from transload.loading import load
from transload.saving import save, save_async
from transload.saving.background import background as queue

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
else:
    CheckpointIO = object

StrPath = str | os.PathLike[str]
_PACKAGES = ("lightning.fabric", "lightning_fabric")


class LightningCheckpointIO(CheckpointIO):  # type: ignore[misc] # its type is unknown here
    """A ``CheckpointIO`` plugin of Lightning: checkpoints are saved and loaded by transload.

    >>> plugin = transload.LightningCheckpointIO()  # lightning.Trainer(plugins=[plugin])   # doctest: +SKIP

    It works in a ``Trainer`` and in ``Fabric``, of ``lightning`` and of ``pytorch_lightning``, with the strategies that
    use such plugins: one device, and DDP. Files are those of ``transload.save``: tagged ``cpu``, and written whole or
    not at all. They are loaded onto the CPU, from where Lightning copies them, unless it asks for another
    ``map_location``.

    With ``background`` the training goes on while a file is written, as after ``transload.save_async``; a checkpoint
    that Lightning removes stays until those saved before that are in place. ``weights_only`` is for loading, where
    Lightning does not say; ``None`` is the rule of ``transload.load``. ``storage_options`` of a ``save_checkpoint`` is
    a dict of options of ``transload.save``, such as ``{"compact": True}``.
    """

    def __init__(self, *, background: bool = False, weights_only: bool | None = None) -> None:
        self.background = background
        self.weights_only = weights_only
        self._pending: list[Future[None]] = []
        imported = [name for name in _PACKAGES if name in sys.modules]
        for name in imported or [name for name in _PACKAGES if find_spec(name.partition(".")[0])]:
            import_module(f"{name}.plugins.io.checkpoint_io").CheckpointIO.register(type(self))

    def __getstate__(self) -> dict[str, Any]:
        """Without the pending saves, for a process that a strategy starts."""
        return {**vars(self), "_pending": []}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: StrPath, storage_options: Any | None = None) -> None:
        """Save a checkpoint; its directory is made if it is missing."""
        options = {} if storage_options is None else storage_options
        if not isinstance(options, Mapping):
            what = f"storage_options has the type {type(options).__name__}; it must be a dict"
            raise UsageError(what, fix='It takes options of transload.save, such as {"compact": True}.')
        path = os.fspath(path)
        if is_url(path):
            store, key = _store_of(path)
            with store.transaction, store.open(key, "wb") as file:
                save(checkpoint, file, **options)
            return
        with suppress(OSError):  # then the save says what is wrong
            os.makedirs(os.path.dirname(path), exist_ok=True)
        # A process that a strategy has started hands the file to its parent, which does not wait.
        if self.background and multiprocessing.parent_process() is None:
            saving = save_async(checkpoint, path, **options)
            self._pending = [*(saving for saving in self._pending if not saving.done()), saving]
        else:
            save(checkpoint, path, **options)

    def load_checkpoint(
        self, path: StrPath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, onto the CPU unless ``map_location`` says otherwise."""
        path = os.fspath(path)
        queue.wait_for_target(path)
        trusted = self.weights_only if weights_only is None else weights_only
        checkpoint: dict[str, Any] = load(path, "cpu" if map_location is None else map_location, weights_only=trusted)
        return checkpoint

    def remove_checkpoint(self, path: StrPath) -> None:
        """Remove a checkpoint: a file, or a directory that another strategy has written."""
        path = os.fspath(path)
        pending = [*self._pending]
        if all(saving.done() and not Future.exception(saving) for saving in pending):
            _remove(path)
            return
        target = path if is_url(path) else os.path.abspath(path)

        def remove() -> None:
            if not any(map(Future.exception, pending)):  # else this may be the last checkpoint that is whole
                _remove(target)

        self._pending.append(queue.submit(target, remove))

    def teardown(self) -> None:
        """Wait for the saves in the background, and raise the error of one that failed."""
        pending, self._pending = self._pending, []
        for saving in pending:
            saving.result()


def _store_of(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there; Lightning itself needs fsspec."""
    from fsspec.core import url_to_fs

    store, key = url_to_fs(url)
    return store, key


def _remove(path: str) -> None:
    if is_url(path):
        store, key = _store_of(path)
        if store.exists(key):
            store.rm(key, recursive=True)
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
