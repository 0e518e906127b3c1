"""Blocks as HTML, and the notebook views: fragments of HTML and CSS without scripts, for light and dark themes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from html import escape
from itertools import groupby

from transload.contents import Contents
from transload.findings import packaged
from transload.render.checkpoint import (
    Twig,
    described,
    findings,
    statistics_listed,
    summary,
    summary_lines,
    tensor_tree,
)
from transload.render.lines import (
    BLANK,
    GLUE,
    Block,
    Cell,
    Chain,
    Heading,
    Item,
    Line,
    Link,
    Plot,
    Prose,
    Table,
    Tiles,
    Words,
    text_of,
)
from transload.render.words import count, plural, printable, shape_text, size

MAX_TWIGS = 600
"""Lines of the tensor tree in the page: a notebook is saved with its output, and must still open."""

# The most of each that is shown.
_ROWS = 20
_BARS = 8
_PARTS = 60
_TILES = 5000
PLOTTED = 48  # bars of a histogram


def fragment(checkpoint: Contents) -> Iterator[str]:
    """Pieces of HTML for any page. Viewers that strip styles show the plain text in it instead.

    The summary and the findings; then the sections that can be opened: dtypes, parts, tensors.
    """
    yield from _framed(_checkpoint(checkpoint), "\n".join(summary_lines(checkpoint)))


def notebook_view(blocks: Iterable[Block], text: str) -> Iterator[str]:
    """Pieces of HTML for any report; sections can be closed. ``text`` is the same report as text."""
    yield from _framed(_sections(blocks), text)


def _framed(inside: Iterable[str], text: str) -> Iterator[str]:
    # Text has the colour of the page and shades of it, to fit any theme. Only verdicts have their own colours, readable
    # on white and on black, and brighter if the page says that it is dark.
    css = packaged(__package__, "notebook.css")
    yield f'<div class="transload"><style>\n{css}</style><pre class="tl-plain">{escape(text)}</pre>'
    # The style attribute hides the rich form in viewers that drop <style>, where no CSS makes it visible again.
    yield '<div class="tl-rich" style="display:none">'
    yield from inside
    yield "</div></div>"


def _sections(blocks: Iterable[Block]) -> Iterator[str]:
    for heading, inside in sections(blocks):
        if heading is None:
            yield from markup(inside, _ROWS, titled=True)
        else:
            title = f"{escaped(heading.text)} {_dim(heading.note, 'span') if heading.note else ''}"
            yield f'<details class="tl-section" open><summary>{title}</summary>'
            yield from markup(inside, _ROWS)
            yield "</details>"


def _checkpoint(checkpoint: Contents) -> Iterator[str]:
    words = summary(checkpoint)
    words.pop("dtypes", None)  # they have a section
    yield from heading(checkpoint, words)
    yield from markup(described(words))
    yield from markup(findings(checkpoint.findings))

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
    if checkpoint.stats is not None:
        yield from _sections(statistics_listed(checkpoint.stats))
    if checkpoint.tensors:
        tree = tensor_tree(checkpoint.tensors, MAX_TWIGS)
        yield _section("tensors", tree.tensors) + '<div class="tl-tree">'
        yield from _twigs(tree, mixed=len(checkpoint.devices) > 1, is_open=True)
        yield "</div></details>"


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


# -- blocks as HTML


def sections(blocks: Iterable[Block]) -> Iterator[tuple[Heading | None, list[Block]]]:
    """The headings, each with the blocks below it; none for what is above the first."""
    heading, inside = None, list[Block]()
    for block in blocks:
        if isinstance(block, Heading):
            if heading is not None or inside:
                yield heading, inside
            heading, inside = block, []
        else:
            inside.append(block)
    yield heading, inside


def table(block: Table, most: int) -> Iterator[str]:
    """A table of the first ``most`` rows."""
    right = [' class="num"' if column in block.right else "" for column in range(64)]
    yield '<div class="wide"><table>'
    if block.titles:
        titles = zip(right, block.titles, strict=False)
        yield f"<thead><tr>{''.join(f'<th{align}>{escaped(title)}</th>' for align, title in titles)}</tr></thead>"
    yield "<tbody>"
    for row in block.rows[:most]:
        yield "<tr>"
        for column, cell in enumerate(row):
            yield f"<td{right[column]}>{_spans(cell, 'dim' if column in block.dim else '')}</td>"
        yield "</tr>"
    yield f"</tbody></table></div>{more(len(block.rows) - most)}"


Emitter = Callable[[Table, int], Iterator[str]]


def markup(
    blocks: Iterable[Block], most: int = _ROWS, *, titled: bool = False, table: Emitter = table
) -> Iterator[str]:
    """The HTML of blocks; what is to be copied is in ``<code>``. If ``titled``, the first is the title of a page.

    Tables have at most ``most`` rows, unless ``table`` does more. A lead tells what text is: a sign, an arrow before
    advice, or the label of a row.
    """
    for kind, group in groupby((block for block in blocks if block != BLANK), _kind):
        inside = [*group]
        lines = [block for block in inside if isinstance(block, Prose)]
        if titled and lines:
            yield f'<div class="tl-head"><span>{_lead(lines[0])} {_spans(lines[0].body)}</span></div>'
            del lines[0]
        titled = False
        if kind == "row" and lines:
            yield f"<dl>{''.join(f'<dt>{_lead(row)}</dt><dd>{_spans(row.body)}</dd>' for row in lines)}</dl>"
        elif kind == "command":
            yield from (_code([line.body], "$ ") for line in lines)
        elif kind in ("copy", "code") and lines:
            yield _code([line.body for line in lines])
        elif kind:
            for line in lines:
                lead = f"{_lead(line)} " if kind == "sign" else ""
                yield f'<div class="tl-{"fix" if kind == "advice" else "text"}">{lead}{_spans(line.body)}</div>'
        else:
            for block in inside:
                yield from _html(block, most, table)


def _kind(block: Block) -> str:
    if not isinstance(block, Prose):
        return ""
    sign = text_of(block.lead).strip()
    if block.whole:
        return {"$": "command", "|": "copy"}.get(sign, "code")
    # A sign is no word, or ends with a colon. A row without a label has an empty one, which is dim.
    is_row = any(map(str.isalnum, sign)) and not sign.endswith(":")
    is_row = is_row or (not sign and not isinstance(block.lead, str) and any(role == "dim" for _, role in block.lead))
    return "row" if is_row else {"": "text", "→": "advice"}.get(sign, "sign")


def _html(block: Block, most: int, table: Emitter) -> Iterator[str]:
    if isinstance(block, Item):
        yield f'<div class="tl-finding tl-{block.role}">'
        yield from markup(block.blocks, most, table=table)
        yield "</div>"
    elif isinstance(block, Table):
        yield from table(block, most)
    elif isinstance(block, Chain):
        yield '<div class="tl-chain">'
        for title, links in block.groups:
            yield f'<div class="tl-group"><div class="tl-side">{escaped(title)}</div>'
            yield from map(_link, links)
            yield "</div>"
        yield "</div>"
    elif isinstance(block, Tiles):
        yield '<div class="tl-tiles">'
        for name, role, text in block.tiles[:_TILES]:
            yield f'<span class="tl-tile tl-{role}" title="{safe(text, 400)}">{safe(name, 40)}</span>'
        yield f"</div>{more(len(block.tiles) - _TILES)}"


def _link(link: Link) -> str:
    (sign, role), name, words, below = link
    lines = "".join(f'<div class="tl-dim">{_spans(line)}</div>' for line in below)
    return (
        f'<div class="tl-link tl-{role}"><b class="tl-{role} ink">{escaped(sign)}</b>'
        f"<div><b>{escaped(name)}</b> {_spans(words)}{lines}</div></div>"
    )


def _code(lines: Iterable[Words], prompt: str = "") -> str:
    lead = _dim(prompt, "span") if prompt else ""
    return f'<div class="tl-code">{lead}<code>{chr(10).join(escaped(text_of(line)) for line in lines)}</code></div>'


def plot(histogram: Plot) -> str:
    """A histogram as SVG, in lines that ``page.js`` draws in the same way."""
    start, counts, end = histogram.counts(PLOTTED)
    most = max(counts)
    heights = ((place, max(1, 16 * number / most)) for place, number in enumerate(counts) if number)
    path = "".join(f"M{place} 16V{16 - high:.2f}H{place + 1}V16" for place, high in heights)
    svg = f'<svg class="tl-plot" viewBox="0 0 {len(counts)} 16" preserveAspectRatio="none"><path d="{path}"/></svg>'
    return f'<span class="plot">{_dim(start, "span")}{svg}{_dim(end, "span")}</span>'


def _lead(line: Prose) -> str:
    """What precedes a text, without the spaces that align it."""
    lead = ((line.lead, ""),) if isinstance(line.lead, str) else line.lead
    return " ".join(_spans(((text.strip(), role),)) for text, role in lead if text.strip())


def _spans(words: Cell, role: str = "") -> str:
    """The words with their roles, without spaces at the ends."""
    if isinstance(words, Plot):
        return plot(words)
    line = ((words, role),) if isinstance(words, str) else words
    out = []
    for text, own in line:
        is_verdict = own in ("good", "trust", "bad")
        shown = escaped(text)
        if is_verdict or own == "strong":
            shown = f'<b class="tl-{own}{" ink" if is_verdict else ""}">{shown}</b>'
        elif own or role:
            shown = f'<span class="tl-dim">{shown}</span>'
        out.append(shown)
    return "".join(out).strip()


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


def escaped(text: str) -> str:
    """A text of a report, which should be printable: this is where nothing else gets into a page."""
    return escape(GLUE.join(printable(part, None) for part in text.split(GLUE)))


def safe(text: str, limit: int | None = 160) -> str:
    """A text of the file, printable and escaped."""
    return escape(printable(text, limit))


def _dim(text: str, tag: str = "div") -> str:
    return f'<{tag} class="tl-dim">{escaped(text)}</{tag}>'


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
