"""Measure how fast two checkpoints are compared, and in how much memory, against torch.

    python bench/diff.py [--json] [--gb N] [--repeat N] [--folder DIR]

The files are in the page cache. Each contender is a process of its own, which is measured from its start to its end;
they take turns. ``torch`` loads both files with ``mmap=True``, and computes for each tensor what the script of a
training run does: is it equal, and if not, the largest and mean absolute and relative difference and the cosine.
``torch import`` is the part of its time that only starts it. The files are equal, or every number of one is a little
different. Needs torch and numpy.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from stats import make, measure, options_of, show

TORCH = """
import sys, torch
load = lambda path: torch.load(path, mmap=True, weights_only=True)
a, b, out = load(sys.argv[1]), load(sys.argv[2]), {}
assert a.keys() == b.keys()
for name, x in a.items():
    y = b[name]
    if torch.equal(x, y):
        continue
    x, y = x.float(), y.float()
    apart = (x - y).abs()
    relative = (apart / torch.maximum(x.abs(), y.abs())).nan_to_num(0)
    cosine = torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0)
    out[name] = (int((apart != 0).sum()), apart.max().item(), apart.mean().item(), relative.max().item(),
                 relative.mean().item(), cosine.item())
"""


def main() -> int:
    """Write the files, measure, print."""
    options = options_of(__doc__)
    results, nbytes = {}, int(options.gb * 1e9)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        script, empty = Path(folder, "with_torch.py"), Path(folder, "empty.py")
        script.write_text(TORCH, encoding="utf-8")
        empty.write_text("import torch", encoding="utf-8")
        for dtype in ("float32", "bfloat16"):
            first = make(Path(folder, "a.pt"), dtype, nbytes)
            for case, seed in (("equal", 0), ("different", 1)):
                paths = str(first), str(make(Path(folder, "b.pt"), dtype, nbytes, seed))
                contenders: dict[str, tuple[str, ...]] = {
                    "transload": ("-m", "transload", "diff", *paths, "--json"),
                    "torch": (str(script), *paths),
                    "torch import": (str(empty),),
                }
                results[f"two files of {options.gb:g} GB of {dtype}, {case}"] = measure(contenders, options.repeat)
    show(results, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
