"""Files of every torch release, converted to every format and back: the values are those that torch recorded."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.each import each
from tests.shared import open_elements

import transload
from transload.converting import convert

DATA = Path(__file__).parent.parent / "data"
SOURCE = Path(transload.__file__).parent.parent
FOLDERS = sorted(path.parent for path in DATA.glob("torch-releases/*/expected.json"))
FILES = sorted(
    path
    for path in (*DATA.glob("torch-releases/*/*"), *DATA.glob("h200/*"))
    if path.suffix in {".pt", ".pth", ".ckpt", ".pt2"} and not path.name.startswith("aoti")
)
every_file = each("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")


def hashes(path: Path | str) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and hash of every tensor, by its name."""
    result = {}
    with open_elements(path) as content:
        for tensor in content.checkpoint.tensors:
            if tensor.kind == "strided":
                digest = hashlib.sha256(b"".join(map(bytes, content.chunks(tensor)))).hexdigest()
                result[tensor.name] = (tensor.dtype, tensor.shape, digest)
    return result


def expected(path: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """The same, as recorded by the torch release that wrote the file."""
    recorded = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))["files"][path.name]["tensors"]
    return {
        name[1:]: (entry["dtype"].removeprefix("torch."), tuple(entry["shape"]), entry["sha256"])
        for name, entry in recorded.items()
        if entry["sha256"]
    }


@every_file
def test_tensors_survive_torch_to_safetensors_to_torch(path: Path, tmp_path: Path) -> None:
    """The safetensors library reads the intermediate file."""
    result = convert(path, tmp_path / "a.safetensors")
    back = convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert (result.verified, back.verified, back.complete) == (True, True, True)
    left = {item.name for item in result.left}
    before = {name: item for name, item in hashes(path).items() if name not in left}
    after = hashes(tmp_path / "b.pt")
    assert before.items() <= after.items()
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} <= {"sparse"}
    library = pytest.importorskip("safetensors")
    with library.safe_open(tmp_path / "a.safetensors", "numpy") as opened:
        assert {*opened.keys(), *dict(result.aliases)} == set(after)
        metadata = opened.metadata()
    assert metadata == {"format": "pt", **dict(result.aliases)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_torch_numpy_and_safetensors_read_every_target(folder: Path, tmp_path: Path) -> None:
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.torch")
    from tests.release import RELEASE

    for path in sorted(folder.iterdir()):
        if path.suffix not in {".pt", ".ckpt"}:
            continue
        if not all(hasattr(torch, dtype) for dtype, _, _ in expected(path).values()):
            continue  # this torch lacks a dtype of the file
        base = tmp_path / path.name
        results = {to: convert(path, f"{base}.{to}", to=to) for to in ("safetensors", "torch", "npz", "raw")}
        left = {to: {item.name for item in result.left} for to, result in results.items()}
        assert not left["torch"]
        tensors = library.load_file(f"{base}.safetensors")
        tensors.update({name: tensors[kept] for name, kept in results["safetensors"].aliases})
        loaded = dict(flattened(torch.load(f"{base}.torch", weights_only=RELEASE >= (2, 6))))
        index = json.loads((tmp_path / f"{path.name}.raw" / "index.json").read_text(encoding="utf-8"))
        with numpy.load(f"{base}.npz") as arrays:
            for name, (dtype, shape, digest) in expected(path).items():
                if name not in left["safetensors"]:
                    assert summary(torch, tensors[name]) == (dtype, shape, digest)
                if name not in left["npz"]:
                    assert hashlib.sha256(arrays[name].tobytes()).hexdigest() == digest
                    assert arrays[name].shape == shape
                if name not in left["raw"]:
                    entry = index["tensors"][index["aliases"].get(name, name)]
                    raw = (tmp_path / f"{path.name}.raw" / entry["file"]).read_bytes()
                    assert hashlib.sha256(raw).hexdigest() == digest
                assert summary(torch, loaded[name]) == (dtype, shape, digest)


def flattened(value: Any, name: str = "") -> Any:
    if hasattr(value, "dtype"):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flattened(inner, f"{name}/{key}" if name else str(key))


def summary(torch: Any, tensor: Any) -> tuple[str, tuple[int, ...], str]:
    plain = tensor.int_repr() if tensor.is_quantized else tensor
    raw = plain.contiguous().flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()


def test_hash_of_all_tensors_is_the_same_in_every_format(tmp_path: Path) -> None:
    source = DATA / "h200" / "train_cuda0.ckpt"
    outputs = [convert(source, tmp_path / name).out for name in ("a.pt", "a.safetensors")]
    convert(source, tmp_path / "m.safetensors", max_shard_size=500)
    outputs += [str(tmp_path / "m.safetensors.index.json"), convert(outputs[1], tmp_path / "b.pt").out]
    assert len({transload.verify(path, hashes=True).sha256 for path in (str(source), *outputs)}) == 1


PROGRAM = """
import sys
for name in ("torch", "numpy", "safetensors"):
    sys.modules[name] = None  # importing it fails
import transload
for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
    result = transload.convert(source, target)
    assert result.verified and result.complete, source
"""


def test_pickled_modules_become_state_dicts_in_a_process_without_torch(tmp_path: Path) -> None:
    paths = [path for path in FILES if path.name.startswith("whole_") and path.parent.parent.name == "torch-releases"]
    assert len(paths) >= 16
    targets = [tmp_path / f"{number}.safetensors" for number in range(len(paths))]
    arguments = [str(part) for pair in zip(paths, targets, strict=True) for part in pair]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, env=env, timeout=300)
    for path, target in zip(paths, targets, strict=True):
        with open_elements(target) as content:
            facts = dict(content.checkpoint.facts)
        actual = hashes(target)
        ties = {key.removeprefix("metadata."): value for key, value in facts.items() if key.startswith("metadata.")}
        actual.update({name: actual[kept] for name, kept in ties.items() if name != "format"})
        assert actual == expected(path)


@pytest.mark.parametrize("name", ["torchscript_cuda0.pt", "export_cuda0.pt2"])
def test_weights_of_a_torchscript_or_exported_program_are_converted(name: str, tmp_path: Path) -> None:
    result = convert(DATA / "h200" / name, tmp_path / "a.pt")
    state_dict = convert(DATA / "h200" / "state_dict_cuda0.pt", tmp_path / "b.pt")
    assert result.tensors == state_dict.tensors
    assert hashes(tmp_path / "a.pt") == hashes(tmp_path / "b.pt")
    assert "the program itself is not converted, only its weights" in result.notes


def test_program_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(transload.ConvertError, match="no tensor to convert"):
        convert(DATA / "h200" / "aoti_cuda0.pt2", tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
