"""Runs a benchmark: files made, contenders taking turns, each run in a process of its own, until the time is up."""

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
HANGS = 300  # seconds after which a run has hung
LIMITED = "large"  # the case on whose file the limits are measured, where it takes part
GRACE = 30  # seconds that a run may take beyond the end


def options(about: str, cases: dict[str, Case], device: str) -> argparse.Namespace:
    """The command line that both benchmarks have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--case", default=",".join(cases), help="cases, with commas between them")
    add("--where", default="cache", help=f"where the files lie when they are read: {', '.join(PLACES)}")
    add("--contender", default="", help="only those whose name has one of these, with commas between them, in it")
    add("--without", action="append", default=[], metavar="NAME", help="leave out the contender of that whole name")
    add("--repeat", type=int, default=3, help="processes for each contender")
    add("--later", type=int, default=2, help="calls after the first in each process")
    add("--size-scale", type=float, default=1, help="multiplies the sizes")
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        help="begin no run after so many seconds, and print what there is",
    )
    add("--folder", default=tempfile.gettempdir(), help="for the files, on the disk to be measured")
    add("--tmpfs", default="/dev/shm", help="for the files in memory")  # noqa: S108 - a file system, not a file
    add("--peers", default="", help="a folder with unpacked wheels of other loaders, searched last")
    add("--device", default=device, help="where to load to; cpu tries the benchmark without a GPU")
    add("--spawn", action="store_true", help="start every process anew instead of forking one that imported torch")
    add("--no-check", action="store_true", help="do not compare the results with what was written")
    add("--save", type=Path, metavar="FILE", help="also write the JSON object to a file")
    add("--json", action="store_true", help="print one JSON object")
    told = parser.parse_args()
    told.folder, told.tmpfs, told.peers = (
        path and str(Path(path).resolve()) for path in (told.folder, told.tmpfs, told.peers)
    )
    return told


@dataclass
class Workers:
    """The processes that do the work, one task at a time."""

    spawn: bool
    _process: subprocess.Popen[str] | None = field(default=None, init=False)

    def ask(self, task: str, limit: int = HANGS, **what: Any) -> dict[str, Any]:
        """The answer to a task, or the word why there is none after so many seconds."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        process.stdin.write(json.dumps({"task": task, "limit": limit, **what}) + "\n")
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
            [sys.executable, "-m", "bench.contest.worker"],
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
    """No run may begin any more."""


@dataclass
class Contest:
    """One run of a benchmark."""

    told: argparse.Namespace
    results: Results
    kind: str
    """The device whose contenders take part, whatever they load to."""
    workers: Workers
    end: float

    def run(self) -> None:
        """Every case at every place, until the time is up."""
        try:
            for case in self.results.cases.values():
                self._case(case)
        except OutOfTimeError:
            self.results.notes.append(f"stopped after {self.told.seconds:g} s: some of it has fewer runs, or none")
        finally:
            self.workers.close()

    def _case(self, case: Case) -> None:
        """A case, its files made once and copied to where else they are read."""
        with folder(self.told.folder) as disk, folder(self.told.tmpfs if self._on("tmpfs") else "") as memory:
            made = disk if self._on("cache") or self._on("cold") else memory
            self._make(case, made)
            for where in PLACES:  # cold last: the others find their file in the page cache
                if not self._on(where):
                    continue
                if where == "tmpfs" and made != memory:
                    for file in disk.iterdir():
                        shutil.copyfile(file, memory / file.name)
                self._place(case, where, memory if where == "tmpfs" else disk)
                if where == "tmpfs":
                    for file in memory.iterdir():
                        file.unlink()

    def _on(self, where: str) -> bool:
        return where in self.told.where.split(",")

    def _make(self, case: Case, where: Path) -> None:
        self._tell(f"{case}: writing")
        suffixes = sorted({contender.suffix for place in PLACES for contender in self._contenders(case, place)})
        answer = self._ask("make", case=asdict(case), folder=str(where), suffixes=suffixes)
        if answer:
            raise SystemExit(f"{case.name} could not be written: {answer}")

    def _contenders(self, case: Case, where: str) -> list[Contender]:
        wanted = self.told.contender.split(",")
        return [
            contender
            for contender in CONTENDERS.values()
            if contender.takes(case, where, self.kind)
            and contender.name not in self.told.without
            and any(part in contender.name for part in wanted)
        ]

    def _place(self, case: Case, where: str, folder: Path) -> None:
        """The limits, then rounds in which each contender has its turn."""
        place, contenders = Place(case.name, where), self._contenders(case, where)
        rows = self.results.rows[place] = {contender.name: Measured(contender.name) for contender in contenders}
        if case.name == LIMITED or (LIMITED not in self.results.cases and where not in self._limited()):
            self._limits(place, next(folder.iterdir()))
        for number in range(self.told.repeat):
            for contender in contenders:
                if not rows[contender.name].trouble:
                    self._tell(f"{case.name}, {PLACES[where]}, {number + 1} of {self.told.repeat}: {contender.name}")
                    rows[contender.name].add(self._turn(contender, case, where, folder))
        self._doubt(place, rows)

    def _limited(self) -> set[str]:
        return {place.where for place in self.results.limits}

    def _turn(self, contender: Contender, case: Case, where: str, folder: Path) -> dict[str, Any]:
        return self._ask(
            "run",
            contender=contender.name,
            case=asdict(case),
            path=str(folder / f"{case.name}{contender.suffix}"),
            device=self.told.device,
            where=where,
            later=self.told.later,
            check=not self.told.no_check,
            peers=self.told.peers,
        )

    def _limits(self, place: Place, path: Path) -> None:
        answer = self._ask("limits", path=str(path), device=self.told.device, where=place.where)
        if "limits" in answer:
            self.results.limits[place] = [Limit(*limit) for limit in answer["limits"]]
        else:
            self.results.notes.append(f"{place.case}, {PLACES[place.where]}: no limits: {answer}")

    def _doubt(self, place: Place, rows: dict[str, Measured]) -> None:
        """Say where a file was not in, or not out of, the page cache as it should have been."""
        parts = [part for row in rows.values() for part in row.cached]
        if place.where == "cold" and max(parts, default=1) > 0.01:
            self.results.notes.append(
                f"{place.case}: not cold: up to {max(parts, default=1):.0%} was in the page cache"
            )
        elif place.where == "cold":
            self.results.notes.append(f"{place.case}: at most {max(parts):.2%} was in the page cache before a cold run")
        elif min(parts, default=1) < 0.99:
            self.results.notes.append(f"{place.case}: only {min(parts):.0%} was in the page cache before one run")

    def _ask(self, task: str, **what: Any) -> dict[str, Any]:
        left = self.end - time.monotonic()
        if left < 0:
            raise OutOfTimeError
        answer = self.workers.ask(task, round(min(HANGS, left + GRACE)), **what)
        if "failed" in answer and time.monotonic() > self.end:  # it was given no more time: that says nothing of it
            raise OutOfTimeError
        return answer

    def _tell(self, what: str) -> None:
        if sys.stderr.isatty():
            print(what, file=sys.stderr)


@contextmanager
def folder(parent: str) -> Iterator[Path]:
    """An empty folder that goes away again; nowhere in particular for an empty name, where nothing is written."""
    with tempfile.TemporaryDirectory(dir=parent or None, prefix="transload-bench-") as name:
        yield Path(name)


def main(about: str, cases: dict[str, Case], device: str, judge: Judge) -> int:
    """A benchmark from its command line to its table."""
    start, told = time.monotonic(), options(about, cases, device)
    chosen = {name: cases[name].scaled(told.size_scale) for name in told.case.split(",")}
    workers = Workers(told.spawn)
    found = machine(told, workers)
    results = Results(told.device, chosen)
    Contest(told, results, device, workers, start + told.seconds).run()
    if told.size_scale != 1:
        results.notes.append(f"sizes are multiplied by {told.size_scale:g}; the goals are for whole ones")
    goals = judge(results)
    if told.save:
        told.save.write_text(as_json(results, goals, found), encoding="utf-8")
    print(as_json(results, goals, found)) if told.json else show(results, goals, found)
    return 0


def machine(told: argparse.Namespace, workers: Workers) -> dict[str, Any]:
    """What it was measured on, with what, and when."""
    answer = workers.ask("versions", device=told.device, peers=told.peers)
    return {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "device": answer.get("device", ""),
        "cores": os.cpu_count(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "disk": filesystem(told.folder),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **answer.get("versions", {}),
    }


def filesystem(path: str) -> str:
    """The kind of file system that a folder is on; empty where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    real = Path(path).resolve()
    within = [entry for entry in mounts if real.is_relative_to(entry[1])]
    return max(within, key=lambda entry: len(entry[1]))[2] if within else ""
