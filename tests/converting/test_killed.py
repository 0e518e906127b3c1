"""A conversion killed at any system call that changes the disk leaves the complete old set or the complete new set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs os.fork and renameat2(RENAME_EXCHANGE)")

# Forks once per call, from a process without threads; the child exits at that call as if it were killed.
SCRIPT = r"""
import json, os, struct, sys, shutil
from transload.converting import convert
from transload.writing import output
import transload.opening.elements

scene, base = sys.argv[1], sys.argv[2]
CALLS = "open write writev pwrite pwritev copy_file_range fsync rename replace link unlink mkdir rmdir".split()

def source(name, value, count):
    table = {f"t{n}": {"dtype": "U8", "shape": [100], "data_offsets": [100 * n, 100 * n + 100]} for n in range(count)}
    head = json.dumps(table).encode()
    with open(f"{base}/{name}", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + bytes([value]) * 100 * count)
    return f"{base}/{name}"

OLD, NEW = source("old", 1, 3), source("new", 2, 4 if scene == "another number of shards" else 3)
RAW = scene.startswith("raw")
OUT = f"{base}/place/out/" if RAW else f"{base}/place/m.safetensors"
SIZES = {"one file": (None, None), "shards replace a file": (None, 100), "a file replaces shards": (100, None)}

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
    "Every set of tensors that a loader can find: a file, an index with its shards, a directory."
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

def expected_tensors(value):
    count = 4 if scene == "another number of shards" and value == 2 else 3
    return {f"t{n}": bytes([value]) * 100 for n in range(count)}

def fresh():
    shutil.rmtree(f"{base}/place", ignore_errors=True)
    os.mkdir(f"{base}/place")
    to(OLD, 0)

def killed(at):
    "Run a conversion in a child that exits before its call number `at`; return whether it got that far."
    child = os.fork()
    if not child:
        left = [at]
        def watched(real):
            def call(*args, **more):
                left[0] -= 1
                if not left[0]:
                    os._exit(9)
                return real(*args, **more)
            return call
        for name in CALLS:
            setattr(os, name, watched(getattr(os, name)))
        output.swap = watched(output.swap) if scene != "raw, without exchange" else lambda *_: False
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
counts = {"points": 0, "old": 0, "new": 0, "both": 0, "neither": 0, "mixed": 0, "debris": 0}
while True:
    fresh()
    if not killed(counts["points"] + 1):
        break
    counts["points"] += 1
    found = read(f"{base}/place")
    if any(tensors not in (expected_tensors(1), expected_tensors(2)) for tensors in found):
        counts["mixed"] += 1
    kinds = (expected_tensors(1) in found, expected_tensors(2) in found)
    counts[{(True, False): "old", (False, True): "new", (True, True): "both", (False, False): "neither"}[kinds]] += 1
    to(NEW, 1)
    debris = {name for name in os.listdir(f"{base}/place") if name[0] == "."}
    counts["debris"] += bool(debris) or expected_tensors(2) not in read(f"{base}/place")
print(json.dumps(counts))
"""


@pytest.mark.parametrize(
    ("scene", "always_complete"),
    [
        ("one file", True),
        ("shards with the same names", True),
        ("another number of shards", True),
        ("shards replace a file", True),
        ("a file replaces shards", True),
        ("raw", True),
        ("raw, without exchange", False),
        ("shards that cannot be linked", False),
    ],
)
def test_killed_conversion_leaves_the_old_or_the_new_set(scene: str, always_complete: bool, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, scene, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONPATH": str(SOURCE)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    counts = json.loads(process.stdout)
    print(f"{scene}: killed at {counts['points']} points: {counts}")  # noqa: T201 - shows how many points were tried
    assert counts["points"] >= 8
    assert counts["mixed"] == counts["debris"] == 0
    assert not counts["neither"] or not always_complete
    assert counts["old"]
    assert counts["new"] + counts["both"]
