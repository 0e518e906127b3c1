from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.each import for_each
from tests.render.conftest import Builder

import transload
from transload.checkpoint import Checkpoint, Origin, Record, Storage, Tensor
from transload.findings import Finding, packaged
from transload.render.html_report import MAX_PLAIN, columns, is_report, page

NAMES = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>",
    "\u2028\u2029",
    "'\"`&lt;",
    "\ud800",
    "__proto__",
    "\x00\x1b[31m",
    "",
)


SVG = "http://www.w3.org/2000/svg"


class Page(HTMLParser):
    """The tags of a page, and the text in its data scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, set[str | None]] = {}
        self.data: list[Any] = []
        self.text = ""
        self._kind: str | None = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._kind = dict(attrs).get("type") if tag == "script" else ""
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value)

    def handle_endtag(self, _: str) -> None:
        self._kind = ""

    def handle_data(self, data: str) -> None:
        if self._kind == "application/json":
            self.data.append(json.loads(data))
        elif self._kind == "application/gzip":
            self.data.append(json.loads(gzip.decompress(base64.b64decode(data))))
        elif not self._kind:
            self.text += data


def test_every_part_is_there(training: Checkpoint) -> None:
    finding = Finding("truncated", "error", "it ends early", ("at byte 7",), ("$ transload rescue a.pt b.pt",))
    text = replace(
        training, findings=(finding,), written_by=Origin("2.1", "2.6", ("a record named .format_version",))
    ).to_html()
    parts = Page(text)
    assert text.startswith("<!doctype html>\n")
    for words in ("needs-trust", "it ends early", "at byte 7", "Tensors", "Layout on disk", "argparse.Namespace"):
        assert words in parts.text
    assert "a record named .format_version" in parts.text
    assert "global_step" in parts.text
    assert "<code>transload rescue a.pt b.pt</code>" in text
    assert len(parts.data) == 1
    assert text.index("it ends early") < text.index("Tensors</h2>")


def test_only_styles_and_scripts_of_the_page_may_run(training: Checkpoint) -> None:
    text = training.to_html()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert text.index(f'content="{policy}"') < text.index("<style>")
    text = text.replace(SVG, "")  # a name, not an address
    assert not re.search(r"https?:|url\(|@import|src=|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_names_never_become_markup(training: Checkpoint) -> None:
    harmless = Page(training.to_html())

    def same(name: str) -> None:
        uses = tuple(replace(use, name=name, purpose=name) for use in training.globals)
        leaves = tuple(replace(leaf, name=name, text=name) for leaf in training.leaves)
        tensors = tuple(tensor._replace(name=name, dtype=name, device=name, cls=name) for tensor in training.tensors)
        storages = tuple(storage._replace(record=name, tensors=(name, name)) for storage in training.storages)
        records = (Record(name, 3, 4, 4),)
        finding = Finding(name, "error", name, (name,), (f"$ {name}", name))
        origin = Origin("1", "2", (name,), ((name, name),))
        text = replace(
            training,
            path=name,
            globals=uses,
            leaves=leaves,
            tensors=tensors,
            storages=storages,
            records=records,
            findings=(finding,),
            written_by=origin,
            facts=((name, name),),
            flavour=name,
        ).to_html()
        text.encode()
        hostile = Page(text)
        assert set(hostile.tags) <= {*harmless.tags, "br"}
        assert hostile.tags.count("script") == harmless.tags.count("script") == 2
        assert hostile.attributes.keys() == harmless.attributes.keys()
        assert hostile.data[0]["tensors"]["name"]

    for_each(NAMES, same)


@pytest.mark.parametrize("number", [20, 3000])
def test_data_is_plain_if_small_and_says_what_is_in_the_file(number: int) -> None:
    builder = Builder()
    for place in range(number):
        builder.add(f"layers.{place}.weight", dtype=("float32", "bfloat16")[place % 2], shape=(place, 2))
    checkpoint = builder.checkpoint()
    text = checkpoint.to_html()
    assert ('type="application/json"' in text) == (number == 20)
    (data,) = Page(text).data
    assert data == json.loads(json.dumps(columns(checkpoint)))
    assert data["tensors"]["name"] == [tensor.name for tensor in checkpoint.tensors]
    shapes = [data["kinds"][kind][1] for kind in data["tensors"]["kind"]]
    assert shapes == [f"[{place}, 2]" for place in range(number)]
    assert set(data["tensors"]["piece"]) == {1}  # the storage after that of the tensor before
    assert set(data["pieces"]["at"]) == {0}  # one after the other


def test_storages_records_files_and_parts_in_columns() -> None:
    def storage(key: str, offset: int | None, file: str, stored: int = 8) -> Storage:
        return Storage(key, key, "cpu", "float32", 8, stored, offset, f"data/{key}", file)

    whole = Tensor(("w",), "w", "float32", (2,), (1,), "cpu", "b", file_offset=104)
    pieces = tuple(whole._replace(storage=key, start=(place,)) for place, key in enumerate("ac"))
    sharded = whole._replace(name="s", storage=None, kind="sharded", parts=pieces, file_offset=None)
    storages = storage("a", 10, "x"), storage("b", 100, "y", 5), storage("c", None, "x")
    records = Record("data.pkl", 0, 10**30, 10**30), Record("data/b", 100, 8, 8)
    data = columns(Checkpoint("d", "dcp", 10**30, tensors=(whole, sharded), storages=storages, records=records))
    assert data["bytes"] == 1 << 53
    assert data["pieces"]["name"] == ["data/a", "data/b", "data/c", "data.pkl", "data/b"]  # not the one in y
    assert data["pieces"]["file"] == [1, 2, 1, 0, 0]
    assert data["pieces"]["at"] == [10, 100 - 18, None, -105, 100 - (1 << 53)]
    assert data["pieces"]["lacks"] == [0, 3, 0, 0, 0]
    assert data["tensors"]["piece"] == [2, -2]
    assert data["tensors"]["inside"] == [4, 0]
    assert data["parts"] == {1: [0, 2]}
    assert data["storages"] == 3


def test_tied_tensors_and_views_are_told_apart() -> None:
    builder = Builder()
    for name in ("a", "b", "c", "d"):
        builder.add(name)
    tied = builder.tensors[1]._replace(storage="0")
    view = builder.tensors[3]._replace(storage="2", shape=(1,), stride=(1,))
    builder.tensors[1], builder.tensors[3] = tied, view
    builder.storages = [
        builder.storages[0]._replace(tensors=("a", "b")),
        builder.storages[2]._replace(tensors=("c", "d")),
    ]
    text = builder.checkpoint().to_html()
    assert "<td>a<br>b<td>the same tensor<td>16 B" in text
    assert "<td>c<br>d<td>views of one storage<td>16 B" in text


def test_without_scripts_the_first_tensors_are_listed() -> None:
    builder = Builder()
    for place in range(MAX_PLAIN + 50):
        builder.add(f"w{place}")
    text = builder.checkpoint().to_html()
    plain = text[text.index("<noscript>") : text.index("</noscript>")]
    assert f"<td>w{MAX_PLAIN - 1}<td>float32<td>[2, 2]" in plain
    assert f"w{MAX_PLAIN}<" not in plain
    assert "and 50 more" in plain


def test_a_report_is_small() -> None:
    assert len(packaged("transload.render", "page.js") + packaged("transload.render", "report.js")) < 28_000
    empty = Checkpoint("e.pt", "torch-zip", 0).to_html()
    assert len(empty.encode()) < 50_000
    builder = Builder()
    for place in range(20_000):
        layer, rest = divmod(place, 300)
        part = f"model.layers.{layer}.mlp.experts.{rest // 3}.{('gate', 'up', 'down')[rest % 3]}_proj.weight"
        builder.add(part, dtype="bfloat16", shape=(2048, 7168), device=f"cuda:{rest % 8}")
    assert len(builder.checkpoint().to_html().encode()) < 500_000


def test_several_files_have_an_overview(training: Checkpoint, hostile: Checkpoint) -> None:
    text = "".join(page([training, hostile], 3))
    assert text.count('<section class="file"') == len(Page(text).data) == 2
    assert '<a href="#file-1">' in text
    assert "1 file of 3 could not be read and is not here." in text


def test_a_report_is_recognised(training: Checkpoint) -> None:
    assert is_report(training.to_html().replace(transload.__version__, "99.0").encode())
    assert not is_report(b"<!doctype html>\n<html>")
    assert not is_report(b"PK\x03\x04")
    assert not is_report(b"")
