"""Reports of the ranks of one job, brought together at rank 0: through a folder that all share, or torch's TCPStore.

Without a named folder the store is used, and a rank that cannot reach it falls back to a folder whose name every rank
derives from what the launcher says. A rank that never reports is missing; the others still count.

The exit code of rank 0 goes the same way back, and all ranks end with it: an agent of torchrun whose rank ends with 0
waits five minutes for one whose rank failed. Every rank ends by itself, soon after its deadline at the latest.
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
GRACE = 10.0
"""Seconds after that in which the others hear the exit code of rank 0: half for the folder, half for the store."""
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
"""What rank 0 leaves in a named folder, with the exit code at its end: older reports belong to an earlier run."""


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
Conclude = Callable[[dict[int, str]], tuple[str, int]]


class Gathering:
    """One rank of a job that gathers, from its start, with ``seconds`` for everything.

    Rank 0 calls ``waiting`` once, after a while, with the ranks that have not reported and the seconds that are left.
    """

    def __init__(self, rank: int, size: int, folder: str, seconds: float, waiting: Waiting | None = None) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self.named, self.folder = bool(folder), folder or folder_of(os.environ)
        self.waiting = waiting
        self.deadline = monotonic() + seconds
        self.grace = min(GRACE, seconds)
        self._before = 0
        if folder:
            with _using(folder):
                os.makedirs(folder, exist_ok=True)
                with suppress(FileNotFoundError):
                    self._before = os.stat(os.path.join(folder, RESULT)).st_mtime_ns
        with _using(self.folder), suppress(FileNotFoundError):
            os.unlink(self._own(self.folder))  # of an earlier run

    def exchange(self, report: str, conclude: Conclude, python: str = "", broken: str = "") -> int:
        """Hand in the report of this rank, and return the exit code of all.

        Rank 0 waits for the reports of the others, and ``conclude`` makes a text and the exit code of all that came, by
        rank. Another rank waits for the exit code, unless the folder is named and no agent of torchrun cares. Without a
        named folder, ``python`` runs torch in a child process, unless ``broken`` says why it cannot. Raises if this
        rank could not take part.
        """
        if self.named:
            self._write(self.folder, report)
            if self.rank == 0:
                text, code = conclude(self._collect(lambda: (self.folder,)))
                self._write(self.folder, f"{text}exit code {code}\n", RESULT)
                return code
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                return 0
            while monotonic() < self.deadline + self.grace:
                if (told := self._code()) is not None:
                    return told
                sleep(_AGAIN)
            raise TransloadError(f"rank {self.rank} has not heard what rank 0 found", where=self.folder)
        left = max(1.0, self.deadline - monotonic())
        unset = "" if {*_MASTER} <= os.environ.keys() else "MASTER_ADDR and MASTER_PORT are not set"
        temporary = TemporaryDirectory(prefix="transload-")
        with temporary as private:
            self._write(private, report)
            asked = replace(
                question(Host(), python or sys.executable),
                script=source("ask_store"),
                arguments=(str(self.rank), str(self.size), private, RESULT, str(left), str(self.grace)),
                refusal=broken or unset,
            )
            with Child(asked, left + self.grace + 1.0) as child:
                problem = "no other rank was there"
                try:
                    if self.rank and (told := self._send(child, report, temporary)) is not None:
                        return told
                    found = {} if self.rank else self._collect(lambda: self._sources(child, private, report))
                    if found and (len(found) == self.size or len(found) > 1 or _told(child, "connected")):
                        text, code = conclude(found)
                        with suppress(TransloadError, OSError):  # the disk is full: the others end by themselves
                            self._tell(f"{text}exit code {code}\n", temporary, child)
                        return code
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

    def _tell(self, result: str, temporary: TemporaryDirectory[str], child: Child) -> None:
        """Pass on the exit code, and wait until the others have it: the store may end with rank 0.

        No rank has anything left on the disk once all know it: an agent of torchrun ends all its ranks when one fails.
        """
        end = monotonic() + self.grace
        connected = _told(child, "connected") and not child.ended()
        if not connected:
            temporary.cleanup()
        if os.path.exists(self._own(self.folder)):
            self._write(self.folder, result, RESULT)
            while len(os.listdir(self.folder)) > 2 and monotonic() < end - self.grace / 2:  # the result and its own
                sleep(_AGAIN)
            self._clear()
        if connected:
            self._write(temporary.name, result, RESULT)
        while connected and not child.ended() and monotonic() < end:
            sleep(_AGAIN)

    def _code(self) -> int | None:
        """The exit code that rank 0 has left for this rank in the folder."""
        with suppress(OSError, ValueError, IndexError):
            result = os.path.join(self.folder, RESULT)
            if os.stat(result).st_mtime_ns >= os.stat(self._own(self.folder)).st_mtime_ns:  # not of an earlier run
                with open(result, encoding="utf-8") as stream:
                    return int(stream.read().split()[-1])
        return None

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

    def _send(self, child: Child, report: str, temporary: TemporaryDirectory[str]) -> int | None:
        """Hand in the report through the store or the folder, and wait for the exit code, which comes the same way."""
        met, code = False, None
        while monotonic() < self.deadline + self.grace:
            for record in child.records:
                if "code" in record:
                    return int(record["code"])
            if code is not None:
                if not os.path.exists(self.folder):  # rank 0 has left
                    break
            elif _told(child, "sent") and not child.ended():
                if met:  # rank 0 would wait until this is gone
                    self._clear()
                met = False
            else:
                met = met or self._meet(child, report)
                code = self._code() if met else None
                if code is not None:
                    temporary.cleanup()
                    self._clear()
            sleep(_AGAIN)
        return code

    def _sources(self, child: Child, private: str, report: str) -> tuple[str, ...]:
        """The folders in which rank 0 finds reports: that of its child, and the one of those without a store."""
        met = os.path.exists(self._own(self.folder)) or self._meet(child, report)
        return (private, self.folder) if met else (private,)

    def _collect(self, folders: Callable[[], tuple[str, ...]]) -> dict[int, str]:
        """The reports in some folders by rank, as soon as all are there, else at the deadline.

        Those from before the last comparison are of an earlier run, as are those much older than this rank's own: by
        the clock of the file system, since the clock of a node may be wrong.
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
                mine = name == os.path.basename(self._own(""))
                if mine or (self.rank == 0 and (name == RESULT or _REPORT.fullmatch(name))):
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
