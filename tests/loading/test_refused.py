"""What is not loaded, and how that is said: no checkpoints, damage, attacks, names, directories; in plain words."""

from __future__ import annotations

import errno
import io
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from tests import forge
from tests.forge import DANGEROUS, archive, call, checkpoint, entries, legacy, listing, name, ordered, pickled, tensor
from tests.loading.zoo import saved

import transload
from transload.errors import (
    BrokenFileError,
    LoadError,
    NotACheckpointDirectoryError,
    NotACheckpointError,
    TransloadError,
    UnsafeError,
)
from transload.loading import load

DATA = Path(__file__).parents[1] / "data"
SOURCE = Path(__file__).parents[2] / "src"
STATE_DICT = DATA / "torch-releases" / "torch-2.13.0-py3.11.7" / "state_dict_cpu.pt"


# -- no checkpoint at all


NOTHING = {
    "empty": b"",
    "a page": b"<!DOCTYPE html><html>404</html>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "text": b"hello, this is a text\n",
    "zeros": bytes(4096),
    "gzip": b"\x1f\x8b\x08" + bytes(100),
    "a plain pickle": pickle.dumps({"a": 1}),
    "a plain pickle that is hostile": pickled(DANGEROUS),
    "noise": bytes(range(256)) * 4,
}


@pytest.mark.parametrize("case", NOTHING)
@pytest.mark.parametrize("weights_only", [True, False])
def test_what_is_no_checkpoint_is_named_and_trust_is_not_asked_for(case: str, *, weights_only: bool) -> None:
    with pytest.raises(NotACheckpointError) as raised:
        load(NOTHING[case], weights_only=weights_only)
    assert "weights_only" not in str(raised.value)
    assert isinstance(raised.value, RuntimeError | EOFError)
    assert isinstance(raised.value, pickle.UnpicklingError)


def test_torch_is_not_needed_to_say_so(tmp_path: Path) -> None:
    """Nor is it imported: a wrong file is named at once."""
    (tmp_path / "page.pt").write_bytes(NOTHING["a page"])
    program = """
import sys
sys.modules["torch"] = None
from transload.loading import load
for path in sys.argv[1:]:
    try:
        load(path)
    except Exception as error:
        print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "page.pt"), str(STATE_DICT), str(tmp_path / "gone.pt")],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["NotACheckpointError", "NoTorchError", "MissingFileError"]


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    for read in (load, transload.open, partial(transload.load_into, torch.nn.Linear(1, 1))):
        with pytest.raises(NotACheckpointError, match=r"notes\.txt") as raised:
            read(tmp_path)
        error = pickle.loads(pickle.dumps(raised.value))
        assert type(error) is NotACheckpointDirectoryError
        assert isinstance(error, IsADirectoryError)
        assert (error.errno, str(error)) == (errno.EISDIR, str(raised.value))


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_directories_of_ranks_are_refused_with_what_gathers_them(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    if not hasattr(dcp, "save"):
        pytest.skip("this torch has no dcp.save")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(LoadError, match=r"torch\.distributed\.checkpoint") as raised:
        load(tmp_path / "dcp")
    assert "transload convert DIR NEW.pt" in raised.value.fix


# -- damage


@pytest.mark.parametrize("left", [10, 100, 300, 600, 900, -1, -40, -200])
def test_a_cut_archive_is_never_loaded(left: int) -> None:
    with pytest.raises((BrokenFileError, NotACheckpointError)):
        load(checkpoint()[:left])


@pytest.mark.parametrize("left", range(4, len(legacy()), 9))
def test_a_cut_stream_is_never_loaded(left: int) -> None:
    with pytest.raises((BrokenFileError, NotACheckpointError)):
        load(legacy()[:left])


def test_lost_tensors_are_named() -> None:
    with pytest.raises(BrokenFileError, match="w1") as raised:
        load(legacy()[:-8])
    assert "w0" not in raised.value.what
    assert raised.value.fix


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    import json

    torch.save({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.bin")
    weights = {"a": "model-00001-of-00002.bin", "b": "model-00002-of-00002.bin"}
    (tmp_path / "model.bin.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(BrokenFileError, match="model-00002-of-00002"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore::transload.errors.LandingWarning")
def test_no_change_of_a_byte_is_an_error_that_is_not_ours() -> None:
    """Each byte of a small archive and of a stream set to three other values: loaded, or refused in our words."""
    for sound in (checkpoint(), legacy()):
        for at in range(0, len(sound), 7):
            for value in (0, 0x2E, 0xFF):
                damaged = sound[:at] + bytes([value]) + sound[at + 1 :]
                try:
                    load(damaged)
                except TransloadError as error:
                    assert error.what  # noqa: PT017 - most of them load


def test_the_command_that_saves_what_is_left_is_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "my model.pt"
    torch.save({"a": torch.ones(2000), "b": torch.ones(2000)}, path)
    path.write_bytes(path.read_bytes()[:12_000])
    with pytest.raises(BrokenFileError) as raised:
        load(path)
    advice = raised.value.fix.split("\n")
    assert advice[0].startswith("Download or copy the file again")
    assert advice[-1] == f"$ transload rescue '{path}' NEW.pt"
    assert len(advice) == 3


def test_the_command_is_told_with_whatever_is_told_first(tmp_path: Path) -> None:
    """Here the finding that is raised is not the one that holds the command."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(2000), "b": torch.ones(2000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:12_000] + bytes(len(data) - 12_000))
    with pytest.raises(BrokenFileError) as raised:
        load(path)
    assert raised.value.fix.count(f"$ transload rescue {path} NEW.pt") == 1


def test_a_packed_checkpoint_is_unpacked_by_a_command(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "model.pt.gz").write_bytes(gzip.compress(STATE_DICT.read_bytes()))
    with pytest.raises(NotACheckpointError, match="gzip around a PyTorch checkpoint") as raised:
        load(tmp_path / "model.pt.gz")
    assert raised.value.fix.endswith(f"$ transload rescue {tmp_path / 'model.pt.gz'} NEW.pt")


# -- attacks


class Payload:
    """Where hostile files of these tests would leave a trace."""

    ran = False

    def __reduce__(self) -> Any:
        return print, ("ran",)


HOSTILE = {
    "a call": DANGEROUS,
    "a call inside": listing(tensor(), ordered({"a": DANGEROUS})),
    "a call thrown away": DANGEROUS + b"0K\x01",
    "a name alone": name("os", "getcwd"),
    "a name under another": name("torch.serialization", "os.getcwd"),
    "a computed name": b"\x8c\x02os\x8c\x06getcwd\x93)R",
    "an old class": b"(ios\ngetcwd\n",
    "another loader": call(name("torch", "load"), "x.pt"),
    "bytes of another": call(name("torch.storage", "_load_from_bytes"), b"C\x01x"),
    "a changed class": name("collections", "OrderedDict") + forge.dictionary({"__init__": 1}) + b"b",
    "by way of an attribute": call(call(name("builtins", "getattr"), name("torch", "serialization"), "load"), "x"),
    "as hooks": forge.rebuilt("_rebuild_tensor_v2", forge.storage_id(), 0, (4,), (1,), False, DANGEROUS),
    "as a function of a tensor": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("builtins", "print"),
        name("torch", "Tensor"),
        ("ran",),
        b"N",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("form", ["zip", "stream", "tar"])
def test_nothing_hostile_is_run(case: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "getcwd", lambda: ran.append("getcwd"))
    monkeypatch.setattr("builtins.print", lambda *_: ran.append("print"))
    body = pickled(HOSTILE[case], 4)
    data = {
        "zip": lambda: checkpoint(body),
        "stream": lambda: legacy(object=body),
        "tar": lambda: forge.tar({"pickle": body}),
    }[form]()
    with pytest.raises((UnsafeError, BrokenFileError)) as raised:
        load(data)
    assert ran == []
    assert "weights_only=False" not in raised.value.fix


@pytest.mark.parametrize("stage", ["magic", "protocol", "facts", "keys"])
def test_the_other_parts_of_a_stream_are_no_way_in(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "getcwd", lambda: ran.append("getcwd"))
    sound = getattr(forge.Legacy(), stage)
    with pytest.raises((UnsafeError, BrokenFileError, NotACheckpointError)):
        load(legacy(**{stage: sound[:-1] + DANGEROUS + b"0."}))
    assert ran == []


def test_a_hostile_record_that_is_not_loaded_is_passed_over() -> None:
    """As torch.load does: what is built is the index, and nothing else is given to anybody."""
    made = load(archive(entries(extra={"extra/evil.pkl": pickled(DANGEROUS)})))
    assert list(made) == ["w0", "w1"]


def test_two_files_in_one_are_refused() -> None:
    other = io.BytesIO()
    with ZipFile(other, "w") as archive_:
        archive_.writestr("archive/data.pkl", pickled(DANGEROUS))
    with pytest.raises((UnsafeError, BrokenFileError)):
        load(legacy(after=other.getvalue()))


def test_no_tensor_is_read_before_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:

    def never(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("transload.loading.read_storages", never)
    for body in (listing(tensor(), DANGEROUS), listing(tensor(), call(name("ipaddress", "IPv4Address")))):
        with pytest.raises(UnsafeError):
            load(checkpoint(pickled(body)))


def test_a_claim_of_memory_is_not_believed() -> None:
    """A storage of a terabyte in a file of a kilobyte."""
    body = ordered({"w": tensor("0", (1 << 38,), (1,), numel=1 << 38)})
    with pytest.raises(BrokenFileError):
        load(checkpoint(pickled(body)))


# -- names


def test_all_names_are_told_at_once_with_the_lines_that_allow_them() -> None:
    body = listing(
        call(name("ipaddress", "IPv4Address")),
        call(name("my.package", "Config")),
        call(name("string", "Template")),
    )
    with pytest.raises(UnsafeError) as raised:
        load(checkpoint(pickled(body)))
    error = raised.value
    assert all(
        text in error.what for text in ("ipaddress.IPv4Address", "my.package.Config", "string.Template", "3 names")
    )
    if hasattr(torch.serialization, "safe_globals"):
        assert "with torch.serialization.safe_globals([IPv4Address, Config, Template]):" in error.fix
        assert "    obj = transload.load(path)" in error.fix
    assert "weights_only=False" in error.fix


@pytest.mark.parametrize("name", ["whole_custom_module_cuda0.pt", "torchscript_cuda0.pt"])
def test_the_way_that_needs_no_trust_is_told(name: str) -> None:
    path = DATA / "h200" / name
    with pytest.raises(UnsafeError) as raised:
        load(path)
    assert raised.value.fix.endswith(f"\n$ transload convert {path} {path.with_suffix('.safetensors')}")


def test_the_tensors_beside_a_name_can_be_had_without_it(tmp_path: Path) -> None:
    from ipaddress import IPv4Address

    torch.save({"model": {"weight": torch.ones(3)}, "host": IPv4Address("1.2.3.4")}, tmp_path / "train.ckpt")
    with pytest.raises(UnsafeError) as raised:
        load(tmp_path / "train.ckpt")
    assert raised.value.fix.endswith(f"convert {tmp_path / 'train.ckpt'} {tmp_path / 'train.safetensors'}")


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="this torch has no safe_globals")
def test_the_lines_that_allow_names_work() -> None:
    from collections import ChainMap
    from ipaddress import IPv4Address

    value = [IPv4Address("1.2.3.4"), ChainMap({"a": 1})]
    data = saved(value)
    with pytest.raises(UnsafeError) as raised:
        load(data)
    lines = [line[2:] for line in raised.value.fix.splitlines() if line.startswith("  ")]
    made: dict[str, Any] = {"transload": transload, "path": io.BytesIO(data)}
    exec("\n".join(lines), made)  # noqa: S102 - the very lines a user would paste
    assert made["obj"] == value
    with pytest.raises(UnsafeError):
        load(data)


def test_what_is_allowed_already_is_not_told_again() -> None:
    from ipaddress import IPv4Address

    data = saved([IPv4Address("1.2.3.4"), Payload()])
    if not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("this torch has no safe_globals")
    with torch.serialization.safe_globals([IPv4Address]), pytest.raises(UnsafeError) as raised:
        load(data)
    assert "IPv4Address" not in str(raised.value)
    assert "builtins.print" in raised.value.what


@pytest.mark.parametrize("kind", [RuntimeError, pickle.UnpicklingError, TransloadError])
def test_errors_are_those_that_people_catch(kind: type[Exception]) -> None:
    for data in (NOTHING["a page"], legacy()[:-8], checkpoint(pickled(DANGEROUS))):
        with pytest.raises(kind):
            load(data)
