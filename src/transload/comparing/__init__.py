"""``transload.diff``: how two checkpoints differ, in keys, tensors, values and ties; whatever format each has.

``names`` finds out which tensor of one is which of the other; here their elements are read side by side, in bounded
memory; ``objects`` compares what is no tensor; ``report`` is the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from math import inf
from threading import Lock
from typing import Any

from transload.checkpoint import Leaf, Tensor
from transload.comparing.names import Entry, Pair, Pairs, paired
from transload.comparing.objects import is_same
from transload.comparing.report import Diff, TensorDiff, TensorSide, Tie, ValueDiff, report
from transload.contents import tie_of
from transload.errors import ContentError, TransloadError, UsageError
from transload.formats.gguf import header_values
from transload.formats.safetensors import aliases_in
from transload.frozen import NamedTuple
from transload.io import pool
from transload.io.memory import is_equal
from transload.io.sources import Progress, SourceLike
from transload.judge.problems import refuse_broken
from transload.nodes import Call, called
from transload.opening import OpenCheckpoint
from transload.opening.digests import leaves
from transload.opening.elements import Allowance, numpy_or_none
from transload.opening.numbers import MOST_THREADS, NUMERIC, Comparison
from transload.opening.stats import PIECE
from transload.opening.values import FLOATING, count_special

__all__ = ["Diff", "diff", "report"]

_WHOLE_TEXTS = frozenset({"int", "float", "bool", "None"})
_LONGEST = 200  # characters of a text that a leaf has completely


def diff(a: SourceLike, b: SourceLike, *, rtol: float = 0.0, atol: float = 0.0, progress: Progress = None) -> Diff:
    """How two checkpoints differ: keys, shapes, dtypes, devices, ties, numbers, and values that are no tensors.

    Each is a path (of a file or a directory), a URL, bytes, or a seekable binary file object, in any format and any
    number of files; torch is not needed, and nothing in them is run. Memory stays bounded: tensors are read a part at a
    time. With ``rtol`` and ``atol``, numbers count as equal if ``|a - b| <= atol + rtol * |a|``. ``progress`` is a
    function of the bytes done and the total, or True for a line on the terminal.

    >>> transload.diff("model.pt", "model_cuda0.pt").same  # doctest: +SKIP
    True

    Raises ``CannotReadError`` or ``LoadError`` if one of them cannot be read, or is not a checkpoint; a single tensor
    that cannot be read is in the result.
    """
    for name, number in (("rtol", rtol), ("atol", atol)):
        given: object = number
        if not (isinstance(given, int | float) and 0 <= given < inf):
            raise UsageError(f"{name} must be a number, at least 0", fix="For example rtol=1e-5.")
    start = time.perf_counter()
    with OpenCheckpoint(a, lazy=True) as first, OpenCheckpoint(b, lazy=True) as second:
        sides = _Side(first), _Side(second)
        pairs = paired(sides[0].entries, sides[1].entries, sides[0].digest, sides[1].digest)
        tensors = _Tensors(*sides, pairs, rtol, atol).compared(progress)
        values, count = _values(*sides)
        ties = _ties(*sides, pairs)
        for opened in (first, second):
            opened.check_unchanged()
        one, two = first.checkpoint, second.checkpoint
    return Diff(
        a=one.path,
        b=two.path,
        a_format=one.format,
        b_format=two.format,
        tensors=tensors,
        values=values,
        value_count=count,
        unlisted=any(map(_unlisted, sides)),
        ties=ties,
        rtol=float(rtol),
        atol=float(atol),
        seconds=time.perf_counter() - start,
    )


class _Side:
    """One of the two checkpoints."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self.opened = opened
        self.reader, checkpoint = opened.elements, opened.checkpoint
        refuse_broken(checkpoint)
        self.entries = [
            Entry(t.name, t, why) for t, why in leaves(checkpoint.tensors, several=checkpoint.traits.several)
        ]
        named = {entry.name: entry for entry in self.entries}
        texts = self.reader.header_metadata()
        self.aliases = aliases_in(texts, named)
        kinds = {part.traits.metadata for _, part in self.reader.files}
        self.texts = {key: text for key, text in texts.items() if key not in self.aliases} if "text" in kinds else None
        self._header: dict[str, object] = {}
        if "values" in kinds:
            self._header = header_values(self.reader.open_file(""))
        self.entries += [named[name]._replace(name=alias) for alias, name in self.aliases.items()]
        self._allowance = Allowance(checkpoint)
        self._lock = Lock()
        self._nodes = {tensor.name: tensor for tensor in checkpoint.tensors if tensor.kind == "quantized"}

    @property
    def is_tagged(self) -> bool:
        """Whether it says on which device each tensor was, and which tensors are one."""
        traits = self.opened.checkpoint.traits
        return traits.tagged and not traits.several

    def digest(self, place: int) -> str:
        """The sha256 of the elements of an entry; empty if they cannot be read."""
        digest = sha256()
        try:
            for chunk in self.chunks(self.entries[place].tensor, PIECE):
                digest.update(chunk)
        except TransloadError as error:
            self.reader.refuse_fault(error)
            return ""  # it is reported as missing from the other
        return digest.hexdigest()

    def chunks(self, tensor: Tensor, size: int) -> Iterator[memoryview]:
        """The elements of a tensor, in chunks."""
        with self._lock:
            self._allowance.spend(tensor)
        return self.reader.chunks(tensor, size)

    def leaves(self, *, texts: bool) -> dict[str, Leaf]:
        """The values that are no tensors by name, with the texts of the header of a safetensors file."""
        found: dict[str, Leaf] = {}
        pairs = (self.texts or {}).items() if texts else ()
        described = [Leaf(("__metadata__", key), f"__metadata__/{key}", "str", text) for key, text in pairs]
        for leaf in (*self.opened.checkpoint.leaves, *described):
            name, number = leaf.name, 2
            while name in found:
                name, number = f"{leaf.name} ({number})", number + 1
            found[name] = leaf
        return found

    def value(self, leaf: Leaf) -> tuple[Any, ...]:
        """All of a value, of which a leaf has only the beginning; empty if that is not known."""
        if leaf.path[:1] == ("__metadata__",):
            return (leaf.text,)
        if leaf.name in self._header:
            return (self._header[leaf.name],)
        place = self.opened.node(leaf.path)
        return place[1:] if place is not None else ()

    def quantizer(self, name: str) -> object:
        """How the integers of a quantized tensor become numbers, as a node; ``None`` if there is none."""
        tensor = self._nodes.get(name)
        place = self.opened.node(tensor.path) if tensor is not None else None
        node: Any = place[1] if place is not None else None
        while type(node) is Call and called(node) != "torch._utils._rebuild_qtensor":  # a parameter around it
            node = node.args[0] if type(node.args) is tuple and node.args else None
        args = node.args if type(node) is Call else ()
        return args[4] if type(args) is tuple and len(args) > 4 else None


# -- tensors


class _Read(NamedTuple):
    """What was read of a pair: how the numbers differ, or that the bytes do; NaN and infinities in both."""

    comparison: Comparison | None
    equal: bool
    a: _Special
    b: _Special


class _Special:
    """How many numbers of a tensor are NaN and infinite; ``None`` of a dtype that has no such numbers."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._counts = 0, 0

    def add(self, data: memoryview, counts: tuple[int, int] | None = None) -> tuple[int, int]:
        """Count those in a chunk, unless the counts are known; return them."""
        if counts is None:
            counts = count_special(data, self._dtype, numpy_or_none()) if self._dtype in FLOATING else (0, 0)
        self._counts = self._counts[0] + counts[0], self._counts[1] + counts[1]
        return counts

    def noted(self, side: TensorSide) -> TensorSide:
        """The side with the counts."""
        return side._replace(nan=self._counts[0], inf=self._counts[1]) if self._dtype in FLOATING else side


class _Tensors:
    """The comparison of all pairs."""

    def __init__(self, a: _Side, b: _Side, pairs: Pairs, rtol: float, atol: float) -> None:
        self._a, self._b, self._pairs = a, b, pairs
        self._tolerance = rtol, atol
        self._threads = 1
        self._devices = a.is_tagged and b.is_tagged
        self._report_progress: Callable[[int], None] = lambda _: None

    def compared(self, progress: Progress) -> tuple[TensorDiff, ...]:
        """All tensors: those of A in order, and then those that only B has."""
        pairs, a, b = self._pairs.pairs, self._a.entries, self._b.entries
        sizes = [a[pair.a].tensor.nbytes + b[pair.b].tensor.nbytes for pair in pairs]
        line = pool.ProgressLine(pool.terminal() if progress is True else None, "comparing", passing=True)
        show = line if progress is None or isinstance(progress, bool) else progress
        done, total, lock = 0, sum(sizes), Lock()

        def count_bytes(nbytes: int) -> None:
            nonlocal done
            with lock:
                done = min(done + nbytes, total)  # some are read twice
                show(done, total)

        self._report_progress = count_bytes
        out: dict[tuple[int, int], TensorDiff] = {}

        def do(pair: Pair) -> None:
            out[0, pair.a] = self._compare(pair)

        try:
            self._threads = pool.threads_for(
                sizes, [*self._a.reader.sources(), *self._b.reader.sources()], MOST_THREADS
            )
            pool.each(pairs, lambda: do, self._threads)
        finally:
            line.end()
        out |= {(0, place): TensorDiff(a[place].name, "removed", a=_shown(a[place])) for place in self._pairs.only_a}
        out |= {(1, place): TensorDiff(b[place].name, "added", b=_shown(b[place])) for place in self._pairs.only_b}
        return tuple([out[key] for key in sorted(out)])

    def _compare(self, pair: Pair) -> TensorDiff:
        one, two = self._a.entries[pair.a], self._b.entries[pair.b]
        a, b = _shown(one), _shown(two)
        name = two.name if pair.evidence else ""
        out = TensorDiff(one.name, "renamed" if pair.evidence else "same", name, pair.evidence, a=a, b=b)
        differs = [kind for kind in ("dtype", "shape") if getattr(a, kind) != getattr(b, kind)]
        if self._devices and a.device != b.device:
            differs.append("device")
        if not (one.why or two.why or "shape" in differs):
            why = self._why_not(one.tensor.dtype, two.tensor.dtype)
            try:
                read = None if why else self._read(one.tensor, two.tensor)
            except TransloadError as error:
                for side in (self._a, self._b):
                    side.reader.refuse_fault(error)
                note = f"{error.where}: {error.what}" if error.where else error.what
                return out._replace(status="unread", differs=tuple(differs), note=note)
            out = out._replace(note=why)
            if read is not None:
                values = read.comparison.result() if read.comparison is not None else None
                out = out._replace(a=read.a.noted(a), b=read.b.noted(b), values=values)
                if not read.equal:
                    differs.append("values")
                    note = "" if values is not None else f"elements of {one.tensor.dtype} are compared as bytes"
                    out = out._replace(note=note)
        same = is_same(self._a.quantizer(one.name), self._b.quantizer(two.name))
        if same is False:
            differs.append("quantizer")
        elif same is None and not differs:
            note = "its integers are equal; the scales of its channels are not compared"
            return out._replace(status="unread", note=note)
        return out._replace(status="different" if differs else out.status, differs=tuple(differs))

    def _why_not(self, one: str, two: str) -> str:
        """Why numbers of two dtypes are not compared; empty if they are."""
        if one == two:
            return ""
        apart = [dtype for dtype in (one, two) if dtype not in NUMERIC or dtype.endswith("_x2")]
        if apart:
            return f"elements of {apart[0]} are not compared with other numbers"
        return "real and complex numbers are not compared" if ("complex" in one) != ("complex" in two) else ""

    def _read(self, one: Tensor, two: Tensor) -> _Read:
        """Compare the elements. Where all bytes are equal there is nothing to compute, which is found out first."""
        for begun in (False, True):
            comparison = (
                Comparison(one.dtype, two.dtype, *self._tolerance, self._threads) if one.dtype in NUMERIC else None
            )
            started, equal, is_first = begun or one.dtype != two.dtype, True, True
            a, b = _Special(one.dtype), _Special(two.dtype)
            for data, other in self._both(one, two):
                self._report_progress(len(data) + len(other))
                same = one.dtype == two.dtype and _have_same_bytes(data, other)
                found = a.add(data)
                b.add(other, found if same else None)
                if same and not started:
                    is_first = False
                    continue
                equal = equal and same
                if comparison is None:
                    continue
                if not started and not is_first:
                    break  # once more from the start: sums are over all elements
                started = True
                comparison.add(data, other)
            else:
                if not started or comparison is None:
                    return _Read(None, equal, a, b)
                return _Read(comparison, comparison.is_within, a, b)
        raise AssertionError  # the second pass ends

    def _both(self, one: Tensor, two: Tensor) -> Iterator[tuple[memoryview, memoryview]]:
        """The same elements of both, whose chunks may end at different places."""
        numbers = PIECE // 16
        widths = [max(1, tensor.nbytes // tensor.numel) if tensor.numel else 1 for tensor in (one, two)]
        if one.dtype == two.dtype:
            widths, numbers = [1, 1], PIECE
        streams = self._a.chunks(one, numbers * widths[0]), self._b.chunks(two, numbers * widths[1])
        left = [memoryview(b""), memoryview(b"")]
        while True:
            left = [part or next(stream, memoryview(b"")) for part, stream in zip(left, streams, strict=True)]
            count = min(len(part) // width for part, width in zip(left, widths, strict=True))
            if not count:
                if any(left):
                    raise ContentError(f"{one.name} has elements that do not fit its shape")
                return
            ends = [count * width for width in widths]
            yield left[0][: ends[0]], left[1][: ends[1]]
            left = [part[end:] for part, end in zip(left, ends, strict=True)]


def _have_same_bytes(data: memoryview, other: memoryview) -> bool:
    numpy = numpy_or_none()
    if numpy is None or len(data) != len(other):
        return bytes(data) == bytes(other)
    first, second = (numpy.frombuffer(part, "u1").ctypes.data for part in (data, other))
    return is_equal(first, second, len(data))


def _shown(entry: Entry) -> TensorSide:
    tensor = entry.tensor
    return TensorSide(f"{tensor.dtype} {tensor.kind}" if entry.why else tensor.dtype, tensor.shape, tensor.device)


# -- everything else


def _values(a: _Side, b: _Side) -> tuple[tuple[ValueDiff, ...], int]:
    """The values that differ, in the order of the checkpoints, and how many there are."""
    texts = a.texts is not None and b.texts is not None
    one, two = a.leaves(texts=texts), b.leaves(texts=texts)
    names = list(dict.fromkeys((*one, *two)))
    out: list[ValueDiff] = []
    for name in names:
        old, new = one.get(name), two.get(name)
        if old is None or new is None:
            out.append(ValueDiff(name, "removed" if new is None else "added", _text(old), _text(new)))
        elif (same := _is_same_leaf(a, old, b, new)) is not True:
            out.append(ValueDiff(name, "unread" if same is None else "different", _text(old), _text(new)))
    return tuple(out), len(names)


def _text(leaf: Leaf | None) -> str | None:
    return None if leaf is None else leaf.text


def _is_same_leaf(a: _Side, one: Leaf, b: _Side, two: Leaf) -> bool | None:
    if (one.kind, one.text) != (two.kind, two.text):
        return False
    whole = one.kind in _WHOLE_TEXTS and one.text != "a huge integer"
    if whole or (one.kind == "str" and len(one.text) <= _LONGEST):
        return True
    values = a.value(one), b.value(two)
    return is_same(*values[0], *values[1]) if all(values) else None


def _unlisted(side: _Side) -> bool:
    """Whether it has so many values that the reader only counted some of them."""
    return any(problem.code == "leaves-uncounted" for problem in side.opened.checkpoint.problems)


def _ties(a: _Side, b: _Side, pairs: Pairs) -> tuple[Tie, ...]:
    """The groups of tensors that are one tensor in only one of the two; only of those that both have."""
    if not (a.is_tagged or a.aliases) or not (b.is_tagged or b.aliases):
        return ()
    groups = []
    for side, places in ((a, [pair.a for pair in pairs.pairs]), (b, [pair.b for pair in pairs.pairs])):
        by_key: dict[object, list[int]] = {}
        for number, place in enumerate(places):
            key = tie_of(side.entries[place].tensor)
            if key is not None:
                by_key.setdefault(key, []).append(number)
        groups.append({tuple(numbers) for numbers in by_key.values() if len(numbers) > 1})
    names = [a.entries[pair.a].name for pair in pairs.pairs]
    sides = (("a", groups[0] - groups[1]), ("b", groups[1] - groups[0]))
    return tuple([Tie(tuple(names[at] for at in group), side) for side, only in sides for group in sorted(only)])
