"""``transload doctor --compare`` and ``--gather``: the reports of many machines, judged and compared."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from glob import escape, glob
from signal import SIGTERM, signal
from time import monotonic, sleep, time
from typing import TYPE_CHECKING

from transload.cli.output import print_error, show_result
from transload.diagnose import judge_machine
from transload.diagnose.compare import Comparison, compare, folded, report
from transload.diagnose.saved import machine_of, reports_in
from transload.errors import CannotReadError, TransloadError, UsageError
from transload.render.json import to_json
from transload.render.lines import as_text

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

    from transload.diagnose.report import Diagnosis

_LONGEST_REPORT = 1 << 26
_LONGEST = 1 << 30  # of all reports in one stream


def read_report(path: str, longest: int = _LONGEST_REPORT) -> str:
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
    """Judge the reports in a text and add them, or why not; ``name`` is used for a report that names no machine."""
    found = list(reports_in(text)) if isinstance(text, str) else [("", text)]
    for place, (label, document) in enumerate(found, 1):
        node = document.get("node") if isinstance(document, dict) else None
        unnamed = (f"{name} {place}" if len(found) > 1 else name) if name else f"report {place}"
        machine = unique = node if isinstance(node, str) and node else label or unnamed
        number = 1
        while unique in reports:
            number += 1
            unique = f"{machine} ({number})"
        try:
            if isinstance(document, Exception):
                raise document
            reports[unique] = judge_machine(machine_of(document, ""))
        except TransloadError as error:
            reports[unique] = error.what
        except ValueError as error:
            reports[unique] = str(error)


def run_compare(arguments: Namespace) -> int:
    """Compare the reports in files, directories and standard input."""
    reports: dict[str, Diagnosis | str] = {}
    silent = []
    paths = list(_paths(arguments.compare))
    for path, name in zip(paths, _names(paths), strict=True):
        text: str | TransloadError
        try:
            text = read_report(path, _LONGEST)
        except TransloadError as error:
            text = error
        if isinstance(text, str) and not text.strip():
            silent.append(name)  # the launcher created the file, and nothing was written to it
        else:
            _add_reports(reports, text, "" if path == "-" else name)
    return _show(compare(reports, silent=silent), arguments)


def _show(comparison: Comparison, arguments: Namespace) -> int:
    show_result(comparison, report, arguments)
    if arguments.require and comparison.without_cuda:
        print_error(UsageError(f"CUDA is required but not usable on {folded(comparison.without_cuda)}"))
    if comparison.unreadable or not comparison.nodes:
        return 2
    return int(not comparison.ok or bool(arguments.require and comparison.without_cuda))


def _paths(given: Iterable[str]) -> Iterator[str]:
    """The files to read: a directory stands for its ``.json`` files, and a pattern for what it matches."""
    for path in given:
        found = [path]
        if os.path.isdir(path):
            found = sorted(glob(os.path.join(escape(path), "*.json")))
        elif path != "-" and not os.path.exists(path) and any(sign in path for sign in "*?["):
            found = sorted(glob(path))
        if not found:
            raise UsageError("there is no report in it", where=path, fix="Name the files of transload doctor --json.")
        yield from found


def _names(paths: list[str]) -> list[str]:
    """Names for the machines: the paths of their reports, without what all have in common.

    >>> _names(["out/gpu1.json", "out/gpu2.json"]), _names(["out/0/stdout.log", "out/1/stdout.log"])
    (['gpu1', 'gpu2'], ['0', '1'])
    """
    names = ["standard input" if path == "-" else os.path.basename(path).removesuffix(".json") for path in paths]
    if len({*names}) == len(names):
        return names
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    for end in (0, -1):
        while len({each[end] for each in parts}) == 1 and min(map(len, parts)) > 1:
            parts = [each[1:] if end == 0 else each[:-1] for each in parts]
    return ["/".join(each).removesuffix(".json") for each in parts]


def _waiting(missing: list[int], seconds: float) -> None:
    """Say what the command is waiting for."""
    who = folded([f"rank {rank}" for rank in missing])
    print(f"transload: waiting at most {seconds:.0f} s for the reports of {who}", file=sys.stderr, flush=True)


def run_gather(arguments: Namespace) -> int:
    """Examine this rank's machine and send the report to rank 0, which compares all of them.

    Every rank that waits for rank 0 exits with its code, whatever was found on the rank itself: when one rank fails, a
    launcher may end all of them, including rank 0.
    """
    from transload.diagnose.gather import GRACE, PATIENCE, Gathering, job_of
    from transload.diagnose.probes import IDLE, probe
    from transload.diagnose.redact import names_here, redacted

    rank, size, _ = job_of(os.environ)
    seconds = arguments.timeout or PATIENCE
    end = monotonic() + seconds
    with suppress(ValueError):  # not the main thread
        signal(SIGTERM, lambda *_: sys.exit(128 + SIGTERM))  # clean up when a launcher ends a rank

    def conclude(found: dict[int, str]) -> tuple[str, int]:
        reports: dict[str, Diagnosis | str] = {}
        for number in sorted(found):
            _add_reports(reports, found[number], f"rank {number}")
        silent = [f"rank {number}" for number in range(size) if number not in found]
        comparison = compare(reports, silent=silent, together=True)
        code = _show(comparison, arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # a launcher may end rank 0 as soon as another rank fails
        return as_text(report(comparison)) + "\n", code

    try:
        gathering = Gathering(rank, size, arguments.gather, end - monotonic(), _waiting)
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
            code = conclude({0: text})[1] or 2
    except TransloadError as error:
        if rank == 0 or isinstance(error, UsageError):
            raise
        print_error(error)
        sleep(max(0.0, end + GRACE - monotonic()))  # until rank 0 is done: see above
        return 2
    if code and (torchrun := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        # torchrun shows this below its traceback, so that it does not look like a crash.
        words = f"transload doctor exits with {code}: see the comparison that rank 0 has printed"
        message = {"message": words, "extraInfo": {"timestamp": str(int(time()))}}
        with suppress(OSError), open(torchrun, "w", encoding="utf-8") as stream:
            stream.writelines(to_json([{"message": message}], several=False))
    return code
