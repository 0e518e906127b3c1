"""What a target holds: tensors under their names, in their dtypes, each number once though it may have many names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.converting.casting import cast, is_cast
from transload.converting.selection import Distinct, Left, Named
from transload.dtypes import itemsize
from transload.errors import OverflowRefusedError
from transload.tensors import Allowance, Content, Run

if TYPE_CHECKING:
    from transload.checkpoint import Tensor
    from transload.converting.wish import Wish

__all__ = ["Data", "Entry", "Sorted", "sorted_out", "tie_of"]

_PIECE = 4 << 20
_UNHELD = {
    "meta": "it was on the meta device and has no numbers",
    "quantized": "it is quantized: its numbers mean nothing without their scales",
    "subclass": "it is of a class of its own",
    "device": "its numbers lie in the pickle, as an array of numpy",
}
_FORMAT = "format"  # in a safetensors file's metadata no second name of a tensor, but what its loaders look for


class Entry(NamedTuple):
    """A tensor of the target."""

    name: str
    tensor: Tensor
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes it takes there."""
        return itemsize(self.dtype, self.tensor.numel)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape there."""
        return self.tensor.shape


class Sorted(NamedTuple):
    """What becomes of the tensors: held, held under another name as well, or not; ``in_parts`` are held as several.

    ``renamed`` are parts whose name another tensor has.
    """

    entries: tuple[Entry, ...]
    aliases: tuple[tuple[str, str], ...]
    left: tuple[Left, ...]
    in_parts: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()


def sorted_out(  # noqa: PLR0913 - what there is, and what the target can do
    named: Iterable[Named],
    content: Content,
    wish: Wish,
    holds: Callable[[str], bool],
    *,
    tied: bool = False,
    views: bool = False,
) -> Sorted:
    """The entries of a target that ``holds`` some dtypes.

    With ``tied``, equal views become names of one. One that holds ``views`` does not write all that they claim.
    """
    allowance = None if views else Allowance(content.checkpoint)
    entries: list[Entry] = []
    aliases: list[tuple[str, str]] = []
    left: list[Left] = []
    kept: dict[Any, str] = {}
    in_parts: list[str] = []
    simple = list(_simple(named, left, in_parts))
    distinct = Distinct(each.name for each in simple)
    for first in simple:
        each = first._replace(name=distinct(first.name))
        dtype = wish.dtype if is_cast(each.tensor.dtype, wish.dtype) else each.tensor.dtype
        if not holds(dtype):
            left.append(Left(each.name, f"the format has no {dtype}", lost=True))
            continue
        tie = tie_of(each.tensor) if tied and each.name != _FORMAT else None
        if tie is not None and kept.setdefault(tie, each.name) != each.name:
            aliases.append((each.name, kept[tie]))
            continue
        if allowance is not None:
            allowance.spend(each.tensor)
        entries.append(Entry(each.name, each.tensor, dtype))
    return Sorted(tuple(entries), tuple(aliases), tuple(left), tuple(in_parts), tuple(distinct.renamed))


def _simple(named: Iterable[Named], left: list[Left], in_parts: list[str]) -> Iterator[Named]:
    """Tensors that are plain runs of numbers; of those made of others, the others."""
    for name, tensor in named:
        kind = tensor.kind
        same = kind == "device" and len(tensor.parts) == 1 and tensor.parts[0].dtype == tensor.dtype
        if kind in ("strided", "sharded") or same:
            yield Named(name, tensor)
        elif tensor.parts and kind != "quantized":
            in_parts.append(name)
            lead = len(tensor.name) + 1 if tensor.name else 0
            yield from _simple([Named(f"{name}/{part.name[lead:]}", part) for part in tensor.parts], left, in_parts)
        else:
            left.append(Left(name, _UNHELD.get(kind, f"it is {kind}"), lost=True))


def tie_of(tensor: Tensor) -> Any:
    """What two names of the same numbers have in common; ``None`` where there are no numbers to share."""
    if tensor.kind != "strided" or tensor.storage is None or not tensor.numel:
        return None
    steps = [(size, step) for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1]
    return (tensor.storage, tensor.offset, tensor.shape, tuple(steps), tensor.dtype, tensor.flags)


class Data:
    """The bytes of entries as the target has them."""

    def __init__(self, content: Content, *, allow_inf: bool) -> None:
        self.content = content
        self._allow_inf = allow_inf
        self.infinite: dict[str, int] = {}

    def run(self, entry: Entry) -> Run | None:
        """Where exactly these bytes lie in a file of the source, if they do."""
        return None if entry.dtype != entry.tensor.dtype else self.content.run(entry.tensor)

    def pieces(self, entry: Entry, size: int = _PIECE) -> Iterator[Any]:
        """The bytes, in pieces that are valid until the next is asked for."""
        if entry.dtype == entry.tensor.dtype:
            yield from self.content.pieces(entry.tensor, size)
            return
        new = 0
        for piece in self.content.pieces(entry.tensor, size):
            made, infinite = cast(piece, entry.tensor.dtype, entry.dtype)
            new += infinite
            yield made
        if new:
            self._overflow(entry, new)

    def _overflow(self, entry: Entry, count: int) -> None:
        self.infinite[entry.name] = count
        if not self._allow_inf:
            what = f"{count:,} of the {entry.tensor.numel:,} numbers of {entry.name} are too large for {entry.dtype}"
            wider = "bfloat16 or float32" if entry.dtype == "float16" else "float64"
            fix = f"Choose {wider}, or --allow-inf to make infinities of them."
            raise OverflowRefusedError(what, where=self.content.checkpoint.path, fix=fix)
