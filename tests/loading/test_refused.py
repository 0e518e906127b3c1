"""Files that ``load`` refuses, and the messages: not a checkpoint, damaged, hostile, or with names not allowed."""

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
from tests.forge import DANGEROUS, archive, call, checkpoint, entries, legacy, list_of, name, ordered, pickled, tensor
from tests.loading.zoo import saved

import transload
from transload.errors import (
    BrokenFileError,
    NotACheckpointDirectoryError,
    NotACheckpointError,
    TransloadError,
    UnsafeError,
)
from transload.findings import quoted
from transload.loading import load

DATA = Path(__file__).parents[1] / "data"
SOURCE = Path(__file__).parents[2] / "src"
STATE_DICT = DATA / "torch-releases" / "torch-2.13.0-py3.11.7" / "state_dict_cpu.pt"


# -- not a checkpoint


NOT_CHECKPOINTS = {
    "empty": b"",
    "HTML page": b"<!DOCTYPE html><html>404</html>",
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "text": b"hello, this is a text\n",
    "zeros": bytes(4096),
    "gzip": b"\x1f\x8b\x08" + bytes(100),
    "a plain pickle": pickle.dumps({"a": 1}),
    "a hostile plain pickle": pickled(DANGEROUS),
    "noise": bytes(range(256)) * 4,
}


@pytest.mark.parametrize("case", NOT_CHECKPOINTS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_file_that_is_not_a_checkpoint_is_an_error_that_does_not_suggest_trust(
    case: str, *, weights_only: bool
) -> None:
    with pytest.raises(NotACheckpointError) as raised:
        load(NOT_CHECKPOINTS[case], weights_only=weights_only)
    assert "weights_only" not in str(raised.value)
    assert isinstance(raised.value, RuntimeError | EOFError)
    assert isinstance(raised.value, pickle.UnpicklingError)


def test_wrong_or_missing_file_is_reported_without_torch(tmp_path: Path) -> None:
    """torch is not even imported, so a wrong file is reported at once."""
    (tmp_path / "page.pt").write_bytes(NOT_CHECKPOINTS["HTML page"])
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
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "page.pt"), str(STATE_DICT), str(tmp_path / "gone.pt")],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert process.stdout.split() == ["NotACheckpointError", "NoTorchError", "MissingFileError"]


def test_directory_without_a_checkpoint_is_an_error_that_names_its_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    for read in (load, transload.open, partial(transload.load_into, torch.nn.Linear(1, 1))):
        with pytest.raises(NotACheckpointError, match=r"notes\.txt") as raised:
            read(tmp_path)
        error = pickle.loads(pickle.dumps(raised.value))
        assert type(error) is NotACheckpointDirectoryError
        assert isinstance(error, IsADirectoryError)
        assert (error.errno, str(error)) == (errno.EISDIR, str(raised.value))


def test_web_page_in_place_of_a_shard_is_the_same_error_by_directory_and_by_index(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.safetensors").write_text("<html><title>Sign in</title></html>")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    for path in (tmp_path, index):
        with pytest.raises(NotACheckpointError, match="a web page") as raised:
            load(path)
        assert type(raised.value) is NotACheckpointError  # the directory itself is one


# -- damage


@pytest.mark.parametrize("left", [10, 100, 300, 600, 900, -1, -40, -200])
def test_truncated_archive_is_an_error(left: int) -> None:
    with pytest.raises((BrokenFileError, NotACheckpointError)):
        load(checkpoint()[:left])


@pytest.mark.parametrize("left", range(4, len(legacy()), 9))
def test_truncated_stream_is_an_error(left: int) -> None:
    with pytest.raises((BrokenFileError, NotACheckpointError)):
        load(legacy()[:left])


def test_truncated_tensors_are_reported_by_name() -> None:
    with pytest.raises(BrokenFileError, match="w1") as raised:
        load(legacy()[:-8])
    assert "w0" not in raised.value.what
    assert raised.value.fix


def test_missing_shard_is_reported_by_name(tmp_path: Path) -> None:
    import json

    torch.save({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.bin")
    weights = {"a": "model-00001-of-00002.bin", "b": "model-00002-of-00002.bin"}
    (tmp_path / "model.bin.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(BrokenFileError, match="model-00002-of-00002"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore::transload.errors.LandingWarning")
def test_changed_byte_raises_only_transload_errors() -> None:
    """Set every seventh byte of a small archive and of a stream to three values: it loads, or raises our errors."""
    for intact in (checkpoint(), legacy()):
        for position in range(0, len(intact), 7):
            for value in (0, 0x2E, 0xFF):
                damaged = intact[:position] + bytes([value]) + intact[position + 1 :]
                try:
                    load(damaged)
                except TransloadError as error:
                    assert error.what  # noqa: PT017 - most of them load


def test_error_of_a_truncated_file_suggests_the_rescue_command(tmp_path: Path) -> None:
    path = tmp_path / "my model.pt"
    torch.save({"a": torch.ones(2000), "b": torch.ones(2000)}, path)
    path.write_bytes(path.read_bytes()[:12_000])
    with pytest.raises(BrokenFileError) as raised:
        load(path)
    advice = raised.value.fix.split("\n")
    assert advice[0].startswith("Download or copy the file again")
    assert advice[-1] == f"$ transload rescue {quoted(str(path))} NEW.pt"
    assert len(advice) == 3


def test_rescue_command_is_suggested_once_if_the_end_is_zeros(tmp_path: Path) -> None:
    """Here the command comes from another finding than the one that is raised."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(2000), "b": torch.ones(2000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:12_000] + bytes(len(data) - 12_000))
    with pytest.raises(BrokenFileError) as raised:
        load(path)
    assert raised.value.fix.count(f"$ transload rescue {path} NEW.pt") == 1


def test_gzipped_checkpoint_is_an_error_that_suggests_the_rescue_command(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "model.pt.gz").write_bytes(gzip.compress(STATE_DICT.read_bytes()))
    with pytest.raises(NotACheckpointError, match="gzip around a PyTorch checkpoint") as raised:
        load(tmp_path / "model.pt.gz")
    assert raised.value.fix.endswith(f"$ transload rescue {tmp_path / 'model.pt.gz'} NEW.pt")


# -- attacks


class Payload:
    """An object whose pickle calls ``print``."""

    ran = False

    def __reduce__(self) -> Any:
        return print, ("ran",)


HOSTILE = {
    "a call": DANGEROUS,
    "a nested call": list_of(tensor(), ordered({"a": DANGEROUS})),
    "a call whose result is dropped": DANGEROUS + b"0K\x01",
    "a name that is not called": name("os", "getcwd"),
    "a dotted name in a known module": name("torch.serialization", "os.getcwd"),
    "a name from the stack": b"\x8c\x02os\x8c\x06getcwd\x93)R",
    "an INST opcode": b"(ios\ngetcwd\n",
    "a call of torch.load": call(name("torch", "load"), "x.pt"),
    "a call of _load_from_bytes": call(name("torch.storage", "_load_from_bytes"), b"C\x01x"),
    "state set on a class": name("collections", "OrderedDict") + forge.dictionary({"__init__": 1}) + b"b",
    "a call of getattr": call(call(name("builtins", "getattr"), name("torch", "serialization"), "load"), "x"),
    "a call as hooks": forge.rebuild_call("_rebuild_tensor_v2", forge.storage_id(), 0, (4,), (1,), False, DANGEROUS),
    "a function that rebuilds a tensor": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("builtins", "print"),
        name("torch", "Tensor"),
        ("ran",),
        b"N",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("form", ["zip", "stream", "tar"])
def test_hostile_code_is_not_run(case: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_hostile_code_in_other_parts_of_a_stream_is_not_run(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "getcwd", lambda: ran.append("getcwd"))
    intact = getattr(forge.Legacy(), stage)
    with pytest.raises((UnsafeError, BrokenFileError, NotACheckpointError)):
        load(legacy(**{stage: intact[:-1] + DANGEROUS + b"0."}))
    assert ran == []


def test_hostile_record_that_is_not_loaded_is_ignored() -> None:
    """As with torch.load: only data.pkl is unpickled."""
    loaded = load(archive(entries(extra={"extra/evil.pkl": pickled(DANGEROUS)})))
    assert list(loaded) == ["w0", "w1"]


def test_stream_followed_by_an_archive_is_refused() -> None:
    appended = io.BytesIO()
    with ZipFile(appended, "w") as archive_:
        archive_.writestr("archive/data.pkl", pickled(DANGEROUS))
    with pytest.raises((UnsafeError, BrokenFileError)):
        load(legacy(after=appended.getvalue()))


def test_file_is_refused_before_any_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:

    def never(*_: object) -> None:
        raise AssertionError("a storage was read")

    monkeypatch.setattr("transload.loading.read_storages", never)
    for body in (list_of(tensor(), DANGEROUS), list_of(tensor(), call(name("ipaddress", "IPv4Address")))):
        with pytest.raises(UnsafeError):
            load(checkpoint(pickled(body)))


def test_storage_larger_than_the_file_is_a_broken_file_error() -> None:
    """The pickle declares a storage of a terabyte in a file of a kilobyte."""
    body = ordered({"w": tensor("0", (1 << 38,), (1,), numel=1 << 38)})
    with pytest.raises(BrokenFileError):
        load(checkpoint(pickled(body)))


# -- names


def test_refusal_lists_all_names_and_the_code_that_allows_them() -> None:
    body = list_of(
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
def test_refusal_suggests_the_convert_command(name: str) -> None:
    path = DATA / "h200" / name
    with pytest.raises(UnsafeError) as raised:
        load(path)
    assert raised.value.fix.endswith(f"\n$ transload convert {path} {path.with_suffix('.safetensors')}")


def test_refusal_of_a_checkpoint_with_an_object_suggests_the_convert_command(tmp_path: Path) -> None:
    from ipaddress import IPv4Address

    torch.save({"model": {"weight": torch.ones(3)}, "host": IPv4Address("1.2.3.4")}, tmp_path / "train.ckpt")
    with pytest.raises(UnsafeError) as raised:
        load(tmp_path / "train.ckpt")
    assert raised.value.fix.endswith(f"convert {tmp_path / 'train.ckpt'} {tmp_path / 'train.safetensors'}")


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="this torch has no safe_globals")
def test_suggested_code_that_allows_names_works() -> None:
    from collections import ChainMap
    from ipaddress import IPv4Address

    value = [IPv4Address("1.2.3.4"), ChainMap({"a": 1})]
    data = saved(value)
    with pytest.raises(UnsafeError) as raised:
        load(data)
    lines = [line[2:] for line in raised.value.fix.splitlines() if line.startswith("  ")]
    namespace: dict[str, Any] = {"transload": transload, "path": io.BytesIO(data)}
    exec("\n".join(lines), namespace)  # noqa: S102 - exactly what a user would paste
    assert namespace["obj"] == value
    with pytest.raises(UnsafeError):
        load(data)


def test_refusal_omits_names_that_are_already_allowed() -> None:
    from ipaddress import IPv4Address

    data = saved([IPv4Address("1.2.3.4"), Payload()])
    if not hasattr(torch.serialization, "safe_globals"):
        pytest.skip("this torch has no safe_globals")
    with torch.serialization.safe_globals([IPv4Address]), pytest.raises(UnsafeError) as raised:
        load(data)
    assert "IPv4Address" not in str(raised.value)
    assert "builtins.print" in raised.value.what


@pytest.mark.parametrize("kind", [RuntimeError, pickle.UnpicklingError, TransloadError])
def test_refusals_can_be_caught_as_the_usual_exceptions(kind: type[Exception]) -> None:
    for data in (NOT_CHECKPOINTS["HTML page"], legacy()[:-8], checkpoint(pickled(DANGEROUS))):
        with pytest.raises(kind):
            load(data)
