"""The site that `make docs` builds: every code is found, nothing leads nowhere, and a browser shows it as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.render.browser import CHROMIUM, Browser
from tests.test_docs import load_script

from transload._version import __version__
from transload.diagnose.rules import BY_CODE
from transload.explaining.matching import known_errors
from transload.judge.problems import rules

ROOT = Path(__file__).parent.parent
BUILDER = find_spec("properdocs") and find_spec("pygments")
SITE = pytest.mark.skipif(not BUILDER, reason="properdocs is not installed: make docs does")
SHOWN = pytest.mark.skipif(not BUILDER or not CHROMIUM or os.name == "nt", reason="there is no properdocs or Chromium")


def test_the_page_of_codes_is_up_to_date() -> None:
    script = load_script("codes_page")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python scripts/codes_page.py"


def test_the_page_of_codes_leads_to_every_code() -> None:
    text = (ROOT / "docs" / "codes.md").read_text(encoding="utf-8")
    homes = dict.fromkeys(BY_CODE, "doctor/{}.md") | dict.fromkeys(rules(), "findings.md#{}")
    homes |= {known.code: "errors.md#{}" for _, known in known_errors()}
    assert len(homes) == len(BY_CODE) + len(rules()) + sum(1 for _ in known_errors()), "a code has two meanings"
    assert [code for code, home in homes.items() if text.count(f"\n| [`{code}`]({home.format(code)}) | ") != 1] == []
    headings = {
        line.lstrip("# ")
        for page in ("errors.md", "findings.md")
        for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        if line.startswith("##")
    }
    assert homes.keys() - headings == BY_CODE.keys()


def test_links_that_lead_nowhere_or_load_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">1</a><a href="b.html#y">2</a><a href="c.html">3</a><a href="#z">4</a><a href="b.html">5</a>'
        '<a href="https://example.com/">6</a><img src="https://example.com/i.png">'
        '<script src="//example.com/s"></script>'
    )
    (tmp_path / "b.html").write_text('<h2 id="x">x</h2><img alt="" src="i.png"><a href="a.html">1</a>')
    (tmp_path / "s.css").write_text("@import 'https://example.com/s.css';")
    (tmp_path / "fine.css").write_text("a { color: red }")
    assert sorted(load_script("docs_site").broken_links(tmp_path)) == [
        "a.html: #z",
        "a.html: //example.com/s",
        "a.html: b.html#y",
        "a.html: c.html",
        "a.html: https://example.com/i.png",
        "b.html: i.png",
        "s.css: an address",
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command: list[str | Path] = [sys.executable, "-m", "properdocs", "build", "--strict", "-q", "-d", folder]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@SITE
def test_pages_show_the_version(site: Path) -> None:
    assert f"transload <i>{__version__}</i></a>" in (site / "index.html").read_text(encoding="utf-8")


@SITE
def test_every_code_has_an_address_and_is_in_the_index(site: Path) -> None:
    codes = {*BY_CODE, *rules(), *(known.code for _, known in known_errors())}
    assert {path.parent.name for path in site.glob("codes/*/index.html")} == codes
    assert '"0; url=../../doctor/U04.html"' in (site / "codes" / "U04" / "index.html").read_text(encoding="utf-8")
    _, _, index = (site / "search" / "index.js").read_text(encoding="utf-8").partition(" = ")
    titles = {title.partition(":")[0] for _, title, _, _ in json.loads(index.rstrip(";\n"))}
    assert codes - titles == set()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def visit(browser: Browser, page: Path, *, width: int = 1400, scheme: str = "light") -> None:
    browser.events.clear()
    size: dict[str, Any] = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.send("Emulation.setDeviceMetricsOverride", **size)
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.send("Page.navigate", url=page.as_uri())
    browser.wait(f"location.href === {json.dumps(page.as_uri())} && document.readyState === 'complete'")


def arrive(browser: Browser, address: str) -> None:
    """Wait until it shows an address, without asking a page that may be going away."""
    end = time.monotonic() + 60
    shown = ""
    while not shown.endswith(address):
        assert time.monotonic() < end, shown
        time.sleep(0.05)
        frame = browser.send("Page.getFrameTree")["frameTree"]["frame"]
        shown = frame["url"] + frame.get("urlFragment", "")


def found(browser: Browser, words: str) -> list[str]:
    """What a search shows, best first."""
    typed = json.dumps(words)
    browser.run(f"(box => {{ box.value = {typed}; return box.oninput(); }})(document.querySelector('[type=search]'))")
    titles: list[str] = browser.run("[...document.querySelectorAll('.results b')].map(b => b.textContent)")
    return titles


@SHOWN
def test_the_search_finds_codes_and_words_also_from_the_disk(site: Path, browser: Browser) -> None:
    visit(browser, site / "doctor" / "E01.html")
    assert found(browser, "u04")[0].startswith("U04: ")
    assert found(browser, "device-index")[0] == "device-index"
    assert found(browser, "crc-mismatch")[0] == "crc-mismatch"
    assert found(browser, "Stub library")
    assert found(browser, "no such words xyzzy") == []
    found(browser, "U04")
    enter = "document.querySelector('[type=search]').onkeydown(new KeyboardEvent('keydown', {key: 'Enter'}))"
    browser.run(f"setTimeout(() => {enter}, 100), 0")  # the answer comes before the page goes
    arrive(browser, "/doctor/U04.html")


@SHOWN
def test_light_and_dark_follow_the_system_until_the_reader_chooses(site: Path, browser: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    visit(browser, site / "index.html", scheme="dark")
    dark = browser.run(background)
    assert browser.run("document.querySelector('img[src*=dark]').checkVisibility()")
    visit(browser, site / "index.html")
    light = browser.run(background)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(17, 20, 24)")
    assert not browser.run("document.querySelector('img[src*=dark]').checkVisibility()")
    browser.run("document.querySelector('.theme').click()")
    assert browser.run(background) == dark
    visit(browser, site / "codes.html")
    assert browser.run(background) == dark
    browser.run("document.querySelector('.theme').click()")
    assert browser.run(background) == light


@SHOWN
@pytest.mark.parametrize("width", [400, 1400])
def test_pages_fit_load_nothing_from_elsewhere_and_do_not_complain(site: Path, browser: Browser, width: int) -> None:
    for page in ("index", "codes", "api", "inspect", "doctor", "performance", "doctor/U04"):
        visit(browser, site / f"{page}.html", width=width)
        assert browser.run("document.documentElement.scrollWidth") <= width, page
        assert [url for url in browser.requests if not url.startswith((site.as_uri(), "data:"))] == []
        assert not browser.complaints


@SHOWN
def test_the_address_of_a_code_leads_to_it(site: Path, browser: Browser) -> None:
    browser.send("Page.navigate", url=(site / "codes" / "device-index" / "index.html").as_uri())
    arrive(browser, "/errors.html#device-index")
