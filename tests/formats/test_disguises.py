"""Misleading files: two formats at once, arguments that change later, excessive sharing. Each was once accepted."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import makers
from tests.each import each
from tests.forge import text
from tests.release import needs_torch

from transload.cli.main import main
from transload.formats.torch_legacy import MAGIC
from transload.opening import inspect

REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOOKS = b"ccollections\nOrderedDict\n)R"


def storage(key: str, numel: int = 4) -> bytes:
    return b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + b"K" + bytes([numel]) + b"tQ"


def saved(body: bytes, **records: bytes) -> bytes:
    """A ``torch.save`` archive whose object is the given pickle."""
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("archive/version", b"3\n")
        for key in ("0", "1"):
            archive.writestr(f"archive/data/{key}", bytes(16))
        for name, data in records.items():
            archive.writestr(f"archive/{name.replace('_', '.')}", data)
    return out.getvalue()


def tar_with_legacy_magic(number: bytes) -> bytes:
    """A tar archive whose first header, read as a pickle, is the magic number of a legacy file."""
    magic = b"\x80\x02\x8a\n" + MAGIC.to_bytes(10, "little") + b"."
    block = bytearray(512)
    block[: len(magic)] = magic
    block[124:136] = number.ljust(12, b"\0")
    block[156:157] = b"0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in (("storages", b"K\0.]."), ("tensors", b"K\0."), ("pickle", b"cos\ngetcwd\n)R.")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return bytes(block) + out.getvalue()


@each("number", [b"", b" ", b"0", b"0o0", b"+0", b"-0", b"0_0", b"\x80"], ids=repr)
def test_legacy_file_that_is_also_a_tar_is_dangerous(number: bytes, tmp_path: Path) -> None:
    path = tmp_path / "both.pt"
    path.write_bytes(tar_with_legacy_magic(number))
    assert tarfile.is_tarfile(path)
    assert inspect(path).safety == "dangerous"


def test_zip_inside_a_safetensors_header_is_not_data_only() -> None:
    start = b"PK\x03\x04\x00\x00\x00\x00"  # as a header length: 67 MB
    length = int.from_bytes(start, "little")
    header = json.dumps({"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode().ljust(length)
    body = bytearray(start + header)
    archive = saved(HOOKS)
    body[1000 : 1000 + len(archive)] = archive
    assert inspect(bytes(body)).safety in ("unknown", "dangerous")


def test_tensor_size_that_is_a_list_is_broken() -> None:
    tensor = b"](K\x02eq\x01](K\x01eq\x02" + REBUILD + b"(" + storage("0") + b"K\0h\x01h\x02\x89" + HOOKS + b"tR"
    assert "tensor-broken" in {problem.code for problem in inspect(saved(tensor)).problems}


def test_argument_that_grows_after_the_call_is_reported() -> None:
    ordered_dict = b"ccollections\nOrderedDict\n]q\x01\x85Rh\x01" + text("w") + b"N\x86a0"
    assert "pickle-irregular" in {problem.code for problem in inspect(saved(ordered_dict)).problems}


def test_last_of_two_values_for_a_key_is_used() -> None:
    def tensor(key: str) -> bytes:
        return REBUILD + b"(" + storage(key) + b"K\0K\x04\x85K\x01\x85\x89" + HOOKS + b"tR"

    data = saved(b"}(" + text("w") + tensor("0") + text("w") + tensor("1") + b"u")
    assert [(t.name, t.storage) for t in inspect(data).tensors] == [("w", "1")]


def test_dangerous_record_that_torch_ignores_does_not_change_the_prediction() -> None:
    checkpoint = inspect(saved(HOOKS, extra_pkl=b"cos\ngetcwd\n)R."))
    assert (checkpoint.safety, checkpoint.prediction) == ("dangerous", "torch.load loads it anywhere")


def test_conj_flag_is_reported() -> None:
    data = makers.saved({"c": torch.ones(2, dtype=torch.complex64).conj(), "p": torch.ones(2)})
    assert [tensor.flags for tensor in inspect(data).tensors] == [("conj",), ()]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_code_record_of_torch_1_1_is_not_reported() -> None:
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("m/version", b"1\n")
        archive.writestr("m/code/m.py", b"x")
        archive.writestr("m/code/m.py", b"x")
        archive.writestr("m/model.json", b"{}")
        archive.writestr("m/data.txt", b"a")
        archive.writestr("m/data.txt", b"a")
    duplicates = [problem.where for problem in inspect(out.getvalue()).problems if problem.code == "zip-duplicate-name"]
    assert duplicates == ["m/data.txt"]


def test_nested_archive_makes_safety_unknown() -> None:
    inner = makers.saved({})
    assert inspect(saved(HOOKS)).safety == "data-only"
    assert inspect(saved(HOOKS, extra_pt=inner)).safety == "unknown"


SHARING: dict[str, Callable[[int], bytes]] = {
    "one state behind many objects": lambda n: (
        b"(}(" + b"K\1N" * n + b"uq\1c__main__\nX\nq\2" + b"h\2)Rh\1b" * n + b"t"
    ),
    "one pair of states behind many objects": lambda n: (
        b"(}(" + b"K\1N" * n + b"uq\1c__main__\nX\nq\2" + b"h\2)Rh\1h\1\x86b" * n + b"t"
    ),
    "one shape behind many tensors": lambda n: (
        b"((" + b"K\1" * n + b"tq\1" + REBUILD + b"q\2" + storage("0") + b"q\3" + HOOKS + b"q\4"
        + b"h\2(h\3K\0h\1h\1\x89h\4tR" * n + b"t"
    ),
    "one list of pairs behind many dictionaries": lambda n: (
        b"((" + b"NN\x86" * n + b"tq\1ccollections\nOrderedDict\nq\2" + b"h\2h\1\x85R" * n + b"t"
    ),
    "many modules with one class name": lambda n: b"(" + b"".join(b"cm%d\nX\n" % i for i in range(n)) + b"t",
}  # fmt: skip


@each("attack", SHARING)
def test_shared_objects_do_not_multiply_the_work(attack: str) -> None:
    """The work may grow linearly with the file, not quadratically. Steps are counted, since times vary."""
    small, large = (count_steps(saved(SHARING[attack](n))) for n in (500, 2000))
    assert large < 8 * small + 200_000


def count_steps(data: bytes) -> int:
    """Count the trace events of the interpreter (calls, lines, returns) while a file is inspected."""
    import sys

    steps = 0

    def trace(*_: object) -> object:
        nonlocal steps
        steps += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        inspect(data)
    finally:
        sys.settrace(before)
    return steps


def test_escape_sequences_in_names_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = b"B\x1b]0;x\x07"
    wrapper = (
        b"ctorch._utils\n_rebuild_wrapper_subclass\n(cm\n" + evil + b"\nctorch\n" + evil + b"\nK\x04\x85K\x01\x85K\0N"
    )
    path = tmp_path / "evil.pt"
    path.write_bytes(saved(wrapper + text("cpu") + b"\x89tR"))
    for option in ((), ("--tensors",), ("--tree",), ("--globals",)):
        main(["inspect", *option, str(path)])
        assert "\x1b" not in capsys.readouterr().out


@needs_torch(2, 5)  # safe_globals
def test_suggested_safe_globals_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "module.pt"
    torch.save(torch.nn.Sequential(*(getattr(torch.nn, n)() for n in ("ReLU", "GELU", "Tanh", "SiLU", "Mish"))), path)
    main(["inspect", str(path)])
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("import torch")
    last = lines.index("    obj = torch.load(path)")
    namespace: dict[str, Any] = {"path": path}
    before = torch.serialization.get_safe_globals()
    exec("\n".join(lines[first : last + 1]), namespace)  # noqa: S102 - as a user would
    assert isinstance(namespace["obj"], torch.nn.Sequential)
    assert set(torch.serialization.get_safe_globals()) == set(before)
