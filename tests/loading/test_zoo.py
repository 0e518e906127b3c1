"""``transload.load`` against ``torch.load``: everything in the zoo, in every form, by every way in, with every wish."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import for_each, grouped
from tests.loading.equal import same
from tests.loading.zoo import BESIDE, BUILT_FROM_BYTES, DTYPES, FORMS, QUIET, ZOO, allowed, saved

from transload.errors import LandingWarning, LoadError, NoDeviceError, UnsafeError
from transload.loading import load

pytestmark = QUIET

RICH = ("training checkpoint", "views of one storage", "sparse", "storages")
"""Enough of the zoo to try every combination of the rest on."""

TAGS = ("cuda:0", "cuda:1", "cuda:7", "mps", "xpu:0", "hpu:1", "npu:3")
WAYS = ("path", "text path", "file", "buffer", "bytes", "bytearray")


def file_of(name: str, form: str = "zip", tag: str = "") -> bytes:
    """A file of the zoo, always the same one: memory that nothing has written, and numbers of hooks, differ else."""
    return _file_of(name, form, tag)


@functools.cache
def _file_of(name: str, form: str, tag: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return saved(_made(name), form, tag)


@functools.cache
def _made(name: str) -> Any:
    return ZOO[name].make()


def truth(name: str, form: str = "zip", tag: str = "", **options: Any) -> Any:
    """What torch makes of it, trusting the file; where it cannot read a stream it wrote, what it makes of the zip."""
    stream = form.startswith("legacy")
    if not (stream and name in BUILT_FROM_BYTES):
        try:
            return torch.load(io.BytesIO(file_of(name, form, tag)), weights_only=False, **options)
        except AttributeError:  # dtypes that are newer than the format, though torch writes them
            assert stream
    return torch.load(io.BytesIO(file_of(name, "zip", tag)), weights_only=False, **options)


@grouped("names", ZOO, 20)
def test_a_trusted_file_is_what_torch_makes_of_it(names: list[str]) -> None:
    def check(case: tuple[str, str]) -> None:
        same(truth(*case), load(file_of(*case), weights_only=False))

    for_each(itertools.product(names, ["zip", "legacy"]), check)  # the other forms: test_trusted.py


@grouped("names", [name for name in ZOO if ZOO[name].safe])
def test_data_is_what_torch_makes_of_it(names: list[str]) -> None:
    """Whether torch loads it with ``weights_only`` or not, what we make of it is what torch makes of a trusted one."""
    for_each(itertools.product(names, ["zip", "legacy", "zip, protocol 4"]), lambda case: as_data(*case))


def as_data(name: str, form: str) -> None:
    data = file_of(name, form)
    with allowed(ZOO[name]):
        theirs = None if form == "legacy" and name in BUILT_FROM_BYTES else by_weights_only(data)
        try:
            ours = load(data)
        except UnsafeError:
            assert theirs is None, "torch loads it"
            return
    same(truth(name, form), ours)
    if theirs is not None:
        same(theirs[0], ours)


def by_weights_only(data: bytes) -> tuple[Any] | None:
    try:
        return (torch.load(io.BytesIO(data), weights_only=True),)
    except Exception:  # noqa: BLE001 - it fails in many ways, and all that counts is that it does
        return None


@pytest.mark.parametrize("name", [name for name in ZOO if not ZOO[name].safe and name not in BESIDE])
def test_what_is_not_data_is_refused(name: str) -> None:
    for form in ("zip", "legacy", "zip, protocol 4"):
        with pytest.raises(UnsafeError):
            load(file_of(name, form))


def test_data_that_torch_refuses_and_we_need_not() -> None:
    """These must never turn into refusals: plain values in the newer protocols, and what has no danger in it."""
    for name in ("state dict", "training checkpoint", "plain values", "views of one storage", "keys", "deep"):
        for form in FORMS:
            same(truth(name, form), load(file_of(name, form)))


def test_the_usual_dtypes_are_in_the_zoo() -> None:
    usual = {"float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"}
    assert usual | {"complex64", "complex128"} <= set(DTYPES)
    newer = {"float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "complex32"}
    if hasattr(torch._utils, "_rebuild_tensor_v3"):
        assert newer <= set(DTYPES)


# -- ways in -----------------------------------------------------------------------------------------------------------


def given(way: str, data: bytes, folder: Path) -> Any:
    """What is passed to ``load``."""
    path = folder / "file.pt"
    path.write_bytes(data)
    makers: dict[str, Callable[[], Any]] = {
        "path": lambda: path,
        "text path": lambda: str(path),
        "file": lambda: path.open("rb"),
        "buffer": lambda: io.BytesIO(data),
        "bytes": lambda: data,
        "bytearray": lambda: bytearray(data),
    }
    return makers[way]()


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("form", ["zip", "legacy"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_in(way: str, form: str, trusted: bool, tmp_path: Path) -> None:
    for name in RICH:
        f = given(way, file_of(name, form), tmp_path)
        with f if way == "file" else contextlib.nullcontext():
            same(truth(name, form), load(f, weights_only=not trusted))
            assert not getattr(f, "closed", False)


@pytest.mark.parametrize("trusted", [False, True])
def test_mapped(trusted: bool, tmp_path: Path) -> None:
    for name in (*RICH, "dtypes in one file"):
        path = given("text path", file_of(name), tmp_path)
        expected = torch.load(path, weights_only=False, mmap=True)
        same(expected, load(path, weights_only=not trusted, mmap=True))


def test_two_loads_share_nothing() -> None:
    first, second = (load(file_of("views of one storage")) for _ in range(2))
    first["all"].zero_()
    assert second["all"].abs().sum() > 0


def test_what_is_loaded_can_be_written_to() -> None:
    held = load(file_of("views of one storage"))
    held["all"].fill_(5)
    assert held["head"].eq(5).all()


def test_a_file_that_holds_several_objects(tmp_path: Path) -> None:
    path = tmp_path / "several.pt"
    path.write_bytes(file_of("data set", "legacy") + file_of("state dict", "legacy"))
    with path.open("rb") as ours, path.open("rb") as theirs:
        for _ in range(2):
            same(torch.load(theirs), load(ours))


# -- wishes ------------------------------------------------------------------------------------------------------------

ON_CPU: dict[str, Any] = {
    "cpu": "cpu",
    "device": torch.device("cpu"),
    "function": lambda storage, tag: storage,  # noqa: ARG005 - torch passes both
}


COMBINATIONS = [(tag, "zip", False) for tag in ("", *TAGS)]
COMBINATIONS += [
    (tag, form, trusted) for tag in ("", "cuda:1") for form in ("zip", "legacy") for trusted in (True, False)
]


@pytest.mark.parametrize(("tag", "form", "trusted"), dict.fromkeys(COMBINATIONS))
def test_a_wish_means_what_it_means_to_torch(tag: str, form: str, trusted: bool) -> None:
    wishes = {**ON_CPU, "mapping": {tag: "cpu"}}
    for name in RICH:
        data = file_of(name, form, tag)
        for wish in wishes.values():
            expected = truth(name, form, tag, map_location=wish)
            same(expected, load(data, wish, weights_only=not trusted))


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_function_sees_the_same_tags_as_torchs(form: str) -> None:
    def seen_by(function: Callable[..., Any]) -> list[str]:
        tags: list[str] = []

        def land(storage: Any, tag: str) -> Any:
            tags.append(tag)
            return storage

        function(io.BytesIO(file_of("state dict", form, "cuda:1")), land)
        return tags

    ours = seen_by(load)
    assert ours == seen_by(torch.load)
    assert set(ours) == {"cuda:1"}


def test_a_function_that_returns_nothing_leaves_it_to_the_tag() -> None:
    same(truth("state dict"), load(file_of("state dict"), lambda *_: None))


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("name", ["training checkpoint", "storages", "conjugate", "meta parameter"])
def test_meta(name: str, trusted: bool) -> None:
    expected = truth(name, map_location="meta")
    same(expected, load(file_of(name), "meta", weights_only=not trusted))


@pytest.mark.parametrize("trusted", [False, True])
def test_meta_views(trusted: bool) -> None:
    """Which torch gives storages of their own, up to 2.1 even smaller ones."""
    theirs, ours = (
        {key: (tensor.shape, tensor.stride(), tensor.device) for key, tensor in held.items()}
        for held in (
            truth("views of one storage", map_location="meta"),
            load(file_of("views of one storage"), "meta", weights_only=not trusted),
        )
    )
    assert ours == theirs


no_accelerator = pytest.mark.skipif(torch.backends.mps.is_available(), reason="an accelerator is available")


@no_accelerator
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("tag", TAGS)
def test_what_was_saved_on_an_absent_device_lands_on_the_cpu_with_one_warning(tag: str, trusted: bool) -> None:
    for name in RICH:
        for form in ("zip", "legacy"):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", LandingWarning)
                made = load(file_of(name, form, tag), weights_only=not trusted)
            same(truth(name, form, tag, map_location="cpu"), made)
            about = [each for each in told if each.category is LandingWarning]
            assert len(about) == 1
            assert tag in str(about[0].message)
            assert about[0].filename == __file__


@no_accelerator
@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_that_cannot_be_honoured_is_named(tag: str) -> None:
    for trusted in (False, True):
        with pytest.raises(NoDeviceError, match=tag) as caught:
            load(file_of("state dict", tag=tag), None, weights_only=not trusted)
        assert isinstance(caught.value, RuntimeError)
        assert "map_location" in caught.value.fix


def test_what_is_on_the_cpu_stays_there_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LandingWarning)
        same(truth("training checkpoint"), load(file_of("training checkpoint")))


# -- habits ------------------------------------------------------------------------------------------------------------


def test_a_data_set_feeds_a_loader() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*load(file_of("data set"))), batch_size=5)
    assert [len(batch[0]) for batch in loader] == [5, 5]


def test_training_goes_on_where_it_stopped() -> None:
    from tests.loading.zoo import trained

    held, torchs = load(file_of("training checkpoint")), truth("training checkpoint")
    ends = []
    for checkpoint in (held, torchs):
        net, optimizer = trained("Adam")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        net.load_state_dict(checkpoint["state_dict"])
        optimizer.zero_grad()
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        scheduler.load_state_dict(checkpoint["lr_schedulers"][0])
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(checkpoint["rng"])
            net(torch.randint(0, 7, (3,))).sum().backward()
        optimizer.step()
        scheduler.step()
        ends.append([net.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    same(*ends)


def test_errors_are_those_that_are_caught_already() -> None:
    data = file_of("state dict")
    with pytest.raises(RuntimeError):
        load(data[: len(data) // 2])
    with pytest.raises(LoadError):
        load(b"<html></html>")
