"""The notebook view: a fragment of HTML and CSS without scripts, for light and dark themes."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from transload.contents import Contents
from transload.findings import SEVERITIES, packaged
from transload.render.checkpoint import SEVERITY, TRUSTED, Twig, summary, summary_lines, tensor_tree
from transload.render.lines import Line
from transload.render.words import count, plural, printable, shape_text, size
from transload.steps import steps_of

MAX_TWIGS = 600
"""Lines of the tensor tree in the page: a notebook is saved with its output, and must still open."""

# The most of each that is shown.
_FINDINGS = 20
_EVIDENCE = 20
_BARS = 8
_PARTS = 60


def fragment(checkpoint: Contents) -> Iterator[str]:
    """Pieces of HTML for any page. Viewers that strip styles show the plain text in it instead.

    The summary and the findings; then the sections that can be opened: dtypes, parts, tensors.
    """
    # Text has the colour of the page and shades of it, to fit any theme. Only verdicts have their own colours, readable
    # on white and on black, and brighter if the page says that it is dark.
    css = packaged(__package__, "notebook.css")
    plain = escape("\n".join(summary_lines(checkpoint)))
    yield f'<div class="transload"><style>\n{css}</style><pre class="tl-plain">{plain}</pre>'
    # The style attribute hides the rich form in viewers that drop <style>, where no CSS makes it visible again.
    yield '<div class="tl-rich" style="display:none">'
    words = summary(checkpoint)
    words.pop("dtypes", None)  # they have a section
    yield from heading(checkpoint, words)
    yield from described(words)
    yield from findings(checkpoint)

    if dtypes := checkpoint.dtypes:
        total = sum(nbytes for _, _, nbytes in dtypes) or 1
        yield _section("dtypes", len(dtypes)) + '<div class="tl-bars">'
        for dtype, tensors, nbytes in dtypes[:_BARS]:  # a bar for each, in proportion to its bytes
            share = max(1, 1000 * nbytes // total) / 10
            yield f'<span>{safe(dtype, 40)}</span><span class="tl-bar"><i style="width:{share}%"></i></span>'
            yield f"<span>{size(nbytes)}</span><span>{plural(tensors, 'tensor')}</span>"
        yield "</div>"
        yield more(len(dtypes) - _BARS) + "</details>"
    if parts := checkpoint.parts:
        yield _section("parts", len(parts), is_open=len(parts) <= 6)
        for part in parts[:_PARTS]:
            yield _line(safe(part.name), safe(part.kind), "", size(part.nbytes))
        yield more(len(parts) - _PARTS) + "</details>"
    if checkpoint.tensors:
        tree = tensor_tree(checkpoint.tensors, MAX_TWIGS)
        yield _section("tensors", tree.tensors) + '<div class="tl-tree">'
        yield from _twigs(tree, mixed=len(checkpoint.devices) > 1, is_open=True)
        yield "</div></details>"
    yield "</div></div>"


def heading(checkpoint: Contents, words: dict[str, Line]) -> Iterator[str]:
    """The path and the verdicts; takes what it shows from ``words``, a summary."""
    ((format_words, _),) = words.pop("format")
    yield f'<div class="tl-head"><b>{safe(checkpoint.path)}</b>{_dim(format_words, "span")}</div>'
    yield '<div class="tl-verdicts">'
    for label in ("safety", "integrity"):
        (verdict, role), (reason, _) = words.pop(label)
        reason = reason.removeprefix(": ")
        yield f'<span class="tl-badge tl-{role}"><b>{escape(verdict)}</b> {escape(reason)}</span>'
    yield "</div>"


def described(words: dict[str, Line]) -> Iterator[str]:
    """Labels, and what is said under each."""
    yield "<dl>"
    for label, line in words.items():
        spans = "".join(f'<span class="tl-{role or "word"}">{escape(text)}</span>' for text, role in line)
        yield f"<dt>{label}</dt><dd>{spans}</dd>"
    yield "</dl>"


def findings(checkpoint: Contents) -> Iterator[str]:
    """The findings, errors first, each with what to do; what is to be copied is in ``<code>``."""
    order = sorted(checkpoint.findings, key=lambda finding: SEVERITIES.index(finding.severity))
    for finding in order[:_FINDINGS]:
        title = f"<b>{safe(finding.title, None)}</b> {_dim(f'[{printable(finding.code)}]', 'span')}"
        yield f'<div class="tl-finding tl-{SEVERITY[finding.severity][0]}"><div>{title}</div>'
        yield from (f"<div>{safe(text, 400)}</div>" for text in finding.evidence[:_EVIDENCE])
        yield more(len(finding.evidence) - _EVIDENCE)
        for step in steps_of(finding.fix):
            if step.copied or step.kind == "python":
                lead = f"{TRUSTED}\n" if len(step.lines) > 1 else step.lines[0].removesuffix(step.text)
                text = "\n".join(safe(line, None) for line in step.text.split("\n"))
                yield f'<div class="tl-fix">{lead}<code>{text}</code></div>'
            else:
                yield f'<div class="tl-fix">{safe(step.text, None)}</div>'
        yield "</div>"
    yield more(len(order) - _FINDINGS, "{:,} further findings are not shown")


def _twigs(twig: Twig, *, mixed: bool, is_open: bool) -> Iterator[str]:
    """The children of a twig, nested; ``tensor_tree`` limits the depth."""
    for child in twig.children:
        name = safe(child.name) or "&quot;&quot;"
        if child.copies > 1:
            name += " " + _dim(f"×{child.copies:,}", "span")
        if (tensor := child.tensor) is not None:
            kind = f"{safe(tensor.dtype, 40)} {safe(tensor.device, 40)}" if mixed else safe(tensor.dtype, 40)
            yield _line(name, kind, escape(shape_text(tensor.shape)), size(child.nbytes))
            continue
        amount = f"{size(child.nbytes // child.copies)} each" if child.copies > 1 else plural(child.tensors, "tensor")
        line = _line(name, "", _dim(amount, "span"), size(child.nbytes))
        yield f"<details{' open' if is_open else ''}><summary>{line}</summary><div class='tl-below'>"
        yield from _twigs(child, mixed=mixed, is_open=is_open and len(child.children) + child.hidden == 1)
        yield "</div></details>"
    yield more(twig.hidden, "{:,} more are not shown")


def safe(text: str, limit: int | None = 160) -> str:
    """A text of the file, printable and escaped."""
    return escape(printable(text, limit))


def _dim(text: str, tag: str = "div") -> str:
    return f'<{tag} class="tl-dim">{escape(text)}</{tag}>'


def more(number: int, words: str = "and {:,} more") -> str:
    """How many are not shown, if there are any."""
    return _dim(words.format(number)) if number > 0 else ""


def _section(title: str, number: int, *, is_open: bool = True) -> str:
    mark = " open" if is_open else ""
    return f'<details class="tl-section"{mark}><summary>{title} {_dim(count(number), "span")}</summary>'


def _line(name: str, kind: str, shape: str, total: str) -> str:
    """A row of four cells; all arguments are HTML."""
    return (
        f'<div class="tl-line"><span class="tl-name">{name}</span><span class="tl-dim">{kind}</span>'
        f"<span>{shape}</span><span>{total}</span></div>"
    )
