"""The report a person reads: a summary, what was found, and the tensors as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.render.escape import cut, printable
from transload.render.lines import BLANK, GLUE, Block, Line, Prose, Table, heading, note
from transload.render.listing import parts
from transload.render.sizes import count, plural, shape_text, size
from transload.render.summary import summary
from transload.render.tree import Row, Twig, tensor_tree, tree_rows
from transload.render.words import SEVERITY, steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.checkpoint import Checkpoint
    from transload.findings import Finding

__all__ = ["findings", "head", "report", "summary_lines", "tensors_folded"]

_EVIDENCE = 8
_FINDINGS = 20
_TREE_LINES = 48
_TREE_NAME = 64
_TREE_SHAPE = 32
_LABEL = 12


def summary_lines(checkpoint: Checkpoint) -> list[str]:
    """Plain text of at most ten lines, without colour or signs that a terminal may lack; ``repr()`` shows it."""
    lines = [f"<Checkpoint {printable(checkpoint.path)!s}>"]
    for label, words in summary(checkpoint):
        text = "".join(text for text, _ in words).replace(" · ", "; ").replace("…", "...").replace(GLUE, " ")
        lines.append(f"  {label:<{_LABEL}}{text}")
    if checkpoint.findings:
        worst = checkpoint.findings[0]
        more = f" (and {len(checkpoint.findings) - 1} more)" if len(checkpoint.findings) > 1 else ""
        lines[9:] = []
        lines.append(f"  {'findings':<{_LABEL}}{worst.severity}: {printable(worst.title)}{more}")
    return lines


def report(checkpoint: Checkpoint) -> Iterator[Block]:
    """Everything ``transload inspect`` says of one file when nothing special is asked for."""
    yield from head(checkpoint)
    yield from parts(checkpoint)
    yield from tensors_folded(checkpoint)


def head(checkpoint: Checkpoint) -> Iterator[Block]:
    """The path, the summary and the findings."""
    yield Prose(((printable(checkpoint.path, None), "strong"),))
    for label, words in summary(checkpoint):
        yield Prose(words, lead=((f"  {label:<{_LABEL}}", "dim"),))
    for finding in findings(checkpoint.findings):
        yield BLANK
        yield from finding


def findings(found: Sequence[Finding]) -> Iterator[list[Block]]:
    """The findings, errors first, the blocks of each together."""
    order = sorted(found, key=lambda finding: list(SEVERITY).index(finding.severity))
    yield from (list(_finding(finding)) for finding in order[:_FINDINGS])
    if len(order) > _FINDINGS:
        yield [note(f"{len(order) - _FINDINGS:,} further findings; --json lists all of them")]


def _finding(finding: Finding) -> Iterator[Block]:
    role, sign = SEVERITY[finding.severity]
    yield Prose(((printable(finding.title, None), "strong"), (f"  {finding.code}", "dim")), lead=((f"{sign} ", role),))
    for text in finding.evidence[:_EVIDENCE]:
        yield Prose(((printable(text, 400), ""),), lead=(("    ", ""),))
    if len(finding.evidence) > _EVIDENCE:
        yield Prose(((f"… and {len(finding.evidence) - _EVIDENCE:,} more", "dim"),), lead=(("    ", ""),))
    for step in steps(finding.fix):
        if step[0].startswith("$ "):  # to be copied, so never folded
            command = (printable(step[0][2:], None), "strong")
            yield Prose((command,), lead=(("    ", ""), ("$ ", "dim")), whole=True)
        elif len(step) == 1:
            yield Prose(((printable(step[0], None), ""),), lead=(("  → ", "good"),))
        else:
            yield from _code(step)


def _code(lines: Sequence[str]) -> Iterator[Block]:
    """Lines to be pasted: at the margin and never folded, since Python minds both."""
    yield Prose((("before torch.load, if you trust the file:", ""),), lead=(("  → ", "good"),))
    yield BLANK
    for line in lines:
        yield Prose(((printable(line, None).replace(" ", GLUE), ""),))
    yield BLANK


def tensors_folded(checkpoint: Checkpoint) -> Iterator[Block]:
    """The tensors as a tree in a screenful or so, equal branches folded."""
    if not checkpoint.tensors:
        return
    tree = tensor_tree(checkpoint.tensors)
    rows = tree_rows(tree, _TREE_LINES)
    yield from heading("tensors", count(tree.tensors))
    mixed = len(checkpoint.devices) > 1
    yield Table([_tree_row(row, mixed=mixed) for row in rows], right=frozenset({4}), drops=(3, 1))
    if any(row.more or row.closed for row in rows):
        yield note("--tensors lists every one")


def _tree_row(row: Row, *, mixed: bool) -> tuple[Line, ...]:
    """The cells of one line: name, dtype, shape, device, bytes."""
    twig = row.twig
    if twig is None:
        return (((f"{row.guide}… {row.more:,} more", "dim"),),)
    name: Line = ((row.guide, "dim"), (printable(twig.name, _TREE_NAME) or '""', ""))
    total: Line = ((size(twig.nbytes), ""),)
    if twig.copies > 1:
        name = (*name, (f"  ×{twig.copies:,}", "dim"))
    if twig.tensor is None:
        return (name, (), ((_inside(twig, closed=row.closed), "dim"),), (), total)
    tensor = twig.tensor
    device = printable(tensor.device, 24) if mixed else ""
    shape = cut(shape_text(tensor.shape), _TREE_SHAPE)
    return (name, ((printable(tensor.dtype, 40), "dim"),), ((shape, ""),), ((device, "dim"),), total)


def _inside(twig: Twig, *, closed: bool) -> str:
    """What stands beside a branch: the size of one where it is several, the number of tensors where it is closed."""
    inside = [plural(twig.tensors // twig.copies, "tensor")] if closed else []
    if twig.copies > 1:
        inside.append(f"{size(twig.nbytes // twig.copies)} each")
    return ", ".join(inside)
