from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.render.browser import CHROMIUM, Browser
from tests.render.conftest import HOSTILE, Builder
from tests.render.test_doctor import BUILD, CACHE, NODES, NOTE, STUB, STUBBED, diagnosed

from transload.checkpoint import Checkpoint
from transload.comparing.report import Diff, TensorDiff, TensorSide
from transload.contents import TensorStats
from transload.diagnose.report import Muted, drawn, further
from transload.findings import Finding
from transload.opening.numbers import ValuesDiff
from transload.render.html_report import page, page_of

pytestmark = pytest.mark.skipif(not CHROMIUM or os.name == "nt", reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report about 20,000 tensors."""
    builder = Builder()
    for number in range(20_000):
        layer, expert = divmod(number, 400)
        dtype = "float32" if expert == 7 else "bfloat16"
        builder.add(f"model.layers.{layer}.experts.{expert}.weight", dtype=dtype, shape=(64, 1 + expert))
    path = tmp_path_factory.mktemp("report") / "large.html"
    path.write_text(builder.checkpoint().to_html(), encoding="utf-8")
    return path


FIRST = "document.querySelector('.window .row:not(.none) .f-name').textContent"
LAST = "[...document.querySelectorAll('.window .f-name')].at(-1).textContent"
TOTAL = "document.querySelector('.body').ariaRowCount"
DRAWN = "document.querySelector('.map canvas').toDataURL()"


def find(browser: Browser, words: str) -> None:
    browser.run(f"(box => {{ box.value = '{words}'; box.oninput(); }})(document.querySelector('[type=search]'))")


def test_nothing_complains_and_nothing_is_requested(browser: Browser, large: Path) -> None:
    browser.open(large)
    assert not browser.complaints
    assert browser.requests == [large.as_uri()]


def test_a_script_of_the_page_cannot_reach_a_network(browser: Browser, large: Path) -> None:
    browser.open(large)
    assert browser.run("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert [complaint for complaint in browser.complaints if "Content Security Policy" in str(complaint)]


def test_the_last_of_20000_rows_is_there_after_scrolling(browser: Browser, large: Path) -> None:
    browser.open(large)
    assert browser.run(TOTAL) == "20000"
    assert browser.run(FIRST) == "model.layers.0.experts.0.weight"
    browser.run("document.querySelector('.body').scrollTop = 1e9")
    browser.wait(f"{LAST} === 'model.layers.49.experts.399.weight'")
    assert browser.run("document.querySelectorAll('.window .row').length") < 100
    seen = "[...document.querySelectorAll('.window .row')].at(-1).getBoundingClientRect().bottom"
    assert abs(browser.run(f"{seen} - document.querySelector('.body').getBoundingClientRect().bottom")) < 2


def test_rows_are_sorted_by_a_click_on_a_title(browser: Browser, large: Path) -> None:
    browser.open(large)
    title = "document.querySelector('.head .f-{}')"
    browser.run(f"{title.format('bytes')}.click()")
    assert browser.run(FIRST) == "model.layers.0.experts.399.weight"
    assert browser.run(f"{title.format('bytes')}.ariaSort") == "descending"
    browser.run(f"{title.format('name')}.click(), {title.format('name')}.click()")
    assert browser.run(FIRST) == "model.layers.49.experts.399.weight"
    browser.run(f"{title.format('name')}.click()")
    assert browser.run(FIRST) == "model.layers.0.experts.0.weight"


def test_rows_are_filtered_and_the_map_shows_where_they_are(browser: Browser, large: Path) -> None:
    browser.open(large)
    before = browser.run(DRAWN)
    find(browser, "layers.3. FLOAT32")
    # bfloat16 is another word; layers.3. is not layers.30.
    assert browser.run(TOTAL) == "1"
    assert browser.run(FIRST) == "model.layers.3.experts.7.weight"
    assert browser.run(DRAWN) != before
    find(browser, "")
    assert browser.run(TOTAL) == "20000"
    assert browser.run(DRAWN) == before


def test_a_click_on_the_map_zooms_the_table_too(browser: Browser, large: Path) -> None:
    browser.open(large)
    click = "document.querySelector('.map canvas').dispatchEvent(new MouseEvent('click', {clientX: %s, clientY: %s}))"
    at = "document.querySelector('.map canvas').getBoundingClientRect()"
    browser.run(click % (f"{at}.x + 70", f"{at}.y + 70"))
    inside = int(browser.run(TOTAL))
    assert 1 < inside < 20_000
    browser.run("document.querySelector('.crumbs button').click()")
    assert browser.run(TOTAL) == "20000"


def test_bytes_are_divided_another_way_on_a_switch(browser: Browser, large: Path) -> None:
    browser.open(large)
    ways = browser.run("[...document.querySelectorAll('.switch button')].map(way => way.textContent).join()")
    assert ways == "module,dtype"  # there is one device, and one file
    before = browser.run(DRAWN)
    browser.run("document.querySelectorAll('.switch button')[1].click()")
    assert browser.run("document.querySelectorAll('.switch button')[1].ariaPressed") == "true"
    assert browser.run("document.querySelector('.legend').textContent").startswith("bfloat16 ")
    assert browser.run(DRAWN) != before


@pytest.mark.parametrize("width", [1400, 400])
def test_light_and_dark(browser: Browser, large: Path, width: int) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(large, width=width, scheme="dark")
    dark = browser.run(colour), browser.run(DRAWN)
    browser.open(large, width=width)
    light = browser.run(colour), browser.run(DRAWN)
    assert light[0] == "rgb(245, 246, 248)"
    assert dark[0] == "rgb(17, 20, 24)"
    assert light[1] != dark[1]
    browser.run("document.getElementById('theme').click()")
    assert (browser.run(colour), browser.run(DRAWN)) == dark
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_hostile_names_are_shown_and_do_nothing(browser: Browser, hostile: Checkpoint, tmp_path: Path) -> None:
    names = (*HOSTILE, "</script><script>alert(2)</script>", "<!--<script>", "\u2028", "__proto__", "constructor")
    builder = Builder()
    for number, name in enumerate(names):
        builder.add(f"{name}{number}", dtype=("float32", "int8")[number % 2])
    bad = replace(builder.checkpoint("<img src=x onerror=alert(3)>"), findings=hostile.findings)
    for copies in (1, 200):  # plain and packed
        path = tmp_path / f"{copies}.html"
        path.write_text("".join(page([hostile, *[bad] * copies][: 2 if copies == 1 else None], 2)), encoding="utf-8")
        browser.open(path)
        browser.run("location.hash = 'file-1'")
        browser.wait("!document.getElementById('file-1').hidden")
        browser.wait(f"document.querySelectorAll('#file-1 .window .row').length === {len(names)}")
        shown = browser.run("document.getElementById('file-1').querySelector('.window').textContent")
        assert "</script><script>alert(2)</script>" in shown
        assert "<script>alert(1)</script>" in shown
        assert not [event for event in browser.events if event["method"] == "Page.javascriptDialogOpening"]
        assert not browser.complaints
        assert browser.run("document.querySelectorAll('img, iframe, object').length") == 0
        assert set(browser.requests) <= {path.as_uri(), f"{path.as_uri()}#file-1"}


def test_a_command_is_copied_without_its_prompt(browser: Browser, training: Checkpoint, tmp_path: Path) -> None:
    finding = Finding("truncated", "error", "it ends early", fix=("Do this:", "$ transload rescue 'a b.pt' new.pt"))
    path = tmp_path / "report.html"
    path.write_text(replace(training, findings=(finding,)).to_html(), encoding="utf-8")
    browser.open(path)
    browser.run("window.copied = '', document.execCommand = () => { window.copied = getSelection().toString() }")
    browser.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    browser.run("document.querySelector('.copy').click()")
    browser.wait("document.querySelector('.copy').textContent === 'Copied'")
    assert browser.run("window.copied") == "transload rescue 'a b.pt' new.pt"


def test_the_layout_names_what_lies_there(browser: Browser, large: Path) -> None:
    browser.open(large)
    browser.run(
        "(strip => { const at = strip.getBoundingClientRect();"
        " strip.dispatchEvent(new MouseEvent('mousemove', {clientX: at.right - 2, clientY: at.y + 9})); })"
        "(document.querySelector('.strips canvas'))"
    )
    assert "model.layers.49.experts." in browser.run("document.querySelector('.tip').textContent")
    assert browser.run("document.querySelector('.layout .legend').textContent").startswith("tensors ")


# -- the reports of other commands

ROWS = 20_000


@pytest.fixture(scope="module")
def doctors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "doctor.html"
    diagnosis = diagnosed(STUBBED, BUILD, STUB, CACHE, NOTE, muted=(Muted(NODES, "U04"),))
    path.write_text("".join(page_of(drawn(diagnosis), "doctor", further(diagnosis))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report about 20,000 tensors that differ; the names are hostile."""
    path = tmp_path_factory.mktemp("diff") / "diff.html"
    side = TensorSide("float32", (2, 2), "cpu")
    tensors = []
    for place in range(ROWS):
        most = float(f"{(place * 7919) % ROWS + 1}e-9")
        values = ValuesDiff(4, 4, most, most / 2, None, None, None, 0)
        name = f"{HOSTILE[place % len(HOSTILE)]}w{place}"
        tensors.append(TensorDiff(name, "different", differs=("values",), a=side, b=side, values=values))
    diff = Diff("<img src=x>.pt", "b.pt", "torch-zip", "torch-zip", tuple(tensors), (), 0, False, (), 0.0, 0.0, 1.0)
    path.write_text(diff.to_html(), encoding="utf-8")
    return path


def test_reports_of_other_commands_complain_and_ask_for_nothing(
    browser: Browser, doctors: Path, differences: Path
) -> None:
    for path in (doctors, differences):
        for width, scheme in ((1400, "light"), (400, "dark")):
            browser.open(path, width=width, scheme=scheme)
            assert not browser.complaints
            assert browser.requests == [path.as_uri()]
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run("document.querySelectorAll('img, iframe, object').length") == 0


def test_the_doctors_fix_is_copied_and_the_cause_stands_out_in_the_chain(browser: Browser, doctors: Path) -> None:
    browser.open(doctors)
    browser.run("window.copied = '', document.execCommand = () => { window.copied = getSelection().toString() }")
    browser.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    browser.run("document.querySelector('.card .copy').click()")
    browser.wait("document.querySelector('.copy').textContent === 'Copied'")
    assert browser.run("window.copied") == "pip install"
    bad = "[...document.querySelectorAll('.tl-link.tl-bad')].map(link => link.textContent).join()"
    assert "[U04]" in browser.run(bad)
    titles = browser.run("[...document.querySelectorAll('h2')].map(title => title.textContent.trim()).join()")
    assert titles.startswith("From the card to torch,Evidence for T01,Other findings 3,")
    # The two columns do not overlap, and each link is below the one before.
    boxes = browser.run(
        "[...document.querySelectorAll('.tl-group')].map(group => [...group.querySelectorAll('.tl-link')]"
        ".map(link => link.getBoundingClientRect()).map(({top, bottom, left, right}) => [top, bottom, left, right]))"
    )
    assert all(before[1] <= after[0] for group in boxes for before, after in pairwise(group))
    machine, python, both = boxes
    assert machine[0][3] < python[0][2]
    assert max(machine[-1][1], python[-1][1]) <= both[0][0]


def test_differences_are_sorted_as_numbers_and_filtered(browser: Browser, differences: Path) -> None:
    browser.open(differences)
    column = "[...document.querySelectorAll('.window .row')].slice(0, 3).map(row => row.children[2].textContent).join()"
    assert browser.run(TOTAL) == str(ROWS)
    assert browser.run(column) == "2e-05,2e-05,2e-05"  # the largest first
    title = "document.querySelectorAll('.head button')[2]"
    browser.run(f"{title}.click(), {title}.click()")
    assert browser.run(f"{title}.ariaSort") == "ascending"
    assert browser.run(column) == "1e-09,2e-09,3e-09"
    browser.run("document.querySelector('.body').scrollTop = 1e9")
    browser.wait("document.querySelectorAll('.window .row')[5].ariaRowIndex > 19000")
    assert browser.run("document.querySelectorAll('.window .row').length") < 100
    find(browser, "alert(1)</script>w4")
    shown = browser.run("document.querySelector('.window').textContent")
    assert "<script>alert(1)</script>w4" in shown
    browser.run("document.querySelector('.window .row').click()")
    assert "<script>alert(1)</script>w4" in browser.run("document.querySelector('.detail').textContent")
    assert not browser.complaints


def test_histograms_are_drawn(browser: Browser, tmp_path: Path) -> None:
    builder = Builder()
    for place in range(100):
        builder.add(f"w{place}")
    stats = tuple(
        TensorStats(t.name, t.dtype, t.shape, 4, 0.5, 2.0, 1.0, 0.5, histogram=((-1, 1), (place, 3)))
        for place, t in enumerate(builder.tensors)
    )
    path = tmp_path / "stats.html"
    path.write_text(replace(builder.checkpoint(), stats=stats).to_html(), encoding="utf-8")
    browser.open(path)
    assert browser.run("document.querySelectorAll('.card.explorer .window .row').length") > 10
    plot = "document.querySelector('.grid .window .row:nth-child(6) .plot')"
    assert browser.run(f"{plot}.textContent") == "2^-12^-1 … 2^62^6"
    assert browser.run(f"{plot}.querySelector('path').getBoundingClientRect().width") > 20
    assert browser.run(f"{plot}.querySelector('path').getAttribute('d')") == "M0 16V10.67H1V16M6 16V0.00H7V16"
    assert not browser.complaints
