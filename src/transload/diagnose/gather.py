"""Reports of the ranks of one job, brought together at rank 0: through a folder that all share, or torch's TCPStore.

Every rank ends by itself, at its deadline at the latest. A rank that never reports is missing; the others still count.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from transload.diagnose.children import Child, source
from transload.diagnose.host import Host
from transload.diagnose.probes.torch import question
from transload.errors import TransloadError, UsageError

PATIENCE = 120.0
"""Seconds for everything, unless the user says otherwise: twice what torch may take."""
_AGAIN = 0.1
_SILENCE = 10.0  # seconds after which rank 0 says whom it waits for
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # mpiexec of MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
)
_REPORT = re.compile(r"rank-(\d{1,9})\.json")
_SHARED = "Name a folder that all nodes share: transload doctor --gather DIR needs neither torch nor an address."
RESULT = "comparison.txt"
"""What rank 0 leaves in the folder: reports that are older belong to an earlier run."""


def rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """The rank of this process and the number of ranks, by the variables of the launcher.

    >>> rank_of({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
    (3, 8)
    """
    for names in _LAUNCHERS:
        rank, size = (environ.get(name, "") for name in names)
        if rank.isdigit() and size.isdigit() and int(rank) < int(size):
            return int(rank), int(size)
    raise UsageError(
        "no launcher says which rank this is",
        fix="Start it with torchrun, srun or mpirun, or compare files: transload doctor --compare FILE FILE …",
    )


Waiting = Callable[[list[int], float], None]


class Gathering:
    """One rank of a job that gathers, from its start, with ``seconds`` for everything.

    Rank 0 calls ``waiting`` once, after a while, with the ranks that have not reported and the seconds that are left.
    """

    def __init__(self, rank: int, size: int, folder: str, seconds: float, waiting: Waiting | None = None) -> None:
        self.rank, self.size, self.folder, self.seconds = rank, size, folder, seconds
        self.waiting = waiting
        self.deadline = monotonic() + seconds
        self._before = 0
        if not folder and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise UsageError("MASTER_ADDR and MASTER_PORT are not set; torchrun sets them", fix=_SHARED)
        if folder:
            with _using(folder):
                os.makedirs(folder, exist_ok=True)
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, f"rank-{rank}.json"))  # of an earlier run
                with suppress(FileNotFoundError):
                    self._before = os.stat(os.path.join(folder, RESULT)).st_mtime_ns

    def exchange(self, report: str, python: str = "") -> dict[int, str]:
        """Hand in the report of this rank; at rank 0, wait for the others and return all that came, by rank.

        Without a folder, ``python`` runs torch, in a child process. Raises if this rank could not take part.
        """
        if self.folder:
            self._write(self.folder, f"rank-{self.rank}.json", report)
            return {} if self.rank else self._collect(self.folder)
        with TemporaryDirectory(prefix="transload-") as folder:
            self._write(folder, f"rank-{self.rank}.json", report)
            left = max(1.0, self.deadline - monotonic())
            told = (str(self.rank), str(self.size), folder, str(left))
            asked = replace(question(Host(), python or sys.executable), script=source("ask_store"), arguments=told)
            with Child(asked, left + 1.0) as child:
                found = {} if self.rank else self._collect(folder, child.ended)
                outcome = child.outcome() if self.rank or child.ended() else None
        facts = outcome.facts if outcome else {"connected": True}
        if "sent" not in facts and (self.rank or "connected" not in facts):
            why = facts.get("failed") or (outcome.detail if outcome else "")
            raise TransloadError(
                f"rank {self.rank} cannot reach the others through torch: {why}",
                fix=_SHARED,
            )
        return found

    def finish(self, result: str) -> None:
        """Leave the comparison beside the reports."""
        if self.folder:
            self._write(self.folder, RESULT, result)

    def _write(self, folder: str, name: str, text: str) -> None:
        """Whole or not at all: somebody waits for the name."""
        path = os.path.join(folder, name)
        with _using(path):
            with open(f"{path}.new", "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(f"{path}.new", path)

    def _collect(self, folder: str, over: Callable[[], bool] = lambda: False) -> dict[int, str]:
        """The reports in a folder by rank, as soon as all are there, else at the deadline.

        Those from before the last comparison are of an earlier run, as are those much older than this rank's own: by
        the clock of the file system, since the clock of a node may be wrong.
        """
        found: dict[int, str] = {}
        with _using(folder):
            own = os.stat(os.path.join(folder, f"rank-{self.rank}.json")).st_mtime_ns
        before, begun = max(self._before, own - int(2e9 * self.seconds)), monotonic()
        while True:
            last = over() or monotonic() >= self.deadline  # first: what comes between the two is seen below
            with _using(folder), os.scandir(folder) as entries:
                for entry in entries:
                    match = _REPORT.fullmatch(entry.name)
                    rank = int(match[1]) if match else self.size
                    if rank < self.size and rank not in found and entry.stat().st_mtime_ns > before:
                        with open(entry.path, encoding="utf-8", errors="replace") as stream:
                            found[rank] = stream.read()
            if last or len(found) == self.size:
                return found
            if self.waiting and monotonic() > begun + _SILENCE:
                self.waiting([rank for rank in range(self.size) if rank not in found], self.deadline - monotonic())
                self.waiting = None
            sleep(_AGAIN)


@contextmanager
def _using(where: str) -> Iterator[None]:
    """Raise what goes wrong in a folder as an error of ours."""
    try:
        yield
    except OSError as error:
        raise TransloadError(f"it cannot be used to gather reports: {error.strerror or error}", where=where) from None
