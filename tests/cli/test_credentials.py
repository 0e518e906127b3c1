"""Passwords and signatures in URLs are not printed, nor written, by any command and in no result."""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.each import for_each
from tests.file_server import serve
from tests.makers import saved

import transload
from transload import diagnose
from transload.cli import completion
from transload.cli.main import COMMANDS, main, parser_of
from transload.errors import TransloadError
from transload.io import http
from transload.io.sources import is_url

if TYPE_CHECKING:
    from tests.cli.conftest import Transload

PASSWORD, SIGNATURE = "s3cr3tpw", "SECRETSIG"
CUT = 40_000
"""How many bytes of a file of 80 kB its damaged copy has."""
ADAPTER = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["fc"]}).encode()

# Every argument of a command that is a path, as "@"; the others are local files that are right.
CALLS = {
    "check": ["@", "a.pt @", "a.pt --model @", "a.pt --model transformers:@"],
    "completion": ["@"],
    "convert": [
        *("@ o.pt", "@ o.safetensors", "a.pt @", "a.pt @ o.pt", "@ --list", "a.pt o.pt --lora @", "@ o/ --to dcp"),
        *("@ o.npz", "@ o.pt --key model", "a.pt @ o.pt --key model"),
    ],
    "diff": ["@ a.pt", "a.pt @", "@ @"],
    "doctor": ["--python @", "--from @", "--compare @ @", "--compare m.json @", "--gather @"],
    "explain": ["@"],
    "inspect": ["@", "@ a.pt", "a.pt --sarif @", "@ --sarif o.sarif", "@ --verify --stats --tensors"],
    "rescue": ["@ o.pt", "@ --dry-run", "@ o.pt --fill zeros", "a.pt @", "@ o.safetensors"],
    "retag": ["@ --to cpu", "a.pt --to cpu -o @", "@ --undo"],
    "run": ["@", "--json @ none.py", "--prefetch @ s.py", "--json - @"],
    "verify": ["@", "@ a.pt", "@ --hash", "a.pt --write @", "a.pt --against @", "@ --write o.json", "--against @"],
}


def spelled(url: str) -> dict[str, str]:
    """URLs of files with credentials, and what happens when these are mistyped."""
    begin, end = url.replace("//", f"//user:{PASSWORD}@"), f"?sig={SIGNATURE}"
    names = ("a.pt", "cut.pt", "code.pt", "cut.safetensors", "adapter.safetensors", "m.json", "page.html", "none.pt")
    urls = {name: f"{begin}/{name}{end}" for name in (*names, "folder/", "shards/model.safetensors.index.json")}
    whole = urls["a.pt"]
    return {
        **urls,
        "a blank": f" {whole}",
        "a quote": f"'{whole}",
        "one slash": whole.replace("//", "/"),
        "no slash": whole.replace("//", ""),
        "no colon": whole.replace("://", "//"),
        "another scheme": whole.replace("http", "htp"),
        "a slash in the password": whole.replace(PASSWORD, f"a/{PASSWORD}"),
        "a question mark in the password": whole.replace(PASSWORD, f"a?{PASSWORD}"),
        "a folder before it": f"models/{whole}",
        "a port that is none": whole.replace("/a.pt", "x/a.pt"),
    }


@pytest.fixture
def urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """URLs on a server, and a current folder with some files."""
    for name, value in {"_PAUSE": 0.001, "_TIMEOUT": 5.0}.items():
        monkeypatch.setattr(http, name, value)
    monkeypatch.setattr(diagnose, "doctor", functools.cache(diagnose.doctor))  # it takes long, and is asked often
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    whole = saved({"model": {"fc.weight": torch.ones(100, 200)}, "step": 3})
    code = saved({"a": torch.nn.Linear(2, 2)})
    transload.convert(whole, tmp_path / "a.safetensors", key="model")
    tensors = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.pt").write_bytes(whole)
    (tmp_path / "s.py").write_text("")
    assert main(["verify", "a.pt", "--write", "m.json"]) == 0
    index = {"weight_map": {"fc.weight": "a.safetensors", "other": "missing.safetensors"}}
    files = {
        "a.pt": whole,
        "cut.pt": whole[:CUT],
        "code.pt": code,
        "cut.safetensors": tensors[:CUT],
        "adapter.safetensors": tensors,
        "adapter_config.json": ADAPTER,
        "m.json": (tmp_path / "m.json").read_bytes(),
        "page.html": b"<!DOCTYPE html><html><title>Log in</title></html>",
        "folder/model.safetensors": tensors,
        "shards/model.safetensors.index.json": json.dumps(index).encode(),
        "shards/a.safetensors": tensors,
    }
    with serve(files) as server:
        yield spelled(server.url)


def calls_of(command: str) -> list[str]:
    """The calls of a command, so that all it shows is seen: as text, as a page and as JSON."""
    calls = CALLS[command]
    if command in ("completion", "run"):
        return calls
    return [*(f"{call} {more}" for call in calls for more in ("--html r.html", "--json")), f"{calls[0]} --html @"]


def leaks(text: str) -> list[str]:
    return [line[:300] for line in text.splitlines() if PASSWORD in line or SIGNATURE in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_that_is_a_path_is_in_the_list(command: str) -> None:
    parser = parser_of(command)
    parse = parser.parse_intermixed_args if command in ("convert", "rescue") else parser.parse_args
    calls = [vars(parse(call.split())) for call in calls_of(command)] if command != "completion" else []
    named = {name for call in calls for name, value in call.items() if "@" in str(value)}
    assert named >= {action.dest for action in completion.actions_of(command) if completion.is_path(action)}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_credentials(
    command: str, urls: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {*tmp_path.rglob("*")}

    def try_one(call: str, how: str) -> None:
        try:
            code: object = main([command, *(word.replace("@", urls[how]) for word in call.split())])
        finally:
            out, err = capsys.readouterr()
            written = [path for path in tmp_path.rglob("*") if path not in kept and path.is_file()]
            texts = {path.name: path.read_bytes().decode("latin-1") for path in written}
            for path in written:
                path.unlink()
        shown = {name: leaks(text) for name, text in {"stdout": out, "stderr": err, **texts}.items()}
        assert {name: lines for name, lines in shown.items() if lines} == {}
        assert code in (0, 1, 2)
        assert "this is a bug" not in err

    cases = {f"{call}: {how}": (call, how) for call in calls_of(command) for how in urls}
    # A folder with one of the other names would be created.
    cases = {name: case for name, case in cases.items() if "--gather" not in name or is_url(urls[case[1]])}
    for_each(cases, lambda name: try_one(*cases[name]))


def test_modules_are_not_named_by_urls(program: Transload, urls: dict[str, str]) -> None:
    for how in ("a.pt", "one slash"):
        result = program("run", "-m", urls[how])
        assert result.returncode == 1
        assert "No module named" in result.stderr
        assert leaks(result.stdout + result.stderr) == []


@pytest.mark.parametrize(
    "words", ["@", "help @", "inspect --color @", "inspect --model=@ a.pt", "check --device @ a.pt"]
)
def test_credentials_in_the_wrong_place(words: str, urls: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.replace("@", urls["a.pt"]) for word in words.split()]) == 2
    out, err = capsys.readouterr()
    assert "http://127.0.0.1:" in err
    assert leaks(out + err) == []


def test_results_and_errors_have_no_credentials(urls: dict[str, str], tmp_path: Path) -> None:
    whole, cut, code = urls["a.pt"], urls["cut.pt"], urls["code.pt"]
    with transload.open(whole) as handle:
        results = [handle, transload.inspect(whole), transload.verify(cut), transload.check(cut, "cpu")]
    results += [transload.diff(whole, code), transload.rescue(cut, dry_run=True)]
    results += [transload.convert(whole, tmp_path / "o.pt"), transload.verify(whole, against=urls["m.json"])]
    results += [transload.CheckpointReader(whole), transload.CheckpointReader(Path(whole))]
    results += [transload.inspect(url) for url in (code, cut)]
    for url in (code, cut, urls["none.pt"], urls["a blank"], Path(whole)):
        with pytest.raises(TransloadError) as caught:
            transload.load(url)
        error = caught.value
        results += [error, error.where, pickle.loads(pickle.dumps(error))]
    assert [found for result in results for found in leaks(f"{result}\n{result!r}")] == []
    assert repr(transload.CheckpointReader(str(tmp_path / "a.pt"))) == f"CheckpointReader({str(tmp_path / 'a.pt')!r})"
