"""Every checkpoint in tests/data against the truth recorded beside it, read where torch and numpy are absent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.each import each

DATA = Path(__file__).parent.parent / "data"
SOURCE = Path(__file__).parent.parent.parent / "src"

# Reads each file named on its input and prints what it found. The bytes of a tensor are gathered element by element
# through storage, offset and stride, so that all of them must be right.
READER = """
import hashlib, itertools, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"{name} is absent", name=name)

sys.meta_path.insert(0, Absent())
from transload.dtypes import itemsize
from transload.judge import inspect

def gathered(tensor, storages, raw):
    storage = storages.get(tensor.storage)
    if storage is None or storage.offset is None:
        return None
    width, out = itemsize(tensor.dtype), bytearray()
    for index in itertools.product(*map(range, tensor.shape)):
        element = tensor.offset + sum(i * step for i, step in zip(index, tensor.stride))
        begin = storage.offset + element * width
        out += raw[begin : begin + width]
    return hashlib.sha256(out).hexdigest()

def told(path):
    with open(path, "rb") as file:
        raw = file.read()
    ckpt = inspect(path, verify=True)
    storages = {storage.id: storage for storage in ckpt.storages}
    tensors = {
        "/" + t.name: {"dtype": "torch." + t.dtype, "shape": list(t.shape), "device": t.device,
                       "sha256": gathered(t, storages, raw), "kind": t.kind}
        for t in ckpt.tensors
    }
    shown = [repr(ckpt), ckpt._repr_html_(), json.dumps(ckpt.to_dict())]
    return {"tensors": tensors, "format": ckpt.format, "safety": ckpt.safety, "integrity": ckpt.integrity,
            "shared": [list(names) for names in ckpt.shared], "shown": [len(text) for text in shown],
            "problems": [problem.code for problem in ckpt.problems]}

print(json.dumps({path: told(path) for path in sys.stdin.read().splitlines()}))
"""


def files() -> list[Path]:
    return sorted(path for path in DATA.rglob("*") if path.suffix in (".pt", ".ckpt", ".pth", ".pt2"))


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What the reader says of every fixture, from one process."""
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input="\n".join(map(str, files())),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def cases() -> list[Any]:
    out = []
    for index in sorted(DATA.glob("torch-releases/*/expected.json")):
        for name, wanted in json.loads(index.read_text())["files"].items():
            out.append(pytest.param(index.parent / name, wanted, id=f"{index.parent.name}/{name}"))
    return out


@each(("path", "wanted"), cases())
def test_a_release_is_read_to_the_byte(told: dict[str, Any], path: Path, wanted: dict[str, Any]) -> None:
    ours = told[str(path)]["tensors"]
    assert ours.keys() == wanted["tensors"].keys()
    for name, truth in wanted["tensors"].items():
        mine = ours[name]
        assert (mine["dtype"], mine["shape"]) == (truth["dtype"], truth["shape"]), name
        assert mine["device"] == wanted["tag"], name
        if truth["sha256"] is not None and mine["kind"] == "strided":
            assert mine["sha256"] == truth["sha256"], name


def test_every_tensor_with_a_known_digest_was_compared(told: dict[str, Any]) -> None:
    kinds = {mine["kind"] for path in told for mine in told[path]["tensors"].values() if mine["sha256"] is None}
    assert kinds <= {"sparse_coo", "nested", "meta", "subclass", "device"}


@each("path", files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_sound_file_has_no_problem(told: dict[str, Any], path: Path) -> None:
    found = told[str(path)]
    zipped = path.read_bytes()[:2] == b"PK"
    assert found["integrity"] == ("whole" if zipped else "unchecked")
    assert not {code for code in found["problems"] if not code.endswith(("-device", "-architecture"))}
    assert min(found["shown"]) > 100


def safety_of(path: Path) -> str:
    if path.name.startswith(("traced", "torchscript")) or path.suffix == ".pt2":
        return "code"
    return "needs-trust" if path.name.startswith("whole") else "data-only"


@each("path", files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_sound_file_is_no_more_dangerous_than_it_is(told: dict[str, Any], path: Path) -> None:
    assert told[str(path)]["safety"] == safety_of(path)


@each("path", sorted(DATA.glob("torch-releases/*/state_dict_*.pt")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_tied_weights_of_the_fixtures_are_seen(told: dict[str, Any], path: Path) -> None:
    assert told[str(path)]["shared"] == [["fc.weight", "head.weight"]]


# The files that really came from a GPU: their format, and how many tensors are tagged with which device.
H200 = {
    "aoti_cuda0.pt2": ("aotinductor", None),
    "data_cuda0.pt": ("torch-zip", {"cuda:0": 2}),
    "export_cuda0.pt2": ("torch-export", {"cuda:0": 10}),
    "mixed_cpu_cuda.pt": ("torch-zip", {"cuda:0": 10, "cpu": 1}),
    "state_dict_cuda0.pt": ("torch-zip", {"cuda:0": 10}),
    "state_dict_cuda0_legacy.pth": ("torch-legacy", {"cuda:0": 10}),
    "state_dict_cuda1.pt": ("torch-zip", {"cuda:1": 10}),
    "torchscript_cuda0.pt": ("torchscript", {"cuda:0": 10}),
    "train_cuda0.ckpt": ("torch-zip", {"cuda:0": 28, "cpu": 2}),
    "whole_custom_module_cuda0.pt": ("torch-zip", {"cuda:0": 10}),
    "whole_module_cuda0.pt": ("torch-zip", {"cuda:0": 4}),
}


@each("name", H200)
def test_a_file_from_a_gpu_names_it(told: dict[str, Any], name: str) -> None:
    found = told[str(DATA / "h200" / name)]
    wanted, devices = H200[name]
    counts: dict[str, int] = {}
    for tensor in found["tensors"].values():
        counts[tensor["device"]] = counts.get(tensor["device"], 0) + 1
    assert found["format"] == wanted
    assert devices is None or counts == devices


def test_every_fixture_is_accounted_for() -> None:
    listed = {str(case.values[0]) for case in cases()} | {str(DATA / "h200" / name) for name in H200}
    assert {str(path) for path in files()} == listed
