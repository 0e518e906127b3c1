"""The notebook view: one fragment of HTML and CSS, no script, for light and dark pages alike."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from transload.render.css import CSS
from transload.render.escape import printable
from transload.render.sizes import count, plural, shape_text, size
from transload.render.summary import summary
from transload.render.text import summary_lines
from transload.render.tree import Twig, opened, tensor_tree
from transload.render.words import INTEGRITY, SAFETY, SEVERITY, format_words, integrity_reason, safety_reason, steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transload.checkpoint import Checkpoint
    from transload.findings import Finding

__all__ = ["MAX_TWIGS", "fragment"]

MAX_TWIGS = 600
"""Lines of the tensor tree in the page: a notebook is saved with its output, and must open again."""

_FINDINGS = 20
_EVIDENCE = 20
_BARS = 8
_PARTS = 60
_SHOWN_ABOVE = ("format", "dtypes", "safety", "integrity")


def fragment(checkpoint: Checkpoint) -> str:
    """HTML to put into any page. Viewers that strip styles show the plain text inside it instead."""
    # The style attribute hides the rich form from viewers which drop <style>: there the CSS cannot bring it back.
    plain = escape("\n".join(summary_lines(checkpoint)))
    body = "".join(_body(checkpoint))
    return (
        f'<div class="transload"><style>{CSS}</style><pre class="tl-plain">{plain}</pre>'
        f'<div class="tl-rich" style="display:none">{body}</div></div>'
    )


def _body(checkpoint: Checkpoint) -> Iterator[str]:
    kind = f'<span class="tl-dim">{escape(format_words(checkpoint))}</span>'
    yield f'<div class="tl-head"><b>{_safe(checkpoint.path)}</b>{kind}</div>'
    safety, integrity = checkpoint.safety, checkpoint.integrity
    verdicts = _badge(SAFETY[safety][0], safety, safety_reason(checkpoint))
    verdicts += _badge(INTEGRITY[integrity][0], integrity, integrity_reason(checkpoint))
    yield f'<div class="tl-verdicts">{verdicts}</div>'
    yield "<dl>"
    for label, words in summary(checkpoint):
        if label not in _SHOWN_ABOVE:
            spans = "".join(f'<span class="tl-{role or "word"}">{escape(text)}</span>' for text, role in words)
            yield f"<dt>{label}</dt><dd>{spans}</dd>"
    yield "</dl>"
    yield from _findings(checkpoint.findings)
    yield from _dtypes(checkpoint)
    yield from _parts(checkpoint)
    yield from _tensors(checkpoint)


def _safe(text: str, limit: int | None = 160) -> str:
    return escape(printable(text, limit))


def _badge(role: str, word: str, reason: str) -> str:
    return f'<span class="tl-badge tl-{role}"><b>{escape(word)}</b> {escape(reason)}</span>'


def _findings(findings: Iterable[Finding]) -> Iterator[str]:
    order = sorted(findings, key=lambda finding: list(SEVERITY).index(finding.severity))
    for finding in order[:_FINDINGS]:
        role = SEVERITY[finding.severity][0]
        code = f'<span class="tl-dim">{_safe(finding.code)}</span>'
        yield f'<div class="tl-finding tl-{role}"><div><b>{_safe(finding.title, None)}</b> {code}</div>'
        yield from (f"<div>{_safe(text, 400)}</div>" for text in finding.evidence[:_EVIDENCE])
        if len(finding.evidence) > _EVIDENCE:
            yield f'<div class="tl-dim">and {len(finding.evidence) - _EVIDENCE:,} more</div>'
        for step in steps(finding.fix):
            lines = "\n".join(_safe(text, None) for text in step)
            yield f'<div class="tl-fix">{lines}</div>'
        yield "</div>"
    if len(order) > _FINDINGS:
        yield f'<div class="tl-dim">{len(order) - _FINDINGS:,} further findings are not shown</div>'


def _section(title: str, note: str, *, is_open: bool) -> str:
    mark = " open" if is_open else ""
    return f'<details class="tl-section"{mark}><summary>{title} <span class="tl-dim">{note}</span></summary>'


def _dtypes(checkpoint: Checkpoint) -> Iterator[str]:
    """A bar for each dtype, as long as its part of the bytes."""
    rows = checkpoint.dtypes
    if not rows:
        return
    total = sum(nbytes for _, _, nbytes in rows) or 1
    yield _section("dtypes", count(len(rows)), is_open=True)
    yield '<div class="tl-bars">'
    for dtype, tensors, nbytes in rows[:_BARS]:
        share = max(1, 1000 * nbytes // total) / 10
        yield f'<span>{_safe(dtype, 40)}</span><span class="tl-bar"><i style="width:{share}%"></i></span>'
        yield f"<span>{size(nbytes)}</span><span>{plural(tensors, 'tensor')}</span>"
    yield "</div>"
    if len(rows) > _BARS:
        yield f'<div class="tl-dim">and {len(rows) - _BARS:,} more</div>'
    yield "</details>"


def _parts(checkpoint: Checkpoint) -> Iterator[str]:
    if not checkpoint.parts:
        return
    yield _section("parts", count(len(checkpoint.parts)), is_open=len(checkpoint.parts) <= 6)
    for part in checkpoint.parts[:_PARTS]:
        yield _line(_safe(part.name), _safe(part.kind), "", size(part.nbytes))
    if len(checkpoint.parts) > _PARTS:
        yield f'<div class="tl-dim">and {len(checkpoint.parts) - _PARTS:,} more</div>'
    yield "</details>"


def _tensors(checkpoint: Checkpoint) -> Iterator[str]:
    if not checkpoint.tensors:
        return
    tree = tensor_tree(checkpoint.tensors)
    shown = opened(tree, MAX_TWIGS)
    yield _section("tensors", count(tree.tensors), is_open=True)
    yield '<div class="tl-tree">'
    yield from _twigs(tree, shown, mixed=len(checkpoint.devices) > 1, is_open=True)
    yield "</div></details>"


def _twigs(twig: Twig, shown: dict[int, int], *, mixed: bool, is_open: bool) -> Iterator[str]:
    """The children of a twig, nested; the tree is as deep as ``tree`` lets a name be."""
    some = shown.get(id(twig), 0)
    for child in twig.children[:some]:
        line = _twig_line(child, mixed=mixed)
        if not child.children:
            yield line
            continue
        yield f"<details{' open' if is_open else ''}><summary>{line}</summary><div class='tl-below'>"
        yield from _twigs(child, shown, mixed=mixed, is_open=is_open and len(child.children) == 1)
        yield "</div></details>"
    if some < len(twig.children):
        yield f'<div class="tl-dim">{len(twig.children) - some:,} more are not shown</div>'


def _twig_line(twig: Twig, *, mixed: bool) -> str:
    name = _safe(twig.name) or "&quot;&quot;"
    if twig.copies > 1:
        name += f' <span class="tl-dim">×{twig.copies:,}</span>'
    tensor = twig.tensor
    if tensor is None:
        each = f"{size(twig.nbytes // twig.copies)} each" if twig.copies > 1 else plural(twig.tensors, "tensor")
        return _line(name, "", f'<span class="tl-dim">{each}</span>', size(twig.nbytes))
    kind = f"{_safe(tensor.dtype, 40)} {_safe(tensor.device, 40)}" if mixed else _safe(tensor.dtype, 40)
    return _line(name, kind, escape(shape_text(tensor.shape)), size(twig.nbytes))


def _line(name: str, kind: str, shape: str, total: str) -> str:
    """One row of four cells; all arguments are HTML already."""
    return (
        f'<div class="tl-line"><span class="tl-name">{name}</span><span class="tl-dim">{kind}</span>'
        f"<span>{shape}</span><span>{total}</span></div>"
    )
