from __future__ import annotations

from pathlib import Path

from tests.diagnose.cases import cases
from tests.diagnose.trees import Content, Link, Tree, plain_host

from transload.diagnose.probes.kernel import daemons_and_stuck


def process(
    number: int, name: str, state: str = "S", *, command: str = "", files: Tree | None = None
) -> dict[str, Content | None]:
    folder = f"/proc/{number}"
    return {
        f"{folder}/stat": f"{number} ({name[:15]}) {state} 1 1 1 0 -1 4194560\n",
        f"{folder}/cmdline": f"{command or name}\0-d\0",
        **{f"{folder}/{path}": content for path, content in (files or {}).items()},
    }


def test_the_daemons_that_run(tmp_path: Path) -> None:
    tree = {
        **process(1, "systemd"),
        **process(700, "nvidia-persistenced"),
        **process(701, "nv-fabricmanager"),
        **process(702, "nvidia-gridd", "Z"),
        **process(703, "nvidia-persist"),
    }
    assert daemons_and_stuck(plain_host(tmp_path, more=tree)) == (("nv-fabricmanager", "nvidia-persistenced"), ())


@cases(
    ("command", "daemon"),
    [
        ("nvidia-cuda-mps-control", "nvidia-cuda-mps-control"),
        ("/usr/bin/nvidia-cuda-mps-server", "nvidia-cuda-mps-server"),
    ],
)
def test_the_two_of_mps_have_the_same_short_name(tmp_path: Path, command: str, daemon: str) -> None:
    tree = process(80, "nvidia-cuda-mps-x", command=command)
    assert daemons_and_stuck(plain_host(tmp_path, more=tree))[0] == (daemon,)


@cases(
    ("files", "stuck"),
    [
        ({"stack": "[<0>] os_acquire_mutex+0x35/0x60 [nvidia]\n[<0>] nvidia_open+0x1 [nvidia]\n"}, True),
        ({"stack": "[<0>] io_schedule+0x46/0x80\n", "fd/5": Link("/dev/nvidia0")}, False),
        ({"wchan": "os_acquire_rwlock_write"}, True),
        ({"wchan": "0", "fd/5": Link("/dev/nvidiactl")}, True),
        ({"wchan": "folio_wait_bit_common", "fd/5": Link("/data/set.bin")}, False),
        ({}, False),
    ],
)
def test_who_waits_for_the_driver(tmp_path: Path, files: Tree, *, stuck: bool) -> None:
    tree = {**process(4242, "train (1) x", "D", files=files), **process(4243, "sleeps", files=files)}
    assert daemons_and_stuck(plain_host(tmp_path, more=tree))[1] == (("train (1) x (4242)",) if stuck else ())


@cases("tree", [{"/proc/5/stat": b"\xff\0"}, {"/proc/5": ""}, {"/proc/5/stat/x": ""}, {"/proc/5": Link("5")}])
def test_what_cannot_be_read_is_passed_over(tmp_path: Path, tree: Tree) -> None:
    assert daemons_and_stuck(plain_host(tmp_path, more=tree)) == ((), ())
