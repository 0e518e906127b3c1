"""The report on a checkpoint: a summary, the findings, the tensors as a tree, full lists, and the tree of objects."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from re import compile as regex
from typing import Any

from transload.contents import Contents, GlobalUse, Key, Tensor, TensorStats
from transload.findings import SEVERITIES, Finding, first_lines, join_names
from transload.frozen import NamedTuple
from transload.geometry import Box, box_words
from transload.nodes import Big, Call, Dict, Extension, Global, Persistent, Set, walk_nodes
from transload.render.lines import (
    BLANK,
    GLUE,
    Block,
    Cell,
    Item,
    Line,
    Plot,
    Prose,
    Rows,
    Span,
    Table,
    Words,
    copied,
    heading,
    note,
    tally,
)
from transload.render.words import count, cut, path_text, plural, printable, shape_text, size
from transload.steps import steps_of

# Verdict → (role, reason). The verdict itself is shown as in the JSON and the manual, so that it can be searched for.
SAFETY: dict[str, tuple[str, str]] = {
    "data-only": ("good", "loading it runs no code"),
    "needs-trust": ("trust", "it asks for what torch does not load by default"),
    "code": ("trust", "it is a program: use it only if you trust who made it"),
    "unknown": ("bad", "it may do more than transload can see"),
    "dangerous": ("bad", "loading it would run code of the file's choosing"),
}

INTEGRITY: dict[str, tuple[str, str]] = {
    "whole": ("good", "every byte is there and every checksum agrees"),
    "unchecked": ("good", "every tensor has its bytes"),
    "repairable": ("trust", "something is wrong, but no tensor is lost"),
    "damaged": ("bad", "some of it is lost"),
    "not-a-checkpoint": ("bad", "torch cannot load it as it is"),
}

SEVERITY: dict[str, tuple[str, str]] = {"error": ("bad", "✗"), "warning": ("trust", "!"), "note": ("dim", "·")}

# Verdicts on single names, the worst first.
NAMES: dict[str, tuple[str, str]] = {
    "dangerous": ("bad", "runs code of the file's choosing"),
    "unknown": ("trust", "not part of plain checkpoints: what it does depends on who made it"),
    "harmless": ("trust", "known and harmless, but torch does not load it by default"),
    "data": ("good", "part of plain checkpoints"),
}
# Verdicts on names that explain the verdict on the file.
_BLAMED = {"needs-trust": ("unknown", "harmless"), "unknown": ("unknown",), "dangerous": ("dangerous",)}

# The most of each that is shown.
_ITEMS = 6
_FACTS = 8
_FINDINGS = 20
_EVIDENCE = 8
_PARTS = 40
_TREE_LINES = 48

TRUSTED = "Only if you trust the file, from torch 2.5 on:"
"""The sentence before lines of code."""

_LABEL = 12  # columns
_HOUSEKEEPING = frozenset(
    {"folder", "version", "byteorder", "format_version", "storage_alignment", "serialization_id", "archive_version"}
)
_NEAR = 2  # levels below the root; deeper values are details of some module
_NUMBERS = ("float", "bfloat", "complex", "q", "Q", "IQ", "TQ", "MXFP", "NVFP")
_DOT = " · "
_INDENT = "    "


def report(
    checkpoint: Contents,
    *,
    tensors: bool = False,
    names: bool = False,
    structure: bool = False,
    stats: bool = False,
) -> Iterator[Block]:
    """Everything ``transload inspect`` says about one file. Requested lists replace the folded tree."""
    yield Prose(((path_text(checkpoint.path, None), "strong"),))
    yield from described(summary(checkpoint))
    for finding in findings(checkpoint.findings):
        yield BLANK
        yield finding
    if names:
        yield from globals_by_verdict(checkpoint)
    if tensors:
        yield from tensors_listed(checkpoint)
    if structure:
        yield from object_tree(checkpoint)
    if stats:
        yield from statistics_listed(checkpoint.stats or ())
    if names or tensors or structure or stats:
        return
    if checkpoint.parts:  # the files of a directory, or the contents of a package
        yield from heading("parts", count(len(checkpoint.parts)))
        rows = []
        for part in checkpoint.parts[:_PARTS]:
            facts = printable(", ".join(f"{name} {value}" for name, value in part.facts))
            rows.append((printable(part.name), printable(part.kind), size(part.nbytes), facts))
        yield Table(rows, right=(2,), dim=(1, 3), drops=(3, 1))
        if len(checkpoint.parts) > _PARTS:
            yield note(f"… and {len(checkpoint.parts) - _PARTS:,} more")
    if checkpoint.tensors:
        yield from _tensors_folded(checkpoint)


def files(seen: Sequence[Contents], total: int) -> Iterator[Block]:
    """A table of the files that could be read, out of ``total``, then the findings for those with a problem."""
    rows: list[tuple[Words, ...]] = []
    for checkpoint in seen:
        devices = join_names([printable(use.device, 24) for use in checkpoint.devices], 2)
        columns = count(len(checkpoint.tensors)), size(checkpoint.nbytes), devices
        safety = ((checkpoint.safety, SAFETY[checkpoint.safety][0]),)
        integrity = ((checkpoint.integrity, INTEGRITY[checkpoint.integrity][0]),)
        rows.append((path_text(checkpoint.path), format_words(checkpoint), *columns, safety, integrity))
    if seen:
        titles = ("file", "format", "tensors", "size", "devices", "safety", "integrity")
        yield Table(rows, right=(2, 3), dim=(1, 4), titles=titles, drops=(4, 1, 2, 3), indent=0)
    bad = [checkpoint for checkpoint in seen if not checkpoint.ok]
    for checkpoint in bad:
        if checkpoint.findings:
            yield from heading(path_text(checkpoint.path, None))
            yield from findings(checkpoint.findings)
    yield from tally(total, len(seen), len(bad))


def summary(checkpoint: Contents) -> dict[str, Line]:
    """The short answer, by label; the same in a terminal, a REPL and a notebook.

    What it is, who wrote it, its size and devices, whether to trust it, what ``torch.load`` will do.
    """
    out: dict[str, Line] = {"format": ((format_words(checkpoint), ""),)}
    if checkpoint.written_by.text != "unknown":
        out["written by"] = ((printable(checkpoint.written_by.text, None), ""),)

    sizes = [size(checkpoint.nbytes)]
    if checkpoint.tensors:
        sizes.append(f"{plural(len(checkpoint.tensors), 'tensor')} of {size(checkpoint.tensor_nbytes)}")
        model, averages, optimizer = elements(checkpoint.tensors)
        sizes += [plural(model, "parameter")] if model else []
        sizes += [f"{count(averages)} in averaged copies (EMA)"] if averages else []
        sizes += [f"{count(optimizer)} in the optimizer"] if optimizer else []
        sizes += [f"{size(checkpoint.dead_nbytes)} unused by any tensor"] if checkpoint.dead_nbytes else []
    out["size"] = _listed([((text, ""),) for text in sizes])

    devices = [(use.device, use.tensors, use.nbytes) for use in checkpoint.devices]
    for label, uses in (("devices", devices), ("dtypes", checkpoint.dtypes)):
        items = []
        for name, tensors, nbytes in uses[:_ITEMS]:
            counted = f"{plural(tensors, 'tensor')}, " if tensors else ""  # none: only the indices of a sparse one
            items.append(((printable(name, 40), ""), (f" {counted}{size(nbytes)}", "dim")))
        out[label] = _listed(items, len(uses) - _ITEMS)

    # The values nearest to the root, such as epoch, step and loss.
    leaves = checkpoint.leaves
    depth = min((len(leaf.path) for leaf in leaves), default=0)
    if depth <= _NEAR:
        near = [leaf for leaf in leaves if len(leaf.path) == depth][:_ITEMS]
        values = [((f"{printable(leaf.name, 40)} ", "dim"), (printable(leaf.text, 40), "")) for leaf in near]
        out["values"] = _listed(values, len(leaves) - len(near))

    # Facts about this kind of container; those of a plain archive are only in the JSON.
    if not checkpoint.traits.by_torch_save:
        facts = [fact for fact in checkpoint.facts if fact[0] not in _HOUSEKEEPING]
        words = [((f"{printable(name)} {printable(text, 60)}", ""),) for name, text in facts[:_FACTS]]
        out["facts"] = _listed(words, len(facts) - _FACTS)

    safety, integrity = checkpoint.safety, checkpoint.integrity
    reason = SAFETY[safety][1]
    blamed = _BLAMED.get(safety, ())
    names = list(dict.fromkeys(printable(use.full_name, 60) for use in checkpoint.globals if use.verdict in blamed))
    if safety == "unknown" and integrity == "not-a-checkpoint":
        reason = "not judged, since it is not a checkpoint"
    elif names:
        reason += f" ({join_names(names, 2)})"
    out["safety"] = ((safety, SAFETY[safety][0]), (f": {reason}", ""))
    reason = INTEGRITY[integrity][1]
    if integrity == "unchecked":
        sums = any(part.crc32 for parts in (checkpoint.records, checkpoint.storages) for part in parts)
        reason += "; --verify compares their checksums" if sums else "; there are no checksums to compare"
    out["integrity"] = ((integrity, INTEGRITY[integrity][0]), (f": {reason}", ""))
    if checkpoint.prediction:
        out["loading"] = ((printable(checkpoint.prediction, None), ""),)
    return {label: words for label, words in out.items() if words}


def described(words: dict[str, Line]) -> Iterator[Block]:
    """The lines of a summary."""
    return (Prose(line, lead=((f"  {label:<{_LABEL}}", "dim"),)) for label, line in words.items())


def _listed(items: Iterable[Line], more: int = 0) -> Line:
    """``cuda:0 288 tensors, 1.3 GB · cpu 2 tensors, 4 kB · 3 more``; lines break only between items."""
    words: list[Span] = []
    for item in items:
        words += [(_DOT, "dim")] if words else []
        words += [(text.replace(" ", GLUE), role) for text, role in item]
    if more > 0:
        words.append((f"{_DOT}{more:,} more", "dim"))
    return tuple(words)


def summary_lines(checkpoint: Contents) -> list[str]:
    """The ``repr()``: at most ten lines of plain text, without colours or characters that a terminal may lack."""
    lines = [f"<Checkpoint {path_text(checkpoint.path)!s}>"]
    for label, words in summary(checkpoint).items():
        text = "".join(text for text, _ in words).replace(_DOT, "; ").replace("…", "...").replace(GLUE, " ")
        lines.append(f"  {label:<{_LABEL}}{text}")
    if checkpoint.findings:
        worst = checkpoint.findings[0]
        more = f" (and {len(checkpoint.findings) - 1} more)" if len(checkpoint.findings) > 1 else ""
        lines[9:] = [f"  {'findings':<{_LABEL}}{worst.severity}: {printable(worst.title)}{more}"]
    return lines


def format_words(checkpoint: Contents) -> str:
    """The format in words, with the flavour if it has one."""
    words = checkpoint.traits.words
    return printable(f"{words}, {checkpoint.flavour}" if checkpoint.flavour else words)


def elements(tensors: Iterable[Tensor]) -> tuple[int, int, int]:
    """The numbers of elements in the model, in averaged copies of it (EMA), and in optimizer state.

    Shared tensors count once. A tensor belongs to an optimizer if a component of its path begins with "optim", and to
    an averaged copy if "ema" is a word in a component; in a file with nothing else, that copy is the model. Integers
    (counters, labels, states of random generators) and batch norm statistics are not parameters.
    """
    seen: set[object] = set()
    model = averages = optimizer = 0
    for tensor in tensors:
        place = (tensor.storage, tensor.offset, tensor.shape, tensor.stride)
        counted = tensor.storage is not None and place in seen
        if counted or not tensor.dtype.startswith(_NUMBERS) or tensor.name.endswith(("running_mean", "running_var")):
            continue
        seen.add(place)
        steps = [step for step in tensor.path if isinstance(step, str)]
        held = sum(part.numel for part in tensor.parts) if tensor.is_sharded else tensor.numel
        if any(step.startswith("optim") for step in steps):
            optimizer += held
        elif any("ema" in step.partition(".")[0].lower().split("_") for step in steps):
            averages += held
        else:
            model += held
    return (model, averages, optimizer) if model else (averages, 0, optimizer)


def findings(unsorted: Sequence[Finding]) -> Iterator[Block]:
    """The findings, errors first."""
    order = sorted(unsorted, key=lambda finding: SEVERITIES.index(finding.severity))
    for finding in order[:_FINDINGS]:
        role, sign = SEVERITY[finding.severity]
        title = ((printable(finding.title, None), "strong"), (f"  [{finding.code}]", "dim"))
        blocks: list[Block] = [Prose(title, lead=((f"{sign} ", role),))]
        blocks += [Prose(printable(text, 400), lead=_INDENT) for text in first_lines(finding.evidence, _EVIDENCE)]
        arrow = (("  → ", "good"),)
        for step in steps_of(finding.fix):
            if step.copied:
                blocks.append(copied(step, _INDENT))
            elif len(step.lines) == 1:
                blocks.append(Prose(printable(step.text, None), lead=arrow))
            else:  # code to paste: at the margin and never folded, since both matter to Python
                lines = [Prose(printable(line, None), whole=True) for line in step.lines]
                blocks += [Prose(TRUSTED, lead=arrow), BLANK, *lines, BLANK]
        yield Item(role, blocks)
    if len(order) > _FINDINGS:
        yield note(f"{len(order) - _FINDINGS:,} further findings; --json lists all of them")


def _tensors_folded(checkpoint: Contents) -> Iterator[Block]:
    """The tensors as a tree of about a screenful, with equal branches folded."""
    tree = tensor_tree(checkpoint.tensors, _TREE_LINES)
    yield from heading("tensors", count(tree.tensors))
    mixed = len(checkpoint.devices) > 1
    rows: list[tuple[Words, ...]] = []  # name, dtype, shape, device, bytes
    complete = True
    for guide, twig in tree_rows(tree):
        if isinstance(twig, int):
            complete = False
            rows.append((((f"{guide}… {twig:,} more", "dim"),),))
            continue
        copies = f"  ×{twig.copies:,}" if twig.copies > 1 else ""
        name = ((guide, "dim"), (printable(twig.name, 64) or '""', ""), (copies, "dim"))
        tensor = twig.tensor
        if tensor is None:
            # For a branch: the number of tensors if it is closed, the size of each if it stands for several.
            closed = not twig.children
            complete &= not closed
            inside = [plural(twig.tensors // twig.copies, "tensor")] if closed else []
            inside += [f"{size(twig.nbytes // twig.copies)} each"] if copies else []
            rows.append((name, "", ((", ".join(inside), "dim"),), "", size(twig.nbytes)))
        else:
            device = printable(tensor.device, 24) if mixed else ""
            shape = cut(_shape_words(tensor), 32)
            rows.append((name, printable(tensor.dtype, 40), shape, device, size(twig.nbytes)))
    yield Table(rows, right=(4,), dim=(1, 3), drops=(3, 1))
    if not complete:
        yield note("--tensors lists all of them")


def _shape_words(tensor: Tensor) -> str:
    """The shape of a tensor; of one that is not all here, which part of it is."""
    held = [Box(part.start, part.shape) for part in tensor.parts if part.start is not None and part.numel]
    boxes = tensor.is_sharded and all(len(box.start) == len(box.shape) == len(tensor.shape) for box in held)
    if boxes and sum(box.numel for box in held) < tensor.numel:
        return box_words(held, tensor.shape)
    return shape_text(tensor.shape)


def tensors_listed(checkpoint: Contents) -> Iterator[Block]:
    """One line for each tensor: name, dtype, shape, device, bytes, storage, and what is special about it."""
    yield from heading("tensors", count(len(checkpoint.tensors)))
    storages = {storage.id: storage for storage in checkpoint.storages}
    rows = []
    for tensor in checkpoint.tensors:
        storage = storages.get(tensor.storage or "")
        flags = [printable(tensor.kind, 40)] if tensor.kind != "strided" else []
        flags += [printable(tensor.cls, 60)] if tensor.cls else []
        flags += ["requires_grad"] if tensor.requires_grad else []
        if storage is not None:
            flags += ["shared"] if len(storage.tensors) > 1 else []
            flags += ["incomplete"] if storage.stored < storage.nbytes and not storage.compressed else []
        where = f"storage {printable(tensor.storage, 40)}" if tensor.storage is not None else ""
        kind = printable(tensor.dtype, 40), _shape_words(tensor), printable(tensor.device, 40), size(tensor.nbytes)
        rows.append((printable(tensor.name, None) or '""', *kind, where, ", ".join(flags)))
    yield Table(rows, right=(4,), dim=(1, 3, 5, 6), drops=(5, 6, 3, 1))


def statistics_listed(stats: Sequence[TensorStats]) -> Iterator[Block]:
    """One line for each tensor, then what smaller dtypes would lose, and what could not be counted."""
    counted = [entry for entry in stats if entry.numbers]
    yield from heading("statistics", plural(len(counted), "tensor"))
    titles = ("tensor", "dtype", "min", "max", "mean", "std", "zeros", "magnitudes", "")
    yield Table(Rows(counted, _statistics), right=(2, 3, 4, 5, 6), dim=(1,), titles=titles, drops=(1, 7, 4, 6, 5))
    rows: list[tuple[Words, ...]] = []
    floating = [entry for entry in counted if entry.overflow]
    for place, (dtype, _) in enumerate(floating[0].overflow if floating else ()):
        large = [entry.overflow[place][1] for entry in floating]
        small = [entry.underflow[place][1] for entry in floating]
        rows.append((dtype, _lost(large, "trust"), _lost(small, "")))
    if rows:
        yield from heading("rounded to a smaller dtype", "finite numbers that would overflow, or become zero")
        yield Table(rows, titles=("dtype", "too large", "too small"), shrinks=(2, 1))
    if skipped := [entry for entry in stats if entry.note]:
        yield from heading("not counted", count(len(skipped)))
        for entry in skipped[:_PARTS]:
            lead = f"  {printable(entry.name) or 'the tensor itself'}  "
            yield Prose(((printable(entry.note, 400), "dim"),), lead=lead)
        if len(skipped) > _PARTS:
            yield note(f"… and {len(skipped) - _PARTS:,} more; --json lists all of them")


def _statistics(entry: TensorStats) -> tuple[Cell, ...]:
    numbers = (entry.min, entry.max, entry.mean, entry.std)
    shown = (f"{number:.3g}" if number is not None else "" for number in numbers)
    zeros = f"{100 * entry.zeros / entry.numbers:.3g} %" if entry.zeros else ""
    special = [f"{count(number)} {what}" for number, what in ((entry.nan, "NaN"), (entry.inf, "inf")) if number]
    name = printable(entry.name, None) or "the tensor itself"
    plot = Plot(entry.histogram) if entry.histogram else ""
    return name, printable(entry.dtype), *shown, zeros, plot, ((", ".join(special), "trust"),)


def _lost(numbers: Sequence[int], role: str) -> Words:
    """How many numbers are lost, and in how many tensors."""
    if not any(numbers):
        return (("0", "dim"),)
    return ((f"{count(sum(numbers))} in {plural(sum(map(bool, numbers)), 'tensor')}", role),)


def globals_by_verdict(checkpoint: Contents) -> Iterator[Block]:
    """The names that the file imports, the worst first."""
    yield from heading("globals", count(len(checkpoint.globals)))
    if not checkpoint.globals:
        yield note("it imports nothing")
    for verdict, (role, words) in NAMES.items():
        rows: list[tuple[Words, ...]] = []
        for use in (use for use in checkpoint.globals if use.verdict == verdict):
            spelled = f" (written {printable(use.spelling)})" if use.spelling else ""
            name = ((printable(use.full_name), ""), (spelled, "dim"))
            rows.append((name, times_used(use), printable(use.purpose), printable(use.stream, 40)))
        if rows:
            yield Prose(((verdict, role), (f": {words}", "dim")), lead="  ")
            yield Table(rows, dim=(1, 2, 3), shrinks=(2, 0), drops=(3,), indent=4)


def times_used(use: GlobalUse) -> str:
    """What the file does with a name, and how often."""
    number = use.called or use.built or 1
    verb = "called" if use.called else "built" if use.built else "imported"
    return f"{verb} {count(number)}×" if number > 1 else verb


# -- tensor names as a tree, with repetition folded: thirty-two equal layers become one line, followed by one of them

_SEPARATOR = regex(r"(?=[./])")
_DIGITS = regex(r"[0-9]{1,18}")
_DEEPEST = 48  # a name of a million dots is one long name, not a million levels
_ALIKE = 2  # this many branches are folded if their names differ only in a number,
_ALIKE_TENSORS = 3  # this many single tensors,
_ALIKE_UNNUMBERED = 8  # and this many branches or tensors of the same structure under any names


class Twig(NamedTuple):
    """A branch or a tensor of the tree; or several equal ones, with the ``children`` of the first.

    ``label`` begins with the separator after its parent's label. ``copies`` is the number of equal ones; ``tensors``
    and ``nbytes`` count all of them. ``branches`` counts the children, also those for which there is no room.
    """

    label: str
    tensor: Tensor | None
    children: list[Twig]
    branches: int
    tensors: int
    nbytes: int
    copies: int = 1

    @property
    def name(self) -> str:
        """The label without the separator."""
        return self.label[1:] if self.label[:1] in ("/", ".") else self.label

    @property
    def hidden(self) -> int:
        """The number of children for which there is no room."""
        return self.branches - len(self.children)


def tensor_tree(tensors: Iterable[Tensor], limit: int) -> Twig:
    """The tree of all tensors, by their names split at dots and slashes, with at most ``limit`` twigs.

    >>> def tensor(name): return Tensor((name,), name, "float32", (2,), (1,), "cpu", None)
    >>> [(twig.label, twig.copies) for twig in tensor_tree(map(tensor, ["w.0.a", "w.1.a", "b"]), 9).children]
    [('w.0 … 1', 2), ('b', 1)]
    """
    named = [(_SEPARATOR.split(tensor.name, _DEEPEST), tensor) for tensor in tensors]
    root = _branch("", _twigs(_grow(named, 0, {}).below))
    queue = deque([root])
    while queue:  # breadth first: upper levels take precedence
        twig = queue.popleft()
        shown = len(twig.children)
        if shown > limit:
            shown = max(limit // 2, limit if twig is root else 0)
        limit -= shown
        del twig.children[shown:]
        queue.extend(twig.children)
    return root


def _branch(label: str, children: list[Twig], copies: int = 1) -> Twig:
    tensors, nbytes = sum(child.tensors for child in children), sum(child.nbytes for child in children)
    return Twig(label, None, children, len(children), copies * tensors, copies * nbytes, copies)


class _Branch(NamedTuple):
    """The tensors whose names begin with the same components: those that end here, and branches by the next component.

    Branches with the same number ``form`` look the same.
    """

    form: int
    tensors: list[Tensor]
    below: dict[str, _Branch]


def _grow(named: list[tuple[list[str], Tensor]], depth: int, forms: dict[object, int]) -> _Branch:
    ending: list[Tensor] = []
    inside: dict[str, list[tuple[list[str], Tensor]]] = {}
    for steps, tensor in named:
        if len(steps) == depth:
            ending.append(tensor)
        else:
            inside.setdefault(steps[depth], []).append((steps, tensor))
    below = {step: _grow(inner, depth + 1, forms) for step, inner in inside.items()}
    looks = [(t.dtype, t.shape, t.device, t.kind, t.cls) for t in ending]
    form = (*looks, *below, *[branch.form for branch in below.values()])
    return _Branch(forms.setdefault(form, len(forms)), ending, below)


def _twigs(below: dict[str, _Branch]) -> list[Twig]:
    """The children of a branch, in order; similar ones are folded into the first of them."""
    alike: dict[tuple[int, int, str], list[str]] = {}
    for step, branch in below.items():
        pattern, numbers = _DIGITS.subn("#", step)
        # Names without a number are grouped by form alone.
        alike.setdefault((branch.form, numbers, pattern if numbers else _separator(step)), []).append(step)
    groups: dict[str, list[str]] = {}
    for (_, numbers, _), group in alike.items():
        least = _ALIKE_UNNUMBERED if not numbers else _ALIKE if below[group[0]].below else _ALIKE_TENSORS
        groups |= {group[0]: group} if len(group) >= least else {step: [step] for step in group}
    twigs: list[Twig] = []
    for step in (step for step in below if step in groups):
        separator, copies, children = _separator(step), len(groups[step]), _twigs(below[step].below)
        label = separator + _label([name.removeprefix(separator) for name in groups[step]])
        # Usually one twig, but more if several tensors have the same name.
        twigs += [Twig(label, tensor, [], 0, copies, tensor.nbytes * copies, copies) for tensor in below[step].tensors]
        if len(children) == 1 and copies == 1:  # a chain of single branches reads better as one name
            twigs.append(children[0]._replace(label=label + children[0].label))
        elif children:
            twigs.append(_branch(label, children, copies))
    return twigs


def _separator(step: str) -> str:
    return step[:1] if step.startswith(("/", ".")) else ""


def _label(names: list[str]) -> str:
    """``0 … 31`` for consecutive numbers, ``0, 2, 4 … 62`` for others, in numerical order."""
    numbered = sorted(([int(digits) for digits in _DIGITS.findall(name)], place) for place, name in enumerate(names))
    names = [names[place] for _, place in numbered]
    if len(names) == 1:
        return names[0]
    if all(len(a) == 1 and b == [a[0] + 1] for (a, _), (b, _) in pairwise(numbered)):
        return f"{names[0]} … {names[-1]}"
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} … {names[-1]}"


def tree_rows(twig: Twig, guide: str = "", *, top: bool = True) -> Iterator[tuple[str, Twig | int]]:
    """The lines of the drawn tree: a guide and a twig; or how many more siblings there is no room for."""
    below: list[Twig | int] = [*twig.children]
    below += [twig.hidden] if twig.hidden and twig.children else []
    for left, child in zip(range(len(below) - 1, -1, -1), below, strict=True):
        corner, bar = ("", "") if top else ("├─ ", "│  ") if left else ("└─ ", "   ")
        yield guide + corner, child
        if isinstance(child, Twig):
            yield from tree_rows(child, guide + bar, top=False)


# -- the objects that a pickle would build, from inert nodes: shared nodes once, cycles marked, depth and lines limited

MAX_LINES = 2000
MAX_DEPTH = 100
"""Deeper than any checkpoint; a pickle of a megabyte can nest a million levels."""

_LONGEST_INT = 256  # bits
_SHORT = 8
_VALUES = (str, int, float, bool, type(None))
_CONTAINERS = (Dict, Call, list, tuple, Set)
_Path = tuple[Key, ...]
_Child = tuple[str, Key, object]


def object_tree(checkpoint: Contents, max_lines: int = MAX_LINES) -> Iterator[Block]:
    """The objects that the pickle would build, one on each line; for a file without a pickle, its values."""
    yield from heading("structure")
    root = checkpoint.root
    if root is None and not any(pickle.main for pickle in checkpoint.pickles):
        for leaf in checkpoint.leaves[:max_lines]:
            yield Prose(((f"{printable(leaf.name)}: ", "dim"), (printable(leaf.text), "")), lead="  ")
        yield note("this format has no pickled tree; --tensors lists its tensors")
        return
    lines = _drawn(root, {tensor.path: tensor for tensor in checkpoint.tensors})
    yield from (Prose(line, lead="  ") for line in islice(lines, max_lines))
    if more := sum(1 for _ in lines):
        yield note(f"… {more:,} more lines")


def _drawn(root: object, tensors: dict[_Path, Tensor]) -> Iterator[Line]:
    """The lines of the tree. A shared node is marked ``#7`` where it is shown, and ``→ #7`` elsewhere."""
    seen = Counter(id(node) for node in walk_nodes([root]) if type(node) in _CONTAINERS and not _inline(node))
    numbers: dict[int, int] = {}
    stack: list[tuple[str, str, str, _Path, object]] = [("", "", "", (), root)]
    while stack:
        guide, below, label, path, node = stack.pop()
        lead: Line = ((guide, "dim"), (label, ""))
        if id(node) in numbers:
            yield (*lead, (f"→ #{numbers[id(node)]}", "dim"))
            continue
        tensor = tensors.get(path) if type(node) is Call or node is None else None
        mark = ""
        if seen[id(node)] > 1:
            numbers[id(node)] = len(numbers) + 1
            mark = f"  #{len(numbers)}"
        yield (*lead, *_described(node, tensor), (mark, "dim"))
        children = _children(node) if tensor is None else []
        if children and len(path) >= MAX_DEPTH:
            yield ((f"{below}└─ … deeper than {MAX_DEPTH} levels", "dim"),)
            continue
        last = len(children) - 1
        for place in range(last, -1, -1):
            name, step, child = children[place]
            corner, bar = ("└─ ", "   ") if place == last else ("├─ ", "│  ")
            stack.append((below + corner, below + bar, f"{name}: ", (*path, step), child))


def _described(node: Any, tensor: Tensor | None) -> Line:
    """What a node is, and how many items it has."""
    kind = type(node)
    if tensor is not None:
        device = "" if tensor.device == "cpu" else f" on {printable(tensor.device, 40)}"
        details = f" {printable(tensor.dtype, 40)} {shape_text(tensor.shape)}{device}"
        return ((printable(tensor.cls or "Tensor", 60), ""), (details, "dim"))
    if kind is Dict:
        return (("dict", ""), (f" of {len(node.items) // 2:,}", "dim"))
    if kind is Set:
        return (("frozenset" if node.frozen else "set", ""), (f" of {len(node.items):,}", "dim"))
    if kind is Call:
        name = printable(node.callee.full_name, 80) if type(node.callee) is Global else "an object of a computed class"
        args = node.args[:6] if type(node.args) is tuple and not _callee(node).startswith("_rebuild_") else ()
        plain = [_inline(arg) or _value(arg) for arg in args if type(arg) not in _CONTAINERS or _inline(arg)]
        words = f"({', '.join(plain)})" if plain else ""
        items = len(node.items or ()) // 2 + len(node.appended or ())
        return ((name, ""), (f"{words} of {items:,}" if items else words, "dim"))
    short = _inline(node)
    if kind in (list, tuple) and not short:
        return ((kind.__name__, ""), (f" of {len(node):,}", "dim"))
    return ((short or _value(node), ""),)


def _children(node: Any) -> list[_Child]:
    """The children of a node: the label, the path component as in ``Tensor.path``, and the child itself."""
    kind = type(node)
    if kind is Dict:
        return _pairs(node.items)
    if kind is list or kind is tuple:
        return [] if _inline(node) else _counted(node)
    if kind is Set:
        return _counted(node.items)
    if kind is not Call:
        return []
    # Containers among the arguments, then what was put into the object; with paths as in ``formats.graph``.
    out: list[_Child] = []
    callee = _callee(node)
    if type(node.args) is tuple and not callee.startswith("_rebuild_"):
        out += [child for child in _counted(node.args) if type(child[2]) in _CONTAINERS and not _inline(child[2])]
    # The state of an OrderedDict is the ``_metadata`` of ``state_dict()``: versions of modules, of no interest here.
    if node.states and callee != "OrderedDict":
        state = node.states[-1]
        halves = state if type(state) is tuple and len(state) == 2 else (state,)  # __dict__ and __slots__
        if all(type(half) is Dict for half in halves):
            out += [child for half in halves for child in _pairs(half.items)]
        else:
            out.append(("state", "state", state))
    out += _pairs(node.items or [])
    return out + _counted(node.appended or [])


def _callee(call: Call) -> str:
    """The last component of the called name; empty if the callee is not a name."""
    return call.callee.name if type(call.callee) is Global else ""


def _counted(items: list[object] | tuple[object, ...]) -> list[_Child]:
    return [(f"[{index}]", index, child) for index, child in enumerate(items)]


def _pairs(items: list[object]) -> list[_Child]:
    out: list[_Child] = []
    for index in range(0, len(items) - 1, 2):
        key = items[index]
        step = key if isinstance(key, str) else key if type(key) is int else f"#{index}"
        out.append((printable(key, 80) if isinstance(key, str) else _value(key), step, items[index + 1]))
    return out


def _inline(node: Any) -> str:
    """A list or tuple of a few plain values as Python writes it; empty for any other node."""
    if type(node) not in (list, tuple) or len(node) > _SHORT or any(type(item) not in _VALUES for item in node):
        return ""
    inside = ", ".join(map(_value, node))
    if len(inside) > 60:
        return ""
    return f"[{inside}]" if type(node) is list else f"({inside},)" if len(node) == 1 else f"({inside})"


def _value(node: Any) -> str:
    """A value that is not a container, in a few words."""
    kind = type(node)
    if kind is str:
        return f"'{printable(node, 80)}'"
    if kind is Big or (kind is int and node.bit_length() > _LONGEST_INT):
        return "a huge integer"
    if kind in _VALUES:
        return repr(node)
    if kind is bytes or kind is bytearray:
        return f"{kind.__name__} of {plural(len(node), 'byte')}"
    if kind is Global:
        return printable(node.full_name, 80)
    if kind is Extension:
        return f"copyreg extension {node.code}"
    return "a storage" if kind is Persistent else f"a {kind.__name__.lower()}"
