"""Write docs/findings.md: one heading for each code a finding can have, from the tables that make them.

Usage: python scripts/findings_page.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from transload.judge.problems import RULES, Rule

PAGE = Path(__file__).parent.parent / "docs" / "findings.md"
HEAD = """\
# Findings

Every finding of `transload inspect` and `transload check` has a code, stable between releases. In the JSON it is
`findings[].code`, and `doc` leads here. This page is written by `scripts/findings_page.py` from the same tables the
program uses.

What the two verdicts mean is in [safety.md](safety.md). A finding without an effect is a remark. In a report, FILE is
the name of the file itself, and what several findings advise is said once.
"""

# Findings that come from judging names and values, not from a problem a reader met.
JUDGED: dict[str, Rule] = {
    "dangerous-globals": Rule("loading it would run dangerous functions", "error", "dangerous"),
    "dangerous-use": Rule("it uses the loader in a way no checkpoint does", "error", "dangerous"),
    "odd-use": Rule("it holds calls no loader would accept", "warning", "unknown"),
    "trusted-use": Rule("it uses allowed names in unusual ways", "warning", "needs-trust"),
    "needs-trust": Rule("torch.load refuses names in it unless you allow them", "warning", "needs-trust"),
    "rare-opcodes": Rule("torch.load refuses it: weights_only=True does not know its pickle protocol", "warning"),
    "device-objects": Rule("it holds torch.device values, which map_location does not move", "note"),
    # Of `transload check`: what stands in the way on one machine.
    "cuda-only-package": Rule("it needs a package that runs on NVIDIA GPUs only, and there is none here", "warning"),
    "is-a-program": Rule("it is a program, or one piece of a whole, and not loaded as an object", "error"),
    "missing-package": Rule("it needs a package that is not installed", "error"),
    "no-such-device": Rule("it was asked onto a device that is not here", "error"),
    "no-torch": Rule("there is no torch here to load it with", "error"),
    "torch-too-old": Rule("it holds dtypes that this torch does not have", "error"),
    "saved-elsewhere": Rule("it records that it was saved with another torch or on other hardware", "note"),
    "tags-elsewhere": Rule("plain torch.load wants a device that is not here", "note"),
    "other-architecture": Rule("it holds compiled code that this machine does not run", "error"),
    "too-little-memory": Rule("it does not fit where it would land", "error"),
}

# What a title cannot hold.
WHY: dict[str, str] = {
    "dangerous-globals": (
        "The file asks the loader to call functions that run commands or source text, open files, talk to the "
        "network, load another pickle, or reach any attribute by name. No checkpoint needs them."
    ),
    "dangerous-use": (
        "For example: it changes a class for the whole process, asks for a name by number, calls something it has"
        " computed, or gives a size where data belongs, which allocates that much."
    ),
    "needs-trust": (
        "The evidence lists all names with what they are for, and the fix is the lines that allow them, all at "
        "once (torch names only the first). Allowing a class means that its code runs: do it for files whose "
        "author you trust. The tensors themselves can be listed without any of it, as you see, and `transload convert` "
        "takes them out without any of it."
    ),
    "device-objects": (
        "A `torch.device` in the arguments or the configuration stays what it was: only storages are moved."
    ),
    "cuda-only-package": (
        "flash-attn, bitsandbytes, apex and others are built for CUDA, and importing them fails or helps nothing "
        "without. The weights themselves need none of them."
    ),
    "missing-package": (
        "A pickled object is only a reference to its class: the class must be importable under the same name, from the"
        " same package. Where the package is a well-known one the fix installs it; for any other name it is the code "
        "of a project, and a package that happens to have its name on PyPI may be a trap."
    ),
    "other-architecture": (
        "Tensors carry no CUDA version and load under any. Machine code does depend on the GPU it was compiled for, and"
        " PTX on a driver that can compile it."
    ),
    "too-little-memory": (
        "The bytes that would land on a device are compared with what is free of it, before any of them is read. The "
        "evidence says by how much it is too little, and the fix what would fit."
    ),
    "crc-mismatch": (
        "torch never compares checksums (it is built without), so such a file loads with wrong numbers, or with a"
        " renamed tensor, and no word."
    ),
    "legacy-unlisted": (
        "The list of storages at the end of the file omits one that the object uses. torch 2.13 returns the "
        "tensor all the same, filled with whatever was in memory."
    ),
    "zip-shifted": (
        "torch reads the directory where the end record says it is; `zipfile`, and every scanner built on it, "
        "computes the place from the end of the file. Where the two differ, they see two different archives."
    ),
    "zip-duplicate-name": (
        "torch compares names without regard to case over an unstable sort: which of two equal names it reads "
        "depends on how many records the archive has."
    ),
    "zip-compressed": (
        "torch never compresses a storage. Read through `mmap=True`, the compressed bytes would be taken for numbers."
    ),
    "zip-no-directory": (
        "The directory lies at the end of a zip file, so a cut-off file has none. torch gives up there; the "
        "records can still be found one after the other, and the other findings say what is whole."
    ),
    "pickle-ambiguous": (
        "Loaders treat the borders of pickle frames differently: the same bytes can be a text to one and a call "
        "to another (python/cpython#154848). Writers never produce that."
    ),
    "storage-size": ("torch before 2.10, and every torch under `mmap=True`, reads foreign memory for such a tensor."),
    "tree-too-large": (
        "Objects can be shared under any number of names for two bytes each. What was found is shown; the rest is not."
    ),
    "zeros-at-end": ("Space was reserved and never written: the disk ran full, or a copy was interrupted."),
    "shard-outside": ("An index must name files beside it. One that names others could make a loader read anything."),
}


def main() -> int:
    """Write the page, or with ``--check`` say whether it is up to date."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The whole page."""
    entries = {**JUDGED, **RULES}
    return "\n".join([HEAD, *(section(code, entries[code]) for code in sorted(entries))])


def section(code: str, rule: Rule) -> str:
    """One code: what it says, what it does to the verdicts, what to do."""
    effects = [f"safety at best `{rule.safety}`"] if rule.safety != "data-only" else []
    effects += [f"integrity at best `{rule.integrity}`"] if rule.integrity != "whole" else []
    lines = [f"## {code}", "", f"*{rule.severity}*: {rule.title}.", ""]
    if code in WHY:
        lines += [textwrap.fill(WHY[code], 118, break_on_hyphens=False), ""]
    if effects:
        lines += [f"Effect: {'; '.join(effects)}.", ""]
    lines += [f"- `{step[2:]}`" if step.startswith("$ ") else f"- {step}" for step in rule.fix]
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(main())
