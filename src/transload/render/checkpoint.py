"""The report on a checkpoint: a summary, the findings, the tensors as a tree, and full lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.contents import FORMATS
from transload.findings import join_names
from transload.render.lines import BLANK, GLUE, Block, Line, Prose, Span, Table, Words, command, heading, note, tally
from transload.render.tree import tensor_tree, tree_rows
from transload.render.words import count, cut, plural, printable, shape_text, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transload.contents import Contents, Tensor
    from transload.findings import Finding

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

SEVERITY: dict[str, tuple[str, str]] = {
    "error": ("bad", "✗"),
    "warning": ("trust", "!"),
    "note": ("dim", "·"),
}

# Verdicts on single names, the worst first.
_NAMES: dict[str, tuple[str, str]] = {
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
_TREE_NAME = 64
_TREE_SHAPE = 32
_HOUSEKEEPING = frozenset(
    {"folder", "version", "byteorder", "format_version", "storage_alignment", "serialization_id", "archive_version"}
)
_PLAIN = frozenset({"torch-zip", "torch-legacy", "torch-tar", "torch-directory"})
_NEAR = 2  # levels below the root; deeper values are details of some module
_STATISTICS = ("running_mean", "running_var")
_NUMBERS = ("float", "bfloat", "complex", "q", "Q", "IQ", "TQ", "MXFP", "NVFP")
_DOT = " · "
_INDENT = "    "


def report(
    checkpoint: Contents, *, tensors: bool = False, names: bool = False, structure: bool = False
) -> Iterator[Block]:
    """Everything ``transload inspect`` says about one file. Requested lists replace the folded tree."""
    yield Prose(((printable(checkpoint.path, None), "strong"),))
    for label, words in summary(checkpoint).items():
        yield Prose(words, lead=((f"  {label:<{_LABEL}}", "dim"),))
    for finding in findings(checkpoint.findings):
        yield BLANK
        yield from finding
    if names:
        yield from globals_by_verdict(checkpoint)
    if tensors:
        yield from tensors_listed(checkpoint)
    if structure:
        from transload.render.structure import structure as drawn

        yield from drawn(checkpoint)
    if not (names or tensors or structure):
        yield from _parts(checkpoint)
        yield from _tensors_folded(checkpoint)


def files(seen: Sequence[Contents], total: int) -> Iterator[Block]:
    """A table of the files that could be read, out of ``total``, then the findings for those with a problem."""
    rows: list[tuple[Words, ...]] = []
    for each in seen:
        devices = join_names([printable(use.device, 24) for use in each.devices], 2)
        held = count(len(each.tensors)), size(each.nbytes), devices
        verdicts = (each.safety, SAFETY[each.safety][0]), (each.integrity, INTEGRITY[each.integrity][0])
        rows.append((printable(each.path), format_words(each), *held, *((verdict,) for verdict in verdicts)))
    if seen:
        titles = ("file", "format", "tensors", "size", "devices", "safety", "integrity")
        yield Table(rows, right=(2, 3), dim=(1, 4), titles=titles, drops=(4, 1, 2), indent=0)
    bad = [checkpoint for checkpoint in seen if not checkpoint.ok]
    for checkpoint in bad:
        if checkpoint.findings:
            yield from heading(printable(checkpoint.path, None))
            for finding in findings(checkpoint.findings):
                yield from finding
    yield from tally(total, len(seen), f"{len(bad):,} with a problem" if bad else "")


# -- the summary


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

    for label, uses in (
        ("devices", [(use.device, use.tensors, use.nbytes) for use in checkpoint.devices]),
        ("dtypes", checkpoint.dtypes),
    ):
        shown = [
            ((printable(name, 40), ""), (f" {plural(tensors, 'tensor')}, {size(nbytes)}", "dim"))
            for name, tensors, nbytes in uses[:_ITEMS]
        ]
        out[label] = _listed(shown, len(uses) - _ITEMS)

    # The values nearest to the root, such as epoch, step and loss.
    leaves = checkpoint.leaves
    depth = min((len(leaf.path) for leaf in leaves), default=0)
    if depth <= _NEAR:
        near = [leaf for leaf in leaves if len(leaf.path) == depth][:_ITEMS]
        values = [((f"{printable(leaf.name, 40)} ", "dim"), (printable(leaf.text, 40), "")) for leaf in near]
        out["values"] = _listed(values, len(leaves) - len(near))

    # Facts about this kind of container; those of a plain archive are uninteresting, and only in the JSON.
    if checkpoint.format not in _PLAIN:
        facts = [
            f"{printable(name)} {printable(text, 60)}" for name, text in checkpoint.facts if name not in _HOUSEKEEPING
        ]
        out["facts"] = _listed([((fact, ""),) for fact in facts[:_FACTS]], len(facts) - _FACTS)

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
        sums = any(record.crc32 for record in checkpoint.records) or any(each.crc32 for each in checkpoint.storages)
        reason += "; --verify compares their checksums" if sums else "; there are no checksums to compare"
    out["integrity"] = ((integrity, INTEGRITY[integrity][0]), (f": {reason}", ""))
    if checkpoint.prediction:
        out["loading"] = ((printable(checkpoint.prediction, None), ""),)
    return {label: words for label, words in out.items() if words}


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
    lines = [f"<Checkpoint {printable(checkpoint.path)!s}>"]
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
    words = FORMATS.get(checkpoint.format, checkpoint.format)
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
        if (tensor.storage is not None and place in seen) or not tensor.dtype.startswith(_NUMBERS):
            continue
        if tensor.name.endswith(_STATISTICS):
            continue
        seen.add(place)
        steps = [step for step in tensor.path if isinstance(step, str)]
        if any(step.startswith("optim") for step in steps):
            optimizer += tensor.numel
        elif any("ema" in step.partition(".")[0].lower().split("_") for step in steps):
            averages += tensor.numel
        else:
            model += tensor.numel
    return (model, averages, optimizer) if model else (averages, 0, optimizer)


# -- findings


def findings(found: Sequence[Finding]) -> Iterator[list[Block]]:
    """The blocks of each finding, errors first."""
    order = sorted(found, key=lambda finding: list(SEVERITY).index(finding.severity))
    for finding in order[:_FINDINGS]:
        role, sign = SEVERITY[finding.severity]
        title = ((printable(finding.title, None), "strong"), (f"  {finding.code}", "dim"))
        blocks: list[Block] = [Prose(title, lead=((f"{sign} ", role),))]
        blocks += [Prose(printable(text, 400), lead=_INDENT) for text in finding.evidence[:_EVIDENCE]]
        if len(finding.evidence) > _EVIDENCE:
            more = f"… and {len(finding.evidence) - _EVIDENCE:,} more"
            blocks.append(Prose(((more, "dim"),), lead=_INDENT))
        arrow = (("  → ", "good"),)
        for step in steps(finding.fix):
            if step[0].startswith(("$ ", "| ")):
                blocks.append(command(step[0], _INDENT))
            elif len(step) == 1:
                blocks.append(Prose(printable(step[0], None), lead=arrow))
            else:  # code to paste: at the margin and never folded, since both matter to Python
                lines = [Prose(printable(line, None).replace(" ", GLUE)) for line in step]
                blocks += [Prose(TRUSTED, lead=arrow), BLANK, *lines, BLANK]
        yield blocks
    if len(order) > _FINDINGS:
        yield [note(f"{len(order) - _FINDINGS:,} further findings; --json lists all of them")]


def steps(fix: Iterable[str]) -> list[list[str]]:
    """What to do, step by step: a sentence, a command, or consecutive lines of code.

    >>> steps(["Ask who made it.", "import torch", "torch.load(path)"])
    [['Ask who made it.'], ['import torch', 'torch.load(path)']]
    """
    out: list[list[str]] = []
    for line in fix:
        if out and out[-1][0].startswith("import ") and not line.startswith("$ ") and not line.endswith("."):
            out[-1].append(line)
        else:
            out.append([line])
    return out


# -- what is in it


def _parts(checkpoint: Contents) -> Iterator[Block]:
    """The files of a directory, or the contents of a package."""
    if not checkpoint.parts:
        return
    yield from heading("parts", count(len(checkpoint.parts)))
    rows = []
    for part in checkpoint.parts[:_PARTS]:
        facts = printable(", ".join(f"{name} {value}" for name, value in part.facts))
        rows.append((printable(part.name), printable(part.kind), size(part.nbytes), facts))
    yield Table(rows, right=(2,), dim=(1, 3), drops=(3, 1))
    if len(checkpoint.parts) > _PARTS:
        yield note(f"… and {len(checkpoint.parts) - _PARTS:,} more")


def _tensors_folded(checkpoint: Contents) -> Iterator[Block]:
    """The tensors as a tree of about a screenful, with equal branches folded."""
    if not checkpoint.tensors:
        return
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
        name = ((guide, "dim"), (printable(twig.name, _TREE_NAME) or '""', ""), (copies, "dim"))
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
            shape = cut(shape_text(tensor.shape), _TREE_SHAPE)
            rows.append((name, printable(tensor.dtype, 40), shape, device, size(twig.nbytes)))
    yield Table(rows, right=(4,), dim=(1, 3), drops=(3, 1))
    if not complete:
        yield note("--tensors lists every one")


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
        kind = printable(tensor.dtype, 40), shape_text(tensor.shape), printable(tensor.device, 40), size(tensor.nbytes)
        rows.append((printable(tensor.name, None) or '""', *kind, where, ", ".join(flags)))
    yield Table(rows, right=(4,), dim=(1, 3, 5, 6), drops=(5, 6, 3))


def globals_by_verdict(checkpoint: Contents) -> Iterator[Block]:
    """The names that the file imports, the worst first."""
    yield from heading("globals", count(len(checkpoint.globals)))
    if not checkpoint.globals:
        yield note("it asks for nothing to be imported")
    for verdict, (role, words) in _NAMES.items():
        rows: list[tuple[Words, ...]] = []
        for use in (use for use in checkpoint.globals if use.verdict == verdict):
            spelled = f" (written {printable(use.spelling)})" if use.spelling else ""
            number = use.called or use.built or 1
            verb = "called" if use.called else "built" if use.built else "imported"
            times = f"{verb} {count(number)}×" if number > 1 else verb
            name = ((printable(use.full_name), ""), (spelled, "dim"))
            rows.append((name, times, printable(use.purpose), printable(use.stream, 40)))
        if rows:
            yield Prose(((verdict, role), (f": {words}", "dim")), lead="  ")
            yield Table(rows, dim=(1, 2, 3), shrinks=(2, 0), drops=(3,), indent=4)
