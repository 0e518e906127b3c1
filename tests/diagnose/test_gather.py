"""Reports of the ranks of one job: under a real torchrun, with ranks that are broken or never come."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests import forks
from tests.each import each
from tests.release import RELEASE

from transload.cli.main import main
from transload.diagnose.gather import RESULT, Gathering, job_of
from transload.errors import TransloadError, UsageError

SOURCES = Path(__file__).parents[2] / "src"
needs_shell = pytest.mark.skipif(shutil.which("sh") is None, reason="needs a POSIX shell")


def torchrun(folder: Path, nodes: int, ranks: int, script: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a shell script, whose arguments are the command ``transload doctor``, in each rank of each node."""
    path, temporary = folder / "rank.sh", folder / "tmp"  # torchrun leaves folders behind
    path.write_text(f"{script.format(doctor=f'{sys.executable} -m transload doctor')}\n", encoding="utf-8")
    temporary.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(temporary)}
    launch = ("-m", "torch.distributed.run", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    size = (f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--no-python", "sh", path)
    with ThreadPoolExecutor() as pool:
        started = [(*launch, f"--node-rank={node}", *size) for node in range(nodes)]
        agents = [pool.submit(forks.run, *each, cwd=folder, env=environ) for each in started]
        return [agent.result() for agent in agents]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def broken_torch(folder: Path) -> Path:
    """A folder for PYTHONPATH with a torch that is installed, as its files show, but cannot be imported."""
    torch = folder / "broken" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open')", encoding="utf-8")
    (torch / "_C.so").touch()
    return torch.parent


@needs_shell
@pytest.mark.parametrize(("broken", "absent", "nodes"), [(1, ["rank 3"], 2), (0, [], 1)], ids=str)
def test_a_rank_with_a_broken_torch_reports_and_one_that_never_starts_is_named(
    tmp_path: Path, broken: int, absent: list[str], nodes: int
) -> None:
    """The first rank or another: whoever cannot reach the store of torchrun uses files, and leaves none.

    Each agent of torchrun fails, since one that succeeds waits five minutes for those that failed.
    """
    script = f"""
        [ "$RANK" = {broken} ] && export PYTHONPATH="{broken_torch(tmp_path)}:$PYTHONPATH"
        [ "$RANK" = 3 ] && exit 0
        exec {{doctor}} --gather --no-torch --timeout {15 if absent else 60} --json
    """
    begun, before = time.monotonic(), {*tmp_path.iterdir(), tmp_path / "rank.sh", tmp_path / "tmp"}
    agents = torchrun(tmp_path, nodes, 2 if absent else 3, script)
    assert [agent.returncode for agent in agents] == [1] * nodes, agents
    if RELEASE >= (2, 6):  # whose torchrun prints it; the agent of the second node may lose the store before that
        assert "transload doctor exits with 1: see the comparison" in agents[0].stderr, agents
    assert time.monotonic() - begun < 60
    told = json.loads("".join(agent.stdout for agent in agents))
    assert (told["nodes"], told["silent"]) == (["rank 0", "rank 1", "rank 2"], absent), agents
    # A machine whose GPU is hidden has faults of its own, in all ranks.
    because = [fault["because"] for fault in told["faults"] if fault["nodes"] == [f"rank {broken}"]]
    assert because
    assert all(each == ["PYTHONPATH"] for each in because)
    assert {*tmp_path.iterdir()} == before
    assert not [*(tmp_path / "tmp").glob("transload*")]


@needs_shell
def test_the_init_container_of_the_recipe(tmp_path: Path) -> None:
    recipes = (SOURCES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    found = re.search(r'command: \[sh, -c, "(.* /shared/doctor)"\]', recipes)
    assert found is not None
    command = found[1].replace("/shared", str(tmp_path)).replace("WORLD_SIZE=4", "WORLD_SIZE=2") + " --no-torch --json"
    program = tmp_path / "bin" / "transload"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m transload "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    environ = {**os.environ, "PYTHONPATH": str(SOURCES), "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    pods = [
        subprocess.Popen(
            ["sh", "-c", command],  # noqa: S607
            stdout=subprocess.PIPE,
            env={**environ, "JOB_COMPLETION_INDEX": str(index)},
        )
        for index in (0, 1)
    ]
    first, _ = (pod.communicate(timeout=60)[0] for pod in pods)
    told = json.loads(first)
    assert told["nodes"] == ["rank 0", "rank 1"]
    assert [pod.returncode for pod in pods] == [0 if told["ok"] else 1, 0]


def exchange(gathering: Gathering, report: str, broken: str = "") -> dict[int, str] | int:
    """What rank 0 has found, where its exit code is 1, and what any other rank ends with."""
    found: dict[int, str] = {}

    def conclude(reports: dict[int, str]) -> tuple[str, int]:
        found.update(reports)
        return "all alike\n", 1

    code = gathering.exchange(report, conclude, "", broken)
    assert code == 1 or gathering.rank
    return code if gathering.rank else found


def test_without_torchrun_rank_0_keeps_the_store(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(exchange, Gathering(1, 2, "", 60.0), "one")
        assert exchange(Gathering(0, 2, "", 60.0), "zero") == {0: "zero", 1: "one"}
        assert sent.result() == 1
    assert not job.with_name(f"transload-doctor-17-0-127.0.0.1-{port}").exists()


# -- a folder that nobody named


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the ranks of a job of Slurm meet."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"PROCID": "0", "NTASKS": "2", "JOB_ID": "17", "STEP_ID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return tmp_path / "transload-doctor-17-0"


def test_without_torch_the_ranks_meet_in_a_folder_and_leave_nothing(job: Path) -> None:
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(exchange, Gathering(rank, 3, "", 60.0), f"{rank}", "broken") for rank in (1, 2)]
        assert exchange(Gathering(0, 3, "", 60.0), "0", "broken") == {0: "0", 1: "1", 2: "2"}
        assert [each.result() for each in others] == [1, 1]
    assert not job.exists()


def test_what_was_left_in_that_folder_long_ago_does_not_count(job: Path) -> None:
    job.mkdir()
    (job / "rank-1.json").write_text("old", encoding="utf-8")
    os.utime(job / "rank-1.json", (1e9, 1e9))
    with pytest.raises(TransloadError, match=r"through torch: MASTER_ADDR .*; through .*: no other rank used it"):
        exchange(Gathering(0, 2, "", 0.3), "0")
    assert not job.exists()


def test_a_rank_whom_nobody_hears_says_so(job: Path) -> None:
    with pytest.raises(TransloadError, match="rank 1 cannot reach the others: through torch: no torch; through"):
        exchange(Gathering(1, 2, "", 0.3), "{}", "no torch")
    assert not job.exists()
    job.touch()
    with pytest.raises(TransloadError, match="it cannot be used to gather reports"):
        Gathering(1, 2, "", 60.0)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_rank_that_a_launcher_ends_leaves_nothing(job: Path) -> None:
    temporary = job.with_name("tmp")
    temporary.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(temporary), "SLURM_PROCID": "1"}
    rank = subprocess.Popen([sys.executable, "-m", "transload", "doctor", "--gather", "--no-torch"], env=environ)
    end = time.monotonic() + 60
    while not (job / "rank-1.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    rank.terminate()
    assert rank.wait(60) == 128 + signal.SIGTERM
    assert [*temporary.iterdir(), *job.parent.glob("transload*")] == []


def test_a_torch_that_cannot_be_imported_is_quoted(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("PYTHONPATH", str(broken_torch(job.parent)))
    with pytest.raises(TransloadError, match=r"through torch: ImportError: libtorch_cpu\.so: cannot open; through"):
        exchange(Gathering(1, 2, "", 0.75), "{}")


def test_a_torch_that_hangs_is_not_waited_for(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transload.diagnose.gather._CONNECT", 0.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    broken = broken_torch(job.parent)
    (broken / "torch" / "__init__.py").write_text("import time; time.sleep(600)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    with ThreadPoolExecutor() as pool:
        other = pool.submit(exchange, Gathering(1, 2, "", 60.0), "1")
        assert exchange(Gathering(0, 2, "", 60.0), "0") == {0: "0", 1: "1"}
        assert other.result() == 1


def test_jobs_are_told_apart_by_what_their_launchers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    master = {"MASTER_ADDR": "gpu0", "MASTER_PORT": "29500"}
    elastic = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a/../b", "SLURM_STEP_ID": "9", **master}
    assert job_of(elastic)[2] == "transload-doctor-a-..-b-gpu0-29500"
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun@1"}
    assert job_of(mpi)[2] == "transload-doctor-prterun-1"
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT are not set"):
        Gathering(0, 2, "", 60.0)


# -- a folder that is named


def test_all_reports_or_those_that_came_by_the_deadline(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "folder")
    assert exchange(Gathering(1, 3, folder, 10.0), "one") == 0
    (tmp_path / "new" / "folder" / "rank-7.json").write_text("not one of three", encoding="utf-8")
    assert exchange(Gathering(0, 3, folder, 0.3), "zero") == {0: "zero", 1: "one"}
    (tmp_path / "new" / "folder" / RESULT).unlink()
    exchange(Gathering(2, 3, folder, 10.0), "two")
    begun = time.monotonic()
    assert exchange(Gathering(0, 3, folder, 60.0), "zero") == {0: "zero", 1: "one", 2: "two"}
    assert time.monotonic() - begun < 30


def test_a_rank_of_torchrun_waits_for_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "17")
    folder = str(tmp_path)
    (tmp_path / RESULT).write_text("of an earlier run\nexit code 7\n", encoding="utf-8")
    os.utime(tmp_path / RESULT, (1e9, 1e9))
    with pytest.raises(TransloadError, match="rank 1 did not receive the result of rank 0"):
        exchange(Gathering(1, 2, folder, 0.1), "one")
    with ThreadPoolExecutor() as pool:
        other = pool.submit(exchange, Gathering(1, 2, folder, 10.0), "one")
        assert exchange(Gathering(0, 2, folder, 10.0), "zero") == {0: "zero", 1: "one"}
        assert other.result() == 1
    assert (tmp_path / RESULT).read_text(encoding="utf-8") == "all alike\nexit code 1\n"


def test_whom_rank_0_waits_for_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[int]] = []
    monkeypatch.setattr("transload.diagnose.gather._SILENCE", 0.0)
    exchange(Gathering(1, 4, str(tmp_path), 10.0), "one")
    exchange(Gathering(0, 4, str(tmp_path), 0.3, lambda missing, _: said.append(missing)), "zero")
    assert said == [[2, 3]]


def test_reports_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    folder = str(tmp_path)
    exchange(Gathering(1, 3, folder, 10.0), "one")
    exchange(Gathering(2, 3, folder, 10.0), "two")
    time.sleep(0.05)  # a file system may count in hundredths
    assert exchange(Gathering(0, 3, folder, 10.0), "zero") == {0: "zero", 1: "one", 2: "two"}
    time.sleep(0.05)
    exchange(Gathering(2, 3, folder, 10.0), "two again")
    assert exchange(Gathering(0, 3, folder, 0.2), "zero") == {0: "zero", 2: "two again"}
    long_ago = time.time() - 1000
    (tmp_path / RESULT).unlink()
    os.utime(tmp_path / "rank-1.json", (long_ago, long_ago))
    assert exchange(Gathering(0, 3, folder, 0.2), "zero") == {0: "zero", 2: "two again"}


def test_a_rank_that_starts_takes_its_old_report_away(tmp_path: Path) -> None:
    exchange(Gathering(1, 2, str(tmp_path), 10.0), "old")
    Gathering(1, 2, str(tmp_path), 10.0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TransloadError, match="cannot be used to gather reports") as caught:
        Gathering(0, 2, str(tmp_path / "file" / "folder"), 10.0)
    assert caught.value.where == str(tmp_path / "file" / "folder")


# -- launchers


@each(
    ("environ", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (5, 8)),
    ],
)
def test_launchers(environ: dict[str, str], rank: tuple[int, int]) -> None:
    assert job_of(environ)[:2] == rank


@each(
    "environ",
    [
        {},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "²", "WORLD_SIZE": "9"},
        {"SLURM_PROCID": "0"},
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="no launcher"):
        job_of(environ)


def test_a_result_that_cannot_be_written_is_still_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RESULT).mkdir()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["doctor", "--gather", str(tmp_path), "--no-torch", "--json"])  # not 0: the others get no result
    out, err = capsys.readouterr()
    assert len(json.loads(out)["nodes"]) == 1
    assert RESULT in err


@each(
    "options",
    [
        ("--compare", "a.json", "--no-torch"),
        ("--compare", "a.json", "--from", "b.json"),
        ("--gather", "--python", "python3"),
        ("--gather", "--from", "b.json"),
        ("--gather", "--verbose"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *options]) == 2
    assert re.search("cannot be combined with", capsys.readouterr().err)
