"""``load`` gives what ``torch.load`` gives: over every fixture, every kind of map_location, and the whole zoo."""

from __future__ import annotations

import io
import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import pytest
import torch
from tests.each import for_each, grouped
from tests.loading.equal import same
from tests.loading.zoo import BESIDE, FORMS, QUIET, ZOO, Specimen, allowed, saved

from transload.errors import CannotReadError, LandingWarning, NoDeviceError, UnsafeError, UsageError
from transload.loading import load

DATA = Path(__file__).parents[1] / "data"
LOADABLE = sorted(
    path
    for path in DATA.rglob("*")
    if path.suffix in (".pt", ".pth", ".ckpt") and not path.name.startswith(("whole", "traced", "torchscript"))
)
NEWEST = DATA / "torch-releases" / "torch-2.13.0-py3.11.7"
STATE_DICT = NEWEST / "state_dict_cpu.pt"
CUDA = NEWEST / "state_dict_cuda0.pt"

pytestmark = QUIET


OLD = not hasattr(torch, "uint16")
"""Whether this torch is older than some fixtures, which it then cannot load."""


def by_torch(path: Path, **options: Any) -> Any:
    """What torch makes of a file: as weights alone, or, where it refuses what we need not, as a whole."""
    try:
        return torch.load(path, weights_only=True, **options)
    except UnpicklingError:
        pass
    try:
        return torch.load(path, weights_only=False, **options)
    except (AttributeError, RuntimeError):
        if OLD:
            pytest.skip("this torch cannot load it")
        raise


# Only torch 1.4 and 1.5 read the first form of the zip format; it holds what the file beside it holds.
FIRST_ZIP = DATA / "torch-releases" / "torch-1.4.0-py3.7.16" / "state_dict_cuda0_other_format.pt"

WISHES: dict[str, Any] = {
    "cpu": "cpu",
    "device": torch.device("cpu"),
    "mapping": {f"cuda:{index}": "cpu" for index in (0, 1, 7)},
    "function": lambda storage, _: storage,
    "meta": "meta",
}


@grouped("paths", LOADABLE)
def test_a_file_is_what_torch_makes_of_it(paths: list[Path]) -> None:
    """Under every wish that can be fulfilled without a GPU."""

    def check(case: tuple[Path, str]) -> None:
        path, wish = case
        if wish == "meta" and path.name.startswith("zoo"):
            pytest.skip("torch does not support quantized tensors here")
        readable = FIRST_ZIP.with_name("state_dict_cuda0.pt") if path == FIRST_ZIP else path
        same(by_torch(readable, map_location=WISHES[wish]), load(path, WISHES[wish]))

    for_each(itertools.product(paths, WISHES), check)


@grouped("paths", [path for path in LOADABLE if "cuda" in path.name], 20)
def test_a_file_of_a_gpu_lands_here_with_one_warning(paths: list[Path]) -> None:
    for_each(paths, lands_with_one_warning)


def lands_with_one_warning(path: Path) -> None:
    readable = FIRST_ZIP.with_name("state_dict_cuda0.pt") if path == FIRST_ZIP else path
    expected = by_torch(readable, map_location="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = load(path)
    told = [warning for warning in caught if issubclass(warning.category, LandingWarning)]
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "cuda" in str(told[0].message)
    assert "cpu" in str(told[0].message)
    same(expected, made)


def test_a_file_of_the_cpu_lands_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(torch.load(STATE_DICT), load(STATE_DICT))


@pytest.mark.parametrize(
    "wish", [None, "cuda", "cuda:1", torch.device("cuda:0"), {"cpu": "cuda:0"}, "mps", ["cuda:1"]], ids=str
)
def test_a_device_that_is_not_here_is_named_with_what_to_do(wish: Any) -> None:
    path = STATE_DICT if isinstance(wish, dict) else CUDA
    with pytest.raises(NoDeviceError) as raised:
        load(path, wish)
    assert "map_location" in raised.value.fix
    assert isinstance(raised.value, RuntimeError)


def test_of_a_list_of_devices_the_first_that_is_here_takes_everything() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wish in (["cuda:1", "cuda:0", "cpu"], (torch.device("cuda:1"), torch.device("cpu"))):
            same(torch.load(CUDA, "cpu"), load(CUDA, wish))
    with pytest.raises(NoDeviceError, match="there is no cuda:1 or xpu here, only cpu"):
        load(CUDA, ["cuda:1", "xpu"])


# -- the zoo

REGISTER = hasattr(torch.serialization, "add_safe_globals")
SAFE = [name for name, specimen in ZOO.items() if specimen.safe and (REGISTER or not specimen.classes)]


def with_leave(name: str) -> Specimen:
    """A specimen, with the classes that this torch wants to be allowed: those of jagged tensors, from 2.15 on."""
    if name != "jagged":
        return ZOO[name]
    from torch.nested._internal import nested_tensor

    return replace(ZOO[name], classes=(nested_tensor.NestedTensor, nested_tensor._rebuild_njt))


def trusting(data: bytes, **options: Any) -> Any:
    """What torch makes of a file if it may do anything."""
    return torch.load(io.BytesIO(data), weights_only=False, **options)


@grouped("names", SAFE)
def test_the_zoo_without_trust_in_every_form(names: list[str]) -> None:
    def check(case: tuple[str, str]) -> None:
        name, form = case
        specimen = with_leave(name)
        made = specimen.make()
        data = saved(made, form)
        try:
            expected = trusting(data)
        except (AttributeError, RuntimeError, SystemError):  # streams that torch writes and cannot read
            assert form.startswith("legacy")
            expected = trusting(saved(made))
        with allowed(specimen):
            same(expected, load(data))

    for_each(itertools.product(names, FORMS), check)


def test_what_is_no_data_is_refused_and_loads_with_trust() -> None:
    def check(name: str) -> None:
        data = saved(ZOO[name].make())
        with pytest.raises(UnsafeError):
            load(data)
        same(trusting(data), load(data, weights_only=False))

    for_each([name for name in ZOO if not ZOO[name].safe and name not in BESIDE], check)


@grouped("names", SAFE, 30)
def test_the_zoo_from_an_absent_gpu(names: list[str]) -> None:
    """Everything that can be tagged with a device that is not here lands on the CPU."""

    def check(name: str) -> None:
        specimen = with_leave(name)
        data = saved(specimen.make(), tag="cuda:5")
        with allowed(specimen), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(trusting(data, map_location="cpu"), load(data))

    for_each(names, check)


# -- where it comes from


def test_a_path_a_file_object_and_bytes_are_the_same() -> None:
    expected = torch.load(STATE_DICT)
    same(expected, load(str(STATE_DICT)))
    same(expected, load(STATE_DICT.read_bytes()))
    same(expected, load(bytearray(STATE_DICT.read_bytes())))
    with STATE_DICT.open("rb") as file:
        same(expected, load(file))
    same(expected, load(io.BytesIO(STATE_DICT.read_bytes())))


class _Slow(io.RawIOBase):
    """A file object that gives a few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._held = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._held.seek(offset, whence)

    def tell(self) -> int:
        return self._held.tell()

    def readinto(self, buffer: Any) -> int:
        return self._held.readinto(memoryview(buffer)[:7])

    def read(self, size: int = -1) -> bytes:
        return self._held.read(size)


def test_a_file_object_that_gives_little_at_a_time() -> None:
    same(torch.load(STATE_DICT), load(cast(Any, _Slow(STATE_DICT.read_bytes()))))


def test_several_objects_in_one_stream_are_read_one_after_the_other() -> None:
    stream = io.BytesIO()
    for value in (torch.arange(3), {"a": 1}, torch.ones(2)):
        torch.save(value, stream, _use_new_zipfile_serialization=False)
    stream.write(b"rest")
    stream.seek(0)
    assert load(stream).tolist() == [0, 1, 2]
    assert load(stream) == {"a": 1}
    assert load(stream).tolist() == [1, 1]
    assert stream.read() == b"rest"


def test_a_file_object_at_its_end_is_read_from_its_beginning() -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(3), stream)
    assert load(stream).tolist() == [0, 1, 2]


def test_a_text_file_is_no_file() -> None:
    with pytest.raises(UsageError, match="rb"):
        load(cast(Any, io.StringIO("text")))
    with pytest.raises(UsageError):
        load(cast(Any, 5))


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        load(tmp_path / "model.pt")
    assert isinstance(raised.value, CannotReadError)
    assert str(tmp_path) in str(raised.value)
