"""Every checkpoint in tests/data against the expected values recorded beside it, read without torch and numpy."""

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

# Reads each file named on stdin and prints a report. The bytes of a tensor are gathered element by element through
# storage, offset and stride, so that all three must be right.
READER = """
import hashlib, itertools, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"{name} is absent", name=name)

sys.meta_path.insert(0, Absent())
from transload.dtypes import itemsize
from transload.opening import inspect

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

def report(path):
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

print(json.dumps({path: report(path) for path in sys.stdin.read().splitlines()}))
"""


def files() -> list[Path]:
    found = (path for path in DATA.rglob("*") if path.suffix in (".pt", ".ckpt", ".pth", ".pt2"))
    return sorted(path for path in found if "rank-files" not in path.parts)  # see test_pieces and test_ranks


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """The report of the reader for every data file, from one process."""
    process = subprocess.run(
        [sys.executable, "-c", READER],
        input="\n".join(map(str, files())),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1"},
    )
    assert process.returncode == 0, process.stderr
    out: dict[str, Any] = json.loads(process.stdout)
    return out


def cases() -> list[Any]:
    out = []
    for index in sorted(DATA.glob("torch-releases/*/expected.json")):
        for name, expected in json.loads(index.read_text())["files"].items():
            out.append(pytest.param(index.parent / name, expected, id=f"{index.parent.name}/{name}"))
    return out


@each(("path", "expected"), cases())
def test_tensors_of_every_torch_release_match(reports: dict[str, Any], path: Path, expected: dict[str, Any]) -> None:
    tensors = reports[str(path)]["tensors"]
    assert tensors.keys() == expected["tensors"].keys()
    for name, expected_tensor in expected["tensors"].items():
        tensor = tensors[name]
        assert (tensor["dtype"], tensor["shape"]) == (expected_tensor["dtype"], expected_tensor["shape"]), name
        assert tensor["device"] == expected["tag"], name
        if expected_tensor["sha256"] is not None and tensor["kind"] == "strided":
            assert tensor["sha256"] == expected_tensor["sha256"], name


def test_only_special_kinds_of_tensors_have_no_digest(reports: dict[str, Any]) -> None:
    kinds = {
        tensor["kind"] for path in reports for tensor in reports[path]["tensors"].values() if tensor["sha256"] is None
    }
    assert kinds <= {"sparse_coo", "nested", "meta", "subclass", "device"}


@each("path", files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_intact_file_has_no_problems(reports: dict[str, Any], path: Path) -> None:
    report = reports[str(path)]
    zipped = path.read_bytes()[:2] == b"PK"
    assert report["integrity"] == ("whole" if zipped else "unchecked")
    assert not {code for code in report["problems"] if not code.endswith(("-device", "-architecture"))}
    assert min(report["shown"]) > 100


def expected_safety(path: Path) -> str:
    if path.name.startswith(("traced", "torchscript")) or path.suffix == ".pt2":
        return "code"
    return "needs-trust" if path.name.startswith("whole") else "data-only"


@each("path", files(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_safety_of_every_file(reports: dict[str, Any], path: Path) -> None:
    assert reports[str(path)]["safety"] == expected_safety(path)


@each("path", sorted(DATA.glob("torch-releases/*/state_dict_*.pt")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_tied_weights_are_reported(reports: dict[str, Any], path: Path) -> None:
    assert reports[str(path)]["shared"] == [["fc.weight", "head.weight"]]


# The files saved on a real GPU: their format, and the number of tensors per device tag.
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
def test_file_from_a_gpu_has_its_format_and_devices(reports: dict[str, Any], name: str) -> None:
    report = reports[str(DATA / "h200" / name)]
    expected_format, devices = H200[name]
    counts: dict[str, int] = {}
    for tensor in report["tensors"].values():
        counts[tensor["device"]] = counts.get(tensor["device"], 0) + 1
    assert report["format"] == expected_format
    assert devices is None or counts == devices


def test_every_data_file_has_a_case() -> None:
    listed = {str(case.values[0]) for case in cases()} | {str(DATA / "h200" / name) for name in H200}
    assert {str(path) for path in files()} == listed
