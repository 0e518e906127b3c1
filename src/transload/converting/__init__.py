"""``transload.convert``: write a checkpoint of any format in another one, without torch, and read it back to be sure.

``transload.writing`` does the work; ``report`` is what ``transload convert`` says about a ``Conversion``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from transload.errors import CannotReadError, ConvertError, UsageError
from transload.io.atomic import target_path
from transload.io.paths import folder_of, is_folder
from transload.io.sources import Progress, SourceLike, is_url, refuse_fault
from transload.judge.problems import refuse_broken
from transload.opening import OpenCheckpoint
from transload.opening.renaming import Renaming
from transload.render.lines import Block, Prose, Table
from transload.render.words import path_text, plural, printable, size
from transload.writing import Conversion, report, write_content
from transload.writing.inputs import Candidate, candidates
from transload.writing.output import refuse_source
from transload.writing.plan import TARGETS, Options, dtype_of, patterns_of, size_of, target_format

if TYPE_CHECKING:
    import torch

__all__ = ["Conversion", "convert", "listing", "parts", "report"]


def convert(
    src: SourceLike | Sequence[SourceLike],
    dst: str | os.PathLike[str],
    *,
    to: str = "",
    key: str = "",
    strip: str | tuple[str, ...] | list[str] = (),
    only: str | re.Pattern[str] | Sequence[str | re.Pattern[str]] = (),
    drop: str | re.Pattern[str] | Sequence[str | re.Pattern[str]] = (),
    rename: Any = None,
    lora: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "",
    allow_inf: bool = False,
    optimizer: bool = False,
    max_shard_size: str | int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: Progress = None,
) -> Conversion:
    """Write the tensors of a checkpoint in another format. Nothing in the file is run, and torch is not needed.

    ``src`` is a path (of a file or a directory), a URL, bytes, or a file object; or a list of several of these, which
    become one: a name in two of them is an error unless the tensors are equal. The name of ``dst`` decides the format
    unless ``to`` does: ``torch``, ``safetensors``, ``npz``, ``raw`` (a directory), ``dcp`` (a directory that
    ``torch.distributed.checkpoint`` loads on any number of ranks), or ``universal`` (a universal checkpoint of
    DeepSpeed, from which any number of ranks resumes). ``key`` chooses a part (``"model"``), ``strip`` removes prefixes
    from the names (``"module."``). ``only`` and ``drop`` are regular expressions, which choose tensors by the names
    that this leaves; ``rename`` changes these names, and may be all that it may be for ``load_into``. ``lora`` is a
    LoRA adapter of peft (its folder, or a file beside ``adapter_config.json``), which is merged into the weights; this
    needs torch. ``dtype`` (a name, or a ``torch.dtype``) converts floating-point tensors, where a number that does not
    fit is an error unless ``allow_inf``. From a DeepSpeed or Megatron directory, only the weights are written, unless
    ``optimizer`` asks for everything. ``max_shard_size`` (``"5GB"``) splits safetensors
    into shards. ``verify`` compares the source with its checksums, and reads the target back, byte for byte, before it
    gets its name. ``progress`` is ``True`` for a line on the terminal, or a function that gets the bytes done and the
    total.

    >>> transload.convert("model.pt", "model.safetensors")  # doctest: +SKIP
    >>> transload.convert("train.ckpt", "out/", key="model", strip="module.", dtype="bfloat16")  # doctest: +SKIP
    """
    target: Any = os.fspath(dst) if hasattr(dst, "__fspath__") else dst
    if not isinstance(target, str):
        raise UsageError(f"expected the path of a file, not {type(dst).__name__}")
    target = target_path(target)
    prefixes = (strip,) if isinstance(strip, str) else tuple(strip)
    options = Options(
        key=key,
        strip=tuple(filter(None, prefixes)),
        dtype=dtype_of(dtype),
        allow_inf=allow_inf,
        max_shard_size=size_of(max_shard_size),
        optimizer=optimizer,
        only=patterns_of(only, "--only"),
        drop=patterns_of(drop, "--drop"),
        rename=None if rename is None else Renaming(rename),
        lora=None if lora is None else _adapter_config(os.fspath(lora)),
    )
    format_ = target_format(target, to)
    if options.max_shard_size and not TARGETS[format_].has_shards:
        raise UsageError("only safetensors can be split into shards", fix="Leave out --max-shard-size.")
    usual = TARGETS[format_].file
    if usual and (target.endswith(("/", os.sep)) or os.path.isdir(target)):
        target = os.path.join(target, usual)
    sources: list[Any] = [*src] if isinstance(src, list | tuple) else [src]
    if not sources:
        raise UsageError("no checkpoint is named")
    for source in sources:
        if isinstance(source, str | os.PathLike):
            refuse_source(os.fspath(source), target)
    keys = [key for _ in sources]
    if lora is not None:
        if len(sources) > 1:
            raise UsageError("an adapter is merged into one base model", fix="Name one source.")
        refuse_source(os.fspath(lora), target)
        sources, keys = [*sources, lora], [key, ""]
    with ExitStack() as files:
        inputs = [files.enter_context(OpenCheckpoint(source, lazy=True)) for source in sources]
        for opened, part in zip(inputs, keys, strict=True):
            refuse_broken(opened.checkpoint, part)
        (first, origin), *more = [(opened.elements, source) for opened, source in zip(inputs, sources, strict=True)]

        def check_unchanged() -> None:
            for opened in inputs:
                opened.check_unchanged()

        return write_content(
            first,
            target,
            format_,
            options,
            src=origin,
            more=more,
            verify=verify,
            overwrite=overwrite,
            progress=progress,
            check_unchanged=check_unchanged,
        )


def _adapter_config(path: str) -> dict[str, Any]:
    """What the ``adapter_config.json`` of an adapter says: in its folder, or beside its file."""
    from transload.formats.adapters import CONFIG, read_config

    if is_folder(path):
        parent = path
    elif is_url(path):
        from transload.io.remote import parent_of

        parent = parent_of(path)
    else:
        parent = os.path.dirname(path) or os.curdir
    folder = folder_of(parent)[0]
    fix = "Name the folder that peft's save_pretrained wrote: it says the scale and the type of the adapter."
    try:
        with closing(folder.open(CONFIG)) as source:
            config = read_config(source)
    except CannotReadError as error:
        refuse_fault(error, folder.name)
        raise ConvertError(f"{CONFIG} cannot be read: {error.what}", where=path, fix=fix) from error
    if not config:
        raise ConvertError(f"{CONFIG} is no JSON object", where=path, fix=fix)
    return config


def parts(src: SourceLike) -> tuple[Candidate, ...]:
    """The parts of a checkpoint that ``key`` can choose, the whole first."""
    with OpenCheckpoint(src, lazy=True) as opened:
        refuse_broken(opened.checkpoint)
        return candidates(opened.checkpoint)


def listing(path: str, parts: Sequence[Candidate]) -> Iterator[Block]:
    """What ``--list`` says."""
    yield Prose(((path_text(path, None), "strong"),))
    rows = []
    for part in parts:
        key = f"--key {printable(part.key)}" if part.key else "all of it"
        rows.append((key, part.kind, plural(part.tensors, "tensor"), size(part.nbytes)))
    yield Table(rows, right=(2, 3), dim=(1, 3), shrinks=(), drops=(1, 3, 2))  # keys are to be typed
