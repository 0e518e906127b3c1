"""The HTML report: its size, the time to make it, and how a browser copes with it.

Usage: python bench/report.py [TENSORS]

Chromium is needed for the second half, which opens the report five times, each in a new page.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "src")]  # not this folder: its `inspect` would hide the standard library's

from tests.render.browser import CHROMIUM, Browser
from tests.render.conftest import Builder

from transload.checkpoint import Checkpoint

PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
SCROLL = """
(async () => {
  const body = document.querySelector(".body"), gaps = [];
  let before = await new Promise(requestAnimationFrame), bare = 0;
  for (let frame = 0; frame < 120; frame++) {
    body.scrollTop += body.scrollHeight / 120;
    const now = await new Promise(requestAnimationFrame);
    await new Promise(resolve => setTimeout(resolve));
    const seen = body.getBoundingClientRect(), rows = document.querySelectorAll(".window .row");
    const first = rows[0].getBoundingClientRect(), last = rows[rows.length - 1].getBoundingClientRect();
    if (first.top > seen.top + 1 || last.bottom < seen.bottom - 1) bare++;
    gaps.push(now - before);
    before = now;
  }
  return [Math.max(...gaps), bare];
})()
"""


def made(tensors: int) -> Checkpoint:
    """A mixture of experts: names as long as real ones, on eight devices."""
    builder = Builder()
    for place in range(tensors):
        layer, rest = divmod(place, 300)
        part = f"model.layers.{layer}.mlp.experts.{rest // 3}.{('gate', 'up', 'down')[rest % 3]}_proj.weight"
        builder.add(part, dtype="bfloat16", shape=(2048, 7168), device=f"cuda:{rest % 8}")
    return builder.checkpoint()


def main() -> None:
    """Measure, and print what was measured."""
    tensors = int(sys.argv[1]) if sys.argv[1:] else 20_000
    checkpoint = made(tensors)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        text = checkpoint.to_html()
        times.append(time.perf_counter() - start)
    print(f"{tensors:,} tensors: {len(text.encode()):,} bytes, made in {median(times):.2f} s")
    if not CHROMIUM:
        print("there is no Chromium")
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "report.html")
        path.write_text(text, encoding="utf-8")
        browser = Browser(Path(folder, "profile"))
        try:
            paints, ready = [], []
            for _ in range(5):
                browser.open(path)
                browser.wait(f"({PAINT}) > 0")
                paints.append(browser.run(PAINT))
                ready.append(browser.run("performance.getEntriesByName('ready')[0].startTime"))
                assert not browser.complaints
                assert browser.requests == [path.as_uri()]
            slowest, bare = browser.run(SCROLL)
        finally:
            browser.close()
    print(f"first paint after {median(paints):.0f} ms, map and table after {median(ready):.0f} ms")
    print(f"120 frames of scrolling: the slowest {slowest:.0f} ms, rows missing in {bare}")


if __name__ == "__main__":
    main()
