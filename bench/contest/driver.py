"""Runs a benchmark: writes the files, then contenders take turns, each run in its own process, until time is up."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contest.contenders import CONTENDERS, Contender
from bench.contest.limits import Limit
from bench.contest.results import PLACES, Judge, Measured, Place, Results, as_json, show
from bench.contest.worker import MARK

if TYPE_CHECKING:
    from bench.contest.cases import Case

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT = 300  # seconds after which a run counts as hung
LIMITS_CASE = "large"  # the case whose file is used to measure the limits, if it takes part
GRACE = 30  # seconds that a run may continue beyond the end


def options(about: str, cases: dict[str, Case], device: str) -> argparse.Namespace:
    """The command line of both benchmarks."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--case", default=",".join(cases), help="cases, separated by commas")
    add("--where", default="cache", help=f"where the files are when they are read: {', '.join(PLACES)}")
    add("--contender", default="", help="only contenders whose names contain one of these, separated by commas")
    add("--without", action="append", default=[], metavar="NAME", help="leave out the contender with exactly this name")
    add("--repeat", type=int, default=3, help="processes for each contender")
    add("--later", type=int, default=2, help="calls after the first in each process")
    add("--size-scale", type=float, default=1, help="multiplies the sizes")
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="start no run after this many seconds, and print the results so far",
    )
    add("--folder", default=tempfile.gettempdir(), help="for the files, on the disk to measure")
    add("--tmpfs", default="/dev/shm", help="for the files in memory")  # noqa: S108 - a file system, not a file
    add("--peers", default="", help="a folder with unpacked wheels of other loaders, searched last")
    add("--device", default=device, help="where to load to; cpu tests the benchmark without a GPU")
    add(
        "--spawn",
        action="store_true",
        help="start a new interpreter for every run instead of forking one that has imported torch",
    )
    add("--no-check", action="store_true", help="do not compare the results with what was written")
    add("--save", type=Path, metavar="FILE", help="also write the JSON object to a file")
    add("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    arguments.folder, arguments.tmpfs, arguments.peers = (
        path and str(Path(path).resolve()) for path in (arguments.folder, arguments.tmpfs, arguments.peers)
    )
    return arguments


@dataclass
class Workers:
    """The processes that do the work, one task at a time."""

    spawn: bool
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def ask(self, task: str, limit: int = RUN_LIMIT, **parameters: Any) -> dict[str, Any]:
        """The result of a task, or the reason why there is none after this many seconds."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        process.stdin.write(json.dumps({"task": task, "limit": limit, **parameters}) + "\n")
        process.stdin.flush()
        answer = self._answer(process)
        if self.spawn:
            self.close()
        return answer

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        return {"failed": "no answer"}

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-m", "bench.contest.worker", *(["--once"] if self.spawn else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._process = None


class OutOfTimeError(Exception):
    """No run may start any more."""


@dataclass
class Contest:
    """One run of a benchmark."""

    arguments: argparse.Namespace
    results: Results
    kind: str
    """The device whose contenders take part, whatever they load to."""
    workers: Workers
    end: float

    def run(self) -> None:
        """Run every case at every place, until the time is up."""
        try:
            for case in self.results.cases.values():
                self._case(case)
        except OutOfTimeError:
            self.results.notes.append(
                f"stopped after {self.arguments.seconds:g} s: some results have fewer runs, or none"
            )
        finally:
            self.workers.close()

    def _case(self, case: Case) -> None:
        """Run a case: write its files once, and copy them to the other places."""
        with (
            folder(self.arguments.folder) as disk,
            folder(self.arguments.tmpfs if self._selected("tmpfs") else "") as memory,
        ):
            source = disk if self._selected("cache") or self._selected("cold") else memory
            self._write_files(case, source)
            for where in PLACES:  # cold last, so that the others find their file in the page cache
                if not self._selected(where):
                    continue
                if where == "tmpfs" and source != memory:
                    for file in disk.iterdir():
                        shutil.copyfile(file, memory / file.name)
                self._place(case, where, memory if where == "tmpfs" else disk)
                if where == "tmpfs":
                    for file in memory.iterdir():
                        file.unlink()

    def _selected(self, where: str) -> bool:
        return where in self.arguments.where.split(",")

    def _write_files(self, case: Case, where: Path) -> None:
        self._show_progress(f"{case}: writing")
        suffixes = sorted({contender.suffix for place in PLACES for contender in self._contenders(case, place)})
        answer = self._ask("make", case=asdict(case), folder=str(where), suffixes=suffixes)
        if answer:
            raise SystemExit(f"{case.name} could not be written: {answer}")

    def _contenders(self, case: Case, where: str) -> list[Contender]:
        parts = self.arguments.contender.split(",")
        return [
            contender
            for contender in CONTENDERS.values()
            if contender.takes(case, where, self.kind)
            and contender.name not in self.arguments.without
            and any(part in contender.name for part in parts)
        ]

    def _place(self, case: Case, where: str, folder: Path) -> None:
        """Measure the limits, then run rounds in which each contender has its turn."""
        place, contenders = Place(case.name, where), self._contenders(case, where)
        rows = self.results.rows[place] = {contender.name: Measured(contender.name) for contender in contenders}
        if case.name == LIMITS_CASE or (
            LIMITS_CASE not in self.results.cases and where not in self._places_with_limits()
        ):
            self._limits(place, next(folder.iterdir()))
        for number in range(self.arguments.repeat):
            for contender in contenders:
                if not rows[contender.name].trouble:
                    self._show_progress(
                        f"{case.name}, {PLACES[where]}, {number + 1} of {self.arguments.repeat}: {contender.name}"
                    )
                    rows[contender.name].add(self._run_once(contender, case, where, folder))
        self._note_cached_parts(place, rows)

    def _places_with_limits(self) -> set[str]:
        return {place.where for place in self.results.limits}

    def _run_once(self, contender: Contender, case: Case, where: str, folder: Path) -> dict[str, Any]:
        return self._ask(
            "run",
            contender=contender.name,
            case=asdict(case),
            path=str(folder / f"{case.name}{contender.suffix}"),
            device=self.arguments.device,
            where=where,
            later=self.arguments.later,
            check=not self.arguments.no_check,
            peers=self.arguments.peers,
        )

    def _limits(self, place: Place, path: Path) -> None:
        answer = self._ask("limits", path=str(path), device=self.arguments.device, where=place.where)
        if "limits" in answer:
            self.results.limits[place] = [Limit(*limit) for limit in answer["limits"]]
        else:
            self.results.notes.append(f"{place.case}, {PLACES[place.where]}: no limits: {answer}")

    def _note_cached_parts(self, place: Place, rows: dict[str, Measured]) -> None:
        """Note how much of a file was in the page cache, if that is not as it should be, or before cold runs."""
        parts = [part for row in rows.values() for part in row.cached]
        if place.where == "cold" and max(parts, default=1) > 0.01:
            self.results.notes.append(
                f"{place.case}: not cold: up to {max(parts, default=1):.0%} was in the page cache"
            )
        elif place.where == "cold":
            self.results.notes.append(f"{place.case}: at most {max(parts):.2%} was in the page cache before a cold run")
        elif min(parts, default=1) < 0.99:
            self.results.notes.append(f"{place.case}: only {min(parts):.0%} was in the page cache before one run")

    def _ask(self, task: str, **parameters: Any) -> dict[str, Any]:
        left = self.end - time.monotonic()
        if left < 0:
            raise OutOfTimeError
        answer = self.workers.ask(task, round(min(RUN_LIMIT, left + GRACE)), **parameters)
        if "failed" in answer and time.monotonic() > self.end:  # it was stopped early, which is not its failure
            raise OutOfTimeError
        return answer

    def _show_progress(self, text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)


@contextmanager
def folder(parent: str) -> Iterator[Path]:
    """A temporary folder in ``parent``, or, if that is empty and nothing will be written, in the default place."""
    with tempfile.TemporaryDirectory(dir=parent or None, prefix="transload-bench-") as name:
        yield Path(name)


def main(about: str, cases: dict[str, Case], device: str, judge: Judge) -> int:
    """Run a benchmark, from its command line to its table."""
    start, arguments = time.monotonic(), options(about, cases, device)
    chosen = {name: cases[name].scaled(arguments.size_scale) for name in arguments.case.split(",")}
    workers = Workers(arguments.spawn)
    host = machine(arguments, workers)
    results = Results(arguments.device, chosen)
    Contest(arguments, results, device, workers, start + arguments.seconds).run()
    if arguments.size_scale != 1:
        results.notes.append(f"sizes are multiplied by {arguments.size_scale:g}; the goals are for the full sizes")
    goals = judge(results)
    if arguments.save:
        arguments.save.write_text(as_json(results, goals, host), encoding="utf-8")
    print(as_json(results, goals, host)) if arguments.json else show(results, goals, host)
    return 0


def machine(arguments: argparse.Namespace, workers: Workers) -> dict[str, Any]:
    """The machine, the versions and the date of a measurement."""
    answer = workers.ask("versions", device=arguments.device, peers=arguments.peers)
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "device": answer.get("device", ""),
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "disk": filesystem(arguments.folder),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **answer.get("versions", {}),
    }


def filesystem(path: str) -> str:
    """The type of the file system of a folder; empty if the system does not report it."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    real = Path(path).resolve()
    within = [entry for entry in mounts if real.is_relative_to(entry[1])]
    return max(within, key=lambda entry: len(entry[1]))[2] if within else ""
