"""The commands in what is advised: with the file's own name, once, and only where they have something to do."""

from __future__ import annotations

import gzip
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
from transload.judge.problems import CONVERT, RESCUE, rules

DATA = Path(__file__).parent.parent / "data"
WHOLE = DATA / "h200" / "whole_custom_module_cuda0.pt"
STATE = {f"layer{index}.weight": torch.arange(1600.0).mul(index + 1).sin() for index in range(6)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.pt"
    torch.save(STATE, file)
    return file


def lines(checkpoint: Checkpoint) -> list[str]:
    return [line for finding in checkpoint.findings for line in finding.fix]


def commands(checkpoint: Checkpoint) -> list[str]:
    return [line for line in lines(checkpoint) if line.startswith("$ ")]


@pytest.fixture(autouse=True)
def in_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(command: str) -> int:
    return main(shlex.split(command.removeprefix("$ transload ")))


# -- rescue


def test_a_cut_file_is_to_be_downloaded_again_or_rescued_and_both_are_said_once(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20_000])
    found = transload.inspect(path)
    assert len(found.findings) > 2
    assert commands(found) == [f"$ transload rescue {path} NEW.pt"]
    assert found.findings[0].fix[0].startswith("Download or copy the file again")
    assert len(lines(found)) == len(set(lines(found)))


@pytest.mark.parametrize("name", ["cut.pt", "-cut.pt", "it's cut.pt", "a;b $(id).pt"])
def test_the_command_works_as_it_stands(name: str, path: Path) -> None:
    Path(name).write_bytes(path.read_bytes()[:20_000])
    (command,) = commands(transload.inspect(name))
    assert run(command) == 1
    left = torch.load("NEW.pt")
    assert 0 < len(left) < len(STATE)
    assert all(torch.equal(value, STATE[key]) for key, value in left.items())


def test_a_safetensors_file_stays_one(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(STATE, tmp_path / "cut.safetensors")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (command,) = commands(transload.inspect(tmp_path / "cut.safetensors"))
    assert command.endswith(" NEW.safetensors")
    assert run(command) == 1
    assert transload.inspect("NEW.safetensors").ok


@pytest.mark.parametrize("named", ["", "model.safetensors.index.json"])
@pytest.mark.parametrize("cut", [10, None], ids=["cut", "missing"])
def test_of_several_files_what_is_left_is_saved(named: str, cut: int | None, path: Path) -> None:
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
    (command,) = commands(transload.inspect(Path("it is") / named))
    assert shlex.split(command)[1:] == ["transload", "rescue", str(Path("it is") / named), "NEW.safetensors"]
    assert run(command) == 1  # a part of it
    assert len(transload.inspect("NEW.safetensors").tensors) == (4 if cut is None else 5)


def test_bytes_have_no_name() -> None:
    assert commands(transload.inspect(forge.checkpoint()[:-30])) == [RESCUE]


@pytest.mark.parametrize("left", [300, 1200])
def test_where_nothing_is_left_no_rescue_is_promised(left: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:left])
    found = transload.inspect(path)
    assert not commands(found)
    assert not any("no other copy" in line for line in lines(found))
    assert any("again" in line for line in lines(found))


def test_an_attack_is_not_mended(tmp_path: Path) -> None:
    hostile = tmp_path / "model.pt"
    hostile.write_bytes(forge.checkpoint(forge.pickled(forge.DANGEROUS))[:-30])
    found = transload.inspect(hostile)
    assert found.safety == "dangerous"
    assert not commands(found)


def rezipped(path: Path, *, compressed: bool = False, folder: str = "archive/", more: str = "") -> None:
    with ZipFile(path) as archive:
        records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    with ZipFile(path, "w", ZIP_DEFLATED if compressed else 0) as archive:
        for name, data in records.items():
            archive.writestr(f"{folder}{name}", data)
        if more:
            archive.writestr(more, b"")


@pytest.mark.parametrize(
    "code", ["zip-compressed", "zip-no-folder", "zip-two-folders", "zip-trailing-bytes", "crc-mismatch"]
)
def test_what_can_be_put_right_is(code: str, path: Path) -> None:
    if code == "zip-compressed":
        rezipped(path, compressed=True)
    elif code == "zip-no-folder":
        rezipped(path, folder="")
    elif code == "zip-two-folders":
        rezipped(path, more="__MACOSX/._x")
    elif code == "zip-trailing-bytes":
        path.write_bytes(path.read_bytes() + b"junk" * 9)
    else:
        whole = bytearray(path.read_bytes())
        whole[transload.inspect(path).storages[3].offset or 0] ^= 4
        path.write_bytes(whole)
    found = transload.inspect(path, verify=True)
    assert code in [finding.code for finding in found.findings]
    (command,) = commands(found)
    assert run(command) == 0
    assert transload.inspect(path.parent / "NEW.pt", verify=True).integrity == "whole"


def test_a_stream_with_more_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + b"junk")
    (command,) = commands(transload.inspect(path))
    assert run(command) == 1  # nothing vouches for where the bytes came in
    assert not transload.inspect(tmp_path / "NEW.pt").findings


@pytest.mark.parametrize("end", [None, -3000], ids=["whole", "cut"])
def test_a_checkpoint_in_a_packed_file(end: int | None, path: Path) -> None:
    packed = path.with_name("model.pt.gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:end])
    (command,) = commands(transload.inspect(packed))
    assert run(command) == (0 if end is None else 1)
    assert torch.load(path.with_name("NEW.pt"))


def test_a_checkpoint_in_an_archive_has_no_advice_on_folders(path: Path) -> None:
    with ZipFile(path.with_name("all.zip"), "w") as archive:
        archive.write(path, "model.pt")
        archive.write(path, "other.pt")
    found = transload.inspect(path.with_name("all.zip"))
    assert [finding.code for finding in found.findings] == ["not-a-checkpoint"]
    (command,) = commands(found)
    assert command.endswith("--member model.pt")
    assert run(command) == 0


def test_a_directory_becomes_a_file_again(path: Path) -> None:
    with ZipFile(path) as archive:
        archive.extractall(path.parent / "un packed")
    said = transload.inspect(path.parent / "un packed").prediction
    command = f"transload rescue {shlex.quote(str(path.parent / 'un packed'))} NEW.pt"
    assert command in said
    assert run(f"$ {command}") == 0


# -- convert


def test_the_weights_of_a_module_without_its_class(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    path.write_bytes(WHOLE.read_bytes())
    (finding,) = [found for found in transload.inspect(path).findings if found.code == "needs-trust"]
    assert finding.fix[-1] == f"$ transload convert {path} {tmp_path / 'whole.safetensors'}"
    assert run(finding.fix[-1]) == 0
    assert {"conv.weight", "fc.weight"} <= {
        tensor.name for tensor in transload.inspect(tmp_path / "whole.safetensors").tensors
    }


def test_what_is_damaged_is_rescued_first(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    path.write_bytes(WHOLE.read_bytes()[:-2000])
    assert [command.split()[2] for command in commands(transload.inspect(path))] == ["rescue"]


def test_nothing_is_taken_out_of_what_holds_no_tensor() -> None:
    found = transload.inspect(forge.checkpoint(forge.pickled(forge.call(forge.name("models.net", "Net")))))
    assert "needs-trust" in [finding.code for finding in found.findings]
    assert not commands(found)


# -- the table


@each("code", [code for code, rule in rules().items() if {RESCUE, CONVERT} & set(rule.fix)])
def test_a_sentence_leads_to_each_command_of_the_table(code: str) -> None:
    fix = rules()[code].fix
    for at, line in enumerate(fix):
        if line.startswith("$ "):
            assert at
            assert fix[at - 1].endswith(".")
