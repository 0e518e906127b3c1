"""The short answer on a checkpoint: a few labelled lines, the same in a terminal, a REPL and a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from transload.render.escape import printable
from transload.render.lines import GLUE
from transload.render.sizes import count, plural, size
from transload.render.words import INTEGRITY, SAFETY, format_words, integrity_reason, safety_reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transload.checkpoint import Checkpoint, Leaf, Tensor
    from transload.render.lines import Line

__all__ = ["Entry", "elements", "summary"]

_DEVICES = 6
_DTYPES = 6
_VALUES = 6
_FACTS = 8
_HOUSEKEEPING = frozenset(
    {"folder", "version", "byteorder", "format_version", "storage_alignment", "serialization_id", "archive_version"}
)
_PLAIN = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torch-directory"})
_NEAR = 2  # steps from the root; what lies deeper is some module's own affair
_STATISTICS = ("running_mean", "running_var")
_NUMBERS = ("float", "bfloat", "complex", "q")
_DOT = " · "


class Entry(NamedTuple):
    """One line of the summary: what it is about, and the words with their roles."""

    label: str
    words: Line


def summary(checkpoint: Checkpoint) -> list[Entry]:
    """What it is, who wrote it, how big, where it lands, whether to trust it, what ``torch.load`` will do."""
    entries = [Entry("format", ((format_words(checkpoint), ""),))]
    entries += _origin(checkpoint)
    entries.append(Entry("size", ((_DOT.join(map(_glued, _sizes(checkpoint))), ""),)))
    entries += _listed("devices", ((d.device, d.tensors, d.nbytes) for d in checkpoint.devices), _DEVICES)
    entries += _listed("dtypes", checkpoint.dtypes, _DTYPES)
    entries += _values(checkpoint.leaves)
    entries += _facts(checkpoint)
    safety, integrity = checkpoint.safety, checkpoint.integrity
    entries.append(Entry("safety", _verdict(SAFETY[safety][0], safety, safety_reason(checkpoint))))
    entries.append(Entry("integrity", _verdict(INTEGRITY[integrity][0], integrity, integrity_reason(checkpoint))))
    if checkpoint.prediction:
        entries.append(Entry("loading", ((printable(checkpoint.prediction, None), ""),)))
    return entries


def elements(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Parameters in the tensors, and numbers kept by an optimizer. What is shared counts once.

    A tensor belongs to an optimizer when a step of its path begins with "optim". Integers are counters, labels and the
    states of random generators, not parameters, and the statistics of a batch norm are none either.
    """
    seen: set[object] = set()
    model = optimizer = 0
    for tensor in tensors:
        place = (tensor.storage, tensor.offset, tensor.shape, tensor.stride)
        if (tensor.storage is not None and place in seen) or not tensor.dtype.startswith(_NUMBERS):
            continue
        if tensor.name.endswith(_STATISTICS):
            continue
        seen.add(place)
        if any(isinstance(step, str) and step.startswith("optim") for step in tensor.path):
            optimizer += tensor.numel
        else:
            model += tensor.numel
    return model, optimizer


def _origin(checkpoint: Checkpoint) -> Iterator[Entry]:
    text = checkpoint.written_by.text
    if text != "unknown":
        yield Entry("written by", ((printable(text, None), ""),))


def _sizes(checkpoint: Checkpoint) -> Iterator[str]:
    yield size(checkpoint.nbytes)
    if not checkpoint.tensors:
        return
    yield f"{plural(len(checkpoint.tensors), 'tensor')} of {size(checkpoint.tensor_nbytes)}"
    model, optimizer = elements(checkpoint.tensors)
    if model:
        yield plural(model, "parameter")
    if optimizer:
        yield f"{count(optimizer)} in the optimizer"
    if checkpoint.dead_nbytes:
        yield f"{size(checkpoint.dead_nbytes)} unused by any tensor"


def _listed(label: str, uses: Iterable[tuple[str, int, int]], limit: int) -> Iterator[Entry]:
    """``cuda:0 288 tensors, 1.3 GB · cpu 2 tensors, 4 kB``, the numbers dim."""
    rows = list(uses)
    words: list[tuple[str, str]] = []
    for name, tensors, nbytes in rows[:limit]:
        words += [(_DOT, "dim")] if words else []
        words.append((_glued(printable(name, 40)), ""))
        words.append((_glued(f" {plural(tensors, 'tensor')}, {size(nbytes)}"), "dim"))
    if len(rows) > limit:
        words.append((f"{_DOT}{len(rows) - limit:,} more", "dim"))
    if words:
        yield Entry(label, tuple(words))


def _facts(checkpoint: Checkpoint) -> Iterator[Entry]:
    """What only this kind of container has to tell; of a plain archive it is housekeeping, and left to the JSON."""
    facts = [fact for fact in checkpoint.facts if fact[0] not in _HOUSEKEEPING]
    if checkpoint.format in _PLAIN or not facts:
        return
    words = [_glued(f"{printable(name)} {printable(value, 60)}") for name, value in facts[:_FACTS]]
    more = [f"{len(facts) - _FACTS:,} more"] if len(facts) > _FACTS else []
    yield Entry("facts", ((_DOT.join([*words, *more]), ""),))


def _values(leaves: Sequence[Leaf]) -> Iterator[Entry]:
    """The values nearest to the root: epoch, step, loss are kept there."""
    depth = min((len(leaf.path) for leaf in leaves), default=0)
    if depth > _NEAR:
        return
    near = [leaf for leaf in leaves if len(leaf.path) == depth][:_VALUES]
    words: list[tuple[str, str]] = []
    for leaf in near:
        words += [(_DOT, "dim")] if words else []
        words += [(_glued(f"{printable(leaf.name, 40)} "), "dim"), (_glued(printable(leaf.text, 40)), "")]
    if len(leaves) > len(near):
        words.append((f"{_DOT}{len(leaves) - len(near):,} more", "dim"))
    if words:
        yield Entry("values", tuple(words))


def _glued(text: str) -> str:
    """One item of a list, which is not to be broken across lines."""
    return text.replace(" ", GLUE)


def _verdict(role: str, word: str, reason: str) -> Line:
    return ((word, role), (f": {reason}", ""))
