from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.diagnose.cases import cases
from tests.diagnose.trees import FOLDER, Content, Link, plain_host, service, tree_host

from transload.diagnose.probes.surroundings import DECIDING, SHOWN, variables

if TYPE_CHECKING:
    import pytest


def test_values_that_decide_are_told_and_others_are_not(tmp_path: Path) -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "",
        "LD_LIBRARY_PATH": ":/opt/\udcff/lib",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "secret",
        "KAGGLE_KEY": "secret",
        "NVIDIA_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "PIP_INDEX_URL": "https://user:secret@example.org/simple",
        "PATH": "/usr/bin",
    }
    told = variables(tree_host(tmp_path, {}, environ))
    assert told.values == {name: environ[name] for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "SLURM_JOB_ID")}
    assert (told.get("CUDA_VISIBLE_DEVICES"), told.get("HOME")) == ("", None)


def test_no_name_that_is_shown_is_one_of_a_secret() -> None:
    words = ("KEY", "TOKEN", "SECRET", "PASS", "JWT", "CRED", "AUTH", "URL")
    assert DECIDING < SHOWN
    assert not [name for name in SHOWN if any(word in name for word in words)]


def test_a_value_without_an_end_is_cut(tmp_path: Path) -> None:
    told = variables(tree_host(tmp_path, {}, {"LD_LIBRARY_PATH": "/a:" * 100_000}))
    assert len(told.values["LD_LIBRARY_PATH"]) == 1 << 14


@cases(
    ("path", "text", "line"),
    [
        ("/etc/environment", 'PATH="/usr/bin"\nCUDA_VISIBLE_DEVICES="0"\n', 2),
        ("/etc/profile.d/cuda.sh", "export CUDA_VISIBLE_DEVICES=0", 1),
        ("/etc/security/pam_env.conf", "# comment\nCUDA_VISIBLE_DEVICES DEFAULT=0\n", 2),
        ("/home/user/.bashrc", "\n\n  export A=1 CUDA_VISIBLE_DEVICES=0 # one card\n", 3),
        ("/home/user/.zshrc", "typeset -x CUDA_VISIBLE_DEVICES=0", 1),
        ("/home/user/.config/fish/config.fish", "if status is-login\n    set -gx CUDA_VISIBLE_DEVICES 0\nend", 2),
        ("/home/user/.config/fish/config.fish", "set --global --export CUDA_VISIBLE_DEVICES 0", 1),
        ("/home/user/.cshrc", "setenv CUDA_VISIBLE_DEVICES 0", 1),
        ("/home/user/.config/environment.d/gpu.conf", "CUDA_VISIBLE_DEVICES=0", 1),
        ("/opt/conda/etc/conda/activate.d/env.sh", "export CUDA_VISIBLE_DEVICES=0", 1),
        ("/opt/conda/conda-meta/state", '{"version": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}', 1),
        ("/opt/venv/bin/activate", "export CUDA_VISIBLE_DEVICES=0", 1),
        ("/home/user/project/.env", "CUDA_VISIBLE_DEVICES=0", 1),
        ("/home/user/project/Dockerfile", "FROM scratch\nENV CUDA_VISIBLE_DEVICES 0\n", 2),
    ],
)
def test_the_file_that_sets_it(tmp_path: Path, path: str, text: str, line: int) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0", "CONDA_PREFIX": "/opt/conda", "VIRTUAL_ENV": "/opt/venv"}
    told = variables(plain_host(tmp_path, environ=environ, more={path: text}))
    assert told.origins == {"CUDA_VISIBLE_DEVICES": (f"{path}:{line}",)}


@cases(
    "text",
    [
        "# export CUDA_VISIBLE_DEVICES=0",
        "alias one='CUDA_VISIBLE_DEVICES=0 python'",
        'echo "CUDA_VISIBLE_DEVICES=0"',
        "unset CUDA_VISIBLE_DEVICES",
        'if [ -z "$CUDA_VISIBLE_DEVICES" ]; then true; fi',
        "export MY_CUDA_VISIBLE_DEVICES=0",
        "export LD_LIBRARY_PATH=/opt/lib",
    ],
)
def test_a_line_that_speaks_of_it_does_not_set_it(tmp_path: Path, text: str) -> None:
    host = plain_host(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0"}, more={"/home/user/.bashrc": text})
    assert variables(host).origins == {}


def test_several_files_and_variables_in_their_order(tmp_path: Path) -> None:
    more = {
        "/etc/environment": "LD_LIBRARY_PATH=/usr/local/cuda/lib64\n",
        "/home/user/.bashrc": "export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH\nexport PYTHONPATH=/y",
    }
    told = variables(plain_host(tmp_path, environ={"LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/y"}, more=more))
    assert told.origins == {
        "LD_LIBRARY_PATH": ("/etc/environment:1", "/home/user/.bashrc:1"),
        "PYTHONPATH": ("/home/user/.bashrc:2",),
    }


def test_the_unit_of_a_service(tmp_path: Path) -> None:
    more = {
        "/etc/systemd/system/jupyter.service": '[Service]\nEnvironment="A=1" "CUDA_VISIBLE_DEVICES=-1"\n',
        "/etc/systemd/system/jupyter.service.d/gpu.conf": "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=-1\n",
    }
    told = variables(service(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "-1"}, more=more))
    assert told.origins["CUDA_VISIBLE_DEVICES"] == (
        "/etc/systemd/system/jupyter.service:2",
        "/etc/systemd/system/jupyter.service.d/gpu.conf:2",
    )


def test_files_are_not_read_where_nothing_is_set(tmp_path: Path) -> None:
    host = plain_host(tmp_path, more={"/home/user/.bashrc": "export CUDA_VISIBLE_DEVICES=0"})
    assert variables(host).origins == {}


@cases("home", ["", "relative", "/gone", "/\0"])
@cases("content", [FOLDER, Link(".bashrc"), b"\xff\xfe\0CUDA_VISIBLE_DEVICES" * 9])
def test_no_home_and_files_that_are_none(tmp_path: Path, home: str, content: Content) -> None:
    more = {"/home/user/.bashrc": content, "/etc/environment": content}
    host = plain_host(tmp_path, environ={"CUDA_VISIBLE_DEVICES": "0", "HOME": home}, more=more)
    assert variables(host).origins == {}


@cases(
    ("environ", "problem"),
    [
        ({"HOME": "/home/user"}, ""),
        ({"HOME": "/home/file"}, "/home/file: not a folder"),
        ({"HOME": "/home/file", "CUDA_CACHE_PATH": "/home/user/cache"}, ""),
        ({"HOME": "/home/user", "CUDA_CACHE_PATH": "/home/file/cache"}, "/home/file: not a folder"),
        ({"HOME": "/home/user", "CUDA_CACHE_PATH": "file"}, "/home/file: not a folder"),
        ({"HOME": "/home/file", "CUDA_CACHE_DISABLE": "1"}, ""),
        ({"HOME": "/nowhere"}, ""),
        ({}, "neither HOME nor CUDA_CACHE_PATH is set"),
    ],
)
def test_a_cache_that_cannot_be_written(tmp_path: Path, environ: dict[str, str], problem: str) -> None:
    host = tree_host(tmp_path, {"/home/user": FOLDER, "/home/file": ""}, environ, cwd="/home")
    assert variables(host).cache_problem == problem


def test_a_cache_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tree_host(tmp_path, {"/home/user/.nv": FOLDER}, {"HOME": "/home/user"})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert variables(host).cache_problem == "/home/user/.nv: EACCES"
