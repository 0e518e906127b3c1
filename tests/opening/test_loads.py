"""Complete loads through the engine, compared with torch: checkpoints large enough for several threads."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from tests import forks
from tests.loading.equal import assert_same
from torch import nn

import transload
from transload.errors import BrokenFileError, TransloadError
from transload.io import cuda_driver as driver
from transload.opening import engine
from transload.opening.jobs import FEW_BYTES

if TYPE_CHECKING:
    from tests.opening.fake import FakeDriver

LONG = 1_500_000
THREADS = [1, 3]


def content() -> dict[str, Any]:
    """Storages of all sizes, some shared, some with partial views, and small values between them."""
    torch.default_generator.manual_seed(3)
    base = torch.randn(LONG)
    return {
        "base": base,
        "view": base[1000:5000],
        "turned": base[:10_000].view(100, 100).t(),
        "half": torch.randn(2 * LONG, dtype=torch.float64).to(torch.float16),
        "small": {str(index): torch.full((index,), float(index)) for index in range(300)},
        "int": torch.arange(LONG),
        "epoch": 3,
        "none": torch.empty(0),
        "one": torch.tensor(7),
        "last": torch.randn(1001, 1003),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loads") / "model.pt"
    torch.save(content(), path)
    assert path.stat().st_size > FEW_BYTES
    return path


@pytest.fixture
def lane_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of lanes of each transfer."""
    counts: list[int] = []

    def run_lanes(jobs: Any, lanes: Any, *rest: Any) -> None:
        counts.append(len(lanes))
        real_run_lanes(jobs, lanes, *rest)

    monkeypatch.setattr(engine, "run_lanes", run_lanes)
    return counts


# -- load


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("options", [{}, {"verify": True}, {"direct": True}], ids=["plain", "verified", "direct"])
def test_load_with_threads_equals_torch_load(
    threads: int, options: dict[str, Any], saved: Path, lane_counts: list[int]
) -> None:
    assert_same(torch.load(saved), transload.load(saved, threads=threads, **options))
    assert lane_counts == [threads]


def test_default_number_of_threads_is_the_number_of_cores(
    saved: Path, lane_counts: list[int], set_cores: Callable[[int], None]
) -> None:
    set_cores(3)
    assert_same(torch.load(saved), transload.load(saved, direct=False))
    assert lane_counts == [3]


@pytest.mark.parametrize("form", ["legacy", "safetensors", "bytes", "object"])
def test_other_formats_and_sources_load_with_threads(form: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if form == "legacy":
        torch.save(content(), path, _use_new_zipfile_serialization=False)
        assert_same(torch.load(path), transload.load(path, threads=3))
    elif form == "safetensors":
        tensors = {"a": torch.randn(LONG), "b": torch.randn(3, LONG), "c": torch.ones(3)}
        save_file(tensors, path)
        loaded = transload.load(path, threads=3)
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    elif form == "bytes":
        assert_same(torch.load(saved), transload.load(saved.read_bytes(), threads=3))
    else:
        with saved.open("rb") as file:
            assert_same(torch.load(saved), transload.load(file, threads=3))


def test_map_location_function_works_with_threads(saved: Path) -> None:
    assert_same(torch.load(saved), transload.load(saved, lambda storage, _: storage, threads=3))


@pytest.mark.parametrize("threads", THREADS)
def test_progress_increases_to_the_total(threads: int, saved: Path) -> None:
    reported: list[tuple[int, int]] = []
    transload.load(saved, threads=threads, progress=lambda done, total: reported.append((done, total)))
    assert reported == sorted(reported)
    assert reported[-1][0] == reported[-1][1]


class Stop(Exception):  # noqa: N818 - a signal of these tests
    """The error that the progress callback raises."""


@pytest.mark.parametrize("threads", THREADS)
def test_error_in_progress_callback_stops_the_load(threads: int, saved: Path) -> None:
    def stop(*_: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        transload.load(saved, threads=threads, progress=stop)
    assert_same(torch.load(saved), transload.load(saved, threads=threads))


@pytest.mark.parametrize("threads", THREADS)
def test_memory_of_a_failed_load_is_freed_at_once(threads: int, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be device memory, which must not wait for the garbage collector."""
    from transload.loading.storages import _StorageReader

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    real_empty = _StorageReader.empty

    def recorded(reader: _StorageReader, storage: Any, device: str = "cpu") -> Any:
        empty = real_empty(reader, storage, device)
        alive.add(empty)
        return empty

    def stop(*_: int) -> None:
        raise Stop

    def stopped() -> bool:
        try:
            transload.load(saved, threads=threads, progress=stop)
        except Stop:
            return bool(list(alive))
        return False

    monkeypatch.setattr(_StorageReader, "empty", recorded)
    gc.collect()
    gc.disable()
    try:
        assert stopped()
        assert not list(alive)  # some releases of torch do not run callbacks when a storage is freed
    finally:
        gc.enable()


# -- damage


def offset_of(path: Path, name: str) -> int:
    offset = transload.inspect(path).tensor(name).file_offset
    assert offset is not None
    return offset


@pytest.mark.parametrize("name", ["base", "int", "last", "small/250"])
@pytest.mark.parametrize("threads", [1, 3])
def test_flipped_bit_is_found_with_verify(name: str, threads: int, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "flipped.pt"
    data = bytearray(saved.read_bytes())
    data[offset_of(saved, name) + 800] ^= 4
    path.write_bytes(data)
    transload.load(path, threads=threads)
    with pytest.raises(BrokenFileError, match=name):
        transload.load(path, threads=threads, verify=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9])
def test_truncated_stream_is_a_broken_file_error(cut: float, threads: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    torch.save(content(), path, _use_new_zipfile_serialization=False)
    os.truncate(path, int(path.stat().st_size * cut))
    with pytest.raises(BrokenFileError):
        transload.load(path, threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_file_truncated_during_load_is_a_broken_file_error(threads: int, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.pt"
    path.write_bytes(saved.read_bytes())
    offset = offset_of(saved, "int")

    class TruncatingMap(dict[str, str]):
        def get(self, *args: Any) -> Any:
            os.truncate(path, offset + 5_000_000)
            return super().get(*args)

    with pytest.raises(BrokenFileError, match=r"int .*ends 7,000,000 bytes|last .*bytes before"):
        transload.load(path, TruncatingMap({"cuda:0": "cpu"}), threads=threads)


def test_file_replaced_during_load_still_loads_the_opened_one(saved: Path, tmp_path: Path) -> None:
    """The file that was opened is loaded."""
    path, other = tmp_path / "x.pt", tmp_path / "y.pt"
    path.write_bytes(saved.read_bytes())
    other.write_bytes(b"something else")

    class ReplacingMap(dict[str, str]):
        def items(self) -> Any:
            if other.exists():
                other.replace(path)
            return super().items()

    assert_same(torch.load(saved), transload.load(path, ReplacingMap({"cuda:0": "cpu"}), threads=3, direct=True))


LIMITED = """
import resource, sys, transload

transload.load(sys.argv[2], "cpu", threads=3)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[3]),) * 2)
try:
    transload.load(sys.argv[1], "cpu", threads=3)
except transload.DoesNotFitError as error:
    print(error.what)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory")
@pytest.mark.parametrize("left", [4 << 20, 60 << 20], ids=["no room for a thread", "a thread"])
def test_failed_allocation_of_a_storage_is_a_does_not_fit_error(left: int, tmp_path: Path) -> None:
    torch.save({str(index): torch.zeros(3 << 20) for index in range(6)}, tmp_path / "large.pt")
    torch.save(torch.ones(3), tmp_path / "small.pt")
    process = forks.run("-c", LIMITED, tmp_path / "large.pt", tmp_path / "small.pt", str(left))
    assert process.stderr == ""
    assert process.stdout.startswith("there is no memory for ")


# -- load_into


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)
        self.wide = nn.Linear(2000, 2000)
        self.tall = nn.Linear(2000, 100)
        self.tied = nn.Linear(2000, 2000, bias=False)
        self.tied.weight = self.wide.weight
        self.register_buffer("count", torch.tensor(seed))
        self.norms = nn.ModuleList(nn.LayerNorm(17) for _ in range(50))


@pytest.mark.parametrize("cores", [1, 3])
def test_load_into_fills_a_model_in_place(cores: int, tmp_path: Path, set_cores: Callable[[int], None]) -> None:
    set_cores(cores)
    path = tmp_path / "x.pt"
    torch.save(Model(1).state_dict(), path)
    model = Model(2)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    versions = {name: parameter._version for name, parameter in model.named_parameters()}
    transload.load_into(model, path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in torch.load(path).items())
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert all(parameter._version > versions[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("cores", [1, 3])
def test_file_truncated_during_load_into_is_a_broken_file_error(
    cores: int, tmp_path: Path, set_cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cores(cores)
    path = tmp_path / "x.pt"
    torch.save(Model(1).state_dict(), path)
    offset = offset_of(path, "wide.weight")

    def truncating_run_lanes(*arguments: Any) -> None:
        os.truncate(path, offset + 5_000_000)
        real_run_lanes(*arguments)

    monkeypatch.setattr(engine, "run_lanes", truncating_run_lanes)
    with pytest.raises(BrokenFileError, match=r"wide|tall|tied|norms|count"):
        transload.load_into(Model(2), path)


# -- to fake devices


def test_driver_error_is_a_transload_error_and_the_next_load_works(
    saved: Path, cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storages are allocated in host memory and treated as device memory."""
    from transload.loading import placement as arrival
    from transload.loading import storages
    from transload.loading.storages import _StorageReader

    real_empty = _StorageReader.empty

    def on_device(reader: Any, storage: Any, device: str = "cpu") -> Any:
        empty = real_empty(reader, storage)
        if device != "cpu":
            cuda.add_memory(empty.data_ptr(), storage.nbytes, 0)
        return empty

    monkeypatch.setattr(_StorageReader, "empty", on_device)
    monkeypatch.setattr(storages, "_unused", lambda _: 1 << 60)
    monkeypatch.setattr(arrival.DeviceMap, "planned_device", lambda *_: "cuda:0")
    current_driver: Any = driver.cuda_driver()
    assert current_driver is cuda
    assert_same(torch.load(saved), transload.load(saved, threads=2))
    cuda.fails["copy"] = [cuda.calls["copy"] + 3]
    with pytest.raises(TransloadError, match="copy was told to fail"):
        transload.load(saved, threads=2)
    assert_same(torch.load(saved), transload.load(saved, threads=2))


# -- systems other than Linux

WITHOUT_LINUX_FEATURES = """
import mmap, os, sys
import torch
for name in ("preadv", "O_DIRECT", "RWF_NOWAIT", "sched_getaffinity", "register_at_fork"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("PROT_READ", "MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS"):
    if hasattr(mmap, name):
        delattr(mmap, name)
sys.platform = "darwin"
import transload
from transload.io.cuda_driver import cuda_driver
from transload.opening import engine
assert cuda_driver() is None
made = transload.load(sys.argv[1], threads=3, direct=True, verify=True)
true = torch.load(sys.argv[1])
assert torch.equal(made["int"], true["int"]) and torch.equal(made["last"], true["last"])
print("loaded")
"""

real_run_lanes = engine.run_lanes  # before a test replaces it


@pytest.mark.skipif(os.name == "nt", reason="forges macOS")
def test_load_works_without_linux_features(saved: Path) -> None:
    process = forks.run("-c", WITHOUT_LINUX_FEATURES, saved)
    assert process.stdout == "loaded\n", process.stderr
