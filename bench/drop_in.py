"""Compare ``transload.load`` and ``save`` with ``torch.load`` and ``torch.save``, and list everything that differs.

    python bench/drop_in.py              counts, and every difference with its reason
    python bench/drop_in.py --memory     also 100 saves and 100 loads in a loop: peak and final memory next to torch's

Every object of the tests' zoo is saved by both, in every form, and loaded by both, in every way: from ten kinds of file
objects, mapped, with every form of ``map_location``, as data and with trust. The results are compared bit by bit:
types, order, strides, attributes, which tensors share memory, which places hold the same object. If torch raises, the
class of the exception is compared.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import io
import mmap
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "src")]  # not this folder: its `inspect` would hide that of the standard library
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine

import torch
from tests.loading.equal import assert_same
from tests.loading.zoo import BUILT_FROM_BYTES, ZOO, Specimen, registered_as_safe, save_with_tag

import transload

FORMS: dict[str, dict[str, Any]] = {
    **{f"zip {protocol}": {"pickle_protocol": protocol} for protocol in (2, 3, 4, 5)},
    **{f"legacy {n}": {"pickle_protocol": n, "_use_new_zipfile_serialization": False} for n in (2, 3, 4, 5)},
}

Outcome = tuple[str, Any]


# -- ways to pass a file


class Minimal:
    """A file object with only the methods that torch needs."""

    def __init__(self, data: bytes) -> None:
        stream = io.BytesIO(data)
        self.read, self.readline, self.seek, self.tell = stream.read, stream.readline, stream.seek, stream.tell


class ShortReads(io.BytesIO):
    """A file object that returns fewer bytes than requested."""

    def read(self, count: int | None = -1) -> bytes:
        """Half of the requested bytes."""
        return super().read(count if count is None or count < 0 else max(1, count // 2))


def ways(path: Path, data: bytes) -> Iterator[tuple[str, Callable[[], Any], dict[str, Any]]]:
    """Every way to pass a file to ``load``: its name, a function that returns the argument, and options."""

    def member() -> Any:
        with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
            archive.writestr("inner.pt", data)
        return zipfile.ZipFile(path.with_suffix(".zip")).open("inner.pt")

    def packed(module: Any) -> Any:
        target = path.with_suffix(".packed")
        with module.open(target, "wb") as file:
            file.write(data)
        return module.open(target, "rb")

    def spooled() -> Any:
        file = tempfile.SpooledTemporaryFile()  # noqa: SIM115 - closed with the last reference
        file.write(data)
        file.seek(0)
        return file

    def mapped() -> Any:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def shifted() -> Any:
        file = io.BytesIO(b"x" * 100 + data)
        file.seek(100)
        return file

    yield "path", lambda: str(path), {}
    yield "Path", lambda: path, {}
    yield "path, mmap", lambda: str(path), {"mmap": True}
    yield "BytesIO", lambda: io.BytesIO(data), {}
    yield "buffered file", lambda: path.open("rb"), {}
    yield "raw file", lambda: path.open("rb", buffering=0), {}
    yield "spooled file", spooled, {}
    yield "mmap.mmap", mapped, {}
    yield "member of a zip", member, {}
    yield "gzip", lambda: packed(gzip), {}
    yield "bz2", lambda: packed(bz2), {}
    yield "read, readline, seek, tell", lambda: Minimal(data), {}
    yield "short reads", lambda: ShortReads(data), {}
    yield "in the middle of a file", shifted, {}
    yield "file object, mmap", lambda: io.BytesIO(data), {"mmap": True}


def unchanged(storage: Any, _: str) -> Any:
    """A function, not a lambda, that leaves the storage where it is."""
    return storage


LOCATIONS: dict[str, Any] = {
    "None": None,
    "'cpu'": "cpu",
    "device('cpu')": torch.device("cpu"),
    "'meta'": "meta",
    "'cuda'": "cuda",
    "'cuda:3'": "cuda:3",
    "'nonsense'": "nonsense",
    "dict": {"cuda:0": "cpu", "cuda:1": "cpu"},
    "dict of one": {"cuda:0": "cpu"},
    "empty dict": {},
    "lambda: storage": lambda storage, _: storage,
    "lambda: None": lambda _storage, _tag: None,
    "lambda: location": unchanged,
}


# -- comparing


def outcome(action: Callable[..., Any], *args: Any, **options: Any) -> Outcome:
    """The outcome of a call: a value, or the exception."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            return "value", action(*args, **options)
        except Exception as error:  # noqa: BLE001 - exceptions are compared, too
            return "error", error


def difference(theirs: Outcome, ours: Outcome) -> str:
    """A short description; empty if there is none."""
    if theirs[0] == ours[0] == "value":
        try:
            assert_same(theirs[1], ours[1])
        except AssertionError as error:
            return f"another value: {error}"
        return ""
    if theirs[0] == ours[0]:
        kinds = type(ours[1]).__mro__
        return "" if type(theirs[1]) in kinds else f"{name(theirs)} became {name(ours)}"
    if theirs[0] == "error":
        return f"loads, where torch raises {name(theirs)}"
    return f"raises {name(ours)}: {str(ours[1]).splitlines()[0][:160]}"


def name(result: Outcome) -> str:
    """The class of an exception."""
    return type(result[1]).__name__


REASONS = {
    "loads, where torch raises UnpicklingError": "torch reads protocols 2 and 3 only as data; we read all of them",
    "UnpicklingError became NoDeviceError": "the same files: we go on, to the missing device",
    "loads, where torch raises AttributeError": "torch writes untyped storages in the legacy form, and fails on them",
    "loads, where torch raises RuntimeError": "torch maps only zip files; we ignore mmap for others",
    "RuntimeError became UsageError": "mmap=True with a file object, whatever its format",
    "another value: ['view'].storage: size: 1800 and 8000": "on meta torch splits shared legacy storages",
    "KeyError became NotACheckpointError": "torch runs the text as a pickle, until it fails",
    "AttributeError became NotACheckpointError": "we take bytes as the contents of a file",
}
"""Why a difference is intended."""


class Tally:
    """Counts, and the differences by their description."""

    def __init__(self) -> None:
        self.compared: Counter[str] = Counter()
        self.equal: Counter[str] = Counter()
        self.differences: dict[tuple[str, str], list[str]] = {}

    def enter(self, group: str, case: str, theirs: Outcome, ours: Outcome) -> None:
        """Compare two outcomes, and count the result."""
        self.compared[group] += 1
        description = difference(theirs, ours)
        if description:
            self.differences.setdefault((group, description), []).append(case)
        else:
            self.equal[group] += 1


def saved(by: Callable[..., None], value: Any, **options: Any) -> Outcome:
    """The file that torch or transload writes."""
    buffer = io.BytesIO()
    result = outcome(by, value, buffer, **options)
    return ("value", buffer.getvalue()) if result[0] == "value" else result


def compare_objects(tally: Tally) -> None:
    """Compare every object in every form, for every pair of writer and reader."""
    for key, specimen in ZOO.items():
        value = outcome(specimen.make)[1]
        for form, options in FORMS.items():
            if form.startswith("legacy") and key in BUILT_FROM_BYTES:
                continue  # torch builds these from memory that it has not filled yet
            theirs, ours = saved(torch.save, value, **options), saved(transload.save, value, **options)
            case = f"{key}, {form}"
            if theirs[0] == "error" or ours[0] == "error":
                tally.enter("save", case, theirs, ours)
                continue
            for weights_only in (True, False):
                compare_loads(tally, specimen, case, theirs[1], ours[1], weights_only)


def compare_loads(tally: Tally, specimen: Specimen, case: str, theirs: bytes, ours: bytes, weights_only: bool) -> None:
    """Compare transload and torch on the file of torch, and torch on both files."""
    options = {"weights_only": weights_only}
    kind = "as data" if weights_only else "with trust"
    with registered_as_safe(specimen):
        expected = outcome(torch.load, io.BytesIO(theirs), **options)
        tally.enter(f"load {kind}", case, expected, outcome(transload.load, io.BytesIO(theirs), None, **options))
        expected = outcome(torch.load, io.BytesIO(theirs), **options)
        tally.enter(f"save, torch.load {kind}", case, expected, outcome(torch.load, io.BytesIO(ours), **options))


def compare_ways(tally: Tally, folder: Path) -> None:
    """Compare all ways to pass a file, with every map_location and with tags of missing devices."""
    value = OrderedDict(w=torch.randn(40, 50), b=torch.randn(7), n={"step": 3})
    value["view"] = value["w"][3:9]
    for form, options in FORMS.items():
        for tag in ("", "cuda:0", "cuda:1"):
            buffer = io.BytesIO()
            with save_with_tag(tag):
                torch.save(value, buffer, **options)
            path = folder / f"{form}-{tag.replace(':', '')}.pt"
            path.write_bytes(buffer.getvalue())
            for way, open_file, extra in ways(path, buffer.getvalue()):
                for location_name, location in LOCATIONS.items():
                    results = [outcome(load, open_file(), location, **extra) for load in (torch.load, transload.load)]
                    tally.enter("ways to pass a file", f"{form}, tag {tag or 'cpu'}, {way}, {location_name}", *results)


def compare_not_files(tally: Tally, folder: Path) -> None:
    """Compare files that are not checkpoints, and targets that cannot be written."""
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_text("hello\n" * 100)
    (folder / "html").write_text("<!DOCTYPE html><html></html>")
    for case in (folder / "missing", folder, folder / "empty", folder / "text", folder / "html", 7, None, "", b"x"):
        results = [outcome(load, case) for load in (torch.load, transload.load)]
        tally.enter("not a checkpoint", str(case).replace(str(folder), "…"), *results)
    for case in (7, None, [], str(folder), folder / "no" / "folder.pt"):
        results = [outcome(save, {"w": torch.ones(2)}, case) for save in (torch.save, transload.save)]
        tally.enter("invalid targets", str(case).replace(str(folder), "…"), *results)


# -- memory

_LOOP = """
import gc, os, resource, sys, tempfile
sys.path[:0] = {paths!r}
import torch, transload
save, load = (transload.save, transload.load) if {ours} else (torch.save, torch.load)
def rss(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "x.pt")
    for turn in range(100):
        save({{str(n): torch.full((500_000,), float(turn)) for n in range(10)}}, path)
    for turn in range(100):
        loaded = load(path)
        assert float(loaded["3"][0]) == 99
        del loaded
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, rss())
"""


def memory() -> None:
    """Print the peak and the final resident memory of a loop, in fresh processes."""
    rows: dict[bool, list[list[int]]] = {False: [], True: []}
    for _ in range(3):
        for ours in (False, True):
            code = _LOOP.format(paths=[str(ROOT / "src")], ours=ours)
            out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
            rows[ours].append([int(word) for word in out.split()])
    print("\n100 saves and 100 loads of 20 MB, MiB resident (peak, at the end); the least of 3 processes each")
    least = {ours: [min(column) / 2**20 for column in zip(*runs, strict=True)] for ours, runs in rows.items()}
    for ours, (peak, last) in least.items():
        print(f"  {'transload' if ours else 'torch':10} {peak:8.0f} {last:8.0f}")
    print(
        "  ratio     " + "".join(f"{mine / other:9.2f}" for mine, other in zip(least[True], least[False], strict=True))
    )


def main() -> int:
    """Compare everything; return 1 if a difference is not explained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        compare_objects(tally)
        compare_ways(tally, Path(folder))
        compare_not_files(tally, Path(folder))
    for group, count in tally.compared.items():
        print(f"{group:32} {count:6} compared, {count - tally.equal[group]:4} differ")
    for (group, description), cases in sorted(tally.differences.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"\n{group}: {description}\n  {len(cases)} times: {'; '.join(cases[:4])}")
        print(f"  {REASONS.get(description, 'NOT EXPLAINED')}")
    if options.memory:
        memory()
    return int(any(description not in REASONS for _, description in tally.differences))


if __name__ == "__main__":
    sys.exit(main())
