"""What people do with what they load, the switches of torch, and the arguments of ``load``."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.loading.equal import same
from tests.loading.zoo import QUIET, saved
from torch.utils.data import DataLoader, TensorDataset

import transload
from transload.errors import LoadError, UnsafeError, UsageError
from transload.loading import load

DATA = Path(__file__).parents[1] / "data"
SOURCE = Path(__file__).parents[2] / "src"
NEWEST = DATA / "torch-releases" / "torch-2.13.0-py3.11.7"
STATE_DICT = NEWEST / "state_dict_cpu.pt"
ZOO = DATA / "torch-releases" / "torch-1.10.2-py3.7.16" / "zoo_cuda0.pt"
CUDA = NEWEST / "state_dict_cuda0.pt"
WHOLE = sorted(DATA.rglob("whole_*.pt"))

pytestmark = QUIET


# -- habits


def test_a_data_set_feeds_a_loader(tmp_path: Path) -> None:
    torch.save([torch.arange(8.0), torch.arange(8)], tmp_path / "data.pt")
    loader = DataLoader(TensorDataset(*load(tmp_path / "data.pt")), batch_size=4)
    assert [batch[1].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def started() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.default_generator.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()

    one = started()
    step(*one)
    states = [part.state_dict() for part in one]
    torch.save({"states": states, "random": torch.get_rng_state()}, tmp_path / "train.ckpt")
    step(*one)
    held = load(tmp_path / "train.ckpt")
    other = started()
    for part, state in zip(other, held["states"], strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(held["random"])
    step(*other)
    assert all(map(torch.equal, one[0].parameters(), other[0].parameters()))
    assert one[2].state_dict() == other[2].state_dict()


def test_what_was_loaded_can_be_resized_trained_and_saved_again(tmp_path: Path) -> None:
    made = load(STATE_DICT)
    tensor = made["fc.weight"]
    tensor.resize_(1000)
    torch.save(made, tmp_path / "again.pt")
    same(torch.load(tmp_path / "again.pt"), load(tmp_path / "again.pt"))


def test_nothing_holds_on_to_what_was_loaded(tmp_path: Path) -> None:
    """Its memory is free as soon as the caller lets go, without waiting for the garbage collector."""
    torch.save({"a": torch.ones(4), "list": [torch.ones(2)], "p": torch.nn.Parameter(torch.ones(3))}, tmp_path / "x.pt")
    gc.collect()
    gc.disable()
    try:
        made = load(tmp_path / "x.pt")
        watched = [weakref.ref(tensor) for tensor in (made["a"], made["list"][0], made["p"])]
        del made
        assert [reference() for reference in watched] == [None, None, None]
    finally:
        gc.enable()


def test_threads_load_at_the_same_time() -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = torch.load(ZOO, map_location="cpu")
    with ThreadPoolExecutor(4) as pool:
        for made in pool.map(lambda _: load(ZOO, "cpu"), range(12)):
            same(expected, made)


# -- torch's own switches


def test_skip_data_is_honoured() -> None:
    if not hasattr(torch.serialization, "skip_data"):
        pytest.skip("this torch has no skip_data")
    with torch.serialization.skip_data():
        made = load(STATE_DICT)
    expected = torch.load(STATE_DICT)
    assert [(name, tensor.shape) for name, tensor in made.items()] == [(n, t.shape) for n, t in expected.items()]


def test_pretended_tensors_are_pretended() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    if not hasattr(torch._guards, "active_fake_mode"):
        pytest.skip("this torch has no active_fake_mode")
    with FakeTensorMode():
        expected = torch.load(CUDA, map_location="cpu")
        made = load(CUDA, "cpu")
    assert all(type(tensor) is FakeTensor for tensor in made.values())
    assert [(t.shape, t.device, t.dtype) for t in made.values()] == [
        (t.shape, t.device, t.dtype) for t in expected.values()
    ]


@pytest.mark.parametrize("wish", ["cpu", "auto"])
def test_a_default_device_does_not_matter(wish: str) -> None:
    with torch.device("meta"):
        same(torch.load(STATE_DICT), load(STATE_DICT, wish))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_nor_to_sparse_tensors(layout: torch.layout) -> None:
    """torch.load puts them on the default device, where the meta device loses their values."""
    data = saved(torch.eye(3).to_sparse(layout=layout))
    with torch.device("meta"):
        made = [load(data), load(data, weights_only=False), transload.open(data)[""]]
    assert all(torch.equal(each.to_dense(), torch.eye(3)) for each in made)


# -- arguments


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        load(STATE_DICT, device="cpu")
    with pytest.raises(TypeError, match="weights_only=True"):
        load(STATE_DICT, errors="ignore")
    with pytest.raises(UsageError, match="weights_only=False"):
        load(STATE_DICT, "cpu", __import__("pickle"), weights_only=True)
    with pytest.raises(UsageError, match="no encoding"):
        load(STATE_DICT, encoding="klingon")
    with pytest.raises(UsageError, match="path"):
        load(STATE_DICT.read_bytes(), mmap=True)


def test_weights_only_can_be_left_to_torchs_rule() -> None:
    import pickle

    whole = saved(torch.nn.Linear(2, 2))
    with pytest.raises(UnsafeError):
        load(whole, weights_only=None)
    same(torch.load(io.BytesIO(whole), weights_only=False), load(whole, "auto", pickle, weights_only=None))


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_whole_module_names_all_it_needs(path: Path) -> None:
    with pytest.raises(UnsafeError) as raised:
        load(path, "cpu")
    assert "torch.nn.modules.linear.Linear" in raised.value.what
    assert ("safe_globals([" in raised.value.fix) == hasattr(torch.serialization, "safe_globals")
    assert "weights_only=False" in raised.value.fix


def test_what_torch_cannot_make_is_told_in_a_line() -> None:
    with pytest.raises(LoadError, match="torch failed on a tensor in it") as raised:
        load(ZOO, "meta")
    assert str(raised.value).count("\n") == 0


def returned(value: object) -> Callable[[Any, str], object]:
    return lambda *_: value


def test_a_function_that_returns_no_storage() -> None:
    with pytest.raises(LoadError, match="returned str"):
        load(STATE_DICT, returned("cpu"))
    same(torch.load(STATE_DICT), load(STATE_DICT, returned(None)))


class Asked(list[tuple[bytes, str]]):
    """A function for map_location that remembers what it was asked."""

    def __call__(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        self.append((bytes(cast(Any, storage)), tag))
        return storage


def test_a_function_is_asked_once_for_each_storage_in_torchs_order() -> None:
    ours, theirs = Asked(), Asked()
    load(CUDA, ours)
    torch.load(CUDA, theirs)
    assert ours == theirs


@pytest.mark.parametrize("zipped", [True, False])
def test_an_empty_storage_is_seen_as_several_dtypes(*, zipped: bool) -> None:
    empty = torch.empty(0)
    made = {"f": empty, "i": empty.view(torch.int32), "p": torch.nn.Parameter(empty), "g": torch.ones(2)}
    buffer = io.BytesIO()
    torch.save(made, buffer, _use_new_zipfile_serialization=zipped)
    assert transload.inspect(buffer).ok
    assert transload.verify(buffer).ok
    for only in (True, False):
        found = transload.load(buffer, weights_only=only)
        assert [value.dtype for value in found.values()] == [value.dtype for value in made.values()]
    again = io.BytesIO()
    transload.save(made, again)
    assert transload.load(again)["i"].dtype is torch.int32
