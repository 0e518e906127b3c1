"""The command ``transload rescue``: its options, exit codes and streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.schema import validate

from transload.cli.main import main

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "rescue.schema.json"
NOT_FOR_IT = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


@pytest.fixture
def whole(data: Path) -> bytes:
    return (data / "h200" / "train_cuda0.ckpt").read_bytes()


@pytest.fixture
def broken(whole: bytes, tmp_path: Path) -> Path:
    """Two flipped bits, in two records."""
    flipped = bytearray(whole)
    flipped[3000] ^= 4
    flipped[9000] ^= 1
    path = tmp_path / "broken.pt"
    path.write_bytes(flipped)
    return path


@pytest.fixture
def half(whole: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "half.pt"
    path.write_bytes(whole[:8000])
    return path


def valid(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    validate(document, SCHEMA)
    return document


def test_everything(broken: Path, whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = broken.read_bytes()
    out = tmp_path / "mended.pt"
    assert main(["rescue", str(broken), str(out)]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert "2 bits in 2 bytes, 1 tensor" in shown.out
    assert "byte 3,000  0x76 → 0x72  proven  data.pkl" in shown.out
    assert out.read_bytes() == whole
    assert broken.read_bytes() == before
    report = valid((tmp_path / "mended.pt.rescue.json").read_text(encoding="utf-8"))
    assert [(mend["position"], mend["bits"]) for mend in report["mends"]] == [(3000, [2]), (9000, [0])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.pt", "mended.pt", "mended.pt.rescue.json"]


def test_part_of_it(half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescue", str(half), str(tmp_path / "out.pt"), "--json"]) == 1
    made = valid(capsys.readouterr().out)
    assert made["counts"] == {"whole": 26, "mended": 0, "lost": 4}
    assert (made["how"], made["complete"], made["done"]) == ("left-out", False, True)
    assert {tensor["why"] for tensor in made["tensors"] if tensor["state"] == "lost"} == {
        "its bytes are not in the file"
    }


def test_nothing(whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "start.pt"
    path.write_bytes(whole[:500])
    assert main(["rescue", str(path), str(tmp_path / "out.pt")]) == 2
    shown = capsys.readouterr()
    assert "nothing" in shown.out + shown.err
    assert [each.name for each in tmp_path.iterdir()] == ["start.pt"]


def test_a_plan(half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(tmp_path / "out.pt")], ["--fill", "nan"]):
        assert main(["rescue", str(half), *arguments, "--dry-run"]) == 1
        assert "would write" in capsys.readouterr().out
    assert main(["rescue", str(half), "--dry-run", "--json"]) == 1
    assert valid(capsys.readouterr().out)["out"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["half.pt"]


def test_filled(half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescue", str(half), str(tmp_path / "out.pt"), "--fill", "zeros"]) == 1
    assert "with zeros in place of what is lost" in capsys.readouterr().out


def test_nothing_is_written_over(broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.pt"
    out.write_bytes(b"precious")
    assert main(["rescue", str(broken), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    assert main(["rescue", str(broken), str(out), "--force"]) == 0
    assert main(["rescue", str(broken), str(broken), "--force"]) == 2
    assert "never writes to its source" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["absent.pt", "out.pt"], ["README.md", "out.pt"], ["half.pt"], ["half.pt", "half.pt/out.pt"]],
    ids=["nothing", "absent", "a text", "no target", "a file for a folder"],
)
def test_mistakes(
    arguments: list[str], half: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(half.parent)
    (half.parent / "README.md").write_text("# a text")
    assert main(["rescue", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err
    assert "Traceback" not in shown.err
    assert not (half.parent / "out.pt").exists()


def test_a_journal_is_not_touched(broken: Path, tmp_path: Path, whole: bytes) -> None:
    """Other commands put an interrupted retag right first; this one never writes its source."""
    from transload.io.journal import Change, Changes, Journal
    from transload.io.sources import journal_path

    now = broken.read_bytes()
    changes = Changes((Change(100, whole[100:104], now[100:104]),), len(whole), len(now))
    journal = Path(journal_path(str(broken)))
    journal.write_bytes(Journal(changes, broken.stat().st_ino).encoded())
    assert main(["rescue", str(broken), str(tmp_path / "out.pt")]) == 0
    assert broken.read_bytes() == now
    assert journal.exists()


def test_it_needs_nothing(half: Path, tmp_path: Path, program: Transload) -> None:
    done = program("rescue", str(half), str(tmp_path / "out.pt"), "--json", python=("-S",))
    assert done.returncode == 1, done.stderr
    assert valid(done.stdout)["counts"]["whole"] == 26


def test_what_it_imports(half: Path, imported: Imported) -> None:
    modules = imported("rescue", str(half), "--dry-run")
    assert "transload.rescuing.recover" in modules
    assert not modules & NOT_FOR_IT


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_in_any_width(half: Path, program: Transload, columns: str) -> None:
    done = program("rescue", str(half), "--dry-run", COLUMNS=columns, NO_COLOR="1")
    assert done.returncode == 1, done.stderr
    assert "\x1b" not in done.stdout


def test_one_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Advice of several lines is shown as lines."""
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_bytes(b"x")
    assert main(["rescue", str(tmp_path / "__0_0.distcp"), str(tmp_path / "out.pt")]) == 2
    _, advice, command = capsys.readouterr().err.splitlines()
    assert advice == "  Rescue the directory."
    assert command == f"    $ transload rescue {tmp_path} NEW.pt"


def test_several_files(half: Path, whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    half.rename(folder / "model-00001-of-00001.pt")
    assert main(["rescue", str(folder), str(tmp_path / "out.safetensors"), "--json"]) == 1
    told = valid(capsys.readouterr().out)
    assert (told["format"], told["counts"]["whole"]) == ("sharded", 26)
    assert told["counts"]["lost"] > 0
    assert len(whole) > told["nbytes"]
