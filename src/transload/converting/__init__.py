"""``transload.convert``: a checkpoint of any format written as another, without torch, and read back to be sure.

``transload.writing`` does it; ``report`` is what ``transload convert`` says about a ``Conversion``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transload.errors import UsageError
from transload.frozen import Reported, facts
from transload.judge.problems import refuse_broken
from transload.render.lines import Block, Line, Prose, Table, as_text, row
from transload.render.words import plural, printable, size
from transload.writing import write_content
from transload.writing.objects import Omission
from transload.writing.output import file_identity
from transload.writing.plan import Candidate, Options, candidates, dtype_of, format_of, size_of

if TYPE_CHECKING:
    from transload.io.sources import SourceLike

__all__ = ["Conversion", "convert", "listing", "parts", "report"]


@facts(frozen=True)
class Conversion(Reported):
    """What was converted, and what was not.

    ``files`` were written, the first of them holds the weights (or is the directory). ``nbytes`` are those of all
    tensors, ``copied`` those of them that the kernel moved by itself. ``aliases`` are second names of tensors that are
    held once. ``left`` are tensors that are not in the target: those with ``lost`` because it cannot hold them.
    ``listed`` is what else it cannot hold and is not plain data, such as functions: it is written nowhere. Plain data
    are in the file ``leftovers``. ``others`` counts tensors outside of the key. ``notes`` also name the tensors that
    are numpy arrays in the source.
    """

    path: str
    out: str
    format: str
    to: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    copied: int = 0
    cast: int = 0
    infinite: int = 0
    aliases: tuple[tuple[str, str], ...] = ()
    left: tuple[Omission, ...] = ()
    listed: tuple[Omission, ...] = ()
    leftovers: str = ""
    others: int = 0
    renamed: tuple[tuple[str, str], ...] = ()
    verified: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every tensor that was asked for is in the target."""
        return not any(each.lost for each in self.left)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = ("path", "out", "format", "to", "complete", "verified", "files", "tensors", "nbytes", "copied", "cast")
        return {
            "schema": 1,
            **{name: getattr(self, name) for name in (*names, "infinite", "others")},
            "files": list(self.files),
            "seconds": round(self.seconds, 3),
            "aliases": dict(self.aliases),
            "renamed": [{"old": old, "new": new} for old, new in self.renamed],
            "left": [each._asdict() for each in self.left],
            "leftovers": self.leftovers or None,
            "listed": [{"name": each.name, "what": each.why} for each in self.listed],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The report as the command line gives it, without colour."""
        return as_text(report(self))


def convert(
    src: SourceLike,
    dst: str | os.PathLike[str],
    *,
    to: str = "",
    key: str = "",
    strip: str | tuple[str, ...] | list[str] = (),
    dtype: str = "",
    allow_inf: bool = False,
    max_shard_size: str | int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    progress: bool | Callable[[int, int], object] | None = None,
) -> Conversion:
    """Write the tensors of a checkpoint as another format; nothing of it is run, and torch is not needed.

    ``src`` is a path (of a file or a directory), bytes, or a file object. The format of ``dst`` follows from its name,
    or is ``to``: ``torch``, ``safetensors``, ``npz``, or ``raw`` (a directory). ``key`` chooses a part (``"model"``),
    ``strip`` removes prefixes from the names (``"module."``), ``dtype`` is for floating tensors, and a number that does
    not fit is an error unless ``allow_inf``. ``max_shard_size`` (``"5GB"``) splits safetensors into shards. ``verify``
    checks the source's own checksums and reads the target back, byte for byte, before it gets its name. ``progress``
    is a function of the bytes done and of all bytes, or ``True`` for a line on a terminal.

    >>> transload.convert("model.pt", "model.safetensors")  # doctest: +SKIP
    >>> transload.convert("train.ckpt", "out/", key="model", strip="module.", dtype="bfloat16")  # doctest: +SKIP
    """
    from transload.tensors.content import open_content

    target = _path(dst)
    prefixes = (strip,) if isinstance(strip, str) else tuple(strip)
    options = Options(key, tuple(filter(None, prefixes)), dtype_of(dtype), allow_inf, size_of(max_shard_size))
    format_ = format_of(target, to)
    if options.max_shard_size and format_ != "safetensors":
        raise UsageError("only safetensors can be split into shards", fix="Leave out --max-shard-size.")
    if format_ != "raw" and (target.endswith(("/", os.sep)) or os.path.isdir(target)):
        usual = {"safetensors": "model.safetensors", "torch": "pytorch_model.bin", "npz": "model.npz"}[format_]
        target = os.path.join(target, usual)
    if isinstance(src, str | os.PathLike) and not file_identity(os.fspath(src)).isdisjoint(file_identity(target)):
        raise UsageError("the target is the source itself", where=target, fix="Choose another name.")
    with open_content(src) as content:
        refuse_broken(content.checkpoint)
        begun, checkpoint = time.monotonic(), content.checkpoint
        written = write_content(
            content, target, format_, options, src=src, verify=verify, overwrite=overwrite, progress=progress
        )
        seconds = time.monotonic() - begun
    source = (checkpoint.path, target, checkpoint.format, format_)
    return Conversion(*source, **written._asdict(), verified=verify, seconds=seconds)


def parts(src: SourceLike) -> tuple[Candidate, ...]:
    """The parts of a checkpoint that ``key`` can choose, the whole first."""
    from transload.tensors.content import open_content

    with open_content(src) as content:
        refuse_broken(content.checkpoint)
        return candidates(content.checkpoint)


def _path(path: Any) -> str:
    if not isinstance(path, str | os.PathLike) or isinstance(name := os.fspath(path), bytes):
        raise UsageError(f"expected the path of a file, not {type(path).__name__}")
    if not name:
        raise UsageError("the target has no name")
    with suppress(UnicodeEncodeError):  # half of a surrogate pair
        if b"\0" not in os.fsencode(name):
            return name
    raise UsageError("the name of the target is not valid", where=name)


# -- the report

_SHOWN = 16
_FORMATS = {"torch": "torch zip", "safetensors": "safetensors", "npz": "npz", "raw": "raw tensors"}


def report(conversion: Conversion) -> Iterator[Block]:
    """Everything ``transload convert`` says."""
    yield Prose(((printable(conversion.out, None), "strong"),))
    yield row("written", _written(conversion))
    if conversion.cast:
        infinite = f", {conversion.infinite:,} numbers became infinite" if conversion.infinite else ""
        rounded = f"{plural(conversion.cast, 'tensor')} to another dtype{infinite}"
        yield row("rounded", rounded, "trust" if infinite else "")
    if conversion.aliases:
        yield row("tied", _some([f"{printable(name)} is {printable(kept)}" for name, kept in conversion.aliases]))
    if conversion.renamed:
        renamed = [f"{printable(old) or 'the root'} → {printable(new)}" for old, new in conversion.renamed]
        yield row("renamed", _some(renamed), "trust")
    if conversion.others:
        yield row("not chosen", plural(conversion.others, "tensor") + " outside the key", "dim")
    yield from _omissions("lost", [each for each in conversion.left if each.lost], "bad")
    yield from _omissions("left out", [each for each in conversion.left if not each.lost], "")
    if conversion.leftovers:
        yield row("leftovers", f"everything else, as plain data: {printable(conversion.leftovers, None)}")
    yield from _omissions("not kept", conversion.listed, "bad", "; --json names them")
    for note in conversion.notes:
        yield row("note", printable(note, None), "dim")


def _written(conversion: Conversion) -> str:
    shards = sum(name.endswith(".safetensors") for name in conversion.files)
    files = f", {plural(shards, 'shard')} and an index" if shards > 1 else ""
    nbytes, seconds = conversion.nbytes, conversion.seconds
    speed = f", {size(round(nbytes / seconds))}/s" if nbytes >= 1e8 and seconds else ""
    checked = "read back and compared" if conversion.verified else "not read back"
    tensors = f"{plural(conversion.tensors, 'tensor')}, {size(nbytes)}"
    return f"{_FORMATS[conversion.to]}: {tensors}{files}{speed}; {checked}"


def _omissions(label: str, omissions: Sequence[Omission], role: str, hint: str = "") -> Iterator[Block]:
    for name, why, _ in omissions[:_SHOWN]:
        yield row(label, f"{printable(name) or 'the root'}: {printable(why)}", role)
        label = ""  # only before the first
    if len(omissions) > _SHOWN:
        yield row("", f"… and {len(omissions) - _SHOWN:,} more{hint}", "dim")


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def listing(path: str, parts: Sequence[Candidate]) -> Iterator[Block]:
    """What ``--list`` says."""
    yield Prose(((printable(path, None), "strong"),))
    rows: list[tuple[Line, ...]] = [
        (
            ((f"--key {printable(part.key)}" if part.key else "all of it", ""),),
            ((part.kind, "dim"),),
            ((plural(part.tensors, "tensor"), ""),),
            ((size(part.nbytes), "dim"),),
        )
        for part in parts
    ]
    yield Table(rows, right=frozenset({2, 3}))
