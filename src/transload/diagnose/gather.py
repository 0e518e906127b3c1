"""Collects the reports of all ranks of a job at rank 0, through a shared folder or torch's TCPStore.

Without a named folder the ranks use the store, and a rank that cannot reach it falls back to a folder whose name every
rank derives from the launcher's variables. A rank that never reports is missing; the others still count.

The exit code of rank 0 goes back the same way, and all ranks exit with it: an agent of torchrun whose rank exits with 0
waits five minutes for one whose rank failed. Every rank exits soon after its deadline at the latest.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import ENOTDIR
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from transload.diagnose.children import Child, source
from transload.diagnose.host import Host
from transload.diagnose.probes.python import question
from transload.errors import TransloadError, UsageError
from transload.frozen import replace

PATIENCE = 120.0  # seconds for everything, unless the user says otherwise: twice what torch may take
GRACE = 10.0  # seconds after that to send the exit code of rank 0 to the others: half by the folder, half by the store
_POLL = 0.1
_SILENCE = 10.0  # seconds after which rank 0 says which ranks it is waiting for
_CONNECT = 15.0  # seconds after which a rank that has not reached the store also uses the folder
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = {  # the variables with the rank and the number of ranks, and those that identify the job
    ("RANK", "WORLD_SIZE"): ("TORCHELASTIC_RUN_ID",),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"): ("PMIX_NAMESPACE",),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"): ("PMI_JOBID",),  # mpiexec of MPICH and Intel MPI
    ("SLURM_PROCID", "SLURM_NTASKS"): ("SLURM_JOB_ID", "SLURM_STEP_ID"),  # srun
}
_REPORT = re.compile(r"rank-(\d{1,9})\.json")
_SHARED = "Name a folder that all nodes share: transload doctor --gather DIR needs neither torch nor an address."
RESULT = "comparison.txt"
"""The file that rank 0 leaves in a named folder. It ends with the exit code; older reports are from an earlier run."""


def job_of(environ: Mapping[str, str]) -> tuple[int, int, str]:
    """The rank of this process, the number of ranks, and the folder that they share if none is named.

    Every rank derives the same name from the launcher's variables; it is empty if these do not identify the job.

    >>> job_of({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"})
    (3, 8, 'transload-doctor-17-0')
    """
    for names, identity in _LAUNCHERS.items():
        rank, size = (environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            job = "-".join(environ[name] for name in (*identity, *_MASTER) if environ.get(name))
            safe = re.sub(r"[^\w.-]", "-", job, flags=re.ASCII)[-200:]  # a name has at most 255 bytes
            return int(rank), int(size), f"transload-doctor-{safe}" if job else ""
    raise UsageError(
        "no launcher says which rank this is",
        fix="Start it with torchrun, srun or mpirun, or compare files: transload doctor --compare FILE FILE …",
    )


Waiting = Callable[[list[int], float], None]
Conclude = Callable[[dict[int, str]], tuple[str, int]]


class Gathering:
    """One rank of a job whose ranks gather their reports, with ``seconds`` for everything.

    After a while rank 0 calls ``waiting`` once, with the ranks that have not reported and the seconds that are left.
    """

    def __init__(self, rank: int, size: int, folder: str, seconds: float, waiting: Waiting | None = None) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self.named, self.folder = bool(folder), folder or job_of(os.environ)[2]
        if not self.folder:
            raise UsageError("MASTER_ADDR and MASTER_PORT are not set; torchrun sets them", fix=_SHARED)
        self.waiting = waiting
        self.deadline = monotonic() + seconds
        self.grace = min(GRACE, seconds)
        self._last_result = 0
        if folder:
            with _using(folder):
                os.makedirs(folder, exist_ok=True)
                with suppress(FileNotFoundError):
                    self._last_result = os.stat(os.path.join(folder, RESULT)).st_mtime_ns
        with _using(self.folder), suppress(FileNotFoundError):
            if os.path.isfile(self.folder):  # Windows says that what is below it does not exist
                raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
            os.unlink(self._report_path(self.folder))  # from an earlier run

    def exchange(self, report: str, conclude: Conclude, python: str = "", broken: str = "") -> int:
        """Submit the report of this rank, and return the exit code of all ranks.

        Rank 0 waits for the others; ``conclude`` turns the reports that arrived, by rank, into a text and an exit code.
        The others wait for the exit code, except with a named folder and without torchrun. Without a named folder,
        ``python`` runs torch in a child process, unless ``broken`` says why it cannot. Raises ``TransloadError`` if
        this rank cannot reach the others.
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
                if (received := self._code()) is not None:
                    return received
                sleep(_POLL)
            raise TransloadError(f"rank {self.rank} did not receive the result of rank 0", where=self.folder)
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
                problem = "no other rank used it"
                try:
                    if self.rank and (received := self._send(child, report, temporary)) is not None:
                        return received
                    reports = {} if self.rank else self._collect(lambda: self._sources(child, private, report))
                    if reports and (len(reports) == self.size or len(reports) > 1 or _reported(child, "connected")):
                        text, code = conclude(reports)
                        with suppress(TransloadError, OSError):  # the disk is full: the others end at their deadlines
                            self._announce(f"{text}exit code {code}\n", temporary, child)
                        return code
                except TransloadError as error:
                    problem = error.what
                finally:
                    self._clear()
                child.end_by(monotonic())
                outcome = child.outcome()
        raise TransloadError(
            f"rank {self.rank} cannot reach the others: through torch: {outcome.facts.get('failed') or outcome.detail};"
            f" through {self.folder}: {problem}",
            fix=_SHARED,
        )

    def _announce(self, result: str, temporary: TemporaryDirectory[str], child: Child) -> None:
        """Send the exit code to the others, and wait until they have it: the store may end with rank 0.

        By then every rank has removed its files: an agent of torchrun kills all its ranks when one of them fails.
        """
        end = monotonic() + self.grace
        connected = _reported(child, "connected") and not child.ended()
        if not connected:
            temporary.cleanup()
        if os.path.exists(self._report_path(self.folder)):
            self._write(self.folder, result, RESULT)
            while len(os.listdir(self.folder)) > 2 and monotonic() < end - self.grace / 2:  # result and own report
                sleep(_POLL)
            self._clear()
        if connected:
            self._write(temporary.name, result, RESULT)
        while connected and not child.ended() and monotonic() < end:
            sleep(_POLL)

    def _code(self) -> int | None:
        """The exit code that rank 0 wrote into the folder; ``None`` if it has not."""
        with suppress(OSError, ValueError, IndexError):
            result = os.path.join(self.folder, RESULT)
            submitted = os.stat(self._report_path(self.folder)).st_mtime_ns
            if os.stat(result).st_mtime_ns >= submitted:  # not from an earlier run
                with open(result, encoding="utf-8") as stream:
                    return int(stream.read().split()[-1])
        return None

    def _report_path(self, folder: str) -> str:
        return os.path.join(folder, f"rank-{self.rank}.json")

    def _write(self, folder: str, text: str, name: str = "") -> None:
        """Write a file atomically: others read it as soon as it appears."""
        path = os.path.join(folder, name) if name else self._report_path(folder)
        with _using(path):
            with open(f"{path}.new", "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(f"{path}.new", path)

    def _use_folder(self, child: Child, report: str) -> bool:
        """Put the report into the folder if this or another rank cannot use the store, and return whether it is there.

        If the folder exists, the others use it, too. Raises if this rank can use neither the store nor the folder.
        """
        lost = child.ended() and not _reported(child, "complete")
        lost = lost or (monotonic() > child.begun + _CONNECT and not _reported(child, "connected"))
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
        """Submit the report through the store or the folder, and wait for the exit code, which returns the same way."""
        in_folder, code = False, None
        while monotonic() < self.deadline + self.grace:
            for record in child.records:
                if "code" in record:
                    return int(record["code"])
            if code is not None:
                if not os.path.exists(self.folder):  # rank 0 is done
                    break
            elif _reported(child, "sent") and not child.ended():
                if in_folder:  # rank 0 would wait until the file is gone
                    self._clear()
                in_folder = False
            else:
                in_folder = in_folder or self._use_folder(child, report)
                code = self._code() if in_folder else None
                if code is not None:
                    temporary.cleanup()
                    self._clear()
            sleep(_POLL)
        return code

    def _sources(self, child: Child, private: str, report: str) -> tuple[str, ...]:
        """The folders in which rank 0 finds reports: that of its child, and that of ranks without the store."""
        in_folder = os.path.exists(self._report_path(self.folder)) or self._use_folder(child, report)
        return (private, self.folder) if in_folder else (private,)

    def _collect(self, folders: Callable[[], tuple[str, ...]]) -> dict[int, str]:
        """The reports in some folders by rank, as soon as all are there, else at the deadline.

        Reports older than the last result, or much older than this rank's own, are from an earlier run. Ages are
        measured by the clock of the file system, since the clock of a node may be wrong.
        """
        reports: dict[int, str] = {}
        begun = monotonic()
        while True:
            last = monotonic() >= self.deadline  # checked before the scan, so that this sees all that arrived in time
            for folder in folders():
                with _using(folder), os.scandir(folder) as entries:
                    written = os.stat(self._report_path(folder)).st_mtime_ns
                    before = max(self._last_result, written - int(2e9 * self.seconds))
                    for entry in entries:
                        match = _REPORT.fullmatch(entry.name)
                        rank = int(match[1]) if match else self.size
                        with suppress(FileNotFoundError):  # its rank has given up
                            if rank < self.size and rank not in reports and entry.stat().st_mtime_ns > before:
                                with open(entry.path, encoding="utf-8", errors="replace") as stream:
                                    reports[rank] = stream.read()
            if last or len(reports) == self.size:
                return reports
            if self.waiting and monotonic() > begun + _SILENCE:
                self.waiting([rank for rank in range(self.size) if rank not in reports], self.deadline - monotonic())
                self.waiting = None
            sleep(_POLL)

    def _clear(self) -> None:
        """Remove this rank's files from a folder that nobody named; rank 0, which is last, removes everything."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                mine = name == os.path.basename(self._report_path(""))
                if mine or (self.rank == 0 and (name == RESULT or _REPORT.fullmatch(name))):
                    os.unlink(os.path.join(self.folder, name))
            os.rmdir(self.folder)


def _reported(child: Child, word: str) -> bool:
    return any(word in record for record in child.records)


@contextmanager
def _using(where: str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``TransloadError`` about this path."""
    try:
        yield
    except OSError as error:
        raise TransloadError(f"it cannot be used to gather reports: {error.strerror or error}", where=where) from None
