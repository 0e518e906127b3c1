"""Common uses of loaded objects, context managers of torch, and the arguments of ``load``."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests import makers
from tests.loading.equal import assert_same
from tests.loading.zoo import IGNORED_WARNINGS, saved
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
PICKLED_MODULES = sorted(DATA.rglob("whole_*.pt"))

pytestmark = IGNORED_WARNINGS


# -- common uses


def test_loaded_data_set_works_with_data_loader(tmp_path: Path) -> None:
    torch.save([torch.arange(8.0), torch.arange(8)], tmp_path / "data.pt")
    loader = DataLoader(TensorDataset(*load(tmp_path / "data.pt")), batch_size=4)
    assert [batch[1].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_training_resumes_from_a_loaded_checkpoint(tmp_path: Path) -> None:
    def new_training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.default_generator.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()

    original = new_training()
    step(*original)
    states = [part.state_dict() for part in original]
    torch.save({"states": states, "random": torch.get_rng_state()}, tmp_path / "train.ckpt")
    step(*original)
    checkpoint = load(tmp_path / "train.ckpt")
    resumed = new_training()
    for part, state in zip(resumed, checkpoint["states"], strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(checkpoint["random"])
    step(*resumed)
    assert all(map(torch.equal, original[0].parameters(), resumed[0].parameters()))
    assert original[2].state_dict() == resumed[2].state_dict()


def test_loaded_tensor_can_be_resized_and_saved_again(tmp_path: Path) -> None:
    loaded = load(STATE_DICT)
    tensor = loaded["fc.weight"]
    tensor.resize_(1000)
    torch.save(loaded, tmp_path / "again.pt")
    assert_same(torch.load(tmp_path / "again.pt"), load(tmp_path / "again.pt"))


def test_loaded_tensors_are_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """The memory is freed as soon as the caller drops the last reference."""
    torch.save({"a": torch.ones(4), "list": [torch.ones(2)], "p": torch.nn.Parameter(torch.ones(3))}, tmp_path / "x.pt")
    gc.collect()
    gc.disable()
    try:
        loaded = load(tmp_path / "x.pt")
        references = [weakref.ref(tensor) for tensor in (loaded["a"], loaded["list"][0], loaded["p"])]
        del loaded
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()


def test_threads_can_load_at_the_same_time() -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = torch.load(ZOO, map_location="cpu")
    with ThreadPoolExecutor(4) as pool:
        for loaded in pool.map(lambda _: load(ZOO, "cpu"), range(12)):
            assert_same(expected, loaded)


# -- modes of torch


def test_skip_data_is_honoured() -> None:
    if not hasattr(torch.serialization, "skip_data"):
        pytest.skip("this torch has no skip_data")
    with torch.serialization.skip_data():
        loaded = load(STATE_DICT)
    expected = torch.load(STATE_DICT)
    assert [(name, tensor.shape) for name, tensor in loaded.items()] == [(n, t.shape) for n, t in expected.items()]


def test_fake_tensor_mode_is_honoured() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    if not hasattr(torch._guards, "active_fake_mode"):
        pytest.skip("this torch has no active_fake_mode")
    legacy = makers.saved(torch.load(CUDA, map_location="cpu"), _use_new_zipfile_serialization=False)
    for data in (CUDA.read_bytes(), legacy):
        with FakeTensorMode():
            expected = torch.load(io.BytesIO(data), map_location="cpu")
            loaded = load(data, "cpu")
        assert all(type(tensor) is FakeTensor for tensor in loaded.values())
        assert [(t.shape, t.device, t.dtype) for t in loaded.values()] == [
            (t.shape, t.device, t.dtype) for t in expected.values()
        ]


@pytest.mark.parametrize("location", ["cpu", "auto"])
def test_default_device_does_not_affect_dense_tensors(location: str) -> None:
    with torch.device("meta"):
        assert_same(torch.load(STATE_DICT), load(STATE_DICT, location))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_default_device_does_not_affect_sparse_tensors(layout: torch.layout) -> None:
    """torch.load puts them on the default device; on meta they lose their values."""
    data = saved(torch.eye(3).to_sparse(layout=layout))
    with torch.device("meta"):
        loaded = [load(data), load(data, weights_only=False), transload.open(data)[""]]
    assert all(torch.equal(tensor.to_dense(), torch.eye(3)) for tensor in loaded)


# -- arguments


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        load(STATE_DICT, device="cpu")
    with pytest.raises(TypeError, match="weights_only=True"):
        load(STATE_DICT, errors="ignore")
    with pytest.raises(UsageError, match="weights_only=False"):
        load(STATE_DICT, "cpu", __import__("pickle"), weights_only=True)
    for encoding in ("klingon", "hex"):
        with pytest.raises(UsageError, match="no encoding"):
            load(STATE_DICT, encoding=encoding)
    with pytest.raises(UsageError, match="path"):
        load(STATE_DICT.read_bytes(), mmap=True)
    wrong: Any
    for wrong in ("False", ""):  # as conditions they would mean the opposite, and weights_only=False
        with pytest.raises(UsageError, match="weights_only is a string"):
            load(STATE_DICT, weights_only=wrong)
    wrong = 5
    with pytest.raises(UsageError, match="progress is of type int"):
        load(STATE_DICT, progress=wrong)


def test_weights_only_none_trusts_only_with_a_pickle_module() -> None:
    import pickle

    data = saved(torch.nn.Linear(2, 2))
    with pytest.raises(UnsafeError):
        load(data, weights_only=None)
    assert_same(torch.load(io.BytesIO(data), weights_only=False), load(data, "auto", pickle, weights_only=None))


@pytest.mark.parametrize("path", PICKLED_MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_refusal_of_a_pickled_module_names_the_class_and_the_ways_to_allow_it(path: Path) -> None:
    with pytest.raises(UnsafeError) as raised:
        load(path, "cpu")
    assert "torch.nn.modules.linear.Linear" in raised.value.what
    assert ("safe_globals([" in raised.value.fix) == hasattr(torch.serialization, "safe_globals")
    assert "weights_only=False" in raised.value.fix


def test_tensor_that_torch_cannot_build_is_a_one_line_load_error() -> None:
    with pytest.raises(LoadError, match="torch failed on a tensor in it") as raised:
        load(ZOO, "meta")
    assert str(raised.value).count("\n") == 0


def returning(value: object) -> Callable[[Any, str], object]:
    return lambda *_: value


def test_map_location_function_must_return_a_storage_or_none() -> None:
    with pytest.raises(LoadError, match="returned str"):
        load(STATE_DICT, returning("cpu"))
    assert_same(torch.load(STATE_DICT), load(STATE_DICT, returning(None)))


class RecordedCalls(list[tuple[bytes, str]]):
    """A map_location function that records its calls."""

    def __call__(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        self.append((bytes(cast(Any, storage)), tag))
        return storage


def test_map_location_function_gets_the_same_calls_as_with_torch() -> None:
    ours, theirs = RecordedCalls(), RecordedCalls()
    load(CUDA, ours)
    torch.load(CUDA, theirs)
    assert ours == theirs


@pytest.mark.parametrize("zipped", [True, False])
def test_empty_storage_can_be_viewed_with_several_dtypes(*, zipped: bool) -> None:
    empty = torch.empty(0)
    tensors = {"f": empty, "i": empty.view(torch.int32), "p": torch.nn.Parameter(empty), "g": torch.ones(2)}
    data = makers.saved(tensors, _use_new_zipfile_serialization=zipped)
    assert transload.inspect(data).ok
    assert transload.verify(data).ok
    for weights_only in (True, False):
        loaded = transload.load(data, weights_only=weights_only)
        assert [value.dtype for value in loaded.values()] == [value.dtype for value in tensors.values()]
    resaved = io.BytesIO()
    transload.save(tensors, resaved)
    assert transload.load(resaved.getvalue())["i"].dtype is torch.int32
