"""Reports of the ranks of one job, brought together at rank 0: through a folder that all share, or torch's TCPStore.

Without a named folder the store is used, and a rank that cannot reach it falls back to a folder whose name every rank
derives from what the launcher says. Every rank ends by itself, at its deadline at the latest. A rank that never reports
is missing; the others still count.
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
_CONNECT = 15.0  # seconds after which a rank that has not reached the store uses the folder as well
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = {  # the variables with the rank and the number of ranks, and those that tell one job from another
    ("RANK", "WORLD_SIZE"): ("TORCHELASTIC_RUN_ID",),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"): ("PMIX_NAMESPACE",),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"): ("PMI_JOBID",),  # mpiexec of MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"): ("SLURM_JOB_ID", "SLURM_STEP_ID"),  # srun
}
_REPORT = re.compile(r"rank-(\d{1,9})\.json")
_SHARED = "Name a folder that all nodes share: transload doctor --gather DIR needs neither torch nor an address."
RESULT = "comparison.txt"
"""What rank 0 leaves in a named folder: reports that are older belong to an earlier run."""


def rank_of(environ: Mapping[str, str]) -> tuple[int, int]:
    """The rank of this process and the number of ranks, by the variables of the launcher.

    >>> rank_of({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
    (3, 8)
    """
    rank, size, _ = _job(environ)
    return rank, size


def folder_of(environ: Mapping[str, str]) -> str:
    """The folder in which the ranks of this job meet if none is named: the same for all, as far as the launcher tells.

    >>> folder_of({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"})
    'transload-doctor-17-0'
    """
    *_, names = _job(environ)
    told = "-".join(environ[name] for name in (*names, *_MASTER) if environ.get(name))
    if not told:
        raise UsageError("MASTER_ADDR and MASTER_PORT are not set; torchrun sets them", fix=_SHARED)
    return "transload-doctor-" + re.sub(r"[^\w.-]", "-", told, flags=re.ASCII)[-200:]  # a name has at most 255 bytes


def _job(environ: Mapping[str, str]) -> tuple[int, int, tuple[str, ...]]:
    for names, job in _LAUNCHERS.items():
        rank, size = (environ.get(name, "") for name in names)
        if rank.isdigit() and size.isdigit() and int(rank) < int(size):
            return int(rank), int(size), job
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
        self.rank, self.size, self.seconds = rank, size, seconds
        self.named, self.folder = bool(folder), folder or folder_of(os.environ)
        self.waiting = waiting
        self.deadline = monotonic() + seconds
        self._before = 0
        if folder:
            with _using(folder):
                os.makedirs(folder, exist_ok=True)
                with suppress(FileNotFoundError):
                    self._before = os.stat(os.path.join(folder, RESULT)).st_mtime_ns
        with _using(self.folder), suppress(FileNotFoundError):
            os.unlink(self._own(self.folder))  # of an earlier run

    def exchange(self, report: str, python: str = "", broken: str = "") -> dict[int, str]:
        """Hand in the report of this rank; at rank 0, wait for the others and return all that came, by rank.

        Without a named folder, ``python`` runs torch in a child process, unless ``broken`` says why it cannot.
        Raises if this rank could not take part.
        """
        if self.named:
            self._write(self.folder, report)
            return {} if self.rank else self._collect(lambda: (self.folder,))
        left = max(1.0, self.deadline - monotonic())
        unset = "" if {*_MASTER} <= os.environ.keys() else "MASTER_ADDR and MASTER_PORT are not set"
        with TemporaryDirectory(prefix="transload-") as private:
            self._write(private, report)
            asked = replace(
                question(Host(), python or sys.executable),
                script=source("ask_store"),
                arguments=(str(self.rank), str(self.size), private, str(left)),
                refusal=broken or unset,
            )
            with Child(asked, left + 1.0) as child:
                problem = "no other rank was there"
                try:
                    if self.rank and self._send(child, report):
                        return {}
                    found = {} if self.rank else self._collect(lambda: self._sources(child, private, report))
                    if found and (len(found) == self.size or len(found) > 1 or _told(child, "connected")):
                        return found
                except TransloadError as error:
                    problem = error.what
                finally:
                    self._clear()
                child.hurry(monotonic())
                outcome = child.outcome()
        raise TransloadError(
            f"rank {self.rank} cannot reach the others: through torch: {outcome.facts.get('failed') or outcome.detail};"
            f" through {self.folder}: {problem}",
            fix=_SHARED,
        )

    def finish(self, result: str) -> None:
        """Leave the comparison beside the reports, in a folder that was named."""
        if self.named:
            self._write(self.folder, result, RESULT)

    def _own(self, folder: str) -> str:
        return os.path.join(folder, f"rank-{self.rank}.json")

    def _write(self, folder: str, text: str, name: str = "") -> None:
        """Whole or not at all: somebody waits for the name."""
        path = os.path.join(folder, name) if name else self._own(folder)
        with _using(path):
            with open(f"{path}.new", "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(f"{path}.new", path)

    def _meet(self, child: Child, report: str) -> bool:
        """Put the report into the folder once some rank cannot use the store; whether it is there.

        The folder alone tells the others so. Raises where it is this rank that cannot, and the folder is no help.
        """
        lost = child.ended() and not _told(child, "complete")
        lost = lost or (monotonic() > child.begun + _CONNECT and not _told(child, "connected"))
        if not lost and not os.path.isdir(self.folder):
            return False
        try:
            with _using(self.folder):
                os.makedirs(self.folder, exist_ok=True)
            self._write(self.folder, report)
        except TransloadError:
            if lost:
                raise
            return False
        return True

    def _send(self, child: Child, report: str) -> bool:
        """Wait until rank 0 has the report of this rank, from the store or the folder. False at the deadline."""
        met = False
        while monotonic() < self.deadline:
            met = met or self._meet(child, report)
            if _told(child, "complete") or (met and not os.path.exists(self._own(self.folder))):  # rank 0 took it
                return True
            sleep(_AGAIN)
        return False

    def _sources(self, child: Child, private: str, report: str) -> tuple[str, ...]:
        """The folders in which rank 0 finds reports: that of its child, and the one of those without a store."""
        met = os.path.exists(self._own(self.folder)) or self._meet(child, report)
        return (private, self.folder) if met else (private,)

    def _collect(self, folders: Callable[[], tuple[str, ...]]) -> dict[int, str]:
        """The reports in some folders by rank, as soon as all are there, else at the deadline.

        Those from before the last comparison are of an earlier run, as are those much older than this rank's own: by
        the clock of the file system, since the clock of a node may be wrong. Each rank that waits for it is shown that
        its report was read: it is gone.
        """
        found: dict[int, str] = {}
        begun = monotonic()
        while True:
            last = monotonic() >= self.deadline  # first: what comes between the two is seen below
            for folder in folders():
                with _using(folder), os.scandir(folder) as entries:
                    own = os.stat(self._own(folder)).st_mtime_ns
                    before = max(self._before, own - int(2e9 * self.seconds))
                    for entry in entries:
                        match = _REPORT.fullmatch(entry.name)
                        rank = int(match[1]) if match else self.size
                        with suppress(FileNotFoundError):  # its rank has given up
                            if rank < self.size and rank not in found and entry.stat().st_mtime_ns > before:
                                with open(entry.path, encoding="utf-8", errors="replace") as stream:
                                    found[rank] = stream.read()
                                if rank and not self.named:
                                    os.unlink(entry.path)
            if last or len(found) == self.size:
                return found
            if self.waiting and monotonic() > begun + _SILENCE:
                self.waiting([rank for rank in range(self.size) if rank not in found], self.deadline - monotonic())
                self.waiting = None
            sleep(_AGAIN)

    def _clear(self) -> None:
        """Leave nothing of this rank in a folder that nobody named; rank 0, which comes last, leaves nothing at all."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                if name == os.path.basename(self._own("")) or (self.rank == 0 and _REPORT.fullmatch(name)):
                    os.unlink(os.path.join(self.folder, name))
            os.rmdir(self.folder)


def _told(child: Child, word: str) -> bool:
    return any(word in record for record in child.records)


@contextmanager
def _using(where: str) -> Iterator[None]:
    """Raise what goes wrong in a folder as an error of ours."""
    try:
        yield
    except OSError as error:
        raise TransloadError(f"it cannot be used to gather reports: {error.strerror or error}", where=where) from None
