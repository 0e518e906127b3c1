"""Reports gathered from the ranks of a job: under a real torchrun, with ranks that are broken or never start."""

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
    """Run a shell script in each rank of each node, with ``{doctor}`` for the command ``transload doctor``."""
    path, temporary = folder / "rank.sh", folder / "tmp"  # torchrun leaves temporary folders behind
    path.write_text(f"{script.format(doctor=f'{sys.executable} -m transload doctor')}\n", encoding="utf-8")
    temporary.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(SOURCES), "TMPDIR": str(temporary)}
    launcher = ("-m", "torch.distributed.run", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    size = (f"--nnodes={nodes}", f"--nproc-per-node={ranks}", "--no-python", "sh", path)
    with ThreadPoolExecutor() as pool:
        commands = [(*launcher, f"--node-rank={node}", *size) for node in range(nodes)]
        agents = [pool.submit(forks.run, *arguments, cwd=folder, env=environ) for arguments in commands]
        return [agent.result() for agent in agents]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def broken_torch(folder: Path) -> Path:
    """A folder for PYTHONPATH with a torch whose files look installed but which cannot be imported."""
    torch = folder / "broken" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open')", encoding="utf-8")
    (torch / "_C.so").touch()
    return torch.parent


@needs_shell
@pytest.mark.parametrize(("broken", "absent", "nodes"), [(1, ["rank 3"], 2), (0, [], 1)], ids=str)
def test_rank_with_broken_torch_reports_and_absent_rank_is_named(
    tmp_path: Path, broken: int, absent: list[str], nodes: int
) -> None:
    """A rank that cannot reach the store of torchrun, rank 0 or another, uses files and removes them.

    Every agent of torchrun fails, because an agent that succeeds waits five minutes for those that failed.
    """
    script = f"""
        [ "$RANK" = {broken} ] && export PYTHONPATH="{broken_torch(tmp_path)}:$PYTHONPATH"
        [ "$RANK" = 3 ] && exit 0
        exec {{doctor}} --gather --no-torch --timeout {15 if absent else 60} --json
    """
    start, before = time.monotonic(), {*tmp_path.iterdir(), tmp_path / "rank.sh", tmp_path / "tmp"}
    agents = torchrun(tmp_path, nodes, 2 if absent else 3, script)
    assert [agent.returncode for agent in agents] == [1] * nodes, agents
    if RELEASE >= (2, 6):  # older ones do not print it; the agent of the second node may lose the store before
        assert "transload doctor exits with 1: see the comparison" in agents[0].stderr, agents
    assert time.monotonic() - start < 240  # not the five minutes of an agent
    result = json.loads("".join(agent.stdout for agent in agents))
    assert (result["nodes"], result["silent"]) == (["rank 0", "rank 1", "rank 2"], absent), agents
    # On a machine whose GPU is hidden, all ranks have further faults.
    causes = [fault["because"] for fault in result["faults"] if fault["nodes"] == [f"rank {broken}"]]
    assert causes
    assert all(cause == ["PYTHONPATH"] for cause in causes)
    assert {*tmp_path.iterdir()} == before
    assert not [*(tmp_path / "tmp").glob("transload*")]


@needs_shell
def test_init_container_command_of_the_recipe(tmp_path: Path) -> None:
    recipes = (SOURCES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    match = re.search(r'command: \[sh, -c, "(.* /shared/doctor)"\]', recipes)
    assert match is not None
    command = match[1].replace("/shared", str(tmp_path)).replace("WORLD_SIZE=4", "WORLD_SIZE=2") + " --no-torch --json"
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
    first, _ = (pod.communicate(timeout=300)[0] for pod in pods)
    result = json.loads(first)
    assert result["nodes"] == ["rank 0", "rank 1"]
    assert [pod.returncode for pod in pods] == [0 if result["ok"] else 1, 0]


def exchange(gathering: Gathering, report: str, broken: str = "") -> dict[int, str] | int:
    """The reports that rank 0 receives before it ends with exit code 1, or the exit code of any other rank."""
    received: dict[int, str] = {}

    def conclude(reports: dict[int, str]) -> tuple[str, int]:
        received.update(reports)
        return "all alike\n", 1

    code = gathering.exchange(report, conclude, "", broken)
    assert code == 1 or gathering.rank
    return code if gathering.rank else received


def test_rank_0_hosts_the_store_without_torchrun(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(exchange, Gathering(1, 2, "", 60.0), "one")
        assert exchange(Gathering(0, 2, "", 60.0), "zero") == {0: "zero", 1: "one"}
        assert other.result() == 1
    assert not job.with_name(f"transload-doctor-17-0-127.0.0.1-{port}").exists()


# -- default folder


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder in which the ranks of a Slurm job exchange reports."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"PROCID": "0", "NTASKS": "2", "JOB_ID": "17", "STEP_ID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return tmp_path / "transload-doctor-17-0"


def test_ranks_without_torch_use_a_folder_and_remove_it(job: Path) -> None:
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(exchange, Gathering(rank, 3, "", 60.0), f"{rank}", "broken") for rank in (1, 2)]
        assert exchange(Gathering(0, 3, "", 60.0), "0", "broken") == {0: "0", 1: "1", 2: "2"}
        assert [other.result() for other in others] == [1, 1]
    assert not job.exists()


def test_old_report_in_the_default_folder_is_ignored(job: Path) -> None:
    job.mkdir()
    (job / "rank-1.json").write_text("old", encoding="utf-8")
    os.utime(job / "rank-1.json", (1e9, 1e9))
    with pytest.raises(TransloadError, match=r"through torch: MASTER_ADDR .*; through .*: no other rank used it"):
        exchange(Gathering(0, 2, "", 0.3), "0")
    assert not job.exists()


def test_rank_that_reaches_no_other_is_an_error(job: Path) -> None:
    with pytest.raises(TransloadError, match="rank 1 cannot reach the others: through torch: no torch; through"):
        exchange(Gathering(1, 2, "", 0.3), "{}", "no torch")
    assert not job.exists()
    job.touch()
    with pytest.raises(TransloadError, match="it cannot be used to gather reports"):
        Gathering(1, 2, "", 60.0)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_terminated_rank_leaves_no_files(job: Path) -> None:
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


def test_import_error_of_torch_is_quoted(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("PYTHONPATH", str(broken_torch(job.parent)))
    with pytest.raises(TransloadError, match=r"through torch: ImportError: libtorch_cpu\.so: cannot open; through"):
        exchange(Gathering(1, 2, "", 0.75), "{}")


def test_hanging_torch_is_not_waited_for(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_folder_name_comes_from_the_variables_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    master = {"MASTER_ADDR": "gpu0", "MASTER_PORT": "29500"}
    elastic = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a/../b", "SLURM_STEP_ID": "9", **master}
    assert job_of(elastic)[2] == "transload-doctor-a-..-b-gpu0-29500"
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun@1"}
    assert job_of(mpi)[2] == "transload-doctor-prterun-1"
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT are not set"):
        Gathering(0, 2, "", 60.0)


# -- explicit folder


def test_rank_0_returns_at_the_deadline_or_with_all_reports(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "folder")
    assert exchange(Gathering(1, 3, folder, 10.0), "one") == 0
    (tmp_path / "new" / "folder" / "rank-7.json").write_text("not one of three", encoding="utf-8")
    assert exchange(Gathering(0, 3, folder, 0.3), "zero") == {0: "zero", 1: "one"}
    (tmp_path / "new" / "folder" / RESULT).unlink()
    exchange(Gathering(2, 3, folder, 10.0), "two")
    start = time.monotonic()
    assert exchange(Gathering(0, 3, folder, 60.0), "zero") == {0: "zero", 1: "one", 2: "two"}
    assert time.monotonic() - start < 30


def test_torchrun_rank_waits_for_the_exit_code_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rank_0_reports_missing_ranks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[list[int]] = []
    monkeypatch.setattr("transload.diagnose.gather._SILENCE", 0.0)
    exchange(Gathering(1, 4, str(tmp_path), 10.0), "one")
    exchange(Gathering(0, 4, str(tmp_path), 0.3, lambda missing, _: reported.append(missing)), "zero")
    assert reported == [[2, 3]]


def test_reports_of_an_earlier_run_are_ignored(tmp_path: Path) -> None:
    folder = str(tmp_path)
    exchange(Gathering(1, 3, folder, 10.0), "one")
    exchange(Gathering(2, 3, folder, 10.0), "two")
    time.sleep(0.05)  # timestamps of a file system may be as coarse as 10 ms
    assert exchange(Gathering(0, 3, folder, 10.0), "zero") == {0: "zero", 1: "one", 2: "two"}
    time.sleep(0.05)
    exchange(Gathering(2, 3, folder, 10.0), "two again")
    assert exchange(Gathering(0, 3, folder, 0.2), "zero") == {0: "zero", 2: "two again"}
    long_ago = time.time() - 1000
    (tmp_path / RESULT).unlink()
    os.utime(tmp_path / "rank-1.json", (long_ago, long_ago))
    assert exchange(Gathering(0, 3, folder, 0.2), "zero") == {0: "zero", 2: "two again"}


def test_starting_rank_removes_its_old_report(tmp_path: Path) -> None:
    exchange(Gathering(1, 2, str(tmp_path), 10.0), "old")
    Gathering(1, 2, str(tmp_path), 10.0)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
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
def test_rank_and_world_size_of_each_launcher(environ: dict[str, str], rank: tuple[int, int]) -> None:
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
def test_missing_or_invalid_launcher_variables_are_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="no launcher"):
        job_of(environ)


def test_result_that_cannot_be_written_is_still_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RESULT).mkdir()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["doctor", "--gather", str(tmp_path), "--no-torch", "--json"])  # not 0: the other ranks get no result
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
def test_incompatible_options_are_an_error(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options]) == 2
    assert re.search("cannot be combined with", capsys.readouterr().err)
