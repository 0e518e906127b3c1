"""What a load shares with its process: global settings of torch, file descriptors, and files that others modify."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks
from tests.loading.zoo import IGNORED_WARNINGS, saved

from transload.cli.main import main
from transload.errors import BrokenFileError, DoesNotFitError, LoadError
from transload.io.folder import Folder
from transload.loading import load
from transload.loading.handles import open as open_
from transload.loading.into import KeysWarning, MismatchError, load_into
from transload.loading.placement import DeviceMap
from transload.opening import fill
from transload.verifying import verify

SOURCE = Path(__file__).parents[2] / "src"
POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX resource limits")

pytestmark = IGNORED_WARNINGS


# -- sparse invariant checks, a setting of torch for the process


@pytest.fixture
def invariants_are_checked() -> Iterator[None]:
    switch = torch.sparse.check_sparse_tensor_invariants
    switch.enable()
    yield
    switch.disable()


@pytest.mark.usefixtures("invariants_are_checked")
@pytest.mark.parametrize("weights_only", [True, False])
def test_enabled_sparse_invariant_checks_stay_enabled(monkeypatch: pytest.MonkeyPatch, *, weights_only: bool) -> None:
    """torch sets them for each tensor and restores them: of two threads, one may restore the setting of the other."""
    data, checked = saved([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()]), []

    def recording(build: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **options: Any) -> Any:
            checked.append(options["check_invariants"])
            return build(*args, **options)

        return recorded

    for name in ("sparse_coo_tensor", "sparse_compressed_tensor"):
        monkeypatch.setattr(torch, name, recording(getattr(torch, name)))
    load(data, weights_only=weights_only)
    assert checked == [True, True]
    assert torch.sparse.check_sparse_tensor_invariants.is_enabled()


def test_trusted_load_keeps_sparse_tensors_queued_by_others() -> None:
    """Another thread may have queued a tensor for validation before its bytes were read."""
    getter = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    pending = getter() if getter else torch._utils._sparse_tensors_to_validate
    invalid = torch.sparse_coo_tensor(torch.tensor([[7]]), torch.ones(1), (3,), check_invariants=False)
    pending.append(invalid)
    try:
        load(saved(torch.eye(3).to_sparse()), weights_only=False)
        assert len(pending) == 1
    finally:
        pending.clear()


def test_loading_sparse_tensors_triggers_no_warning_of_torch(tmp_path: Path) -> None:
    """torch warns about sparse tensors once per process, so this needs a fresh one."""
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse.pt")
    code = "import sys, transload\nfor only in (True, False): transload.load(sys.argv[1], weights_only=only)"
    strict = "import warnings; warnings.filterwarnings('error', 'Sparse')\n"
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    process = forks.run("-c", strict + code, tmp_path / "sparse.pt", env=env)
    if "implicitly disabled" in process.stderr and forks.run("-c", strict + UNCHECKED_SPARSE_TENSOR).returncode:
        pytest.skip("this torch warns even though warnings are turned off")
    assert (process.returncode, process.stderr) == (0, "")


UNCHECKED_SPARSE_TENSOR = (
    "import torch; torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,), check_invariants=False)"
)
"""torch 2.11 warns about this, 2.13 does not."""


# -- memory

LOAD_REPEATEDLY = """
import sys, transload

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

transload.load(sys.argv[1], "cpu")
before = resident()
after = []
for _ in range(4):
    transload.load(sys.argv[1], "cpu")
    after.append(resident() - before)
print(max(after))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
@pytest.mark.parametrize(("count", "numel"), [(900, 17_000), (12, 2_000_000)])
def test_memory_of_large_tensors_returns_to_the_system_after_later_loads(
    count: int, numel: int, tmp_path: Path
) -> None:
    """After the first load the C library takes memory of their size from its heaps, and returns only the end of one."""
    torch.save({str(index): torch.zeros(numel) for index in range(count)}, tmp_path / "a.pt")
    command = [sys.executable, "-c", LOAD_REPEATEDLY, str(tmp_path / "a.pt")]  # a fork inherits a heap with room
    process = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=False)
    assert process.stderr == b""
    assert int(process.stdout) < 15e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_memory_returns_to_the_system_where_more_threads_read(tmp_path: Path) -> None:
    """On a core that another program uses, threads join a load; none of them gets the heap of the tensors."""
    torch.save({str(index): torch.zeros(2_000_000) for index in range(12)}, tmp_path / "a.pt")
    bind = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    command = [sys.executable, "-c", bind + LOAD_REPEATEDLY, str(tmp_path / "a.pt")]
    other = subprocess.Popen([sys.executable, "-c", f"{bind}while True: pass"])
    try:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        process = subprocess.run(command, capture_output=True, env=environment, check=False)
    finally:
        other.kill()
        other.wait()
    assert process.stderr == b""
    assert int(process.stdout) < 15e6


LOAD_AMONG_THREADS = """
import sys, threading, time, transload

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def work():
    mine = [bytearray(5000) for _ in range(20)]
    begun.release()
    end.wait()

begun, end = threading.Semaphore(0), threading.Event()
transload.load(sys.argv[1], "cpu")
before = resident()
after = []
for _ in range(6):
    loaded = transload.load(sys.argv[1], "cpu")
    for _ in range(4):
        threading.Thread(target=work).start()
        begun.acquire()
    del loaded
    after.append(resident() - before)
end.set()
print(max(after))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs the GNU C library")
def test_memory_below_blocks_of_other_threads_does_not_grow_with_each_load(tmp_path: Path) -> None:
    torch.save({str(index): torch.zeros(60_000) for index in range(200)}, tmp_path / "a.pt")
    command = [sys.executable, "-c", LOAD_AMONG_THREADS, str(tmp_path / "a.pt")]
    # As many heaps as on a machine with 16 cores: with few, threads must share them.
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "GLIBC_TUNABLES": "glibc.malloc.arena_max=128"}
    process = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert process.stderr == b""
    assert int(process.stdout) < 2 * 48e6


def test_profiler_sees_the_memory_of_a_load(tmp_path: Path) -> None:
    torch.save([torch.zeros(5_000_000), torch.ones(2)], tmp_path / "a.pt")
    with torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profile:
        load(tmp_path / "a.pt", "cpu")
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profile.function_events) >= 20_000_000


# -- limits of the process


@contextmanager
def free_descriptors(more: int) -> Iterator[None]:
    """Limit the process to this many files beyond those already open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(entry.name) for entry in Path("/dev/fd").iterdir()}
    free = (number for number in range(soft) if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@POSIX
def test_unpacked_archive_with_more_files_than_descriptors_loads(tmp_path: Path) -> None:
    value = {f"{index}": torch.full((3,), float(index)) for index in range(200)}
    with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
        archive.extractall(tmp_path)
    load(tmp_path)  # its imports need descriptors too
    open_(tmp_path).close()
    with free_descriptors(40):
        loaded = load(tmp_path)
        with open_(tmp_path) as handle:
            read = {name: handle[name] for name in handle}
    for name, tensor in value.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(read[name], tensor)


@POSIX
def test_more_shards_than_descriptors_load(tmp_path: Path) -> None:
    names = {f"w{index}": f"pytorch_model-{index + 1:05}-of-00120.bin" for index in range(120)}
    for key, name in names.items():
        torch.save({key: torch.ones(3)}, tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    load(tmp_path)
    with free_descriptors(40):
        assert len(load(tmp_path)) == 120


def test_failed_buffer_allocation_is_a_does_not_fit_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([torch.ones(100) for _ in range(9)], tmp_path / "small.pt")

    def no_memory(*_: object, **__: object) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", no_memory)
    with pytest.raises(DoesNotFitError, match="no memory for a buffer of"):
        load(tmp_path / "small.pt")


@pytest.mark.parametrize("stream", [None, "closed"])
def test_progress_works_with_missing_or_closed_stderr(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    assert load(saved([1]), progress=True) == [1]


def test_file_object_whose_readinto_fails_loads() -> None:
    class FailingReadinto(io.BytesIO):
        def readinto(self, _: Any) -> int:
            raise OSError(5, "Input/output error")

    value = torch.arange(100_000)
    assert torch.equal(load(FailingReadinto(saved(value))), value)


# -- a file that others modify

VALUES = [torch.full((1 << 18,), 1.0) for _ in range(8)]


def truncate(path: Path) -> None:
    os.truncate(path, 1 << 20)


def rewrite(path: Path) -> None:
    torch.save([tensor + 1 for tensor in VALUES], path)
    os.utime(path, ns=(0, 0))  # a coarse clock may show the same time


def unlink(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    torch.save([1], path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.fixture
def before_bytes_are_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Run a function after the structure of a file was read and before its bytes are."""

    def arrange(change: Callable[[], object]) -> None:
        init = DeviceMap.__init__

        def changed(self: DeviceMap, *args: Any) -> None:
            change()
            init(self, *args)

        monkeypatch.setattr(DeviceMap, "__init__", changed)

    return arrange


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"threads": 3}, {"mmap": True}, {"direct": True}, {"weights_only": False})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("change", "message"), [(truncate, "are incomplete"), (rewrite, "was changed while it was read")]
)
def test_file_changed_during_load_is_a_broken_file_error(
    change: Callable[[Path], None], message: str, options: dict[str, Any], tmp_path: Path, before_bytes_are_read: Any
) -> None:
    path = tmp_path / "model.pt"
    torch.save(VALUES, path)
    before_bytes_are_read(lambda: change(path))
    with pytest.raises(BrokenFileError, match=message):
        load(path, **options)


@pytest.mark.skipif(os.name != "posix", reason="Windows does not let an open file be deleted")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", [unlink, replace])
def test_file_deleted_or_replaced_during_load_still_loads(
    change: Callable[[Path], None], options: dict[str, Any], tmp_path: Path, before_bytes_are_read: Any
) -> None:
    path = tmp_path / "model.pt"
    torch.save(VALUES, path)
    before_bytes_are_read(lambda: change(path))
    assert all(torch.equal(*pair) for pair in zip(load(path, **options), VALUES, strict=True))


def test_shared_mapping_does_not_extend_a_truncated_file(tmp_path: Path, before_bytes_are_read: Any) -> None:
    """Python extends a file that is mapped writable to the requested length."""
    if not hasattr(torch.serialization, "set_default_mmap_options"):
        pytest.skip("this torch has no set_default_mmap_options")
    if os.name == "nt":
        pytest.skip("needs mmap.MAP_SHARED")
    from mmap import MAP_SHARED

    path = tmp_path / "model.pt"
    torch.save(VALUES, path)
    before_bytes_are_read(lambda: truncate(path))
    before = torch.serialization.get_default_mmap_options()
    torch.serialization.set_default_mmap_options(MAP_SHARED)
    try:
        with pytest.raises(BrokenFileError):
            load(path, mmap=True)
    finally:
        torch.serialization.set_default_mmap_options(before)
    assert path.stat().st_size == 1 << 20


@pytest.fixture(params=[True, False], ids=["kept open", "reopened"])
def shards(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Shards that stay open, or are opened for each read, as when there are more than a process may keep open."""
    paths = [tmp_path / f"shard{index}.bin" for index in range(4)]
    for path in paths:
        torch.save({path.name: torch.ones(1 << 18)}, path)
    weights = {"weight_map": {path.name: path.name for path in paths}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(weights))
    opens = Folder.open
    monkeypatch.setattr(Folder, "open", lambda folder, name, **_: opens(folder, name, keep=request.param))
    return paths


def test_shard_changed_during_load_is_a_broken_file_error(shards: list[Path], before_bytes_are_read: Any) -> None:
    def change() -> None:
        torch.save({shards[-1].name: torch.zeros(1 << 18)}, shards[-1])
        os.utime(shards[-1], ns=(0, 0))

    before_bytes_are_read(change)
    with pytest.raises(BrokenFileError, match="was changed while it was read"):
        load(shards[0].parent)


def test_shards_are_verified(shards: list[Path]) -> None:
    assert verify(shards[0].parent).integrity == "whole"


def test_file_changed_during_load_into_is_a_broken_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(8, 8)}, path)

    def changed(*args: Any, **options: Any) -> Any:
        torch.save({"weight": torch.zeros(8, 8)}, path)
        os.utime(path, ns=(0, 0))
        return fill(*args, **options)

    monkeypatch.setattr("transload.loading.handles.fill", changed)
    with pytest.raises(BrokenFileError, match="was changed while it was read"):
        load_into(torch.nn.Linear(8, 8, bias=False), path)


def unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse(name: Any, *arguments: Any, **named: Any) -> int:
        if os.fspath(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return real_open(name, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)


def test_shard_that_cannot_be_read_is_not_left_out(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys would count as missing, and with ``strict=False`` the rest would load."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

    unreadable(shards[1], monkeypatch)
    for strict in (True, False):
        with pytest.raises(LoadError, match=r"shard1\.bin") as caught:
            load_into(Model(), shards[0].parent, strict=strict)
        assert "strict=False loads" not in str(caught.value)
    with open_(shards[0].parent) as handle, pytest.raises(KeyError, match=r"cannot be read: shard1\.bin"):
        handle[shards[1].name]


def test_load_into_says_that_a_shard_is_missing(shards: list[Path]) -> None:
    model = torch.nn.Module()
    for path in shards:
        model.register_buffer(path.stem, torch.zeros(1 << 18))
    rename = {f"{path.stem}.bin": path.stem for path in shards}.__getitem__
    shards[1].unlink()
    with pytest.raises(MismatchError, match=r"\nshards are missing: shard1\.bin\n"):
        load_into(model, shards[0].parent, rename=rename)
    with pytest.warns(KeysWarning, match=r"shards are missing: shard1\.bin"):
        load_into(model, shards[0].parent, rename=rename, strict=False)


def test_retag_names_a_shard_that_cannot_be_read(
    shards: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unreadable(shards[1], monkeypatch)
    assert main(["retag", str(shards[0].parent), "--to", "cpu"]) == 2
    assert "shard1.bin: Permission denied" in capsys.readouterr().err


def test_file_changed_while_it_is_open_is_a_broken_file_error(shards: list[Path]) -> None:
    with open_(shards[0].parent) as handle:
        assert handle[shards[0].name].sum() == 1 << 18
        torch.save({shards[0].name: torch.zeros(1 << 18)}, shards[0])
        os.utime(shards[0], ns=(0, 0))
        with pytest.raises(BrokenFileError, match="was changed while it was read"):
            handle.slice(shards[0].name)[:10]
