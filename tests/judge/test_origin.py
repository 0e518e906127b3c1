"""Which torch wrote a file: the true release lies in the range, for files of ten real ones."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from tests.each import each
from tests.forge import Entry, archive, entries
from tests.release import RELEASE

import transload
from transload.checkpoint import Checkpoint

DATA = Path(__file__).parent.parent / "data"
FILES = sorted(path for path in (DATA / "torch-releases").glob("*/*") if path.suffix in (".pt", ".ckpt"))
GPU_FILES = sorted(path for path in (DATA / "h200").iterdir() if path.suffix in (".pt", ".pth", ".pt2", ".ckpt"))
GPU_RELEASE = "2.11"


def order(release: str) -> tuple[int, int]:
    """Major and minor; the patch does not show."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def release_of(path: Path) -> str:
    """From the record the writer left."""
    if path.parent.name == "h200":
        return GPU_RELEASE
    version: str = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))["torch"]
    return version


def file_id(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


@each("path", [*FILES, *GPU_FILES], ids=file_id)
def test_the_true_release_lies_in_the_range(path: Path) -> None:
    origin = transload.inspect(path).written_by
    release = order(release_of(path))
    assert order(origin.oldest or "0.0") <= release, origin
    if (
        origin.newest and not origin.note
    ):  # a note says that a later release may have been asked to write the old format
        assert release <= order(origin.newest), origin
    assert origin.evidence or path.suffix == ".pt2"


@each("path", [*FILES, *GPU_FILES], ids=file_id)
def test_what_is_cut_off_proves_nothing(path: Path) -> None:
    """The true release lies in the range however little is left of a file."""
    whole, release = path.read_bytes(), order(release_of(path))
    for part in (2, 10, 40, 70, 95):
        origin = transload.inspect(whole[: len(whole) * part // 100]).written_by
        assert order(origin.oldest or "0.0") <= release, (part, origin)
        if origin.newest and not origin.note:
            assert release <= order(origin.newest), (part, origin)


def test_an_archive_cut_early_is_not_said_to_lack_a_record() -> None:
    out = io.BytesIO()
    torch.save({"a": torch.ones(4000)}, out)
    data = out.getvalue()
    left = transload.inspect(data[: data.index(b"PK\x03\x04", 4)])
    assert any(record.name == "data.pkl" for record in left.records)
    assert (left.written_by.oldest, left.written_by.newest) == ("", "")


@each("path", FILES, ids=file_id)
def test_the_range_says_something(path: Path) -> None:
    origin = transload.inspect(path).written_by
    assert origin.oldest
    assert origin.newest or order(origin.oldest) >= (2, 1)


def test_there_are_files_of_many_releases() -> None:
    assert len({release_of(path) for path in FILES}) == 8
    assert len(FILES) > 80
    assert len(GPU_FILES) > 8


def saved(value: object, **how: Any) -> Checkpoint:
    out = io.BytesIO()
    torch.save(value, out, **how)
    return transload.inspect(out.getvalue())


RECORDED: dict[str, tuple[object, dict[str, str]]] = {
    "torch's own version": ({"any": torch.__version__}, {"torch": str(torch.__version__)}),
    "torch_version": ({"torch_version": "2.1.0"}, {"torch": "2.1.0"}),
    "lightning": ({"pytorch-lightning_version": "2.4.0", "epoch": 1}, {"lightning": "2.4.0"}),
    "deepspeed": ({"ds_version": "0.14", "module": {}}, {"deepspeed": "0.14"}),
    "nothing": ({"version": "9"}, {}),
    "no text": ({"torch_version": 2}, {}),
    "a long text": ({"torch_version": "2" * 500}, {"torch": "2" * 80}),
}


@each("case", RECORDED)
def test_versions_that_somebody_recorded(case: str) -> None:
    value, recorded = RECORDED[case]
    assert dict(saved(value).written_by.recorded) == recorded


def test_a_recorded_torch_is_what_is_told() -> None:
    assert saved({"torch_version": "2.1.0"}).written_by.text == "torch 2.1.0 (recorded in the file)"


@each("version", ["2.", ".2", "2", "2.x", "2.٣", "2." + "9" * 5000])
def test_a_recorded_torch_that_is_not_a_release(version: str) -> None:
    record = json.dumps({"schema": 1, "torch": version}).encode()
    data = archive([*entries(), Entry(b"archive/.transload/origin.json", record)])
    assert "transload recorded it" not in transload.inspect(data).written_by.evidence


def test_todays_files_are_of_today() -> None:
    origin = saved(torch.ones(1)).written_by
    assert order(origin.oldest) <= order(torch.__version__)
    assert (origin.newest == "") is (RELEASE > (2, 6))
    assert not origin.newest or order(origin.newest) >= RELEASE


def test_the_older_format_may_come_from_a_later_torch() -> None:
    origin = saved(torch.ones(1), _use_new_zipfile_serialization=False).written_by
    assert "asked to write the old format" in origin.text


def test_a_trait_of_later_releases_overrules_the_older_format() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.mine = True
    origin = saved(parameter, _use_new_zipfile_serialization=False).written_by
    assert (origin.oldest, origin.newest) == ("2.0", "")


def test_files_of_python_2_are_told(data: Path) -> None:
    folder = data / "torch-releases" / "torch-1.0.0-py2.7.18"
    assert any("Python 2" in line for line in transload.inspect(folder / "train_cuda0.ckpt").written_by.evidence)
