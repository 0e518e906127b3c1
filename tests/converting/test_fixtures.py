"""Files of every torch release to every format and back: the numbers are those that torch itself saw."""

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

import transload
from transload.converting import convert
from transload.tensors.content import open_content

DATA = Path(__file__).parent.parent / "data"
SOURCE = Path(transload.__file__).parent.parent
FOLDERS = sorted(path.parent for path in DATA.glob("torch-releases/*/expected.json"))
EVERY = sorted(
    path
    for path in (*DATA.glob("torch-releases/*/*"), *DATA.glob("h200/*"))
    if path.suffix in {".pt", ".pth", ".ckpt", ".pt2"} and not path.name.startswith("aoti")
)
every_file = each("path", EVERY, ids=lambda path: f"{path.parent.name}/{path.name}")


def hashes(path: Path | str) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and hash of every tensor, by its name."""
    found = {}
    with open_content(path) as content:
        for tensor in content.checkpoint.tensors:
            if tensor.kind == "strided":
                digest = hashlib.sha256(b"".join(map(bytes, content.pieces(tensor)))).hexdigest()
                found[tensor.name] = (tensor.dtype, tensor.shape, digest)
    return found


def wanted(path: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """The same, as the release that wrote the file recorded it."""
    told = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))["files"][path.name]["tensors"]
    return {
        name[1:]: (each["dtype"].removeprefix("torch."), tuple(each["shape"]), each["sha256"])
        for name, each in told.items()
        if each["sha256"]
    }


@every_file
def test_there_and_back(path: Path, tmp_path: Path) -> None:
    """torch → safetensors → torch, tensor by tensor; safetensors' own library reads what is between."""
    made = convert(path, tmp_path / "a.safetensors")
    back = convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert (made.verified, back.verified, back.complete) == (True, True, True)
    names = {each.name for each in made.left}
    before = {name: each for name, each in hashes(path).items() if name not in names}
    after = hashes(tmp_path / "b.pt")
    assert before.items() <= after.items()
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} <= {"sparse"}
    library = pytest.importorskip("safetensors")
    with library.safe_open(tmp_path / "a.safetensors", "numpy") as opened:
        assert {*opened.keys(), *dict(made.aliases)} == set(after)
        said = opened.metadata()
    assert said == {"format": "pt", **dict(made.aliases)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_real_libraries_read_every_target(folder: Path, tmp_path: Path) -> None:
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.torch")
    from tests.release import RELEASE

    for path in sorted(folder.iterdir()):
        if path.suffix not in {".pt", ".ckpt"}:
            continue
        if not all(hasattr(torch, dtype) for dtype, _, _ in wanted(path).values()):
            continue  # an older torch
        base = tmp_path / path.name
        made = {to: convert(path, f"{base}.{to}", to=to) for to in ("safetensors", "torch", "npz", "raw")}
        lost = {to: {each.name for each in result.left} for to, result in made.items()}
        assert not lost["torch"]
        tensors = library.load_file(f"{base}.safetensors")
        tensors.update({name: tensors[kept] for name, kept in made["safetensors"].aliases})
        loaded = dict(flattened(torch.load(f"{base}.torch", weights_only=RELEASE >= (2, 6))))
        index = json.loads((tmp_path / f"{path.name}.raw" / "index.json").read_text(encoding="utf-8"))
        with numpy.load(f"{base}.npz") as arrays:
            for name, (dtype, shape, digest) in wanted(path).items():
                if name not in lost["safetensors"]:
                    assert told(torch, tensors[name]) == (dtype, shape, digest)
                if name not in lost["npz"]:
                    assert hashlib.sha256(arrays[name].tobytes()).hexdigest() == digest
                    assert arrays[name].shape == shape
                if name not in lost["raw"]:
                    entry = index["tensors"][index["aliases"].get(name, name)]
                    raw = (tmp_path / f"{path.name}.raw" / entry["file"]).read_bytes()
                    assert hashlib.sha256(raw).hexdigest() == digest
                assert told(torch, loaded[name]) == (dtype, shape, digest)


def flattened(value: Any, name: str = "") -> Any:
    if hasattr(value, "dtype"):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flattened(inner, f"{name}/{key}" if name else str(key))


def told(torch: Any, tensor: Any) -> tuple[str, tuple[int, ...], str]:
    plain = tensor.int_repr() if tensor.is_quantized else tensor
    raw = plain.contiguous().flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()


def test_the_hash_of_all_tensors_stays_the_same(tmp_path: Path) -> None:
    source = DATA / "h200" / "train_cuda0.ckpt"
    made = [convert(source, tmp_path / name).out for name in ("a.pt", "a.safetensors")]
    convert(source, tmp_path / "m.safetensors", max_shard_size=500)
    made += [str(tmp_path / "m.safetensors.index.json"), convert(made[1], tmp_path / "b.pt").out]
    assert len({transload.verify(path, hashes=True).sha256 for path in (str(source), *made)}) == 1


PROGRAM = """
import sys
for name in ("torch", "numpy", "safetensors"):
    sys.modules[name] = None  # importing it fails
import transload
for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
    made = transload.convert(source, target)
    assert made.verified and made.complete, source
"""


def test_whole_modules_become_state_dicts_in_a_process_without_torch(tmp_path: Path) -> None:
    paths = [path for path in EVERY if path.name.startswith("whole_") and path.parent.parent.name == "torch-releases"]
    assert len(paths) >= 16
    targets = [tmp_path / f"{number}.safetensors" for number in range(len(paths))]
    arguments = [str(part) for pair in zip(paths, targets, strict=True) for part in pair]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", PROGRAM, *arguments], check=True, env=env, timeout=300)
    for path, target in zip(paths, targets, strict=True):
        with open_content(target) as content:
            facts = dict(content.checkpoint.facts)
        found = hashes(target)
        ties = {key.removeprefix("metadata."): value for key, value in facts.items() if key.startswith("metadata.")}
        found.update({name: found[kept] for name, kept in ties.items() if name != "format"})
        assert found == wanted(path)


@pytest.mark.parametrize("name", ["torchscript_cuda0.pt", "export_cuda0.pt2"])
def test_programs_give_their_weights(name: str, tmp_path: Path) -> None:
    made = convert(DATA / "h200" / name, tmp_path / "a.pt")
    state = convert(DATA / "h200" / "state_dict_cuda0.pt", tmp_path / "b.pt")
    assert made.tensors == state.tensors
    assert hashes(tmp_path / "a.pt") == hashes(tmp_path / "b.pt")
    assert "the program itself is not converted, only its weights" in made.notes


def test_a_program_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(transload.ConvertError, match="no tensor to convert"):
        convert(DATA / "h200" / "aoti_cuda0.pt2", tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
