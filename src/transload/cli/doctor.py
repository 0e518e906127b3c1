"""``transload doctor``: why PyTorch does not see the GPU. Nothing is changed, and torch runs in a child only."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transload.cli.output import print_error, show, show_result
from transload.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from transload.diagnose.report import Diagnosis
    from transload.render.lines import Block

_PATIENCE = 1.0  # seconds after which a terminal shows what takes so long
_LONG_PATIENCE = 5.0  # the same if stderr is not a terminal


def add_options(_: str, option: Callable[..., object]) -> None:
    """Declare the options of ``doctor``."""
    option("--verbose", action="store_true", help="also show all facts, and where each came from")
    option("--require", choices=("cuda",), help="exit with 1 unless it is usable")
    option("--python", metavar="PATH", help="examine the environment of another interpreter")
    option("--no-torch", action="store_true", help="do not run torch, only look at its files")
    option("--timeout", metavar="SECONDS", type=_seconds, help="the longest that torch may take; all of --gather")
    option("--from", dest="saved", metavar="FILE", help="judge a machine saved by --json; - is stdin")
    option("--no-redact", action="store_true", help="keep names, home folders, hosts and GPU ids")
    option("--compare", metavar="FILE", nargs="+", help="compare machines saved by --json; - is stdin")
    option("--gather", metavar="DIR", nargs="?", const="", help="compare the machines of all ranks of this job")
    option("--explain", metavar="CODE", help="explain one cause in full, such as U04")


def _seconds(text: str) -> float:
    from argparse import ArgumentTypeError
    from math import isfinite

    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise ArgumentTypeError("it takes a number of seconds above 0")
    return seconds


def run_doctor(arguments: Namespace) -> int:
    """Examine this machine or read a saved one, report what is wrong, and return the exit code."""
    _refuse_conflicts(arguments)
    if arguments.explain is not None:
        _explain(arguments.explain, arguments.color)
        return 0
    if arguments.compare is not None or arguments.gather is not None:
        from transload.cli.compare import run_compare, run_gather

        return run_compare(arguments) if arguments.compare is not None else run_gather(arguments)
    from transload.diagnose import doctor, judge_machine
    from transload.diagnose.redact import Names, names_here, redacted

    if arguments.saved is not None:
        from transload.cli.compare import read_report
        from transload.diagnose.saved import machine_in

        where = "standard input" if arguments.saved == "-" else arguments.saved
        diagnosis, names = judge_machine(machine_in(read_report(arguments.saved), where)), Names()
    else:
        python = _interpreter(arguments.python) if arguments.python is not None else ""
        timeout = arguments.timeout or 0.0
        with _progress(redact=not arguments.no_redact) as progress:
            diagnosis = doctor(python, torch=not arguments.no_torch, timeout=timeout, progress=progress)
        names = names_here()
    if not arguments.no_redact:
        diagnosis = redacted(diagnosis, names, runnable=not arguments.json)

    def blocks(diagnosis: Diagnosis) -> Iterator[Block]:
        from transload.diagnose.report import facts, report

        yield from report(diagnosis)
        if arguments.verbose:
            yield from facts(diagnosis.machine)

    show_result(diagnosis, blocks, arguments)
    if arguments.require and not diagnosis.cuda_usable:
        print_error(UsageError("CUDA is required but not usable here"))
        return 1
    return int(not diagnosis.ok)


def _refuse_conflicts(arguments: Namespace) -> None:
    """Refuse options that would silently do nothing in combination."""
    given = {f"--{name.replace('_', '-')}" for name, value in vars(arguments).items() if value not in (None, False)}
    given |= {"--from"} if arguments.saved is not None else set()
    probing = ("--python", "--no-torch", "--timeout")
    for option, why, others in (
        ("--explain", "only prints a page", (*probing, "--verbose", "--json", "--require", "--from", "--no-redact")),
        ("--from", "examines nothing on this machine", probing),
        ("--compare", "reads reports", (*probing, "--from", "--gather", "--explain", "--no-redact", "--verbose")),
        ("--gather", "compares this very environment", ("--python", "--from", "--explain", "--verbose")),
        ("--no-torch", "runs no torch", () if "--gather" in given else ("--timeout",)),
        ("--json", "has all facts anyway", ("--verbose",)),
    ):
        if combined := " and ".join(name for name in others if {option, name} <= given):
            what = f"{option} cannot be combined with {combined}: it {why}"
            raise UsageError(what, fix="See transload doctor --help.")


def _explain(word: str, colour: str) -> None:
    """Show the page of one cause."""
    from transload.diagnose.pages import page
    from transload.diagnose.report import page as shown
    from transload.diagnose.rules import BY_CODE

    code = word.strip().upper()
    if code not in BY_CODE:
        from difflib import get_close_matches

        codes = sorted(BY_CODE)
        near = get_close_matches(code, codes, 3) or [each for each in codes if each[0] == code[:1]][:3]
        hint = f"did you mean {' or '.join(near)}?" if near else f"they run from {codes[0]} to {codes[-1]}"
        raise UsageError(f"there is no cause {word!r}; {hint}")
    show(shown(page(code)), colour)


def _interpreter(given: str) -> str:
    """The interpreter that a path, the directory of an environment, or a command on the PATH stands for."""
    from transload.diagnose.host import Host
    from transload.diagnose.probes.python import located

    executable, absent = located(Host(python=given))
    if absent or not os.access(executable, os.X_OK):
        what = "there is no Python interpreter in it" if os.path.exists(given) else "there is no such interpreter"
        raise UsageError(what, where=given, fix="Name the file, such as .venv/bin/python.")
    return executable


@contextmanager
def _progress(*, redact: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows on stderr what the command is waiting for, if that takes long.

    On a terminal it overwrites a line, which is erased at the end; elsewhere it writes only once.
    """
    from time import monotonic

    from transload.render.lines import style_of

    stream, start, shown = sys.stderr, monotonic(), 0
    terminal = stream is not None and stream.isatty()

    def progress(words: str) -> None:
        nonlocal shown
        late = monotonic() - start >= (_PATIENCE if terminal else _LONG_PATIENCE)
        if stream is None or not late or (shown and not terminal):
            return
        from transload.diagnose.redact import names_here, redacted
        from transload.machine import Machine
        from transload.render.words import printable

        words = redacted(Machine(transload=words), names_here()).transload if redact else words
        style, line = style_of(stream), printable(words, None)
        if not terminal:
            line = f"transload: still {line}\n"
        elif len(line) + 3 > style.width:
            line = f"…{line[4 - style.width :]}"
        line = style.text(f"\r{line} …" if terminal else line)
        print(f"{line:<{shown}}", end="", file=stream, flush=True)
        shown = len(line)

    try:
        yield progress
    finally:
        if shown and terminal:
            print(f"\r{' ' * shown}\r", end="", file=stream, flush=True)
