"""Measure how often ``explain`` is right: known texts in all wordings, and errors that it must not claim to know.

Usage: python bench/explain.py [PACKAGE...]

Every wording is passed bare, at the end of a traceback, with the prefix of a rank before each line, with colours and a
time stamp, and in the middle of a long log; errors of the installed torch are provoked. Complete logs of frameworks
follow, then unrelated errors, none of which may be recognised, and the time that it takes.

Last, how many of the texts in the sources of torch and related packages are known, by project: in the installed
packages, or in the wheels, source distributions and outputs of ``scripts/error_texts.py`` given as arguments. There is
no goal: most texts say what is wrong with a call, and need no explanation.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # to import tests; and this folder has an `inspect`, like the standard library

import importlib.util
import json
import logging
import re
import subprocess
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from tests.explaining.provoke import PROVOCATIONS
from tests.explaining.unrelated import PASTED, PROVOKED, SOURCES, provoked
from tests.explaining.wordings import WORDINGS, sections
from tests.release import RELEASE

import transload
from transload.explaining.logs import lines_of, split
from transload.explaining.matching import known_errors, search

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/run.py", line 3, in <module>\n    main()\n'
REPEATS = 5
LONG_LOG = "2026-01-02 03:04:05 INFO step 12 loss 0.1234 lr 1e-4\n" * 150_000


def main() -> int:
    """Print the tables; return 1 if a goal is missed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    goals = [wordings(), from_torch(), logs(), unrelated()]
    run_time()
    from_sources([Path(path) for path in sys.argv[1:] or [sysconfig.get_paths()["platlib"]]])
    return 0 if all(goals) else 1


def codes(text: str | BaseException) -> list[str]:
    """The codes of the answers to a text or an exception."""
    return [answer.code for answer in transload.explain(text, checks=False).answers]


# -- known texts

Form = Callable[[str], str]
FORMS: dict[str, Form] = {
    "bare": lambda text: text,
    "in a traceback": lambda text: text if not is_exception(text) else f"{TRACEBACK}{text}\n",
    "of a rank": lambda text: "".join(f"[rank0]: {line}\n" for line in text.splitlines()),
    "coloured and stamped": lambda text: "".join(
        f"2026-01-02T03:04:05.678Z stderr F \x1b[31m{line}\x1b[0m\r\n" for line in text.splitlines()
    ),
    "in a long log": lambda text: f"{LONG_LOG[:50_000]}{text}\n{LONG_LOG[:50_000]}",
}


def is_exception(text: str) -> bool:
    """Whether a text is the last line of a traceback, without the traceback."""
    return re.match(r"[\w.]+(?:Error|Exception): ", text) is not None


def wordings() -> bool:
    """Whether every wording is explained correctly, in every form."""
    right = [report(f"wordings, {name}", answers_to(form)) for name, form in FORMS.items()]
    return all(right)


def answers_to(form: Form) -> Iterator[tuple[str, list[str], list[str]]]:
    """The name of each wording, the codes of the answers, and the right ones."""
    for wording in WORDINGS:
        yield f"{wording.code} ({wording.where})", codes(form(wording.text)), [wording.code]


def from_torch() -> bool:
    """Whether the errors of the installed torch are explained."""
    return report(f"provoked from torch {'.'.join(map(str, RELEASE))}", provoked_answers())


def provoked_answers() -> Iterator[tuple[str, list[str], list[str]]]:
    """The same for each provocation that works with this release."""
    for provocation in PROVOCATIONS:
        if provocation.since <= RELEASE:
            with TemporaryDirectory() as folder:
                yield provocation.name, codes(provocation.error(Path(folder))), [provocation.code]


def logs() -> bool:
    """Whether the innermost cause in complete logs is reported."""
    entries = sections(Path(ROOT) / "tests" / "explaining" / "logs.txt")
    heads = ((head.rpartition(" | "), text) for head, text in entries)
    return report("logs of frameworks", ((name, codes(text), right.split()) for (name, _, right), text in heads))


def report(name: str, answers: Iterator[tuple[str, list[str], list[str]]]) -> bool:
    """Print one line, and one for each wrong answer."""
    results = list(answers)
    wrong = [(what, answered, right) for what, answered, right in results if answered != right]
    for what, answered, right in wrong:
        print(f"  wrong: {what}: answered {answered or 'nothing'}, right is {right}")
    print(f"{name:<36} {len(results) - len(wrong):4} of {len(results):4} right (goal all)")
    return not wrong


# -- other texts


def unrelated() -> bool:
    """Whether no unrelated error is recognised."""
    texts = {**{name: provoked(name) for name in PROVOKED}, **PASTED, **SOURCES}
    recognised = {name: codes(text) for name, text in texts.items()}
    for name, answered in recognised.items():
        if answered:
            print(f"  recognised: {name}: {answered}")
    count = sum(map(bool, recognised.values()))
    print(f"{'unrelated errors':<36} {count:4} of {len(texts):4} recognised (goal none)")
    return not count


# -- the texts in the sources

AREAS = {
    "torch, compiled": r"torch/lib/",
    "torch, loading and saving": (
        r"torch/(?:serialization|_weights_only|storage|_utils|hub|jit/|package/|export/|utils/serial|_tensor)"
    ),
    "torch, modules and optimizers": r"torch/(?:nn/modules|optim|utils/checkpoint)",
    "torch, sharding and RPC": r"torch/distributed/(?:fsdp|tensor|rpc|pipelining|algorithms|optim|nn|_\w+)\b",
    "torch, processes": r"torch/(?:distributed|multiprocessing|utils/data|nn/parallel)",
    "torch, devices and extensions": r"torch/",
}
CALL_ERRORS = {
    *("ValueError", "TypeError", "AssertionError", "NotImplementedError", "KeyError", "AttributeError", "IndexError"),
}
"""Exceptions that report a wrong call."""
SAMPLES = ("0", "cuda", "model.pt")
"""Values for the blanks of a text."""


def from_sources(paths: list[Path]) -> None:
    """Print how many of the texts in some packages are known."""
    counts: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    known: Counter[str] = Counter()
    fragments = [wording.text for _, error in known_errors() for wording in error.says]
    for text in {(entry["project"], entry["text"]): entry for path in paths for entry in texts(path)}.values():
        where = text["where"]
        area = next((name for name, pattern in AREAS.items() if re.match(pattern, where)), text["project"])
        # A compiled library contains the parts of a text, without the values between them.
        part = ".so" in where and any(text["text"].rstrip() in fragment for fragment in fragments)
        counts[area] += 1
        calls[area] += text["error"] in CALL_ERRORS
        known[area] += part or any(is_known(text, sample) for sample in SAMPLES)
    print(f"{'texts in the sources of':<36} {'all':>6} {'of a wrong call':>16} {'known':>6} {'share':>6}")
    areas = sorted(counts, key=lambda area: (not area.startswith("torch"), area))
    for area in areas:
        share = known[area] / counts[area]
        print(f"{area:<36} {counts[area]:6} {calls[area]:16} {known[area]:6} {share:6.1%}")
    share = known.total() / max(1, counts.total())
    print(f"{'together':<36} {counts.total():6} {calls.total():16} {known.total():6} {share:6.1%}")


def texts(path: Path) -> Iterator[dict[str, str]]:
    """The texts of a package, or of a file into which they were extracted."""
    if path.suffix == ".jsonl":
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return
    spec = importlib.util.spec_from_file_location("error_texts", Path(ROOT) / "scripts" / "error_texts.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    yield from (entry._asdict() for entry in script.texts(path))


def is_known(text: dict[str, str], sample: str) -> bool:
    """Whether a text is known, in a traceback from its file, with a sample in its blanks."""
    frame = f'  File "/env/lib/python3.11/site-packages/{text["where"]}", line {text["line"]}, in load\n    raise\n'
    error = text["error"] if re.fullmatch(r"\w+(?:Error|Exception)", text["error"]) else "RuntimeError"
    log = f"{TRACEBACK}{frame}{error}: {text['text'].replace('{}', sample)}\n"
    matches, _, _ = search(*split(lines_of(log)))
    return bool(matches)


# -- time


def run_time() -> None:
    """Print the time of the command beyond that of the interpreter, and how fast long logs are read."""
    text = WORDINGS[0].text
    bare = seconds([sys.executable, "-c", "pass"], "")
    quick = seconds([sys.executable, "-m", "transload", "explain", "--no-checks"], text)
    full = seconds([sys.executable, "-m", "transload", "explain"], text)
    print(f"a text {quick - bare:.3f} s beyond the interpreter, with checks {full - bare:.3f} s")
    random = Random(1)  # noqa: S311
    names = ["".join(random.choices("abcdefghij", k=8)) for _ in range(5_000)]
    logs = {
        "numbers": LONG_LOG,
        "other words in each line": "".join(f"step {n} {random.choice(names)} ok\n" for n in range(400_000)),
        "the word error in each line": "step 12, validation error 0.1234\n" * 250_000,
        "nothing but one error": f"{TRACEBACK}{text}\n" * 30_000,
    }
    for name, log in logs.items():
        start = time.process_time()
        found = transload.explain(log + text, checks=False).answers
        speed = len(log) / 1e6 / (time.process_time() - start)
        print(
            f"log with {name:<28} {len(log) >> 20:4} MB {speed:6.1f} MB/s, {sum(each.times for each in found):6} found"
        )


def seconds(command: list[str], text: str) -> float:
    """The CPU time of a command and its children: the best of some runs."""
    return min(once(command, text) for _ in range(REPEATS))


def once(command: list[str], text: str) -> float:
    """The CPU time of one run, whatever its exit code."""
    before = os.times()
    subprocess.run(command, input=text.encode(), stdout=subprocess.DEVNULL, check=False, cwd=ROOT)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    sys.exit(main())
