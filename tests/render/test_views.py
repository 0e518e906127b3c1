"""Every result in a notebook and as a page, about files and machines with hostile names."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose.fleet import server
from tests.diagnose.machines import cuinit_fails, with_facts
from tests.each import for_each
from tests.render.test_doctor import STUBBED, _poisoned
from tests.render.test_html import ATTRIBUTES, TAGS
from tests.render.test_html import Page as Fragment
from tests.render.test_html_report import Page

import transload
from transload.diagnose.compare import compare
from transload.diagnose.report import Diagnosis, judge_machine
from transload.findings import packaged
from transload.render import Reported
from transload.render.html import markup, notebook_view
from transload.render.html_report import page_of
from transload.render.lines import BLANK, Block, Chain, Item, Link, Plot, Prose, Rows, Table, Tiles, heading, note, row

EVIL = "</span></script></style><img src=x onerror=alert(1)>\u202e\x1b[31m'\"&lt;"


def state(number: float) -> dict[str, Any]:
    tensors = {f"{EVIL}{place}": torch.full((4, 4), number + place) for place in range(60)}
    tensors["nan"] = torch.tensor([float("nan"), number])
    return {"model": tensors, EVIL: f"{number}{EVIL}", f"only{number}{EVIL}": torch.zeros(3)}


def results(folder: Path) -> Iterator[Any]:
    """One of each result that commands and functions return."""
    name = "&lt;b&gt;.pt" if os.name == "nt" else "<img src=x onerror=alert(2)>.pt"
    path, other = folder / name, folder / f"other {name}"
    torch.save(state(1), path)
    torch.save(state(2), other)
    damaged = io.BytesIO(path.read_bytes()[:-9000])
    checkpoint = transload.check(path)
    yield checkpoint
    yield checkpoint.plan
    yield transload.check(path, "cuda:7")
    yield transload.is_cuda_compatible(path)
    yield transload.explain(f"RuntimeError: {EVIL}\nRuntimeError: CUDA error: invalid device ordinal {EVIL}")
    yield transload.verify(path, hashes=True, values=True)
    yield transload.verify(damaged.getvalue())
    yield transload.retag(path, to="cuda:0", dry_run=True)
    yield transload.convert(path, folder / "out.safetensors", key="model")
    yield transload.diff(path, other)
    yield transload.rescue(damaged.getvalue(), folder / "rescued.pt")
    yield judge_machine(STUBBED)
    yield poisoned()
    yield compare(
        {EVIL: judge_machine(_poisoned(with_facts(server(), torch_run__nccl="2.21.5"))), "b": poisoned(), "c": EVIL},
        silent=(f"silent {EVIL}",),
    )
    yield transload.inspect(path, stats=True)


def poisoned() -> Diagnosis:
    return judge_machine(_poisoned(cuinit_fails(server(), 34)))


def test_no_result_becomes_markup_of_its_names(tmp_path: Path) -> None:
    styles = packaged("transload.render", "notebook.css")
    kinds = set()

    def is_safe(result: Any) -> None:
        kinds.add(type(result))
        view = result._repr_html_()
        fragment = Fragment(view.replace(styles, ""))  # fails on tags that do not close
        assert set(fragment.tags) <= TAGS
        assert {name for name, _ in fragment.attributes} <= ATTRIBUTES
        page = Page(result.to_html())
        assert not {"img", "iframe", "object", "link", "form"} & {*page.tags}
        assert {*page.attributes} <= {
            *(*ATTRIBUTES, "charset", "content", "http-equiv", "lang", "name", "type", "id", "hidden", "placeholder"),
            *("aria-label", "aria-live", "role", "tabindex"),
        }
        for text in (view, result.to_html()):
            text.encode()
            assert "\x1b" not in text
            assert "\u202e" not in text

    for_each(results(tmp_path), is_safe)
    missing = {name for name in dir(transload) if is_result(getattr(transload, name))} - {k.__name__ for k in kinds}
    assert not missing


def is_result(value: object) -> bool:
    return isinstance(value, type) and (issubclass(value, Reported) or value is transload.Checkpoint)


def test_every_result_has_a_view() -> None:
    facts = {"Finding", "Machine", "Storage", "Tensor"}  # parts of results
    results = [getattr(transload, name) for name in dir(transload) if name not in facts]
    plain = [kind for kind in results if isinstance(kind, type) and hasattr(kind, "to_dict")]
    assert len(plain) >= 10
    assert all(hasattr(kind, "_repr_html_") and hasattr(kind, "to_html") for kind in plain)


def html(*blocks: Block) -> str:
    return "".join(markup(blocks))


def test_leads_say_what_text_is() -> None:
    label = '<dl><dt><span class="tl-dim">size</span></dt><dd>3 B</dd>'
    assert html(row("size", "3 B"), row("", "more")) == f"{label}<dt></dt><dd>more</dd></dl>"
    assert html(Prose("Do it.", lead=(("  → ", "good"),))) == '<div class="tl-fix">Do it.</div>'
    assert html(note("well")) == '<div class="tl-text"><span class="tl-dim">well</span></div>'
    assert html(BLANK) == ""
    sign = '<div class="tl-text"><b class="tl-bad ink">✗</b> no</div>'
    assert html(Prose("no", lead=(("✗ ", "bad"),))) == sign


def test_what_is_copied_has_no_prompt_and_keeps_its_lines() -> None:
    command = Prose("ls", lead="  $ ", whole=True)
    assert html(command, command).count("<code>ls</code>") == 2
    lines = [Prose(text, lead="  | ", whole=True) for text in ("a:", "  b: 1")]
    assert "<code>a:\n  b: 1</code>" in html(*lines)


def test_a_long_table_is_data_and_its_first_rows_are_there_without_scripts() -> None:
    rows = Rows(range(3000), lambda number: (f"w{number}", f"{number} kB", Plot([(-3, 1), (4, 2)])))
    page = Page("".join(page_of([*heading("all"), Table(rows, right=(1,), titles=("name", "size", ""), most=20)])))
    (data,) = page.data
    assert len(data["rows"]) == 3000
    assert data["rows"][7][:2] == ["w7", "7 kB"]
    assert data["rows"][7][2]["plot"][0::2] == ["2^-3", "2^5"]
    assert "w199" in page.text
    assert "w200" not in page.text
    assert page.tags.count("svg") == 200
    view = "".join(notebook_view([Table(rows)], ""))
    assert "w19<" in view
    assert "and 2,980 more" in view


def test_pictures_of_chains_and_fleets() -> None:
    link = Link(("✗", "bad"), "driver", (("gone", ""),), ((("because", "dim"),),))
    text = html(Chain([("machine", [link]), ("together", [])]), Tiles([("gpu1", "good", "fine <b>")]))
    assert Fragment(text).text == "machine✗driver gonebecausetogethergpu1"
    assert '<div class="tl-link tl-bad">' in text
    assert 'title="fine &lt;b&gt;"' in text
    assert html(Item("bad", [Prose("x")])) == '<div class="tl-finding tl-bad"><div class="tl-text">x</div></div>'


@pytest.mark.parametrize("number", [0, 1])
def test_an_empty_report_is_small(number: int) -> None:
    text = "".join(page_of([Prose("nothing")] * number))
    assert len(text.encode()) < 30_000
    assert ("<title>nothing –" if number else "<title> –") in text
