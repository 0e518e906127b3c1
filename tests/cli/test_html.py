"""``--html``, which all commands with a report have."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tests.diagnose.fleet import server
from tests.diagnose.machines import cuinit_fails
from tests.each import each
from tests.render.test_html_report import Page

from transload.cli.main import COMMANDS, main
from transload.diagnose.report import judge_machine
from transload.render.json import to_json


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints and the reports of two machines."""
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(64), "v": torch.ones(3)}, "a.pt")
    torch.save({"w": torch.ones(64), "v": torch.ones(3)}, "b.pt")
    Path("cut.pt").write_bytes(Path("a.pt").read_bytes()[:-400])
    for name, machine in (("gpu1", server()), ("gpu2", cuinit_fails(server(), 802))):
        report = to_json([judge_machine(machine).to_dict()], several=False)
        Path(f"{name}.json").write_text("".join(report), encoding="utf-8")
    return tmp_path


# The words after ``transload``, the exit code, and what the page says.
REPORTS: dict[str, tuple[str, int, str]] = {
    "check": ("check a.pt", 0, "it loads"),
    "checks": ("check a.pt none.pt b.pt", 2, "none.pt: No such file or directory"),
    "convert": ("convert a.pt a.safetensors", 0, "2 tensors, 268 B"),
    "convert --list": ("convert a.pt --list", 0, "all of it"),
    "diff": ("diff a.pt b.pt", 1, "1 of 2 tensors differs"),
    "doctor": ("doctor --from gpu2.json", 1, "All facts"),
    "doctor --compare": ("doctor --compare gpu1.json gpu2.json", 1, "What is alike"),
    "doctor --explain": ("doctor --explain u04", 0, "libcuda.so.1 is the toolkit's stub"),
    "explain": ("explain --no-checks CUDNN_STATUS_NOT_INITIALIZED", 0, "then the real error comes first"),
    "inspect": ("inspect a.pt --stats", 0, "magnitudes"),
    "rescue": ("rescue cut.pt new.pt", 0, "new.pt.rescue.json"),
    "retag": ("retag a.pt b.pt --to cuda:0", 0, "cpu → cuda:0"),
    "verify": ("verify a.pt cut.pt", 1, "2 files: 1 fine, 1 with a problem"),
}


@each("case", REPORTS)
def test_page_says_what_the_report_says(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, code, expected = REPORTS[case]
    for path in (here / "p.html", here / "new.pt", here / "a.safetensors"):
        path.unlink(missing_ok=True)
    if case == "retag":
        torch.save({"w": torch.zeros(64)}, "a.pt")
    assert main([*words.split(), "--html", "p.html"]) == code
    shown = capsys.readouterr()
    assert "p.html written: " in shown.out
    text = (here / "p.html").read_text(encoding="utf-8")
    page = Page(text)
    assert expected in " ".join(page.text.split())
    assert f"transload <i>{words.split()[0]}</i>" in text


def test_every_command_with_a_report_has_the_option() -> None:
    assert {words.split()[0] for words, _, _ in REPORTS.values()} == {*COMMANDS} - {"completion", "run"}


def test_nothing_is_done_if_the_page_cannot_be_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("page.html").write_text("mine", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    for words in ("convert a.pt out.pt", "rescue cut.pt out.pt", "retag a.pt --to cuda:0", "doctor", "diff a.pt b.pt"):
        assert main([*words.split(), "--html", "page.html"]) == 2
        assert "page.html: already exists" in capsys.readouterr().err
        assert main([*words.split(), "--html", "page.html", "--force"]) == 2
        assert "it is not a report" in capsys.readouterr().err
        assert main([*words.split(), "--html", "none/page.html", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["ok"] is False
    assert {path.name: path.read_bytes() for path in here.iterdir()} == before


def test_the_page_does_not_replace_what_the_command_has_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for force in ([], ["--force"]):
        assert main(["convert", "a.pt", "out.pt", "--html", "out.pt", *force]) == 2
        assert "out.pt" in capsys.readouterr().err
        assert torch.load(here / "out.pt", weights_only=True).keys() == {"w", "v"}
        (here / "out.pt").unlink()


@pytest.mark.skipif(os.name == "nt", reason="a closed pipe is another error there")
def test_a_reader_that_leaves_does_not_cost_the_page(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(os.dup(writer), "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert main(["verify", "a.pt", "--html", "p.html"]) == 141
    os.close(writer)
    assert Page((here / "p.html").read_text(encoding="utf-8")).text


def test_json_and_page_together(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "a.pt", "b.pt", "--json", "--html", "p.html"]) == 0
    assert [entry["path"] for entry in json.loads(capsys.readouterr().out)] == ["a.pt", "b.pt"]
    assert main(["verify", "a.pt", "--html", "p.html", "--force"]) == 0
    assert "b.pt" not in (here / "p.html").read_text(encoding="utf-8")
    assert main(["verify", "none.pt", "--html", "q.html"]) == 2
    assert not (here / "q.html").exists()


def test_the_first_rank_writes_the_page_of_all(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    assert main(["doctor", "--gather", "reports", "--no-torch", "--html", "p.html"]) in (0, 1)
    assert "p.html written: " in capsys.readouterr().out
    assert "rank 0" in (here / "p.html").read_text(encoding="utf-8")
    assert main(["doctor", "--gather", "reports", "--no-torch", "--html", "p.html"]) == 2
