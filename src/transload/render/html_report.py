"""The report: one HTML file with its styles, its script and its data, that asks nothing of a network.

What it says is in plain HTML, by the emitters of the notebook view. The tensors and the layout of the file are data for
``report.js``, in columns, which compress well: 20,000 tensors take 200 kB.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from gzip import compress
from html import escape
from typing import Any

from transload._version import __version__
from transload.contents import Contents, Tensor, tie_of, with_parts
from transload.findings import packaged
from transload.geometry import contiguous
from transload.render.checkpoint import (
    INTEGRITY,
    NAMES,
    SAFETY,
    described,
    findings,
    format_words,
    statistics_listed,
    summary,
    times_used,
)
from transload.render.html import PLOTTED, escaped, heading, markup, more, safe, sections, table
from transload.render.lines import GLUE, Block, Cell, Heading, Item, Plot, Prose, Table, text_of
from transload.render.words import count, cut, plural, printable, shape_text, size

MAX_ROWS = 200_000
"""Tensors in the table: an index of a gigabyte can name many millions, and no browser would open the page."""

MAX_PLAIN = 200
"""Tensors in the table for readers that run no script."""

GENERATOR = f'<!doctype html>\n<html lang="en"><head><meta name="generator" content="transload {__version__}">'
"""The first characters of every report, up to the version: ``is_report`` looks for them."""

_SHORT = 40  # rows of a table that the page shows whole

# The most of each that is shown.
_GLOBALS = 500
_GROUPS = 100
_IN_GROUP = 20
_VALUES = 200
_FILES = 200
_LONGEST_NAME = 400
_TITLE = 120

_SMALL = 16_384  # characters of data that stay plain, which older browsers and mail programs can read, too
_LARGEST = 1 << 53  # JavaScript counts exactly up to here; a hostile file states more
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def is_report(start: bytes) -> bool:
    """Whether a file that starts with these bytes is a report, of any version."""
    mark = GENERATOR.removesuffix(f'{__version__}">').encode()
    return start.startswith(mark)


def page(checkpoints: Sequence[Contents], total: int = 1) -> Iterator[str]:
    """Pieces of the page about some checkpoints, out of ``total`` files that were to be read."""
    title = plural(total, "checkpoint") if total > 1 else printable(checkpoints[0].path)
    yield from _page(_files(checkpoints, total), "inspect", title, "page.js", "report.js")


def page_of(
    blocks: Iterable[Block], command: str = "", folded: Iterable[tuple[str, Iterable[Block]]] = ()
) -> Iterator[str]:
    """Pieces of the page with the report of a command. ``folded`` are titles of further reports, to be opened."""
    first, *rest = sections(blocks)
    lines = (line for block in first[1] for line in (block.blocks if isinstance(block, Item) else (block,)))
    title = next((text_of(line.body) for line in lines if isinstance(line, Prose)), command)
    yield from _page(_cards((first, *rest), folded), command, cut(title, _TITLE), "page.js")


def _page(body: Iterable[str], command: str, title: str, *scripts: str) -> Iterator[str]:
    # At the top of the page, where the policy applies to all that follows.
    yield f'{GENERATOR}<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<title>{escaped(title)} – transload</title><style>\n"
    yield packaged(__package__, "notebook.css") + packaged(__package__, "report.css")
    yield f'</style></head>\n<body class="transload"><header><span class="brand">transload <i>{command}</i></span>'
    yield '<button id="theme" type="button" hidden>Dark</button></header>\n<main>'
    yield from body
    yield f"</main><footer>Made by transload {__version__}. This page opens no connection."
    yield "</footer>\n<script type='module'>\n"
    yield from (packaged(__package__, script) for script in scripts)
    yield "ready();\n</script></body></html>\n"


def _cards(
    parts: Iterable[tuple[Heading | None, list[Block]]], folded: Iterable[tuple[str, Iterable[Block]]] = ()
) -> Iterator[str]:
    for title, inside in parts:
        yield f'<div class="card{"" if title else " top"}">{_titled(title)}'
        yield from markup(inside, MAX_PLAIN, titled=title is None, table=_table)
        yield "</div>\n"
    for name, blocks in folded:
        yield f'<details class="card"><summary><h2>{safe(name)}</h2></summary>'
        for title, inside in sections(blocks):
            yield _titled(title, "h3")
            yield from markup(inside, MAX_PLAIN, table=_table)
        yield "</details>\n"


def _titled(title: Heading | None, tag: str = "h2") -> str:
    return f'<{tag}>{escaped(title.text)} <span class="tl-dim">{escaped(title.note)}</span></{tag}>' if title else ""


def _table(block: Table, most: int) -> Iterator[str]:
    """A long table as data for ``page.js``, and its first rows for readers that run no script."""
    if len(block.rows) <= _SHORT:
        yield from table(block, _SHORT)
        return
    rows = [[_cell(cell) for cell in row] for row in block.rows[:MAX_ROWS]]
    yield '<div class="grid" hidden><div class="tools">'
    yield '<input type="search" placeholder="Filter" aria-label="Filter rows"></div>'
    yield '<div class="table"></div><div class="detail" aria-live="polite"></div>'
    yield from _data({"titles": block.titles, "right": [*block.right], "rows": rows})
    yield f"{more(len(block.rows) - MAX_ROWS)}</div><noscript>"
    yield from table(block, most)
    yield "</noscript>"


def _cell(words: Cell) -> str | list[str] | dict[str, object]:
    """A cell as text, or as text and the role that all of it has; or a plot."""
    if isinstance(words, Plot):
        return {"plot": words.counts(PLOTTED)}
    text = printable(text_of(words).replace(GLUE, " "), None)
    roles = {role for _, role in words} if not isinstance(words, str) else {""}
    return text if roles == {""} or len(roles) != 1 else [text, *roles]


def _data(columns: dict[str, Any]) -> Iterator[str]:
    text = json.dumps(columns, separators=(",", ":"))
    if len(text) <= _SMALL:
        yield '<script class="data" type="application/json">' + text.replace("<", "\\u003c") + "</script>"
    else:
        packed = b64encode(compress(text.encode("ascii"), 9, mtime=0)).decode("ascii")
        yield f'<script class="data" type="application/gzip">{packed}</script>'


def _files(checkpoints: Sequence[Contents], total: int) -> Iterator[str]:
    if total > 1:
        yield from _overview(checkpoints, total)
    for number, checkpoint in enumerate(checkpoints):
        yield f'<section class="file" id="file-{number}">'
        yield from _about(checkpoint)
        yield "</section>\n"


def _overview(checkpoints: Sequence[Contents], total: int) -> Iterator[str]:
    """A table of the files, each a link to its section."""
    yield '<div class="card"><div class="wide"><table class="files"><thead><tr><th>file<th>safety<th>integrity'
    yield '<th class="num">tensors<th class="num">size<th>format</thead><tbody>'
    for number, checkpoint in enumerate(checkpoints):
        yield f'<tr><td><a href="#file-{number}">{safe(checkpoint.path)}</a>'
        for verdict, scale in ((checkpoint.safety, SAFETY), (checkpoint.integrity, INTEGRITY)):
            yield f'<td><b class="tl-{scale[verdict][0]} ink">{verdict}</b>'
        yield f'<td class="num">{count(len(checkpoint.tensors))}<td class="num">{size(checkpoint.nbytes)}'
        yield f"<td>{escape(format_words(checkpoint))}"
    yield "</tbody></table></div>"
    if missing := total - len(checkpoints):
        yield f'<p class="tl-bad ink">{plural(missing, "file")} of {total:,} could not be read and is not here.</p>'
    yield "</div>"


def _about(checkpoint: Contents) -> Iterator[str]:
    words = summary(checkpoint)
    yield '<div class="card top">'
    yield from heading(checkpoint, words)
    yield from markup(findings(checkpoint.findings))
    words.pop("written by", None)  # it has a section
    yield from markup(described(words))
    yield "</div>"

    if checkpoint.tensors:
        yield '<div class="card explorer" hidden><h2>Tensors</h2><div class="tools">'
        yield '<input type="search" placeholder="Filter: layers.3 bfloat16 …" aria-label="Filter tensors">'
        yield '<span class="switch" role="group" aria-label="Divide the bytes by"></span></div>'
        yield '<div class="crumbs"></div><div class="map"><canvas tabindex="0"></canvas></div>'
        yield '<div class="legend"></div><div class="table"></div><div class="detail" aria-live="polite"></div>'
        yield (
            more(len(checkpoint.tensors) - MAX_ROWS, "{:,} tensors are not in this page; --tensors lists all")
            + "</div>"
        )
        yield from _plain_table(checkpoint.tensors)
    if checkpoint.stats is not None:
        yield from _cards(sections(statistics_listed(checkpoint.stats)))
    yield from _sharing(checkpoint)
    if any(checkpoint.storages) or any(checkpoint.records):
        yield '<div class="card layout" hidden><h2>Layout on disk</h2><div class="strips"></div>'
        yield '<div class="legend"></div><div class="detail" aria-live="polite"></div></div>'
    yield from _globals(checkpoint)
    yield from _provenance(checkpoint)
    if leaves := checkpoint.leaves:
        rows = [(safe(leaf.name), safe(leaf.kind, 60), safe(leaf.text)) for leaf in leaves[:_VALUES]]
        yield from _listing("Values", len(leaves), ("name", "type", "value"), rows)
    if parts := checkpoint.parts:
        listed = []
        for part in parts[:_FILES]:
            facts = ", ".join(f"{name} {value}" for name, value in part.facts)
            listed.append((safe(part.name), safe(part.kind), size(part.nbytes), safe(facts)))
        yield from _listing("Parts", len(parts), ("name", "kind", "size", "facts"), listed)

    yield from _data(columns(checkpoint))


def _listing(title: str, total: int, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table that can be opened; the rows are HTML."""
    yield f'<details class="card"><summary><h2>{title}</h2> {count(total)}</summary>'
    yield '<div class="wide"><table><thead><tr>' + "".join(f"<th>{name}" for name in titles) + "</thead><tbody>"
    yield from (f"<tr><td>{'<td>'.join(row)}" for row in rows)
    yield f"</tbody></table></div>{more(total - len(rows))}</details>"


def _plain_table(tensors: Sequence[Tensor]) -> Iterator[str]:
    yield '<noscript><div class="card"><h2>Tensors</h2><div class="wide"><table><thead><tr><th>name<th>dtype<th>shape'
    yield '<th>device<th class="num">bytes</thead><tbody>'
    for tensor in tensors[:MAX_PLAIN]:
        yield f"<tr><td>{safe(tensor.name)}<td>{safe(tensor.dtype, 40)}<td>{escape(shape_text(tensor.shape))}"
        yield f'<td>{safe(tensor.device, 40)}<td class="num">{size(tensor.nbytes)}'
    yield f"</tbody></table></div>{more(len(tensors) - MAX_PLAIN)}</div></noscript>"


def _sharing(checkpoint: Contents) -> Iterator[str]:
    """Tensors in the same storage: tied, which are the same tensor under several names, or views of parts of it."""
    groups = [storage for storage in checkpoint.storages if len(storage.tensors) > 1]
    if not groups:
        return
    by_name = {tensor.name: tensor for tensor in checkpoint.tensors}
    rows = []
    for storage in groups[:_GROUPS]:
        ties = {tie_of(by_name[name]) if name in by_name else name for name in storage.tensors}
        names = "<br>".join(safe(name) for name in storage.tensors[:_IN_GROUP])
        rows.append(
            (
                names + more(len(storage.tensors) - _IN_GROUP),
                "the same tensor" if len(ties) == 1 and ties != {None} else "views of one storage",
                size(storage.nbytes),
                safe(storage.record or storage.key),
            )
        )
    yield from _listing("Shared storages", len(groups), ("tensors", "they are", "bytes", "storage"), rows)


def _globals(checkpoint: Contents) -> Iterator[str]:
    """The names that the file imports, the worst first, with what each is for."""
    order = list(NAMES)
    uses = sorted(checkpoint.globals, key=lambda use: order.index(use.verdict))
    if not uses:
        return
    rows = []
    for use in uses[:_GLOBALS]:
        role, meaning = NAMES[use.verdict]
        verdict = f'<b class="tl-{role} ink" title="{escape(meaning)}">{escape(use.verdict)}</b>'
        written = f"<div>written {safe(use.spelling)}</div>" if use.spelling else ""
        rows.append((verdict, f"<code>{safe(use.full_name)}</code>{written}", safe(use.purpose), times_used(use)))
    yield from _listing("Globals", len(uses), ("verdict", "name", "what it is for", "use"), rows)


def _provenance(checkpoint: Contents) -> Iterator[str]:
    origin = checkpoint.written_by
    rows = [("written by", safe(origin.text, None))]
    rows += [("evidence", safe(text, 400)) for text in origin.evidence]
    rows += [(safe(name), safe(version, 400)) for name, version in (*origin.recorded, *checkpoint.facts)]
    yield '<details class="card"><summary><h2>Provenance</h2> '
    yield f"{safe(origin.text, None)}</summary><dl>"
    yield from (f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows[:_VALUES])
    yield f"</dl>{more(len(rows) - _VALUES)}</details>"


def columns(checkpoint: Contents) -> dict[str, Any]:
    """What ``report.js`` draws, in lists of equal length. Equal things are stated once, and positions as differences.

    ``pieces`` are the storages and other records: ``at`` is how far after the end of the one before it a piece begins
    (``null``: unknown), ``lacks`` the bytes it should have but does not. ``kinds`` are what many tensors have in
    common. Of a tensor, ``piece`` is its storage, as the difference to that of the tensor before; ``inside`` how far
    into the storage it begins. One that consists of others has all its storages in ``parts``.
    """
    files = {"": 0}
    pieces: dict[str, list[Any]] = {name: [] for name in ("name", "file", "at", "size", "lacks")}
    places: dict[str | None, tuple[int, int]] = {}
    end = 0

    def add(name: str, file: str, offset: int | None, stored: int, nbytes: int) -> None:
        nonlocal end
        stored, nbytes = _number(stored), _number(nbytes)
        number = files.setdefault(file, len(files))
        pieces["name"].append(printable(name, _LONGEST_NAME))
        pieces["file"].append(number)
        pieces["at"].append(None if offset is None else _number(offset) - end)
        pieces["size"].append(stored)
        pieces["lacks"].append(nbytes - stored)
        end = end if offset is None else _number(offset) + stored

    for place, storage in enumerate(checkpoint.storages[:MAX_ROWS]):
        places[storage.id] = place, storage.offset or 0
        add(storage.record or storage.key, storage.file, storage.offset, storage.stored, storage.nbytes)
    held = {storage.record for storage in checkpoint.storages if not storage.file}
    others = [record for record in checkpoint.records if record.name not in held]
    own = len(pieces["name"])
    for record in others[:MAX_ROWS]:
        add(record.name, "", record.offset, record.stored, record.stored)

    kinds: list[list[Any]] = []
    numbers: dict[tuple[Any, ...], int] = {}
    tensors: dict[str, list[Any]] = {name: [] for name in ("name", "kind", "piece", "inside")}
    parts: dict[int, list[int]] = {}
    before = -1
    for number, tensor in enumerate(checkpoint.tensors[:MAX_ROWS]):
        t = tensor
        key = t.dtype, t.shape, t.stride, t.device, t.nbytes, t.kind, t.cls, t.flags, t.requires_grad
        if key not in numbers:
            numbers[key] = len(kinds)
            kinds.append(_kind(tensor))
        place, start = places.get(tensor.storage, (-1, 0))
        if tensor.parts:
            inner = (places.get(part.storage, (-1, 0))[0] for part in with_parts(tensor))
            parts[number] = list(dict.fromkeys(place for place in inner if place >= 0))
        tensors["name"].append(printable(tensor.name, _LONGEST_NAME))
        tensors["kind"].append(numbers[key])
        tensors["piece"].append(place - before)
        tensors["inside"].append(_number(tensor.file_offset - start) if tensor.file_offset and place >= 0 else 0)
        before = place

    sizes = {part.name: part.nbytes for part in checkpoint.parts}
    return {
        "bytes": _number(checkpoint.nbytes),
        "files": [[printable(name), _number(sizes.get(name, 0))] for name in files],
        "pieces": pieces,
        "storages": own,
        "kinds": kinds,
        "tensors": tensors,
        "parts": parts,
    }


def _kind(tensor: Tensor) -> list[Any]:
    """Dtype, shape, device, bytes and further words, as they are shown."""
    words = [tensor.kind] if tensor.kind != "strided" else []
    words += ["not contiguous"] if not words and tensor.stride != contiguous(tensor.shape) else []
    words += [tensor.cls] if tensor.cls else []
    words += [*tensor.flags, *(["requires grad"] if tensor.requires_grad else [])]
    dtype, device = printable(tensor.dtype, 40), printable(tensor.device, 40)
    return [dtype, shape_text(tensor.shape), device, _number(tensor.nbytes), printable(", ".join(words), 200)]


def _number(value: int) -> int:
    """A size or position that JavaScript represents exactly."""
    return max(-_LARGEST, min(value, _LARGEST))
