"""What a load shares with the rest of the process: torch's switches, descriptors, threads, files others write to."""

from __future__ import annotations

import io
import os
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
from tests.loading.zoo import QUIET, saved

from transload.errors import BrokenFileError, DoesNotFitError
from transload.loading import load
from transload.loading.engine import read_ranges
from transload.loading.handles import open as open_
from transload.loading.into import load_into
from transload.loading.placement import DeviceMap

SOURCE = Path(__file__).parents[2] / "src"
POSIX = pytest.mark.skipif(os.name != "posix", reason="needs POSIX resource limits")

pytestmark = QUIET


# -- torch's switch for sparse tensors, which is that of the process


@pytest.fixture
def invariants_are_checked() -> Iterator[None]:
    switch = torch.sparse.check_sparse_tensor_invariants
    switch.enable()
    yield
    switch.disable()


@pytest.mark.usefixtures("invariants_are_checked")
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_switch_that_is_on_stays_on(monkeypatch: pytest.MonkeyPatch, *, weights_only: bool) -> None:
    """torch turns it to what it is told for a tensor, and back: one of two threads to what the other had told."""
    data, told = saved([torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()]), []

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            told.append(options["check_invariants"])
            return make(*args, **options)

        return made

    for name in ("sparse_coo_tensor", "sparse_compressed_tensor"):
        monkeypatch.setattr(torch, name, noting(getattr(torch, name)))
    load(data, weights_only=weights_only)
    assert told == [True, True]
    assert torch.sparse.check_sparse_tensor_invariants.is_enabled()


def test_a_trusted_load_leaves_the_list_of_others_alone() -> None:
    """What another thread has noted there, before its bytes came, is no business of this load."""
    ask = getattr(torch._utils, "_get_sparse_tensors_to_validate", None)
    noted = ask() if ask else torch._utils._sparse_tensors_to_validate
    others = torch.sparse_coo_tensor(torch.tensor([[7]]), torch.ones(1), (3,), check_invariants=False)
    noted.append(others)
    try:
        load(saved(torch.eye(3).to_sparse()), weights_only=False)
        assert len(noted) == 1
    finally:
        noted.clear()


def test_torch_has_nothing_to_warn_of(tmp_path: Path) -> None:
    """It warns of sparse tensors once in a process, so it takes a fresh one."""
    torch.save(torch.eye(3).to_sparse(), tmp_path / "sparse.pt")
    code = "import sys, transload\nfor only in (True, False): transload.load(sys.argv[1], weights_only=only)"
    strict = "import warnings; warnings.filterwarnings('error', 'Sparse')\n"
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = forks.run("-c", strict + code, tmp_path / "sparse.pt", env=env)
    if "implicitly disabled" in done.stderr and forks.run("-c", strict + EXPLICIT).returncode:
        pytest.skip("this torch warns even though warnings are turned off")
    assert (done.returncode, done.stderr) == (0, "")


EXPLICIT = "import torch; torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,), check_invariants=False)"
"""Of which torch 2.11 warns, and 2.13 does not."""


# -- limits of the process


@contextmanager
def descriptors(more: int) -> Iterator[None]:
    """While the process may open so many files beside those it has."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(each.name) for each in Path("/dev/fd").iterdir()}
    free = (number for number in range(soft) if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(free, more, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@POSIX
def test_more_files_than_can_be_open(tmp_path: Path) -> None:
    value = {f"{index}": torch.full((3,), float(index)) for index in range(200)}
    with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
        archive.extractall(tmp_path)
    load(tmp_path)  # what it imports needs descriptors, too
    open_(tmp_path).close()
    with descriptors(40):
        made = load(tmp_path)
        with open_(tmp_path) as handle:
            read = {name: handle[name] for name in handle}
    for name, tensor in value.items():
        assert torch.equal(made[name], tensor)
        assert torch.equal(read[name], tensor)


@POSIX
def test_more_shards_than_can_be_open(tmp_path: Path) -> None:
    import json

    names = {f"w{index}": f"pytorch_model-{index + 1:05}-of-00120.bin" for index in range(120)}
    for key, name in names.items():
        torch.save({key: torch.ones(3)}, tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    load(tmp_path)
    with descriptors(40):
        assert len(load(tmp_path)) == 120


def test_no_memory_for_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save([torch.ones(100) for _ in range(9)], tmp_path / "small.pt")

    def full(*_: object, **__: object) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", full)
    with pytest.raises(DoesNotFitError, match="no memory for a buffer of"):
        load(tmp_path / "small.pt")


@pytest.mark.parametrize("stream", [None, "closed"])
def test_progress_without_a_terminal(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream else None)
    assert load(saved([1]), progress=True) == [1]


def test_a_file_object_that_cannot_read_into_memory() -> None:
    class Odd(io.BytesIO):
        def readinto(self, _: Any) -> int:
            raise OSError(5, "Input/output error")

    value = torch.arange(100_000)
    assert torch.equal(load(Odd(saved(value))), value)


# -- a file that others write to

VALUES = [torch.full((1 << 18,), 1.0) for _ in range(8)]


def cut(path: Path) -> None:
    os.truncate(path, 1 << 20)


def rewrite(path: Path) -> None:
    torch.save([tensor + 1 for tensor in VALUES], path)
    os.utime(path, ns=(0, 0))  # a coarse clock may not have moved since


def unlink(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    torch.save([1], path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Has something happen between the reading of what is in a file and the reading of its bytes."""

    def arrange(happens: Callable[[], object]) -> None:
        begin = DeviceMap.__init__

        def changed(self: DeviceMap, *args: Any) -> None:
            happens()
            begin(self, *args)

        monkeypatch.setattr(DeviceMap, "__init__", changed)

    return arrange


HOW: tuple[dict[str, Any], ...] = ({}, {"threads": 3}, {"mmap": True}, {"direct": True}, {"weights_only": False})


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(("change", "words"), [(cut, "are incomplete"), (rewrite, "was changed while it was read")])
def test_a_file_that_is_written_to(
    change: Callable[[Path], None], words: str, how: dict[str, Any], tmp_path: Path, meanwhile: Any
) -> None:
    path = tmp_path / "model.pt"
    torch.save(VALUES, path)
    meanwhile(lambda: change(path))
    with pytest.raises(BrokenFileError, match=words):
        load(path, **how)


@pytest.mark.skipif(os.name != "posix", reason="Windows does not let an open file be deleted")
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("change", [unlink, replace])
def test_a_file_that_is_taken_away(
    change: Callable[[Path], None], how: dict[str, Any], tmp_path: Path, meanwhile: Any
) -> None:
    path = tmp_path / "model.pt"
    torch.save(VALUES, path)
    meanwhile(lambda: change(path))
    assert all(torch.equal(*pair) for pair in zip(load(path, **how), VALUES, strict=True))


def test_a_map_that_would_change_the_file_is_not_made(tmp_path: Path, meanwhile: Any) -> None:
    """A file that is mapped to be written to is made as long as it was wanted."""
    if not hasattr(torch.serialization, "set_default_mmap_options"):
        pytest.skip("this torch has no set_default_mmap_options")
    from mmap import MAP_SHARED

    path = tmp_path / "model.pt"
    torch.save(VALUES, path)
    meanwhile(lambda: cut(path))
    before = torch.serialization.get_default_mmap_options()
    torch.serialization.set_default_mmap_options(MAP_SHARED)
    try:
        with pytest.raises(BrokenFileError):
            load(path, mmap=True)
    finally:
        torch.serialization.set_default_mmap_options(before)
    assert path.stat().st_size == 1 << 20


def test_a_model_of_a_file_that_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(8, 8)}, path)

    def changed(*args: Any, **options: Any) -> Any:
        torch.save({"weight": torch.zeros(8, 8)}, path)
        os.utime(path, ns=(0, 0))
        return read_ranges(*args, **options)

    monkeypatch.setattr("transload.loading.handles.read_ranges", changed)
    with pytest.raises(BrokenFileError, match="was changed while it was read"):
        load_into(torch.nn.Linear(8, 8, bias=False), path)
