"""``transload doctor``: why PyTorch does not see the GPU. It changes nothing, and runs torch only in a child."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep, time
from typing import TYPE_CHECKING

from transload.cli.output import print_error, refuse_page, show, show_result, write_page
from transload.credentials import without_credentials
from transload.errors import CannotReadError, TransloadError, UsageError

if TYPE_CHECKING:
    from transload.diagnose.compare import Comparison
    from transload.diagnose.report import Diagnosis
    from transload.render.lines import Block

_PATIENCE = 1.0  # seconds after which a terminal shows what takes so long
_LONG_PATIENCE = 5.0  # the same if stderr is not a terminal
_LONGEST_REPORT = 1 << 26
_LONGEST = 1 << 30  # of all reports in one stream


def run_doctor(arguments: Namespace) -> int:
    """Examine this machine or read a saved one, report what is wrong, and return the exit code."""
    # refuse options that would silently do nothing in combination
    given = {f"--{name.replace('_', '-')}" for name, value in vars(arguments).items() if value not in (None, False)}
    given |= {"--from"} if arguments.saved is not None else set()
    probing = ("--python", "--no-torch", "--timeout")
    for option, why, others in (
        ("--explain", "only prints a page", (*probing, "--verbose", "--json", "--require", "--from", "--no-redact")),
        ("--from", "examines nothing on this machine", probing),
        ("--compare", "reads reports", (*probing, "--from", "--gather", "--explain", "--no-redact", "--verbose")),
        ("--gather", "compares the environment it runs in", ("--python", "--from", "--explain", "--verbose")),
        ("--no-torch", "does not run torch", () if "--gather" in given else ("--timeout",)),
        ("--json", "has all facts anyway", ("--verbose",)),
    ):
        if combined := " and ".join(name for name in others if {option, name} <= given):
            what = f"{option} cannot be combined with {combined}: it {why}"
            raise UsageError(what, fix="See transload doctor --help.")
    if arguments.explain is not None:
        from transload.diagnose.report import page as page_blocks
        from transload.diagnose.rules import BY_CODE
        from transload.diagnose.tables import page

        code, codes = arguments.explain.strip().upper(), sorted(BY_CODE)
        if code not in codes:
            from difflib import get_close_matches

            near = get_close_matches(code, codes, 3) or [cause for cause in codes if cause[0] == code[:1]][:3]
            hint = f"did you mean {' or '.join(near)}?" if near else "docs/doctor/README.md lists all causes"
            raise UsageError(f"there is no cause {arguments.explain!r}; {hint}")
        about = [*page_blocks(page(code))]
        result, written = write_page(about, arguments, 0)
        show([*about, *written], arguments.color)
        return result
    if arguments.compare is not None:
        return _compare(arguments)
    if arguments.gather is not None:
        return _gather(arguments)
    from transload.diagnose.redact import Names, names_here, redacted

    if arguments.saved is not None:
        from transload.diagnose.report import judge_machine
        from transload.diagnose.saved import machine_in

        where = "standard input" if arguments.saved == "-" else arguments.saved
        diagnosis, names = judge_machine(machine_in(_read_report(arguments.saved), where)), Names()
    else:
        from transload.diagnose import doctor

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

    from transload.diagnose.report import drawn, further

    code = int(not diagnosis.ok or bool(arguments.require and not diagnosis.cuda_usable))
    code = show_result(diagnosis, blocks, arguments, code, drawn=drawn, folded=further(diagnosis))
    if arguments.require and not diagnosis.cuda_usable:
        print_error(UsageError("CUDA is required but not usable here"))
    return code


def _interpreter(given: str) -> str:
    """Find the interpreter by its path, the directory of its environment, or its name on PATH."""
    from transload.diagnose.host import Host
    from transload.diagnose.probes.python import located

    executable, absent = located(Host(python=given))
    if absent or not os.access(executable, os.X_OK):
        what = "there is no Python interpreter in it" if os.path.exists(given) else "there is no such interpreter"
        raise UsageError(what, where=given, fix="Name the file, such as .venv/bin/python.")
    return executable


@contextmanager
def _progress(*, redact: bool) -> Iterator[Callable[[str], None]]:
    """Provide a function that shows on stderr what the command is waiting for, once that takes long.

    On a terminal it overwrites one line, which is erased at the end; elsewhere it writes only once.
    """
    stream, start, shown = sys.stderr, monotonic(), 0
    terminal = stream is not None and stream.isatty()

    def progress(words: str) -> None:
        nonlocal shown
        late = monotonic() - start >= (_PATIENCE if terminal else _LONG_PATIENCE)
        if stream is None or not late or (shown and not terminal):
            return
        from transload.diagnose.redact import names_here, redacted
        from transload.machine import Machine
        from transload.render.lines import style_of
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


# -- the reports of many machines, judged and compared


def _read_report(path: str, longest: int = _LONGEST_REPORT) -> str:
    """Read the text of a report; ``-`` is standard input. PowerShell redirects output as UTF-16."""
    where = "standard input" if path == "-" else path
    try:
        if path == "-":
            data = sys.stdin.buffer.read(longest + 1) if sys.stdin is not None else b""
        else:
            with open(path, "rb") as stream:
                data = stream.read(longest + 1)
    except (OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        raise CannotReadError(getattr(error, "strerror", None) or str(error), where=where, errno=number) from None
    if len(data) > longest:
        raise UsageError("it is too long to be a report of transload doctor", where=where)
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    return data.decode("utf-16", "replace") if wide else data.decode("utf-8-sig", "surrogateescape")


def _add_reports(reports: dict[str, Diagnosis | str], text: str | TransloadError, name: str) -> None:
    """Add the diagnosis of each report in a text, or why there is none; ``name`` is for those that name no machine."""
    from transload.diagnose.report import judge_machine
    from transload.diagnose.saved import machine_of, reports_in

    documents = list(reports_in(text)) if isinstance(text, str) else [("", text)]
    for place, (label, document) in enumerate(documents, 1):
        node = document.get("node") if isinstance(document, dict) else None
        unnamed = (f"{name} {place}" if len(documents) > 1 else name) if name else f"report {place}"
        machine = unique = node if isinstance(node, str) and node else label or unnamed
        number = 1
        while unique in reports:
            number += 1
            unique = f"{machine} ({number})"
        try:
            if isinstance(document, Exception):
                raise document
            reports[unique] = judge_machine(machine_of(document, ""))
        except (TransloadError, ValueError) as error:
            reports[unique] = error.what if isinstance(error, TransloadError) else str(error)


def _show_comparison(comparison: Comparison, arguments: Namespace) -> int:
    from transload.diagnose.compare import drawn, folded, further, report

    code = int(not comparison.ok or bool(arguments.require and comparison.without_cuda))
    code = 2 if comparison.unreadable or not comparison.nodes else code
    code = show_result(comparison, report, arguments, code, drawn=drawn, folded=further(comparison))
    if arguments.require and comparison.without_cuda:
        print_error(UsageError(f"CUDA is required but not usable on {folded(comparison.without_cuda)}"))
    return code


def _compare(arguments: Namespace) -> int:
    """Compare the reports in files, directories and standard input."""
    from glob import escape, glob

    from transload.diagnose.compare import compare

    paths: list[str] = []
    for given in arguments.compare:
        files = [given]
        if os.path.isdir(given):
            files = sorted(glob(os.path.join(escape(given), "*.json")))
        elif given != "-" and not os.path.exists(given) and any(sign in given for sign in "*?["):
            files = sorted(glob(given))
        if not files:
            raise UsageError("there is no report in it", where=given, fix="Name the files of transload doctor --json.")
        paths += files
    reports: dict[str, Diagnosis | str] = {}
    silent = []
    for path, name in zip(paths, _names(paths), strict=True):
        text: str | TransloadError
        try:
            text = _read_report(path, _LONGEST)
        except TransloadError as error:
            text = error
        if isinstance(text, str) and not text.strip():
            silent.append(name)  # the launcher created the file, and nothing was written to it
        else:
            _add_reports(reports, text, "" if path == "-" else name)
    return _show_comparison(compare(reports, silent=silent), arguments)


def _names(paths: list[str]) -> list[str]:
    """Names for the machines: the paths of their reports, without what all have in common.

    >>> _names(["out/gpu1.json", "out/gpu2.json"]), _names(["out/0/stdout.log", "out/1/stdout.log"])
    (['gpu1', 'gpu2'], ['0', '1'])
    """
    paths = [*map(without_credentials, paths)]
    names = ["standard input" if path == "-" else os.path.basename(path).removesuffix(".json") for path in paths]
    if len({*names}) == len(names):
        return names
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    for end in (0, -1):
        while len({path[end] for path in parts}) == 1 and min(map(len, parts)) > 1:
            parts = [path[1:] if end == 0 else path[:-1] for path in parts]
    return ["/".join(path).removesuffix(".json") for path in parts]


def _gather(arguments: Namespace) -> int:
    """Examine this rank's machine and send the report to rank 0, which compares all of them.

    Every rank that waits for rank 0 exits with its code, whatever was found on the rank itself: when one rank fails, a
    launcher may end all of them, including rank 0.
    """
    from signal import SIGTERM, signal

    from transload.diagnose.compare import compare, folded, report
    from transload.diagnose.gather import GRACE, PATIENCE, Gathering, job_of
    from transload.diagnose.probes import IDLE, probe
    from transload.diagnose.redact import names_here, redacted
    from transload.diagnose.report import judge_machine
    from transload.render.json import to_json
    from transload.render.lines import as_text

    if arguments.gather:
        from transload.io.atomic import target_path

        target_path(arguments.gather)  # which refuses a URL
    rank, size, _ = job_of(os.environ)
    if rank == 0 and arguments.html is not None:  # other ranks write no page, and may have no such folder
        refuse_page(arguments.html, overwrite=arguments.force)
    seconds = arguments.timeout or PATIENCE
    end = monotonic() + seconds
    with suppress(ValueError):  # not the main thread
        signal(SIGTERM, lambda *_: sys.exit(128 + SIGTERM))  # clean up when a launcher ends a rank

    def waiting(missing: list[int], left: float) -> None:
        who = folded([f"rank {number}" for number in missing])
        print(f"transload: waiting at most {left:.0f} s for the reports of {who}", file=sys.stderr, flush=True)

    shown: list[int] = []  # the exit code, once the comparison is on stdout

    def conclude(texts: dict[int, str]) -> tuple[str, int]:
        reports: dict[str, Diagnosis | str] = {}
        for number in sorted(texts):
            _add_reports(reports, texts[number], f"rank {number}")
        silent = [f"rank {number}" for number in range(size) if number not in texts]
        comparison = compare(reports, silent=silent, together=True)
        code = _show_comparison(comparison, arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # a launcher may end rank 0 as soon as another rank fails
        shown.append(code)
        return as_text(report(comparison)) + "\n", code

    try:
        gathering = Gathering(rank, size, arguments.gather, end - monotonic(), waiting)
        machine = probe(torch=not arguments.no_torch, timeout=seconds / 2, idle=IDLE)
        imported = machine.torch_run.step("import")
        broken = imported.error if imported else machine.torch_run.answer.detail
        diagnosis, node = judge_machine(machine), f"rank {rank}"
        if arguments.no_redact:
            node = f"{node} on {os.uname().nodename if hasattr(os, 'uname') else os.environ.get('COMPUTERNAME')}"
        else:
            diagnosis = redacted(diagnosis, names_here())
        text = "".join(to_json([{"node": node, **diagnosis.to_dict()}], several=False))
        try:
            code = gathering.exchange(text, conclude, machine.python.executable, broken)
        except TransloadError as error:
            if rank:
                raise
            print_error(error)
            code = (shown[0] if shown else conclude({0: text})[1]) or 2
    except TransloadError as error:
        if rank == 0 or isinstance(error, UsageError):
            raise
        print_error(error)
        sleep(max(0.0, end + GRACE - monotonic()))  # until rank 0 is done: see the docstring
        return 2
    if code and (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        # torchrun shows this below its traceback, so that the exit does not look like a crash.
        words = f"transload doctor exits with {code}: see the comparison that rank 0 has printed"
        message = {"message": words, "extraInfo": {"timestamp": str(int(time()))}}
        with suppress(OSError), open(error_file, "w", encoding="utf-8") as stream:
            stream.writelines(to_json([{"message": message}], several=False))
    return code
