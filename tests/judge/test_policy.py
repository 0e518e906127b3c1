from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.block_files import COMMON
from tests.each import each

from transload.checkpoint import Checkpoint
from transload.errors import UsageError
from transload.findings import Finding
from transload.judge.policy import DEFAULT, KINDS, judged_by, kinds_in
from transload.opening import inspect

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 12345\n" % (b"4d" * 32)
REFUSED = {
    "model.pt": ("gpu",),
    "whole.pt": ("code", "gpu"),
    "model.pt2": ("code",),
    "stranger.pt": ("code", "gpu"),
    "broken.pt": ("damage", "gpu"),
    "page.pt": ("other",),
    "train.py": ("other",),
    "lfs": ("other",),
}


def read(name: str) -> Checkpoint:
    return inspect(LFS if name == "lfs" else COMMON[name]())


@each("name", REFUSED)
def test_file_is_refused_for_what_it_is(name: str) -> None:
    assert judged_by(read(name), KINDS).refused == REFUSED[name]


@each("name", REFUSED)
@each("kind", KINDS)
def test_errors_are_the_findings_that_it_is_refused_for(name: str, kind: str) -> None:
    judged = judged_by(read(name), [kind])
    assert judged.refused == ((kind,) if kind in REFUSED[name] else ())
    assert judged.ok == (not judged.refused)
    errors = [finding.code for finding in judged.findings if finding.severity == "error"]
    assert bool(errors) == (kind in REFUSED[name])


def test_default_refuses_what_is_not_ok_in_all_fixtures(data: Path) -> None:
    paths = [path for path in data.rglob("*") if path.is_file()]
    assert len(paths) > 50
    for path in paths:
        checkpoint = inspect(path)
        judged = judged_by(checkpoint, DEFAULT)
        assert judged.ok == checkpoint.ok, path
        assert judged.ok != any(finding.severity == "error" for finding in judged.findings), path


def test_verdict_without_a_finding_is_refused_all_the_same() -> None:
    odd = Checkpoint("a.pt", "torch-zip", 1, safety="dangerous", integrity="damaged")
    assert judged_by(odd, KINDS).refused == ("code", "damage")


def test_remark_is_never_an_error_and_what_is_accepted_is_a_warning() -> None:
    checkpoint = replace(
        Checkpoint("a.pt", "torch-zip", 1, safety="dangerous"),
        findings=(Finding("dangerous-use", "error", "it does"), Finding("needs-trust", "note", "beside it")),
    )
    assert [finding.severity for finding in judged_by(checkpoint, KINDS).findings] == ["error", "note"]
    assert [finding.severity for finding in judged_by(checkpoint, ["damage"]).findings] == ["warning", "note"]


def test_size_counts_from_the_first_byte_too_many() -> None:
    checkpoint = Checkpoint("a.pt", "torch-zip", 1_000, safety="data-only", integrity="unchecked")
    assert judged_by(checkpoint, DEFAULT, 1_000).refused == ()
    judged = judged_by(checkpoint, DEFAULT, 999)
    assert (judged.refused, judged.ok, judged.to_dict()["refused"]) == (("size",), False, ["size"])
    assert judged.findings[0].evidence == ("1.00 kB, and the limit is 999 B",)


def test_tags_come_with_the_command_that_changes_them(data: Path) -> None:
    judged = judged_by(inspect(data / "h200" / "state_dict_cuda0.pt"), ["gpu"])
    assert judged.findings[0].evidence == ("cuda:0: 10 tensors",)
    assert judged.findings[0].fix[1].startswith("$ transload retag ")
    program = judged_by(inspect(data / "h200" / "torchscript_cuda0.pt"), ["gpu", "code"])
    assert "torch.jit.load" in program.findings[0].fix[0]
    assert "save(other)" in program.findings[1].fix[0]


def test_unknown_kind_is_an_error() -> None:
    assert kinds_in("code, gpu") == ("code", "gpu")
    for text in ("", "code,", "cuda"):
        with pytest.raises(UsageError, match="--refuse does not know"):
            kinds_in(text)


@each("kind", KINDS)
def test_folder_whose_files_were_not_examined_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"cos\ngetcwd\n(tR.")
    (tmp_path / "b.pt").write_bytes(b"")
    judged = judged_by(inspect(tmp_path), [kind])
    assert judged.refused == (kind,)
    assert [finding.code for finding in judged.findings if finding.severity == "error"] == ["directory-unknown"]
