"""Files that cannot be retagged: the error gives the reason, and nothing is changed."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests import forge
from tests.retagging.makers import planned, save, state
from tests.retagging.power import Disk, journals

import transload
from transload.cli.main import main
from transload.errors import (
    BusyFileError,
    CannotReadError,
    CannotWriteError,
    ForbiddenFileError,
    RetagError,
    TransloadError,
    UsageError,
)
from transload.io import journal
from transload.io.journal import apply, recover
from transload.io.sources import has_journal
from transload.retagging import retag, undo

H200 = Path(__file__).parent.parent / "data" / "h200"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(state(), tmp_path / "model.pt")


def refused(path: Path, to: str = "cpu", **options: Any) -> TransloadError:
    """The error of a retag that leaves the file and its folder unchanged."""
    before = {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    with pytest.raises(TransloadError) as caught:
        retag(path, to, **options)
    assert {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()} == before
    return caught.value


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("torchscript_cuda0.pt", "TorchScript", "torch.jit.load"),
        ("export_cuda0.pt2", "torch.export", "torch.export.save(transload.load(path, weights_only=False), other)"),
        ("aoti_cuda0.pt2", "AOTInductor", "Compile"),
    ],
)
def test_program_is_refused_with_advice(name: str, what: str, fix: str, tmp_path: Path) -> None:
    shutil.copyfile(H200 / name, tmp_path / name)
    error = refused(tmp_path / name)
    assert isinstance(error, RetagError)
    assert what in error.what
    assert fix in error.fix


def test_safetensors_is_refused_because_it_has_no_device(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    head = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    error = refused(path)
    assert "no device" in error.what
    assert "loads anywhere" in error.fix


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_sharded_checkpoint_is_refused_with_advice(ending: str, tmp_path: Path) -> None:
    for index in (1, 2):
        save(state(), tmp_path / f"pytorch_model-0000{index}-of-00002.{ending}")
    entries = ", ".join(f'"w{i}": "pytorch_model-0000{i}-of-00002.{ending}"' for i in (1, 2))
    index_file = tmp_path / "pytorch_model.bin.index.json"
    index_file.write_text(f'{{"metadata": {{}}, "weight_map": {{{entries}}}}}', encoding="utf-8")
    for path in (index_file, tmp_path):
        error = refused(path)
        assert "several files" in error.what
        assert ("transload retag" if ending == "bin" else "carry no device") in error.fix


def test_command_suggested_for_shards_works(tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    folder.mkdir()
    for index in (1, 2):
        save(state(), folder / f"pytorch_model-0000{index}-of-00002.bin")
    text = '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}}'
    (folder / "pytorch_model.bin.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(RetagError) as caught:
        retag(folder, "cuda:1")
    command = shlex.split(caught.value.fix.partition(": ")[2])
    assert command == ["transload", "retag", str(folder), "--to", "cuda:1"]
    assert main(command[1:]) == 0
    assert {use.device for path in folder.glob("*.bin") for use in transload.inspect(path).devices} == {"cuda:1"}


def test_compressed_archive_is_refused_with_a_rescue_command(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data * 1)
    error = refused(path)
    assert "compression" in error.what
    assert error.fix.endswith(f"$ transload rescue {path} NEW.pt")


def test_archive_after_other_bytes_is_refused_with_a_rescue_command(path: Path) -> None:
    path.write_bytes(b"HTTP/1.1 200 OK\r\n\r\n" + path.read_bytes())
    assert refused(path).fix.endswith(f"$ transload rescue {path} NEW.pt")


def test_unpacked_archive_is_refused_with_a_rescue_command(path: Path) -> None:
    folder = path.parent / "unpacked"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    assert refused(folder).fix.endswith(f"$ transload rescue {folder} NEW.pt")


def test_corrupt_file_is_refused(path: Path) -> None:
    original = path.read_bytes()
    path.write_bytes(original[:-30])
    assert "damaged" in refused(path).what
    assert refused(path).fix.endswith(f"$ transload rescue {path} NEW.pt")
    path.write_bytes(original.replace(b"layers", b"Layers", 1))  # the checksum of the index no longer matches
    assert "damaged" in refused(path).what


@pytest.mark.parametrize("data", [b"", b"<html></html>", b"\x80\x02N.", b"PK\x05\x06" + bytes(18)], ids=repr)
def test_file_that_is_not_a_checkpoint_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    assert isinstance(refused(path), RetagError)


def test_tar_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(forge.tar())
    assert "tar format" in refused(path).what


def test_file_object_or_bytes_instead_of_a_path_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="path"):
        retag(io.BytesIO(b""), "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="path"):
        retag(b"model.pt", "cpu")  # type: ignore[arg-type]


def test_missing_file_is_a_read_error(tmp_path: Path) -> None:
    error = refused(tmp_path / "absent.pt")
    assert isinstance(error, CannotReadError)
    assert error.errno == errno.ENOENT
    with pytest.raises(CannotReadError):
        retag(tmp_path / "absent.pt", "cpu", out=tmp_path / "copy.pt")
    with pytest.raises(CannotReadError):
        retag("nul\0.pt", "cpu")
    with pytest.raises(CannotReadError):
        undo(tmp_path / "absent.pt")
    assert not has_journal(tmp_path / "absent.pt")
    assert recover(tmp_path / "absent.pt") == ""


def test_symbolic_link_is_refused_in_place_but_can_be_copied(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    error = refused(link)
    assert "symbolic link" in error.what
    assert str(path) in error.fix
    retag(link, "cpu", out=tmp_path / "copy.pt")
    assert not (tmp_path / "copy.pt").is_symlink()
    assert transload.inspect(tmp_path / "copy.pt").devices[0].device == "cpu"


def test_journal_is_found_through_a_symbolic_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.pt"
    link.symlink_to(path)
    retag(path, "cpu", keep_undo=True)
    journals(path)[1].rename(journals(path)[0])
    assert has_journal(link)
    assert recover(link) == "finished"


def test_hard_linked_file_is_refused_unless_allowed(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    other.hardlink_to(path)
    assert "2 names" in refused(path).what
    retag(path, "cpu", hard_links=True)
    assert other.read_bytes() == path.read_bytes()
    assert path.stat().st_nlink == 2


def test_read_only_file_is_refused(path: Path) -> None:
    path.chmod(0o444)
    assert "read-only" in refused(path).what
    assert f"{'attrib -r' if os.name == 'nt' else 'chmod u+w'} {path}" in refused(path).fix


def test_unreadable_file_is_not_called_read_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, f"Permission denied ({flags:o})", path)

    path.chmod(0)
    monkeypatch.setattr(os, "open", forbidden)  # root can read every file
    with pytest.raises(ForbiddenFileError, match="Permission denied") as caught:
        retag(path, "cpu")
    assert "read permission" in caught.value.fix


def test_pipe_and_directory_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in refused(pipe).what
    (tmp_path / "folder").mkdir()
    assert isinstance(refused(tmp_path / "folder"), RetagError)


def test_file_is_unchanged_if_the_journal_cannot_be_created(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: str, _: int, mode: int) -> int:
        raise PermissionError(errno.EACCES, f"Permission denied ({mode:o})", path)

    old, disk = path.read_bytes(), Disk()
    monkeypatch.setattr(disk, "create", forbid)
    with disk, pytest.raises(CannotWriteError, match="nothing was changed") as caught:
        retag(path, "cpu")
    assert "-o COPY" in caught.value.fix
    assert path.read_bytes() == old


@pytest.mark.skipif(os.name == "nt" or os.getuid() == 0, reason="needs a user without access")
def test_read_only_folder_is_a_write_error(path: Path) -> None:
    path.parent.chmod(0o555)
    try:
        assert isinstance(refused(path), CannotWriteError)
    finally:
        path.parent.chmod(0o755)


@pytest.mark.parametrize("out", ["", "a\0b"], ids=["empty", "nul"])
def test_invalid_copy_name_does_not_change_the_file(out: str, path: Path) -> None:
    """As with `-o "$COPY"` and an unset variable."""
    old = path.read_bytes()
    with pytest.raises(UsageError, match="no file can have the name"):
        retag(path, "cpu", out=out)
    assert path.read_bytes() == old


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "cpu", "-o", ""], "no file can have the name"),
        (["--to", "cpu", "--map", "*=cuda:0"], "two devices: cuda:0 and cpu"),
        (["--to", "x=cpu"], "'x=cpu' is not a device"),
    ],
    ids=["empty name", "two default devices", "map as device"],
)
def test_ambiguous_command_lines_are_refused(
    arguments: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = path.read_bytes()
    assert main(["retag", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert path.read_bytes() == old


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("x")], ids=["pipe", "dir", "link"]
)
def test_special_file_in_place_of_a_journal_does_not_block(make: Any, path: Path) -> None:
    """Anyone can create one in a folder such as /tmp, where every command would look at it."""
    make(journals(path)[0])
    assert recover(path) == "stale"
    assert transload.load(path, map_location="cpu")
    assert "journal" in refused(path).what


def forged(*runs: tuple[int, int, int], count: int | None = None, size: int = 100, body: bytes = b"ab") -> bytes:
    """A journal with these offsets and lengths; anyone can compute its digest."""
    head = struct.pack("<8s3Q?I", b"TLRETAG1", 0, size, size, False, len(runs) if count is None else count)
    data = head + b"".join(struct.pack("<3Q", *run) for run in runs) + body
    return data + hashlib.sha256(data).digest()


FORGED = {
    "too many runs": forged((0, 1, 1), count=9),
    "far too many runs": forged(count=(1 << 32) - 1),
    "too few runs": forged((0, 1, 1), (2, 1, 1), count=1),
    "bytes left over": forged((0, 1, 0)),
    "bytes missing": forged((0, 1, 1), (2, 1, 1)),
    "impossible offset": forged((1 << 63, 1, 1), size=(1 << 64) - 1),
    "impossible size": forged(size=1 << 63, body=b""),
    "impossible length": forged((0, 1 << 63, 1)),
    "beyond the end": forged((99, 1, 1), size=99),
    "backwards": forged((9, 1, 0), (5, 1, 0)),
    "overlapping": forged((5, 1, 0), (5, 1, 0)),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_journal_is_ignored(case: str, path: Path) -> None:
    assert journal.journal_of(forged((0, 1, 0), (1, 1, 0))) is not None
    assert journal.journal_of(FORGED[case]) is None
    for file in journals(path):
        file.write_bytes(FORGED[case])
    assert recover(path, anywhere=True) == "stale"
    with pytest.raises(RetagError):
        undo(path)
    assert transload.rescue(path, dry_run=True).how == "exact"


def test_failed_undo_does_not_advise_undo(path: Path) -> None:
    journals(path)[0].write_bytes(b"TLRETAG2" + bytes(100))
    assert "--undo" in refused(path).fix
    with pytest.raises(RetagError, match="belongs to another file, or another version") as caught:
        undo(path)
    assert "--undo" not in caught.value.fix
    assert ("del " if os.name == "nt" else "rm -- ") in caught.value.fix


def test_locked_file_is_busy(path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert isinstance(refused(path), BusyFileError)
    retag(path, "cpu")


def test_locked_file_is_not_recovered(path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    retag(path, "cpu", keep_undo=True)
    journals(path)[1].rename(journals(path)[0])
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyFileError):
            recover(path)
    assert recover(path) == "finished"


def test_failed_recovery_is_a_write_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retag(path, "cpu", keep_undo=True)
    journals(path)[1].rename(journals(path)[0])

    def forbidden(path: str, _: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    disk = Disk()
    monkeypatch.setattr(disk, "change", forbidden)
    with disk, pytest.raises(CannotWriteError, match="interrupted") as caught:
        recover(path)
    assert "any transload command" in caught.value.fix
    assert has_journal(path)


def leases(folder: Path) -> bool:
    """Whether the file system supports leases, which show whether a file is open for writing."""
    fcntl = pytest.importorskip("fcntl")
    probe = folder / "probe"
    probe.write_bytes(b"")
    with probe.open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except (OSError, AttributeError):
            return False
        finally:
            probe.unlink()
    return True


def test_file_open_for_writing_is_busy(path: Path) -> None:
    if not leases(path.parent):
        pytest.skip("the file system does not support leases")
    with path.open("ab"):
        error = refused(path)
        assert isinstance(error, BusyFileError)
        assert "open for writing" in error.what
    with path.open("rb"):  # a reader does not matter
        retag(path, "cpu")


def test_file_that_changes_during_the_copy_is_busy(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(*_: object) -> bool:
        os.utime(path, ns=(0, 0))
        return False

    monkeypatch.setattr("transload.io.journal._clone", touch)
    assert isinstance(refused(path, out=tmp_path / "copy.pt"), BusyFileError)


@pytest.mark.parametrize("change", ["written", "replaced", "longer"])
def test_file_that_changes_after_planning_is_busy(change: str, path: Path) -> None:
    changes, seen = planned(path, "cpu")
    if change == "replaced":
        save(state(), path.with_name("new.pt"))
        path.with_name("new.pt").replace(path)
    elif change == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        os.utime(path, ns=(0, 0))
    changed = path.read_bytes()
    with pytest.raises(BusyFileError, match="changed while"):
        apply(str(path), changes, seen)
    assert path.read_bytes() == changed
    assert not has_journal(path)


@pytest.mark.parametrize("limit", [100, 4000], ids=["no journal", "no tail"])
def test_file_size_limit_leaves_the_file_unchanged(limit: int, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for a quota."""
    pytest.importorskip("resource")
    path = save(state(8), tmp_path / "model.pt", "cpu")
    old = path.read_bytes()
    changes, _ = planned(path, "privateuseone:0")
    journal_bytes = sum(len(run.old) + len(run.new) for run in changes.runs)
    quota = journal_bytes // 2 if limit == 100 else max(journal_bytes + 200, len(old) + 1)
    assert limit == 100 or changes.new_size > quota, "the limit must be below the new size"
    code = (
        f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"from transload.retagging import retag; resource.setrlimit(resource.RLIMIT_FSIZE, ({quota}, {quota})); "
        f"retag({str(path)!r}, 'privateuseone:0')"
    )
    source = str(Path(transload.__file__).parent.parent)
    command = [sys.executable, "-B", "-S", "-c", code]  # -B: a truncated .pyc file would stay behind
    process = subprocess.run(
        command, env={"PYTHONPATH": source}, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 1
    assert "nothing was changed" in process.stderr
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


def test_full_disk_during_a_copy_is_an_error(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "write_at", full)
    error = refused(path, out=tmp_path / "copy.pt")
    assert isinstance(error, CannotWriteError)
    assert "the disk is full" in error.what
    assert "Free some space" in error.fix
    assert not list(tmp_path.glob(".copy.pt*"))


def test_directory_without_a_checkpoint_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").what == "not a checkpoint directory of any known kind"


def test_invalid_copy_targets_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(b"precious")
    assert "already" in refused(path, out=tmp_path / "other.pt").what
    assert "itself" in refused(path, out=path).what
    assert "its directory does not exist" in refused(path, out=tmp_path / "absent" / "copy.pt").what
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "nowhere")
    assert "already" in refused(path, out=tmp_path / "dangling.pt").what
    assert "no undo" in refused(path, out=tmp_path / "copy.pt", keep_undo=True).what


def test_copy_of_a_read_only_file_is_writable(path: Path, tmp_path: Path) -> None:
    path.chmod(0o440)
    retag(path, "cpu", out=tmp_path / "copy.pt")
    assert stat.S_IMODE((tmp_path / "copy.pt").stat().st_mode) & 0o600 == 0o600


def test_longer_tag_in_a_legacy_file_needs_a_copy(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt", "cpu", _use_new_zipfile_serialization=False)
    error = refused(path, "cuda:0")
    assert "no" in error.what
    assert "-o COPY" in error.fix


def test_persistent_id_from_the_memo_is_refused(tmp_path: Path) -> None:
    """Loaders accept a tuple fetched from the memo, but its tag cannot be located."""
    pid = forge.tuple_of("storage", forge.name("torch", "FloatStorage"), "0", "cuda:0", 4)
    body = pid + b"q\x050" + forge.list_of(b"h\x05Q", b"h\x05Q")
    path = tmp_path / "model.pt"
    path.write_bytes(forge.checkpoint(forge.pickled(body), {"0": forge.FLOATS}))
    assert isinstance(refused(path), RetagError)


def test_file_name_of_maximum_length_works(tmp_path: Path) -> None:
    path = save(state(), tmp_path / ("m" * 252 + ".pt"))
    retag(path, "cpu", keep_undo=True)
    assert transload.inspect(path).devices[0].device == "cpu"
    undo(path)
    assert transload.inspect(path).devices[0].device == "cuda:0"
