"""Commands in the suggested fixes: they name the inspected file, appear once, and only where they would help."""

from __future__ import annotations

import gzip
import os
import shlex
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from tests import forge
from tests.each import each

import transload
from transload.checkpoint import Checkpoint
from transload.cli.main import main
from transload.findings import quoted
from transload.judge.problems import rules

DATA = Path(__file__).parent.parent / "data"
MODULE_FILE = DATA / "h200" / "whole_custom_module_cuda0.pt"
STATE = {f"layer{index}.weight": torch.arange(1600.0).mul(index + 1).sin() for index in range(6)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.pt"
    torch.save(STATE, file)
    return file


def fix_lines(checkpoint: Checkpoint) -> list[str]:
    return [line for finding in checkpoint.findings for line in finding.fix]


def commands(checkpoint: Checkpoint) -> list[str]:
    return [line for line in fix_lines(checkpoint) if line.startswith("$ ")]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words(command: str) -> list[str]:
    """The words of a command as a shell would split it; in cmd, a backslash is like any other character."""
    return [word.strip('"') for word in shlex.split(command, posix=False)] if os.name == "nt" else shlex.split(command)


def run(command: str) -> int:
    return main(words(command.removeprefix("$ transload ")))


# -- rescue


def test_truncated_file_gets_download_and_rescue_advice_once(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20_000])
    checkpoint = transload.inspect(path)
    assert len(checkpoint.findings) > 2
    assert commands(checkpoint) == [f"$ transload rescue {path} NEW.pt"]
    assert checkpoint.findings[0].fix[0].startswith("Download or copy the file again")
    assert len(fix_lines(checkpoint)) == len(set(fix_lines(checkpoint)))


@pytest.mark.parametrize("name", ["cut.pt", "-cut.pt", "it's cut.pt", "a;b $(id).pt"])
def test_rescue_command_runs_as_printed_for_any_file_name(name: str, path: Path) -> None:
    Path(name).write_bytes(path.read_bytes()[:20_000])
    (command,) = commands(transload.inspect(name))
    assert run(command) == 1
    rescued = torch.load("NEW.pt")
    assert 0 < len(rescued) < len(STATE)
    assert all(torch.equal(value, STATE[key]) for key, value in rescued.items())


def test_rescue_command_for_safetensors_writes_safetensors(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(STATE, tmp_path / "cut.safetensors")
    intact = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(intact[: len(intact) // 2])
    (command,) = commands(transload.inspect(tmp_path / "cut.safetensors"))
    assert command.endswith(" NEW.safetensors")
    assert run(command) == 1
    assert transload.inspect("NEW.safetensors").ok


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
@pytest.mark.parametrize("cut", [10, None], ids=["truncated", "missing"])
def test_rescue_command_saves_remaining_tensors_of_a_sharded_checkpoint(name: str, cut: int | None, path: Path) -> None:
    folder = path.parent / "it is"
    folder.mkdir()
    transload.convert(path, folder / "model.safetensors", max_shard_size=13_000)
    assert commands(transload.inspect(folder)) == []
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 3
    if cut is None:
        shards[1].unlink()
    else:
        shards[1].write_bytes(shards[1].read_bytes()[:-cut])
    (command,) = commands(transload.inspect(Path("it is") / name))
    assert words(command)[1:] == ["transload", "rescue", str(Path("it is") / name), "NEW.safetensors"]
    assert run(command) == 1  # only some of the tensors
    assert len(transload.inspect("NEW.safetensors").tensors) == (4 if cut is None else 5)


def test_rescue_command_for_bytes_has_no_file_name() -> None:
    assert commands(transload.inspect(forge.checkpoint()[:-30])) == ["$ transload rescue FILE NEW.pt"]


@pytest.mark.parametrize("size", [300, 1200])
def test_no_rescue_command_when_no_tensor_is_left(size: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:size])
    checkpoint = transload.inspect(path)
    assert not commands(checkpoint)
    assert not any("no other copy" in line for line in fix_lines(checkpoint))
    assert any("again" in line for line in fix_lines(checkpoint))


def test_no_rescue_command_for_a_dangerous_file(tmp_path: Path) -> None:
    hostile = tmp_path / "model.pt"
    hostile.write_bytes(forge.checkpoint(forge.pickled(forge.DANGEROUS))[:-30])
    checkpoint = transload.inspect(hostile)
    assert checkpoint.safety == "dangerous"
    assert not commands(checkpoint)


def rezip(path: Path, *, compressed: bool = False, folder: str = "archive/", extra: str = "") -> None:
    with ZipFile(path) as archive:
        records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    with ZipFile(path, "w", ZIP_DEFLATED if compressed else 0) as archive:
        for name, data in records.items():
            archive.writestr(f"{folder}{name}", data)
        if extra:
            archive.writestr(extra, b"")


@pytest.mark.parametrize(
    "code", ["zip-compressed", "zip-no-folder", "zip-two-folders", "zip-trailing-bytes", "crc-mismatch"]
)
def test_rescue_command_repairs_the_problem(code: str, path: Path) -> None:
    if code == "zip-compressed":
        rezip(path, compressed=True)
    elif code == "zip-no-folder":
        rezip(path, folder="")
    elif code == "zip-two-folders":
        rezip(path, extra="__MACOSX/._x")
    elif code == "zip-trailing-bytes":
        path.write_bytes(path.read_bytes() + b"junk" * 9)
    else:
        data = bytearray(path.read_bytes())
        data[transload.inspect(path).storages[3].offset or 0] ^= 4
        path.write_bytes(data)
    checkpoint = transload.inspect(path, verify=True)
    assert code in [finding.code for finding in checkpoint.findings]
    (command,) = commands(checkpoint)
    assert run(command) == 0
    assert transload.inspect(path.parent / "NEW.pt", verify=True).integrity == "whole"


def test_rescue_command_removes_trailing_bytes_of_a_legacy_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + b"junk")
    (command,) = commands(transload.inspect(path))
    assert run(command) == 1  # nothing proves where the extra bytes were inserted
    assert not transload.inspect(tmp_path / "NEW.pt").findings


@pytest.mark.parametrize("end", [None, -3000], ids=["intact", "truncated"])
def test_rescue_command_for_a_gzipped_checkpoint(end: int | None, path: Path) -> None:
    compressed = path.with_name("model.pt.gz")
    compressed.write_bytes(gzip.compress(path.read_bytes())[:end])
    (command,) = commands(transload.inspect(compressed))
    assert run(command) == (0 if end is None else 1)
    assert torch.load(path.with_name("NEW.pt"))


def test_checkpoint_inside_a_zip_gets_a_member_command_and_no_folder_advice(path: Path) -> None:
    with ZipFile(path.with_name("all.zip"), "w") as archive:
        archive.write(path, "model.pt")
        archive.write(path, "other.pt")
    checkpoint = transload.inspect(path.with_name("all.zip"))
    assert [finding.code for finding in checkpoint.findings] == ["not-a-checkpoint"]
    (command,) = commands(checkpoint)
    assert command.endswith("--member model.pt")
    assert run(command) == 0


def test_prediction_for_an_extracted_archive_names_the_rescue_command(path: Path) -> None:
    with ZipFile(path) as archive:
        archive.extractall(path.parent / "un packed")
    prediction = transload.inspect(path.parent / "un packed").prediction
    command = f"transload rescue {quoted(str(path.parent / 'un packed'))} NEW.pt"
    assert command in prediction
    assert run(f"$ {command}") == 0


# -- convert


def test_convert_command_extracts_the_weights_of_a_pickled_module(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    path.write_bytes(MODULE_FILE.read_bytes())
    (finding,) = [candidate for candidate in transload.inspect(path).findings if candidate.code == "needs-trust"]
    assert finding.fix[-1] == f"$ transload convert {path} {tmp_path / 'whole.safetensors'}"
    assert run(finding.fix[-1]) == 0
    assert {"conv.weight", "fc.weight"} <= {
        tensor.name for tensor in transload.inspect(tmp_path / "whole.safetensors").tensors
    }


def test_damaged_module_gets_only_a_rescue_command(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    path.write_bytes(MODULE_FILE.read_bytes()[:-2000])
    assert [command.split()[2] for command in commands(transload.inspect(path))] == ["rescue"]


def test_no_convert_command_without_tensors() -> None:
    checkpoint = transload.inspect(forge.checkpoint(forge.pickled(forge.call(forge.name("models.net", "Net")))))
    assert "needs-trust" in [finding.code for finding in checkpoint.findings]
    assert not commands(checkpoint)


# -- places


def test_finding_keeps_the_places_of_its_problems_which_json_has_as_evidence(path: Path) -> None:
    data = bytearray(path.read_bytes())
    storage = transload.inspect(path).storages[3]
    data[storage.offset or 0] ^= 4
    (finding,) = (
        found for found in transload.inspect(bytes(data), verify=True).findings if found.code == "crc-mismatch"
    )
    assert finding.places == (storage.record,)
    assert finding.evidence[0].startswith(f"{storage.record}: ")
    assert "places" not in finding.to_dict()


# -- table of rules


@each("code", [code for code, rule in rules().items() if any("FILE" in line for line in rule.fix)])
def test_every_command_in_the_rules_follows_a_sentence(code: str) -> None:
    fix = rules()[code].fix
    for index, line in enumerate(fix):
        if line.startswith("$ "):
            assert index
            assert fix[index - 1].endswith(".")
