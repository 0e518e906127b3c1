"""The command ``transload rescue``: its options, exit codes and streams."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.schema import validate

from transload.cli.main import main
from transload.render.lines import Style, layout, plain
from transload.rescuing import report, rescue

if TYPE_CHECKING:
    from tests.cli.conftest import Imported, Transload

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "rescue.schema.json"
UNWANTED = {"asyncio", "importlib.metadata", "logging", "numpy", "torch", "urllib"}


@pytest.fixture
def intact(data: Path) -> bytes:
    return (data / "h200" / "train_cuda0.ckpt").read_bytes()


@pytest.fixture
def broken(intact: bytes, tmp_path: Path) -> Path:
    """Two flipped bits, in two records."""
    flipped = bytearray(intact)
    flipped[3000] ^= 4
    flipped[9000] ^= 1
    path = tmp_path / "broken.pt"
    path.write_bytes(flipped)
    return path


@pytest.fixture
def truncated(intact: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "half.pt"
    path.write_bytes(intact[:8000])
    return path


def validated(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    validate(document, SCHEMA)
    return document


def test_flipped_bits_are_repaired(
    broken: Path, intact: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = broken.read_bytes()
    out = tmp_path / "repaired.pt"
    assert main(["rescue", str(broken), str(out)]) == 0
    output = capsys.readouterr()
    assert not output.err
    assert "2 bits in 2 bytes, 1 tensor" in output.out
    assert "byte 3,000  0x76 → 0x72  proven  data.pkl" in output.out
    assert out.read_bytes() == intact
    assert broken.read_bytes() == before
    report = validated((tmp_path / "repaired.pt.rescue.json").read_text(encoding="utf-8"))
    assert [(repair["position"], repair["bits"]) for repair in report["repairs"]] == [(3000, [2]), (9000, [0])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.pt", "repaired.pt", "repaired.pt.rescue.json"]


def test_truncated_file_is_rescued_in_part(truncated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescue", str(truncated), str(tmp_path / "out.pt"), "--json"]) == 1
    document = validated(capsys.readouterr().out)
    assert document["counts"] == {"whole": 26, "repaired": 0, "lost": 4}
    assert (document["how"], document["complete"], document["done"]) == ("left-out", False, True)
    assert {tensor["why"] for tensor in document["tensors"] if tensor["state"] == "lost"} == {
        "its bytes are not in the file"
    }


def test_file_without_rescuable_tensors_exits_with_2(
    intact: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "start.pt"
    path.write_bytes(intact[:500])
    assert main(["rescue", str(path), str(tmp_path / "out.pt")]) == 2
    output = capsys.readouterr()
    assert "nothing" in output.out + output.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["start.pt"]


def test_dry_run_writes_nothing(truncated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [str(tmp_path / "out.pt")], ["--fill", "nan"]):
        assert main(["rescue", str(truncated), *arguments, "--dry-run"]) == 1
        assert "would write" in capsys.readouterr().out
    assert main(["rescue", str(truncated), "--dry-run", "--json"]) == 1
    assert validated(capsys.readouterr().out)["out"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["half.pt"]


def test_fill_replaces_lost_tensors_with_zeros(
    truncated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rescue", str(truncated), str(tmp_path / "out.pt"), "--fill", "zeros"]) == 1
    assert "with zeros in place of what is lost" in capsys.readouterr().out


def test_existing_target_needs_force_and_source_is_never_overwritten(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.pt"
    out.write_bytes(b"precious")
    assert main(["rescue", str(broken), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    assert main(["rescue", str(broken), str(out), "--force"]) == 0
    assert main(["rescue", str(broken), str(broken), "--force"]) == 2
    assert "the target is the source itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["absent.pt", "out.pt"], ["README.md", "out.pt"], ["half.pt"], ["half.pt", "half.pt/out.pt"]],
    ids=["no arguments", "missing source", "not a checkpoint", "no target", "target folder is a file"],
)
def test_usage_errors_are_reported(
    arguments: list[str], truncated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(truncated.parent)
    (truncated.parent / "README.md").write_text("# a text")
    assert main(["rescue", *arguments]) == 2
    output = capsys.readouterr()
    assert output.err
    assert "Traceback" not in output.err
    assert not (truncated.parent / "out.pt").exists()


def test_journal_of_a_retag_is_not_touched(broken: Path, tmp_path: Path, intact: bytes) -> None:
    """Other commands first recover from an interrupted retag; ``rescue`` never writes to its source."""
    from transload.io.journal import Change, Changes, Journal
    from transload.io.sources import journal_path

    now = broken.read_bytes()
    changes = Changes((Change(100, intact[100:104], now[100:104]),), len(intact), len(now))
    journal = Path(journal_path(str(broken)))
    journal.write_bytes(Journal(changes, broken.stat().st_ino).encoded())
    assert main(["rescue", str(broken), str(tmp_path / "out.pt")]) == 0
    assert broken.read_bytes() == now
    assert journal.exists()


def test_rescue_runs_without_installed_packages(truncated: Path, tmp_path: Path, program: Transload) -> None:
    result = program("rescue", str(truncated), str(tmp_path / "out.pt"), "--json", python=("-S",))
    assert result.returncode == 1, result.stderr
    assert validated(result.stdout)["counts"]["whole"] == 26


def test_rescue_imports_neither_torch_nor_unneeded_modules(truncated: Path, imported: Imported) -> None:
    modules = imported("rescue", str(truncated), "--dry-run")
    assert "transload.rescuing.recover" in modules
    assert not modules & UNWANTED


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_no_color_is_honoured_at_any_width(truncated: Path, program: Transload, columns: str) -> None:
    result = program("rescue", str(truncated), "--dry-run", COLUMNS=columns, NO_COLOR="1")
    assert result.returncode == 1, result.stderr
    assert "\x1b" not in result.stdout


def test_one_file_of_a_distributed_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The advice to rescue the directory is followed by its command."""
    for name in (".metadata", "__0_0.distcp"):
        (tmp_path / name).write_bytes(b"x")
    assert main(["rescue", str(tmp_path / "__0_0.distcp"), str(tmp_path / "out.pt")]) == 2
    _, advice, command = capsys.readouterr().err.splitlines()
    assert advice == "  Rescue the directory."
    assert command == f"    $ transload rescue {tmp_path} NEW.pt"


def test_directory_of_shards_is_rescued(
    truncated: Path, intact: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    truncated.rename(folder / "model-00001-of-00001.pt")
    assert main(["rescue", str(folder), str(tmp_path / "out.safetensors"), "--json"]) == 1
    document = validated(capsys.readouterr().out)
    assert (document["format"], document["counts"]["whole"]) == ("sharded", 26)
    assert document["counts"]["lost"] > 0
    assert len(intact) > document["nbytes"]


def test_lost_tensors_fit_a_narrow_terminal(truncated: Path) -> None:
    blocks = report(rescue(truncated, dry_run=True))
    lines = [plain(line) for line in layout(blocks, Style(width=60, cut=True))]
    assert any(line.startswith(" " * 14 + "rng") and "its bytes are not in the file" in line for line in lines)
    assert max(map(len, lines)) <= 60


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode on Windows")
def test_report_of_a_name_that_is_not_utf8_is_strict_json(
    broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt")
    assert main(["rescue", str(broken), target, "--json"]) == 0
    written = json.loads(Path(f"{target}.rescue.json").read_bytes())
    assert written == json.loads(capsys.readouterr().out)
    assert written["out"] == f"{tmp_path}/\\xff.pt"
