"""A conversion that is killed at any call that changes a disk: what is there is the old set or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs os.fork and renameat2(RENAME_EXCHANGE)")

# Forks once for every call, in a process without threads; the child ends at that call as a killed one does.
SCRIPT = r"""
import json, os, struct, sys, shutil
from transload.converting import convert
from transload.writing import output
import transload.tensors.content

scene, base = sys.argv[1], sys.argv[2]
CALLS = "open write writev pwrite pwritev copy_file_range fsync rename replace link unlink mkdir rmdir".split()

def source(name, value, count):
    table = {f"t{n}": {"dtype": "U8", "shape": [100], "data_offsets": [100 * n, 100 * n + 100]} for n in range(count)}
    head = json.dumps(table).encode()
    with open(f"{base}/{name}", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + bytes([value]) * 100 * count)
    return f"{base}/{name}"

OLD, NEW = source("old", 1, 3), source("new", 2, 4 if scene == "shards of another number" else 3)
RAW = scene.startswith("raw")
OUT = f"{base}/place/out/" if RAW else f"{base}/place/m.safetensors"
SIZES = {"one file": (None, None), "shards over a file": (None, 100), "a file over shards": (100, None)}

def to(src, which):
    size = None if RAW else SIZES.get(scene, (100, 100))[which]
    convert(src, OUT, to="raw" if RAW else "safetensors", max_shard_size=size, overwrite=True)

def tensors(path):
    with open(path, "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8 : 8 + length])
    table.pop("__metadata__")
    return {name: data[8 + length + at["data_offsets"][0] :][:100] for name, at in table.items()}

def read(folder):
    "Every set that a loader can find: a file, an index with its shards, a directory."
    found = []
    if RAW:
        if os.path.isdir(f"{folder}/out"):
            index = json.load(open(f"{folder}/out/index.json"))["tensors"]
            found.append({name: open(f"{folder}/out/{at['file']}", "rb").read() for name, at in index.items()})
        return found
    if os.path.exists(f"{folder}/m.safetensors"):
        found.append(tensors(f"{folder}/m.safetensors"))
    if os.path.exists(f"{folder}/m.safetensors.index.json"):
        index = json.load(open(f"{folder}/m.safetensors.index.json"))["weight_map"]
        found.append({name: tensors(f"{folder}/{file}")[name] for name, file in index.items()})
    return found

def of(value):
    count = 4 if scene == "shards of another number" and value == 2 else 3
    return {f"t{n}": bytes([value]) * 100 for n in range(count)}

def fresh():
    shutil.rmtree(f"{base}/place", ignore_errors=True)
    os.mkdir(f"{base}/place")
    to(OLD, 0)

def killed(at):
    "Run a conversion in a child that dies before its call number `at`; whether it did."
    child = os.fork()
    if not child:
        left = [at]
        def watched(true):
            def call(*args, **more):
                left[0] -= 1
                if not left[0]:
                    os._exit(9)
                return true(*args, **more)
            return call
        for name in CALLS:
            setattr(os, name, watched(getattr(os, name)))
        output.swap = watched(output.swap) if scene != "raw, without a swap" else lambda *_: False
        if scene == "shards that cannot be linked":
            def refuse(*_):
                raise OSError(1, "no")
            os.link = refuse
        to(NEW, 1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

fresh()
to(NEW, 1)
expected = {*os.listdir(f"{base}/place")}
told = {"points": 0, "old": 0, "new": 0, "both": 0, "neither": 0, "mixed": 0, "debris": 0}
while True:
    fresh()
    if not killed(told["points"] + 1):
        break
    told["points"] += 1
    found = read(f"{base}/place")
    if any(each not in (of(1), of(2)) for each in found):
        told["mixed"] += 1
    kinds = (of(1) in found, of(2) in found)
    told[{(True, False): "old", (False, True): "new", (True, True): "both", (False, False): "neither"}[kinds]] += 1
    to(NEW, 1)
    debris = {name for name in os.listdir(f"{base}/place") if name[0] == "."}
    told["debris"] += bool(debris) or of(2) not in read(f"{base}/place")
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("scene", "whole"),
    [
        ("one file", True),
        ("shards of the same names", True),
        ("shards of another number", True),
        ("shards over a file", True),
        ("a file over shards", True),
        ("raw", True),
        ("raw, without a swap", False),
        ("shards that cannot be linked", False),
    ],
)
def test_a_set_is_old_or_new_at_every_moment(scene: str, whole: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, scene, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    print(f"{scene}: killed at {told['points']} points: {told}")  # noqa: T201 - how much was tried
    assert told["points"] >= 8
    assert told["mixed"] == told["debris"] == 0
    assert not told["neither"] or not whole
    assert told["old"]
    assert told["new"] + told["both"]
