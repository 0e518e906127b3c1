"""Files that are not retagged: why not is said, and nothing is changed."""

from __future__ import annotations

import errno
import fcntl
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
from transload.errors import BusyFileError, CannotReadError, CannotWriteError, RetagError, TransloadError, UsageError
from transload.io import journal
from transload.io.journal import apply, recover
from transload.io.sources import has_journal
from transload.retagging import retag, undo

H200 = Path(__file__).parent.parent / "data" / "h200"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(state(), tmp_path / "model.pt")


def refused(path: Path, to: str = "cpu", **options: Any) -> TransloadError:
    """The error; the file and its folder are as they were."""
    before = {each: each.read_bytes() for each in path.parent.iterdir() if each.is_file()}
    with pytest.raises(TransloadError) as caught:
        retag(path, to, **options)
    assert {each: each.read_bytes() for each in path.parent.iterdir() if each.is_file()} == before
    return caught.value


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("torchscript_cuda0.pt", "TorchScript", "torch.jit.load"),
        ("export_cuda0.pt2", "torch.export", "torch.export.save(transload.load(path, weights_only=False), other)"),
        ("aoti_cuda0.pt2", "AOTInductor", "Compile"),
    ],
)
def test_programs(name: str, what: str, fix: str, tmp_path: Path) -> None:
    shutil.copyfile(H200 / name, tmp_path / name)
    error = refused(tmp_path / name)
    assert isinstance(error, RetagError)
    assert what in error.what
    assert fix in error.fix


def test_safetensors_have_no_device(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    head = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    error = refused(path)
    assert "no device" in error.what
    assert "loads anywhere" in error.fix


@pytest.mark.parametrize("ending", ["bin", "safetensors"])
def test_shards_are_retagged_one_by_one(ending: str, tmp_path: Path) -> None:
    for index in (1, 2):
        save(state(), tmp_path / f"pytorch_model-0000{index}-of-00002.{ending}")
    listed = ", ".join(f'"w{i}": "pytorch_model-0000{i}-of-00002.{ending}"' for i in (1, 2))
    listing = tmp_path / "pytorch_model.bin.index.json"
    listing.write_text(f'{{"metadata": {{}}, "weight_map": {{{listed}}}}}', encoding="utf-8")
    for path in (listing, tmp_path):
        error = refused(path)
        assert "several files" in error.what
        assert ("transload retag" if ending == "bin" else "carry no device") in error.fix


def test_the_command_for_shards_works(tmp_path: Path) -> None:
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


def test_what_was_zipped_again_with_compression(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data * 1)
    error = refused(path)
    assert "compression" in error.what
    assert error.fix.endswith(f"$ transload rescue {path} NEW.pt")


def test_what_lies_around_it(path: Path) -> None:
    path.write_bytes(b"HTTP/1.1 200 OK\r\n\r\n" + path.read_bytes())
    assert refused(path).fix.endswith(f"$ transload rescue {path} NEW.pt")


def test_an_unpacked_archive(path: Path) -> None:
    folder = path.parent / "unpacked"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    assert refused(folder).fix.endswith(f"$ transload rescue {folder} NEW.pt")


def test_damage(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert "damaged" in refused(path).what
    assert refused(path).fix.endswith(f"$ transload rescue {path} NEW.pt")
    path.write_bytes(whole.replace(b"layers", b"Layers", 1))  # the checksum of the index no longer fits
    assert "damaged" in refused(path).what


@pytest.mark.parametrize("data", [b"", b"<html></html>", b"\x80\x02N.", b"PK\x05\x06" + bytes(18)], ids=repr)
def test_what_is_no_checkpoint(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    assert isinstance(refused(path), RetagError)


def test_the_tar_format(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(forge.tar())
    assert "tar format" in refused(path).what


def test_file_objects() -> None:
    with pytest.raises(UsageError, match="path"):
        retag(io.BytesIO(b""), "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="path"):
        retag(b"model.pt", "cpu")  # type: ignore[arg-type]


def test_no_such_file(tmp_path: Path) -> None:
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


def test_a_symbolic_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    error = refused(link)
    assert "symbolic link" in error.what
    assert str(path) in error.fix
    retag(link, "cpu", out=tmp_path / "copy.pt")
    assert not (tmp_path / "copy.pt").is_symlink()
    assert transload.inspect(tmp_path / "copy.pt").devices[0].device == "cpu"


def test_a_journal_is_found_through_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.pt"
    link.symlink_to(path)
    retag(path, "cpu", keep_undo=True)
    journals(path)[1].rename(journals(path)[0])
    assert has_journal(link)
    assert recover(link) == "finished"


def test_a_hard_link(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    other.hardlink_to(path)
    assert "2 names" in refused(path).what
    retag(path, "cpu", hard_links=True)
    assert other.read_bytes() == path.read_bytes()
    assert path.stat().st_nlink == 2


def test_a_read_only_file(path: Path) -> None:
    path.chmod(0o444)
    assert "read-only" in refused(path).what
    assert f"chmod u+w {path}" in refused(path).fix


def test_a_pipe_and_a_folder(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in refused(pipe).what
    (tmp_path / "folder").mkdir()
    assert isinstance(refused(tmp_path / "folder"), RetagError)


def test_a_folder_that_takes_no_journal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: str, _: int, mode: int) -> int:
        raise PermissionError(errno.EACCES, f"Permission denied ({mode:o})", path)

    old, disk = path.read_bytes(), Disk()
    monkeypatch.setattr(disk, "create", forbid)
    with disk, pytest.raises(CannotWriteError, match="nothing was changed") as caught:
        retag(path, "cpu")
    assert "-o COPY" in caught.value.fix
    assert path.read_bytes() == old


@pytest.mark.skipif(os.getuid() == 0, reason="root bypasses file permissions")
def test_a_folder_of_somebody_else(path: Path) -> None:
    path.parent.chmod(0o555)
    try:
        assert isinstance(refused(path), CannotWriteError)
    finally:
        path.parent.chmod(0o755)


@pytest.mark.parametrize("out", ["", "a\0b"], ids=["empty", "nul"])
def test_a_copy_without_a_name_is_no_change_in_place(out: str, path: Path) -> None:
    """As `-o "$COPY"` is where the variable was never set."""
    old = path.read_bytes()
    with pytest.raises(UsageError, match="no file can have the name"):
        retag(path, "cpu", out=out)
    assert path.read_bytes() == old


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "cpu", "-o", ""], "no file can have the name"),
        (["--to", "cpu", "--map", "*=cuda:0"], "two devices: cuda:0 and cpu"),
        (["--to", "x=cpu"], "'x=cpu' is not a device"),
    ],
    ids=["no name", "two for all others", "a map"],
)
def test_command_lines_that_mean_something_else(
    arguments: list[str], said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = path.read_bytes()
    assert main(["retag", str(path), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert path.read_bytes() == old


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("x")], ids=["pipe", "dir", "link"]
)
def test_what_is_no_journal_is_not_waited_for(make: Any, path: Path) -> None:
    """Anybody can make one in a folder such as /tmp: every command looks at it."""
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
    "an offset that no file has": forged((1 << 63, 1, 1), size=(1 << 64) - 1),
    "a size that no file has": forged(size=1 << 63, body=b""),
    "a length that no file has": forged((0, 1 << 63, 1)),
    "beyond the end": forged((99, 1, 1), size=99),
    "backwards": forged((9, 1, 0), (5, 1, 0)),
    "on top of each other": forged((5, 1, 0), (5, 1, 0)),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_journal_whose_numbers_make_no_sense(case: str, path: Path) -> None:
    assert journal.journal_of(forged((0, 1, 0), (1, 1, 0))) is not None
    assert journal.journal_of(FORGED[case]) is None
    for each in journals(path):
        each.write_bytes(FORGED[case])
    assert recover(path, anywhere=True) == "stale"
    with pytest.raises(RetagError):
        undo(path)
    assert transload.rescue(path, dry_run=True).how == "exact"


def test_undo_does_not_advise_what_was_just_tried(path: Path) -> None:
    journals(path)[0].write_bytes(b"TLRETAG2" + bytes(100))
    assert "--undo" in refused(path).fix
    with pytest.raises(RetagError, match="belongs to another file, or another version") as caught:
        undo(path)
    assert "--undo" not in caught.value.fix
    assert "rm -- " in caught.value.fix


def test_a_file_that_somebody_has_locked(path: Path) -> None:
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert isinstance(refused(path), BusyFileError)
    retag(path, "cpu")


def test_a_file_that_is_being_retagged_is_not_recovered(path: Path) -> None:
    retag(path, "cpu", keep_undo=True)
    journals(path)[1].rename(journals(path)[0])
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyFileError):
            recover(path)
    assert recover(path) == "finished"


def test_a_file_that_cannot_be_put_right_is_not_passed_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Whether the file system supports leases, which show whether somebody writes a file."""
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


def test_a_file_that_somebody_has_open_for_writing(path: Path) -> None:
    if not leases(path.parent):
        pytest.skip("the file system does not support leases")
    with path.open("ab"):
        error = refused(path)
        assert isinstance(error, BusyFileError)
        assert "open for writing" in error.what
    with path.open("rb"):  # a reader is no obstacle
        retag(path, "cpu")


def test_a_file_that_changes_while_it_is_copied(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(*_: object) -> bool:
        os.utime(path, ns=(0, 0))
        return False

    monkeypatch.setattr("transload.io.journal._clone", written)
    assert isinstance(refused(path, out=tmp_path / "copy.pt"), BusyFileError)


@pytest.mark.parametrize("change", ["written", "replaced", "longer"])
def test_a_file_that_changes_meanwhile(change: str, path: Path) -> None:
    changes, seen = planned(path, "cpu")
    if change == "replaced":
        save(state(), path.with_name("new.pt"))
        path.with_name("new.pt").replace(path)
    elif change == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        os.utime(path, ns=(0, 0))
    other = path.read_bytes()
    with pytest.raises(BusyFileError, match="changed while"):
        apply(str(path), changes, seen)
    assert path.read_bytes() == other
    assert not has_journal(path)


@pytest.mark.parametrize("limit", [100, 4000], ids=["no journal", "no tail"])
def test_a_full_disk(limit: int, tmp_path: Path) -> None:
    """The system takes no byte beyond a limit, which is what a quota does."""
    path = save(state(8), tmp_path / "model.pt", "cpu")
    old = path.read_bytes()
    changes, _ = planned(path, "privateuseone:0")
    journal = sum(len(run.old) + len(run.new) for run in changes.runs)
    room = journal // 2 if limit == 100 else max(journal + 200, len(old) + 1)
    assert limit == 100 or changes.new_size > room, "or the limit does not bind"
    code = (
        f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"from transload.retagging import retag; resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room})); "
        f"retag({str(path)!r}, 'privateuseone:0')"
    )
    source = str(Path(transload.__file__).parent.parent)
    command = [sys.executable, "-B", "-S", "-c", code]  # -B: or half a module would stay behind
    done = subprocess.run(command, env={"PYTHONPATH": source}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "nothing was changed" in done.stderr
    assert path.read_bytes() == old
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]


def test_a_full_disk_while_a_copy_is_made(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "write_at", full)
    error = refused(path, out=tmp_path / "copy.pt")
    assert isinstance(error, CannotWriteError)
    assert "the disk is full" in error.what
    assert "Free some space" in error.fix
    assert not list(tmp_path.glob(".copy.pt*"))


def test_where_a_copy_cannot_go(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(b"precious")
    assert "already" in refused(path, out=tmp_path / "other.pt").what
    assert "itself" in refused(path, out=path).what
    assert "folder does not exist" in refused(path, out=tmp_path / "absent" / "copy.pt").what
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "nowhere")
    assert "already" in refused(path, out=tmp_path / "dangling.pt").what
    assert "no undo" in refused(path, out=tmp_path / "copy.pt", keep_undo=True).what


def test_the_copy_of_a_read_only_file_can_be_written(path: Path, tmp_path: Path) -> None:
    path.chmod(0o440)
    retag(path, "cpu", out=tmp_path / "copy.pt")
    assert stat.S_IMODE((tmp_path / "copy.pt").stat().st_mode) & 0o600 == 0o600


def test_a_legacy_file_without_room(tmp_path: Path) -> None:
    path = save(state(), tmp_path / "model.pt", "cpu", _use_new_zipfile_serialization=False)
    error = refused(path, "cuda:0")
    assert "no" in error.what
    assert "-o COPY" in error.fix


def test_an_odd_id_is_refused(tmp_path: Path) -> None:
    """A tuple that a call makes: no loader of torch's files is stopped by it, and its tag cannot be found."""
    pid = forge.tuple_of("storage", forge.name("torch", "FloatStorage"), "0", "cuda:0", 4)
    body = pid + b"q\x050" + forge.listing(b"h\x05Q", b"h\x05Q")
    path = tmp_path / "model.pt"
    path.write_bytes(forge.checkpoint(forge.pickled(body), {"0": forge.FLOATS}))
    assert isinstance(refused(path), RetagError)


def test_a_name_as_long_as_names_can_be(tmp_path: Path) -> None:
    path = save(state(), tmp_path / ("m" * 252 + ".pt"))
    retag(path, "cpu", keep_undo=True)
    assert transload.inspect(path).devices[0].device == "cpu"
    undo(path)
    assert transload.inspect(path).devices[0].device == "cuda:0"
