"""The hook of pre-commit and the GitHub Action, in a repository with ten good and ten bad files."""

from __future__ import annotations

import io
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from tests.block_files import COMMON, DATA, PAGE, Greeting, damaged
from tests.makers import saved
from tests.sarif import run_in, validate_officially

from transload.cli.main import COMMANDS, main, parser_of

ROOT = Path(__file__).parent.parent
ARGUMENTS = ["--refuse", "code,damage,other,gpu", "--max-size", "50kB"]
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"


def archive(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


STATE = {"weight": torch.arange(6.0).reshape(2, 3), "step": 3}
GOOD: dict[str, Callable[[], bytes]] = {
    "state.pt": lambda: saved(STATE),
    "legacy.pth": lambda: saved(STATE, _use_new_zipfile_serialization=False),
    "half.ckpt": lambda: saved({"model": {"weight": torch.ones(4).half()}, "epoch": 1}),
    "pytorch_model.bin": lambda: saved({"layer.bias": torch.zeros(3)}),
    "model.safetensors": lambda: save({"weight": torch.ones(2, 2)}),
    "deep/er/numbers.npz": lambda: archive(a=np.arange(4), b=np.ones(2)),
    "with space, and größe.pt": lambda: saved([torch.ones(2)]),
    "100%.pt": lambda: saved(torch.ones(1)),
    "int8.PT": lambda: saved({"q": torch.ones(5, dtype=torch.int8)}),
    "tied.pt": lambda: saved([STATE["weight"]] * 2),
}
BAD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "call.pkl": ("dangerous-globals", lambda: pickle.dumps(Greeting())),
    "stranger.pt": ("dangerous-globals", lambda: saved({"weight": torch.zeros(4), "note": Greeting()})),
    "deep/whole_model.pt": ("needs-trust", COMMON["whole.pt"]),
    "script.pt": ("is-a-program", (DATA / "torchscript_cuda0.pt").read_bytes),
    "cut.pt": ("zip-no-directory", lambda: saved(STATE)[:-100]),
    "cut, 50%.safetensors": ("safetensors-truncated", lambda: save({"weight": torch.ones(64)})[:-9]),
    "page.bin": ("not-a-checkpoint", PAGE.encode),
    "pointer.pt": ("not-a-checkpoint", POINTER.encode),
    "gpu.pt": ("gpu-tags", COMMON["model_cuda0.pt"]),
    "large.pt": ("too-large", lambda: saved(torch.zeros(20_000))),
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a repository with these files, and others that are no checkpoints by their names."""
    for name, content in {**GOOD, **{name: content for name, (_, content) in BAD.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content())
    (tmp_path / "README.md").write_text("about pt files", encoding="utf-8")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hook() -> dict[str, str]:
    text = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    assert text.startswith("- id: transload\n")
    return dict(re.findall(r"^(?:- |  )(\w+): (.*)$", text, re.MULTILINE))


def failed(run: dict[str, Any]) -> dict[str, set[str]]:
    """The codes of the errors of each file."""
    from urllib.parse import unquote

    codes: dict[str, set[str]] = {}
    for result in run["results"]:
        if result["level"] == "error":
            uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
            codes.setdefault(unquote(uri), set()).add(result["ruleId"])
    return codes


def test_hook_runs_a_command_that_exists_for_the_files_that_it_means() -> None:
    program, command = hook()["entry"].split()
    assert (program, command in COMMANDS, hook()["language"], hook()["types"]) == (
        "transload",
        True,
        "python",
        "[file]",
    )
    named = re.compile(hook()["files"])
    assert [name for name in (*GOOD, *BAD) if not named.search(name)] == []
    assert [name for name in ("README.md", "train.py", "pt", "a.bin.txt", "script.pty") if named.search(name)] == []


def test_empty_list_of_what_to_refuse_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--refuse", "", "a.pt"]) == 2
    assert "--refuse does not know ''" in capsys.readouterr().err


def test_hook_refuses_the_ten_bad_files_and_no_good_one(repository: Path) -> None:  # noqa: ARG001
    entry = hook()["entry"].split()[1:]
    assert [name for name in GOOD if main([*entry, *ARGUMENTS, name])] == []
    assert [name for name in BAD if main([*entry, *ARGUMENTS, name]) != 1] == []
    assert main([*entry, *ARGUMENTS, *GOOD]) == 0
    assert main([*entry, *ARGUMENTS, *GOOD, *BAD]) == 1
    assert main([*entry, "gpu.pt", "large.pt"]) == 0  # these are refused only if that is asked for


def test_hook_says_what_a_pointer_is(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    main([*hook()["entry"].split()[1:], "pointer.pt"])
    assert "a Git LFS pointer for a file of 12,345 bytes, not the file" in capsys.readouterr().out


def test_sarif_has_an_error_for_each_bad_file_only(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *ARGUMENTS, "--sarif", "-", *GOOD, *BAD]) == 1
    text = capsys.readouterr().out
    found = failed(run_in(text))
    assert found.keys() == BAD.keys()
    assert {name: code in found[name] for name, (code, _) in BAD.items()} == dict.fromkeys(BAD, True)
    assert main(["inspect", *ARGUMENTS, "--sarif", "out.sarif", *GOOD, *BAD]) == 1
    assert "out.sarif written: " in capsys.readouterr().out
    assert (repository / "out.sarif").read_text(encoding="utf-8") == text
    validate_officially(text)


def test_sarif_replaces_only_sarif(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (repository / "state.pt").read_bytes()
    assert main(["inspect", "state.pt", "--sarif", "state.pt", "--force"]) == 2
    assert "it is not a report" in capsys.readouterr().err
    assert (repository / "state.pt").read_bytes() == before
    assert main(["inspect", "state.pt", "--sarif", "a.sarif"]) == 0
    assert main(["inspect", "state.pt", "--sarif", "a.sarif"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["inspect", "stranger.pt", "--sarif", "a.sarif", "--force"]) == 1
    assert failed(run_in((repository / "a.sarif").read_text(encoding="utf-8"))).keys() == {"stranger.pt"}
    assert main(["inspect", "state.pt", "--sarif", "-", "--json"]) == 2
    assert main(["inspect", "state.pt", "--sarif", "missing/a.sarif"]) == 2


def test_file_that_cannot_be_read_is_in_the_sarif(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    assert main(["inspect", "nope.pt", "stranger.pt", "--sarif", "-"]) == 2
    run = run_in(capsys.readouterr().out)
    assert not run["invocations"][0]["executionSuccessful"]
    assert failed(run).keys() == {"stranger.pt"}
    assert main(["inspect", "nope.pt", "--sarif", "-"]) == 2
    assert run_in(capsys.readouterr().out)["results"] == []


def test_verify_finds_in_sarif_what_only_checksums_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.pt").write_bytes(damaged())
    assert main(["inspect", "a.pt", "--sarif", "-"]) == 0
    capsys.readouterr()
    assert main(["inspect", "a.pt", "--sarif", "-", "--verify"]) == 1
    assert failed(run_in(capsys.readouterr().out)) == {"a.pt": {"crc-mismatch"}}


# -- the action


@pytest.fixture
def git(repository: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    subprocess.run(["git", "init", "-q"], check=True)  # noqa: S607
    subprocess.run(["git", "add", "-A"], check=True)  # noqa: S607
    (repository / "untracked.pt").write_bytes(pickle.dumps(Greeting()))
    return repository


def act(**inputs: str) -> tuple[int, str]:
    """The exit code and the output of the script of the action."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSLOAD_", "GITHUB_"))}
    env |= {"TRANSLOAD_REFUSE": "code,damage,other", "PYTHONUTF8": "1"}
    env |= {name if name.startswith("GITHUB_") else f"TRANSLOAD_{name}": value for name, value in inputs.items()}
    script = ROOT / "scripts" / "action.py"
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, encoding="utf-8", timeout=300, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_action_annotates_the_bad_files_that_git_tracks(git: Path) -> None:  # noqa: ARG001
    code, output = act(REFUSE="code,damage,other,gpu", MAX_SIZE="50kB")
    assert code == 1
    shown = re.findall(r"^::error file=(.*?)::", output, re.MULTILINE)
    names = [name.replace("%2C", ",").replace("%25", "%") for name in shown]
    assert {*names} == {*BAD}
    assert "::error file=pointer.pt::a Git LFS pointer for a file of 12,345 bytes, not the file: oid sha256:" in output
    code, output = act(PATHS="*.safetensors\nstate.pt\n  deep/**/*.npz\n")
    assert (code, output.count("::error file=cut%2C 50%25.safetensors::")) == (1, 1)
    assert act(PATHS="state.pt\ndeep/**/*.npz")[0] == 0


def test_action_writes_sarif_with_links_to_its_own_manual(git: Path) -> None:
    inputs = {"SARIF": "out.sarif", "ACTION": "owner/name", "REF": "v1", "GITHUB_SERVER_URL": "https://host"}
    for _ in range(2):  # the second run replaces the file of the first
        code, output = act(**inputs, GITHUB_OUTPUT="output.txt")
        assert (code, output.count("::error")) == (1, 0)
        text = (git / "out.sarif").read_text(encoding="utf-8")
        run = run_in(text)
        assert failed(run).keys() == BAD.keys() - {"gpu.pt", "large.pt"}
    assert run["tool"]["driver"]["informationUri"] == "https://host/owner/name/blob/v1"
    links = {rule["id"]: rule["helpUri"] for rule in run["tool"]["driver"]["rules"]}
    assert links["needs-trust"] == "https://host/owner/name/blob/v1/docs/findings.md#needs-trust"
    assert (git / "output.txt").read_text(encoding="utf-8") == "sarif=out.sarif\n" * 2
    validate_officially(text)


def test_action_says_what_it_cannot_do(git: Path) -> None:
    for inputs, said in (
        ({"PATHS": "state.pt\nnope/*.pt"}, "::error::no file matches nope/*.pt"),
        ({"REFUSE": "everything"}, "::error::the inputs of transload cannot be used"),
        ({"MAX_SIZE": "much"}, "::error::the inputs of transload cannot be used"),
        ({"SARIF": "state.pt"}, "::error::state.pt exists, and is not a report of transload"),
        ({"SARIF": "nope/a.sarif"}, "::error::nope/a.sarif cannot be written: No such file or directory"),
        ({"SARIF": "deep"}, "::error::deep cannot be written: Is a directory"),
    ):
        code, output = act(**inputs)
        assert (code, said in output) == (2, True), output
    assert (git / "state.pt").read_bytes() == GOOD["state.pt"]()
    shutil.rmtree(git / ".git")
    code, output = act()
    assert (code, "::error::git cannot list the files" in output) == (2, True)


def test_action_with_nothing_to_inspect_writes_an_empty_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)  # noqa: S607
    code, output = act(SARIF="out.sarif")
    assert (code, output) == (0, "::notice::git tracks no checkpoints: there is nothing to inspect\n")
    assert run_in(Path("out.sarif").read_text(encoding="utf-8"))["results"] == []


def test_inputs_of_the_action_are_those_of_its_script_and_of_inspect() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    inputs, _, rest = text.partition("\noutputs:\n")
    names = re.findall(r"^  ([a-z-]+):$", inputs, re.MULTILINE)
    passed = dict(re.findall(r"^        (TRANSLOAD_\w+): \$\{\{ inputs\.([a-z-]+) \}\}$", rest, re.MULTILINE))
    assert sorted(passed.values()) == sorted(names)
    script = (ROOT / "scripts" / "action.py").read_text(encoding="utf-8")
    assert [name for name in passed if f'"{name}"' not in script] == []
    options = {option for action in parser_of("inspect")._actions for option in action.option_strings}
    assert {f"--{name}" for name in names} - options == {"--paths"}
    assert "scripts/action.py" in rest


def test_workflow_commands_are_escaped() -> None:
    command = runpy.run_path(str(ROOT / "scripts" / "action.py"))["command"]
    assert (
        command("error", "a: b, 5%\r\n::x", "c%3A%2C%25%0A.pt") == "::error file=c%3A%2C%25%0A.pt::a: b, 5%25%0D%0A::x"
    )
    assert command("notice", "a") == "::notice::a"
