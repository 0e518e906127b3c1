"""Whether a checkpoint fits a model, as ``load_into`` compares them; nothing is loaded, and the model is not changed.

``built`` makes the model on the meta device, where tensors have no memory; ``fit`` compares it with a file.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from transload.errors import CannotReadError, LoadError, TransloadError, UsageError
from transload.findings import join_names
from transload.frozen import Plain
from transload.io.sources import SourceLike
from transload.loading.handles import TensorReader
from transload.loading.into.compare import SHOWN, Comparison, KeyMismatch, described, modules_of
from transload.loading.into.shards import own_hooks
from transload.loading.refusal import refuse_piece, refuse_unmerged
from transload.render.words import plural

if TYPE_CHECKING:
    import torch

_TRANSFORMERS = "transformers:"
_FIX = "Name a function or class that returns the model: --model package.module:function, or transformers:NAME."


class Fit(Plain):
    """How a checkpoint fits a model.

    ``ok`` is whether ``load_into(model, path)`` would find every key with its shape, and nothing else. ``model`` is the
    class, ``keys`` how many it has and ``matched`` how many of them the file has; ``found`` is the place in the file.
    ``why`` says what does not fit, as ``MismatchError`` does, and ``fix`` what helps. ``notes`` are what ``load_into``
    would do to the keys, and what cannot be known before it loads.
    """

    ok: bool
    model: str
    keys: int = 0
    matched: int = 0
    found: str = ""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    shapes: tuple[KeyMismatch, ...] = ()
    dtypes: tuple[KeyMismatch, ...] = ()
    why: str = ""
    fix: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        pairs = {name: [each._asdict() for each in getattr(self, name)] for name in ("shapes", "dtypes")}
        return {**super().to_dict(), **pairs}


def fit(f: SourceLike, model: torch.nn.Module) -> Fit:
    """Compare a file with a model."""
    name = type(model).__name__
    try:
        opened = TensorReader(f, "cpu")
        with opened:
            refuse_unmerged(opened.checkpoint)
            refuse_piece(opened.checkpoint, "transload.load_into(model, {})")
            comparison = Comparison(model, opened, None, cast=True)
            return _fit(comparison, name)
    except CannotReadError:
        raise
    except TransloadError as error:  # several places fit, or there is no tensor
        return Fit(False, name, why=error.what, fix=error.fix)


def _fit(comparison: Comparison, name: str) -> Fit:
    match, slots, reader = comparison.match, comparison.slots, comparison.opened.elements
    lost = [(task.key, why) for task in comparison.tasks if (why := reader.missing(task.tensor))]
    nothing = not match.tensors and not comparison.custom and bool(slots)
    ok = not (comparison.missing or comparison.unexpected or comparison.shapes or lost or nothing)
    why, fix = ("", "") if ok else described(comparison, [f"{key} is damaged: {reason}" for key, reason in lost])
    notes = [*match.notes]
    dtypes = []
    for key, tensor in match.tensors.items():
        slot = slots.get(key)
        dtype = str(slot.tensor.dtype).removeprefix("torch.") if slot is not None and slot.tensor is not None else ""
        if dtype and tensor.dtype != dtype:
            dtypes.append(KeyMismatch(key, tensor.dtype, dtype))
    if dtypes:
        kinds = join_names(sorted({f"{each.file} in the file, {each.model} in the model" for each in dtypes}), SHOWN)
        notes.append(f"of another dtype, {plural(len(dtypes), 'key')}: {kinds}; cast=True converts them")
    if comparison.custom:
        places = join_names([prefix.rstrip(".") or "the model" for prefix in comparison.custom], SHOWN)
        notes.append(f"not compared, since these modules load their keys with code of their own: {places}")
    if any(own_hooks(module._load_state_dict_post_hooks) for _, module in modules_of(comparison.model)):  # noqa: SLF001
        notes.append("hooks of the model run after loading, and may still accept what is missing or not expected")
    return Fit(
        ok,
        name,
        len(slots),
        len(match.tensors),
        match.branch.name,
        tuple(comparison.missing),
        tuple(comparison.unexpected),
        tuple(comparison.shapes),
        tuple(dtypes),
        why,
        fix,
        tuple(notes),
    )


# -- the model


def built(model: Any) -> torch.nn.Module:
    """A model on the meta device: what a factory returns there, or the module itself if it is one.

    ``model`` may be the name of a factory, ``package.module:function``, or ``transformers:NAME_OR_DIR``. Whatever it
    prints goes to stderr. ``UsageError`` says how the factory failed.
    """
    try:
        import torch
    except ImportError as error:
        raise LoadError(f"torch cannot be imported, and the model needs it: {error}") from error
    text = model if isinstance(model, str) else ""
    with redirect_stdout(sys.stderr):
        factory = _named(model) if isinstance(model, str) else model
        if isinstance(factory, torch.nn.Module):
            return factory
        if not callable(factory):
            raise UsageError(f"{text or type(model).__name__} is not a model, nor a function or class", fix=_FIX)
        result = _run(text or getattr(factory, "__qualname__", "the factory"), lambda: _on_meta(factory))
    if not isinstance(result, torch.nn.Module):
        what = f"{text or 'the factory'} returned {type(result).__name__}, not a torch.nn.Module"
        raise UsageError(what, fix=_FIX)
    return result


def _on_meta(factory: Callable[[], Any]) -> Any:
    import torch

    with torch.device("meta"):
        return factory()


def _named(text: str) -> Any:
    """What a name such as ``package.module:function`` stands for."""
    if text.startswith(_TRANSFORMERS):
        return _of_transformers(text.removeprefix(_TRANSFORMERS))
    module, colon, path = text.partition(":")
    if not (module and colon and path) or "/" in text or "\\" in text:  # Python's error would quote a part of a URL
        raise UsageError(f"--model is {text!r}", fix=_FIX)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does

    def find() -> Any:
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
        return value

    return _run(text, find)


def _of_transformers(name: str) -> Callable[[], Any]:
    """What makes a model of transformers from the config in a folder or on the hub; it gets no weights."""

    def make() -> Any:
        transformers: Any = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(name)
        kind = next((getattr(transformers, each, None) for each in config.architectures or ()), None)
        return transformers.AutoModel.from_config(config) if kind is None else kind(config)

    return make


def _is_of_user(path: str) -> bool:
    """Whether a file is neither a library's nor this one."""
    return not path.startswith("<") and path not in (__file__, importlib.__file__) and "site-packages" not in path


def _run(name: str, call: Callable[[], Any]) -> Any:
    """The result of code of the user; ``UsageError`` if it raises anything."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
        where = f", raised through {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        what = f"could not build the model {name}: {type(error).__name__}: {error}{where}"
        fix = "It is called without arguments, on the meta device: it must not need values of tensors."
        if isinstance(error, ImportError | AttributeError):
            fix = _FIX
            if name.startswith(_TRANSFORMERS) and isinstance(error, ModuleNotFoundError):
                fix = f"Install it in this environment: python -m pip install {error.name}"
        raise UsageError(what, fix=fix) from error
