"""What the site of `make docs` has besides the pages: dark pictures, the index of the search, an address for each code.

A link that leads nowhere stops the build, and so does anything that a page would load from elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
_ATTRIBUTE = re.compile(r'<(\w+)[^<>]*? (?:href|src|srcset)="([^"]*)"')
_ID = re.compile(r' id="([^"]*)"')
_IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]*)-light\.webp" ?/?>')
_CODE = re.compile(r'<td><a href="([^"]+)"><code>([\w-]+)</code></a></td>')
MOVED = """\
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{code}</title><link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0; url=../../{target}">
<p><a href="../../{target}">{code}</a></p></html>
"""


def on_config(config: Any) -> Any:
    """A hook for the settings: the version, for the head of each page."""
    version = runpy.run_path(str(ROOT / "src" / "transload" / "_version.py"))["__version__"]
    config["extra"]["version"] = version
    return config


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """A hook for the text of a page: a picture that has a dark one is followed by it, and both lead to full size."""
    here = Path(page.file.abs_src_path).parent

    def pictures(found: re.Match[str]) -> str:
        alt, name = found.groups()
        dark = f"{name}-dark.webp"
        both = dark not in html and (here / dark).exists()
        names = {"on-light": f"{name}-light.webp", "on-dark": dark} if both else {"": f"{name}-light.webp"}
        return "".join(
            f'<a class="{kind}" href="{file}"><img alt="{alt}" src="{file}" loading="lazy"></a>'
            for kind, file in names.items()
        )

    return _IMAGE.sub(pictures, html)


def on_post_build(*, config: Any, **_: Any) -> None:
    """A hook for the complete site."""
    site = Path(config["site_dir"])
    index = site / "search" / "search_index.json"
    rows = json.dumps(list(sections(json.loads(index.read_text(encoding="utf-8"))["docs"])), ensure_ascii=False)
    (site / "search" / "index.js").write_text(f"window.searchIndex = {rows};\n", encoding="utf-8")
    index.unlink()
    for target, code in _CODE.findall((site / "codes.html").read_text(encoding="utf-8")):
        page = site / "codes" / code / "index.html"
        page.parent.mkdir(parents=True)
        page.write_text(MOVED.format(code=code, target=target), encoding="utf-8")
    if broken := list(broken_links(site)):
        raise SystemExit("\n".join(["make docs: these lead nowhere:", *broken]))


def sections(entries: list[dict[str, str]]) -> Iterator[tuple[str, str, str, str]]:
    """The address, title, text and page of each section. The builder also has every page as a whole, before them."""
    page = ""
    for entry in entries:
        address, title = entry["location"], entry["title"]
        if "#" not in address:
            page = title
        else:
            first = address.partition("#")[0] if title == page else address
            yield first, title, " ".join(entry["text"].split()), page


def broken_links(site: Path) -> Iterator[str]:
    """Every link of a site to a file or a place that is not there, and everything but a link that leads out of it."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    ids = {page: {"", *map(unescape, _ID.findall(text))} for page, text in pages.items()}
    for page, text in pages.items():
        for tag, link in set(_ATTRIBUTE.findall(text)):
            if re.match(r"[a-z]+:|//", link):
                found = tag == "a" or link.startswith("data:")
            else:
                path, _, place = unescape(link).partition("#")
                target = Path(os.path.normpath(page.parent / unquote(path))) if path else page
                found = place in ids[target] if target in ids else target.is_file()
            if not found and page.name != "404.html":  # that one is shown in the place of any page
                yield f"{page.relative_to(site)}: {link}"
    for file in (*site.glob("*.css"), *site.glob("*.js")):
        if re.search("https?://|@import|url", file.read_text(encoding="utf-8")):
            yield f"{file.name}: an address"
