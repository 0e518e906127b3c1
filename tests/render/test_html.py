from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from transload.checkpoint import Checkpoint, Part
from transload.findings import Finding
from transload.render.checkpoint import TRUSTED
from transload.render.html import MAX_TWIGS
from transload.render.lines import GLUE

# What reports consist of: no script, image or link.
TAGS = {
    *("div", "style", "pre", "span", "b", "i", "dl", "dt", "dd", "details", "summary", "code"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "path"),
}
ATTRIBUTES = {"class", "style", "open", "title", "viewbox", "preserveaspectratio", "d"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def test_html_is_well_formed_and_has_no_script(
    transformer: Checkpoint, training: Checkpoint, web_page: Checkpoint, hostile: Checkpoint
) -> None:
    for checkpoint in (transformer, training, web_page, hostile):
        page = Page(checkpoint._repr_html_())
        assert set(page.tags) <= TAGS
        assert {name for name, _ in page.attributes} <= ATTRIBUTES


def test_html_has_no_external_references(transformer: Checkpoint) -> None:
    assert not re.search(r"https?:|url\(|@import|src=", transformer._repr_html_())


def test_names_are_escaped(hostile: Checkpoint) -> None:
    text = hostile._repr_html_()
    assert "<script" not in text
    assert "<img" not in text
    assert "<b>x" not in text
    assert "<script>alert(1)</script>" in Page(text).text
    assert all(char.isprintable() or char in f"\n{GLUE}" for char in text)
    text.encode()


def test_html_has_a_plain_copy_for_viewers_without_css(transformer: Checkpoint) -> None:
    text = transformer._repr_html_()
    plain = re.search(r'<pre class="tl-plain">(.*?)</pre>', text, re.DOTALL)
    assert plain
    assert "6.74 billion parameters" in plain[1]
    assert '<div class="tl-rich" style="display:none">' in text


def test_html_is_bounded_and_counts_what_is_left_out(transformer: Checkpoint) -> None:
    tensor = transformer.tensors[0]
    many = tuple(tensor._replace(name=f"{word}.{n}x", shape=(n,)) for word in ("a", "b") for n in range(3000))
    parts = tuple(Part(f"part {n}", "shard", n) for n in range(100))
    text = replace(transformer, tensors=many, parts=parts)._repr_html_()
    assert text.count('class="tl-line"') <= MAX_TWIGS + len(parts)
    assert "more are not shown" in text
    assert "and 40 more" in text
    assert len(text) < 300_000


def test_code_in_a_fix_is_preceded_by_a_warning_about_trust(training: Checkpoint) -> None:
    finding = Finding("needs-trust", "warning", "names", fix=("import torch", "with torch:", "Ask its author."))
    text = replace(training, findings=(finding,))._repr_html_()
    code = '<div class="tl-code"><code>import torch\nwith torch:</code></div>'
    assert f'<div class="tl-fix">{TRUSTED}</div>{code}<div class="tl-fix">Ask' in text


def test_bars_show_the_share_of_each_dtype(training: Checkpoint) -> None:
    widths = [float(width) for width in re.findall(r"width:([0-9.]+)%", training._repr_html_())]
    assert len(widths) == len(training.dtypes)
    assert 99 <= sum(widths) <= 101
