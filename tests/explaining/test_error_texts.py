"""``scripts/error_texts.py`` finds error messages in sources, archives and compiled libraries."""

from __future__ import annotations

import importlib.util
import io
import struct
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "error_texts.py"
PYTHON = b"""
NO_FILE = "there is no such file: "

def load(path, kind):
    assert kind, "a kind is needed here"
    if not path:
        raise ValueError(f"cannot load {path!r} as {kind}")
    raise OSError(NO_FILE + path) if path else RuntimeError("%s of %d files" % (path, 3))

def save():
    raise errors.SaveError("cannot save {}: disk full".format(1))
    raise KeyError("short")
"""
CPP = rb"""
  TORCH_CHECK(q.is_cuda(), "query must be", " on CUDA, not on ", q.device(), " at \"all\"");
  TORCH_CHECK(ok);
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("error_texts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_python_is_read_without_running_it(script: ModuleType) -> None:
    assert {(error, text) for _, error, text in script.python_texts(PYTHON)} == {
        ("AssertionError", "a kind is needed here"),
        ("ValueError", "cannot load {} as {}"),
        ("SaveError", "cannot save {}: disk full"),
        ("KeyError", "short"),
    }
    assert list(script.python_texts(b"def (")) == []


def test_values_in_cpp_checks_become_placeholders(script: ModuleType) -> None:
    texts = [text for _, _, text in script.c_texts(CPP)]
    assert texts == ['query must be on CUDA, not on {} at "all"', ""]


def test_rust_errors_have_the_prefix_of_the_binding(script: ModuleType) -> None:
    source = b"""
        impl Display for SafeTensorError { Missing(name) => write!(f, "tensor `{name}` not found") }
        impl fmt::Display for InvalidSlice { TooMany => write!(f, "more indexes than dimensions") }
        impl fmt::Display for Other {
            write!(f, "tensor of type {dtype} and shape (")?;
            for dim in shape { write!(f, "{sep}{dim}", sep = ", ")?; }
            write!(f, ") can't be created from {n_bytes} bytes")
        }
        Err(new_err(format!("device {x:?} is invalid")))"""
    assert [text for _, _, text in script.rust_texts(source)] == [
        "Error while deserializing header: tensor `{}` not found",
        "Error during slicing {} with shape {}: more indexes than dimensions",
        "tensor of type {} and shape ({}{}) can't be created from {} bytes",
        "device {} is invalid",
    ]


def test_strings_are_read_from_rodata_of_a_library(script: ModuleType) -> None:
    texts = b"\0the CUDA device %d is not here\0c10::Device is not prose\0nothing to say about it\0"
    names = b"\0.rodata\0"
    head = 64
    table = head + len(texts) + len(names)
    sections = [
        (0, 0, 0, 0, 0, 0),
        (1, 1, 0, 0, head, len(texts)),
        (0, 3, 0, 0, head + len(texts), len(names)),
    ]
    elf = bytearray(head) + texts + names
    struct.pack_into("<Q", elf, 0x28, table)
    struct.pack_into("<HHH", elf, 0x3A, 64, len(sections), 2)
    for section in sections:
        elf += struct.pack("<IIQQQQ", *section).ljust(64, b"\0")
    assert [text for _, _, text in script.library_texts(bytes(elf))] == ["the CUDA device {} is not here"]


def test_wheels_source_distributions_and_folders_give_the_same_texts(script: ModuleType, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "accelerate-1.whl", "w") as wheel:
        wheel.writestr("accelerate/load.py", PYTHON)
        wheel.writestr("accelerate/tests/load.py", b"raise ValueError('none of our business at all')")
        wheel.writestr("another/load.py", PYTHON)
    with tarfile.open(tmp_path / "accelerate-1.0.tar.gz", "w:gz") as packed:
        member = tarfile.TarInfo("accelerate-1.0/src/accelerate/load.py")
        member.size = len(PYTHON)
        packed.addfile(member, io.BytesIO(PYTHON))
    folder = tmp_path / "site-packages" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "load.py").write_bytes(PYTHON)
    results = [
        [(entry.project, entry.text) for entry in script.texts(tmp_path / name)]
        for name in ("accelerate-1.whl", "accelerate-1.0.tar.gz", "site-packages")
    ]
    assert results[0] == results[1] == results[2]
    assert ("accelerate", "cannot load {} as {}") in results[0]
    assert not any(text == "short" for _, text in results[0])
