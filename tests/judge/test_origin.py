"""The torch release that wrote a file: the reported range contains the real release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.each import each
from tests.forge import Entry, archive, entries
from tests.makers import saved
from tests.release import RELEASE

import transload
from transload.checkpoint import Checkpoint

DATA = Path(__file__).parent.parent / "data"
FILES = sorted(path for path in (DATA / "torch-releases").glob("*/*") if path.suffix in (".pt", ".ckpt"))
GPU_FILES = sorted(path for path in (DATA / "h200").iterdir() if path.suffix in (".pt", ".pth", ".pt2", ".ckpt"))
GPU_RELEASE = "2.11"


def major_minor(release: str) -> tuple[int, int]:
    """Major and minor number; a file does not show the patch number."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def release_of(path: Path) -> str:
    """The release recorded when the fixture was written."""
    if path.parent.name == "h200":
        return GPU_RELEASE
    version: str = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))["torch"]
    return version


def file_id(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


@each("path", [*FILES, *GPU_FILES], ids=file_id)
def test_real_release_is_in_the_reported_range(path: Path) -> None:
    origin = transload.inspect(path).written_by
    release = major_minor(release_of(path))
    assert major_minor(origin.oldest or "0.0") <= release, origin
    if origin.newest and not origin.note:  # a note means that a newer release may have written the old format
        assert release <= major_minor(origin.newest), origin
    assert origin.evidence or path.suffix == ".pt2"


@each("path", [*FILES, *GPU_FILES], ids=file_id)
def test_real_release_is_in_the_range_of_a_truncated_file(path: Path) -> None:
    """However little is left of the file."""
    data, release = path.read_bytes(), major_minor(release_of(path))
    for part in (2, 10, 40, 70, 95):
        origin = transload.inspect(data[: len(data) * part // 100]).written_by
        assert major_minor(origin.oldest or "0.0") <= release, (part, origin)
        if origin.newest and not origin.note:
            assert release <= major_minor(origin.newest), (part, origin)


def test_record_cut_off_by_truncation_is_not_evidence_of_its_absence() -> None:
    data = saved({"a": torch.ones(4000)})
    checkpoint = transload.inspect(data[: data.index(b"PK\x03\x04", 4)])
    assert any(record.name == "data.pkl" for record in checkpoint.records)
    assert (checkpoint.written_by.oldest, checkpoint.written_by.newest) == ("", "")


@each("path", FILES, ids=file_id)
def test_range_has_a_lower_bound_and_before_2_1_an_upper_bound(path: Path) -> None:
    origin = transload.inspect(path).written_by
    assert origin.oldest
    assert origin.newest or major_minor(origin.oldest) >= (2, 1)


def test_fixtures_cover_eight_releases() -> None:
    assert len({release_of(path) for path in FILES}) == 8
    assert len(FILES) > 80
    assert len(GPU_FILES) > 8


def save_and_inspect(value: object, **options: Any) -> Checkpoint:
    return transload.inspect(saved(value, **options))


RECORDED: dict[str, tuple[object, dict[str, str]]] = {
    "torch's own version": ({"any": torch.__version__}, {"torch": str(torch.__version__)}),
    "torch_version": ({"torch_version": "2.1.0"}, {"torch": "2.1.0"}),
    "lightning": ({"pytorch-lightning_version": "2.4.0", "epoch": 1}, {"lightning": "2.4.0"}),
    "deepspeed": ({"ds_version": "0.14", "module": {}}, {"deepspeed": "0.14"}),
    "nothing": ({"version": "9"}, {}),
    "not a text": ({"torch_version": 2}, {}),
    "a long text": ({"torch_version": "2" * 500}, {"torch": "2" * 80}),
}


@each("case", RECORDED)
def test_recorded_versions_are_reported(case: str) -> None:
    value, recorded = RECORDED[case]
    assert dict(save_and_inspect(value).written_by.recorded) == recorded


def test_recorded_torch_version_is_shown() -> None:
    assert save_and_inspect({"torch_version": "2.1.0"}).written_by.text == "torch 2.1.0 (recorded in the file)"


@each("version", ["2.", ".2", "2", "2.x", "2.٣", "2." + "9" * 5000])
def test_recorded_version_that_is_not_a_release_is_no_evidence(version: str) -> None:
    record = json.dumps({"schema": 1, "torch": version}).encode()
    data = archive([*entries(), Entry(b"archive/.transload/origin.json", record)])
    assert "transload recorded it" not in transload.inspect(data).written_by.evidence


def test_range_of_a_new_file_contains_the_running_torch() -> None:
    origin = save_and_inspect(torch.ones(1)).written_by
    assert major_minor(origin.oldest) <= major_minor(torch.__version__)
    assert (origin.newest == "") is (RELEASE > (2, 6))
    assert not origin.newest or major_minor(origin.newest) >= RELEASE


def test_legacy_format_may_come_from_a_newer_torch() -> None:
    origin = save_and_inspect(torch.ones(1), _use_new_zipfile_serialization=False).written_by
    assert "asked to write the old format" in origin.text


def test_feature_of_newer_releases_outweighs_the_legacy_format() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.mine = True
    origin = save_and_inspect(parameter, _use_new_zipfile_serialization=False).written_by
    assert (origin.oldest, origin.newest) == ("2.0", "")


def test_evidence_names_python_2(data: Path) -> None:
    folder = data / "torch-releases" / "torch-1.0.0-py2.7.18"
    assert any("Python 2" in line for line in transload.inspect(folder / "train_cuda0.ckpt").written_by.evidence)
