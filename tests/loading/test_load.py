"""``load`` returns what ``torch.load`` returns: for every fixture, every kind of map_location, and the entire zoo."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests import forge, makers
from tests.each import each, for_each, parametrize_groups
from tests.loading.equal import assert_same
from tests.loading.zoo import DATA_TORCH_REFUSES, FORMS, IGNORED_WARNINGS, ZOO, Specimen, registered_as_safe, saved
from tests.release import RELEASE

from transload.errors import CannotReadError, LandingWarning, NoDeviceError, UnsafeError, UsageError
from transload.loading import load

DATA = Path(__file__).parents[1] / "data"
LOADABLE = sorted(
    path
    for path in DATA.rglob("*")
    if "rank-files" not in path.parts
    and path.suffix in (".pt", ".pth", ".ckpt")
    and not path.name.startswith(("whole", "traced", "torchscript"))
)
NEWEST = DATA / "torch-releases" / "torch-2.13.0-py3.11.7"
STATE_DICT = NEWEST / "state_dict_cpu.pt"
CUDA = NEWEST / "state_dict_cuda0.pt"

pytestmark = IGNORED_WARNINGS


OLD_TORCH = not hasattr(torch, "uint16")
"""Whether this torch is older than some fixtures and cannot load them."""


def loaded_by_torch(path: Path, **options: Any) -> Any:
    """Load a file with torch: with ``weights_only``, or, if torch refuses that, without."""
    try:
        return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError:
        pass
    try:
        return torch.load(path, weights_only=False, **options)
    except (AttributeError, RuntimeError):
        if OLD_TORCH:
            pytest.skip("this torch cannot load it")
        raise


# Only torch 1.4 and 1.5 read the first version of the zip format. The file beside it has the same content.
TORCH_1_4_ZIP = DATA / "torch-releases" / "torch-1.4.0-py3.7.16" / "state_dict_cuda0_other_format.pt"

LOCATIONS: dict[str, Any] = {
    "cpu": "cpu",
    "device": torch.device("cpu"),
    "mapping": {f"cuda:{index}": "cpu" for index in (0, 1, 7)},
    "function": lambda storage, _: storage,
    "meta": "meta",
}


@parametrize_groups("paths", LOADABLE)
def test_fixture_loads_as_with_torch_for_every_map_location(paths: list[Path]) -> None:
    """With every kind of map_location that needs no GPU."""

    def check(case: tuple[Path, str]) -> None:
        path, location = case
        if location == "meta" and path.name.startswith("zoo"):
            pytest.skip("torch cannot load quantized tensors on meta")
        readable = TORCH_1_4_ZIP.with_name("state_dict_cuda0.pt") if path == TORCH_1_4_ZIP else path
        assert_same(loaded_by_torch(readable, map_location=LOCATIONS[location]), load(path, LOCATIONS[location]))

    for_each(itertools.product(paths, LOCATIONS), check)


@parametrize_groups("paths", [path for path in LOADABLE if "cuda" in path.name], 20)
def test_gpu_fixture_loads_on_cpu_with_one_warning(paths: list[Path]) -> None:
    for_each(paths, check_lands_with_one_warning)


def check_lands_with_one_warning(path: Path) -> None:
    readable = TORCH_1_4_ZIP.with_name("state_dict_cuda0.pt") if path == TORCH_1_4_ZIP else path
    expected = loaded_by_torch(readable, map_location="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(path)
    landing = [warning for warning in caught if issubclass(warning.category, LandingWarning)]
    assert len(landing) == 1
    assert landing[0].filename == __file__
    assert "cuda" in str(landing[0].message)
    assert "cpu" in str(landing[0].message)
    assert_same(expected, loaded)


def test_cpu_fixture_loads_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(torch.load(STATE_DICT), load(STATE_DICT))


@pytest.mark.parametrize(
    "location", [None, "cuda", "cuda:1", torch.device("cuda:0"), {"cpu": "cuda:0"}, "mps", ["cuda:1"]], ids=str
)
def test_absent_device_is_an_error_whose_fix_names_map_location(location: Any) -> None:
    path = STATE_DICT if isinstance(location, dict) else CUDA
    with pytest.raises(NoDeviceError) as raised:
        load(path, location)
    assert "map_location" in raised.value.fix
    assert isinstance(raised.value, RuntimeError)


def test_first_present_device_of_a_list_gets_all_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for devices in (["cuda:1", "cuda:0", "cpu"], (torch.device("cuda:1"), torch.device("cpu"))):
            assert_same(torch.load(CUDA, "cpu"), load(CUDA, devices))
    with pytest.raises(NoDeviceError, match="there is no cuda:1 or xpu here, only cpu"):
        load(CUDA, ["cuda:1", "xpu"])


# -- specimens

HAS_SAFE_GLOBALS = hasattr(torch.serialization, "add_safe_globals")
SAFE = [name for name, specimen in ZOO.items() if specimen.safe and (HAS_SAFE_GLOBALS or not specimen.classes)]


def specimen_with_classes(name: str) -> Specimen:
    """A specimen; jagged tensors come with the classes that torch 2.15 and newer want registered as safe."""
    if name != "jagged":
        return ZOO[name]
    from torch.nested._internal import nested_tensor

    return replace(ZOO[name], classes=(nested_tensor.NestedTensor, nested_tensor._rebuild_njt))


def loaded_with_trust(data: bytes, **options: Any) -> Any:
    """Load a file with torch without ``weights_only``."""
    return torch.load(io.BytesIO(data), weights_only=False, **options)


@parametrize_groups("names", SAFE)
def test_safe_specimens_load_without_trust_in_every_form(names: list[str]) -> None:
    def check(case: tuple[str, str]) -> None:
        name, form = case
        specimen = specimen_with_classes(name)
        value = specimen.make()
        data = saved(value, form)
        try:
            expected = loaded_with_trust(data)
        except (AttributeError, RuntimeError, SystemError):  # streams that torch writes and cannot read
            assert form.startswith("legacy")
            expected = loaded_with_trust(saved(value))
        with registered_as_safe(specimen):
            assert_same(expected, load(data))

    for_each(itertools.product(names, FORMS), check)


def test_unsafe_specimens_are_refused_and_load_with_trust() -> None:
    def check(name: str) -> None:
        data = saved(ZOO[name].make())
        with pytest.raises(UnsafeError):
            load(data)
        assert_same(loaded_with_trust(data), load(data, weights_only=False))

    for_each([name for name in ZOO if not ZOO[name].safe and name not in DATA_TORCH_REFUSES], check)


@parametrize_groups("names", SAFE, 30)
def test_specimens_tagged_with_an_absent_gpu_load_on_cpu(names: list[str]) -> None:
    """Storages tagged with a device that this machine lacks are placed on the CPU."""

    def check(name: str) -> None:
        specimen = specimen_with_classes(name)
        data = saved(specimen.make(), tag="cuda:5")
        with registered_as_safe(specimen), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(loaded_with_trust(data, map_location="cpu"), load(data))

    for_each(names, check)


# -- sources


def test_path_file_object_and_bytes_load_alike() -> None:
    expected = torch.load(STATE_DICT)
    assert_same(expected, load(str(STATE_DICT)))
    assert_same(expected, load(STATE_DICT.read_bytes()))
    assert_same(expected, load(bytearray(STATE_DICT.read_bytes())))
    with STATE_DICT.open("rb") as file:
        assert_same(expected, load(file))
    assert_same(expected, load(io.BytesIO(STATE_DICT.read_bytes())))


class _ShortReads(io.RawIOBase):
    """A file object whose ``readinto`` returns at most 7 bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(memoryview(buffer)[:7])

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


def test_file_object_with_short_reads_loads() -> None:
    assert_same(torch.load(STATE_DICT), load(cast(Any, _ShortReads(STATE_DICT.read_bytes()))))


def test_objects_in_one_stream_are_read_one_after_the_other() -> None:
    stream = io.BytesIO()
    for value in (torch.arange(3), {"a": 1}, torch.ones(2)):
        torch.save(value, stream, _use_new_zipfile_serialization=False)
    stream.write(b"rest")
    stream.seek(0)
    assert load(stream).tolist() == [0, 1, 2]
    assert load(stream) == {"a": 1}
    assert load(stream).tolist() == [1, 1]
    assert stream.read() == b"rest"


def _saved(value: Any, *, legacy: bool = False) -> bytes:
    return makers.saved(value, _use_new_zipfile_serialization=not legacy)


_ZIP, _LEGACY = _saved(torch.ones(1)), _saved(torch.zeros(2), legacy=True)
_VIEWS = _saved({"a": torch.arange(6.0)[:2], "n": torch.ones(0), "b": torch.ones(3)})
STREAMS: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 0),
    "zip": (_ZIP, 0),
    "zip of several storages": (_VIEWS, 0),
    "zip without tensors": (_saved({"a": 1}), 0),
    "legacy": (_LEGACY, 0),
    "legacy without tensors": (_saved({"a": 1}, legacy=True) * 2, 0),
    "several legacy": (_LEGACY * 3, 0),
    "zip after legacy": (_LEGACY * 2 + _ZIP, 0),
    "zip after other bytes": (bytes(9) + _ZIP, 9),
    "legacy after zip": (_ZIP + _LEGACY, len(_ZIP)),
    "other bytes after legacy": (_LEGACY + b"rest", 0),
    "end of a zip": (_ZIP, len(_ZIP)),
    "beyond the end": (_LEGACY, len(_LEGACY) + 5),
    "in the middle": (_LEGACY, 3),
}
_KINDS: list[Callable[[Path], Any]] = [
    lambda path: io.BytesIO(path.read_bytes()),
    lambda path: path.open("rb"),
    lambda path: path.open("rb", buffering=0),
]


@each("name", STREAMS)
def test_stream_is_read_as_torch_reads_it(name: str, tmp_path: Path) -> None:
    if name.startswith("zip after") and RELEASE < (2, 6):
        pytest.skip("this torch finds no archive in the middle of a file object")
    data, start = STREAMS[name]
    path = tmp_path / "stream"
    path.write_bytes(data)
    for kind, weights_only in itertools.product(_KINDS, (True, False)):
        with kind(path) as torchs, kind(path) as ours:
            torchs.seek(start)
            ours.seek(start)
            while True:
                try:
                    expected = torch.load(torchs, weights_only=weights_only)
                except (EOFError, pickle.UnpicklingError, RuntimeError, struct.error) as error:
                    kinds = EOFError if isinstance(error, EOFError) else (pickle.UnpicklingError, RuntimeError)
                    before = ours.tell()
                    with pytest.raises(kinds):
                        load(ours, weights_only=weights_only)
                    assert ours.tell() == before
                    break
                assert_same(expected, load(ours, weights_only=weights_only))
                assert ours.tell() == torchs.tell()


def test_other_formats_are_read_from_the_position_to_the_end() -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3))
    for data in (forge.tar(), array.getvalue()):
        stream = io.BytesIO(b"x" + data)
        stream.seek(1)
        load(stream, weights_only=False)
        with pytest.raises(EOFError, match=rf"byte {len(data) + 1:,}\n.*seek\(0\)"):
            load(stream)


class _Pipe(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, _: Any) -> int:
        return 0


class _NoSeek:
    read = readline = tell = io.BytesIO().read


def test_object_that_cannot_seek_raises_what_torch_raises() -> None:
    for file in (_Pipe(), _NoSeek()):
        for loader in (torch.load, load):
            expected = io.UnsupportedOperation if isinstance(file, _Pipe) else AttributeError
            with pytest.raises(expected, match="seek"):
                loader(cast(Any, file))


def test_text_file_or_number_as_source_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="rb"):
        load(cast(Any, io.StringIO("text")))
    with pytest.raises(UsageError):
        load(cast(Any, 5))


def test_missing_file_is_file_not_found_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        load(tmp_path / "model.pt")
    assert isinstance(raised.value, CannotReadError)
    assert str(tmp_path) in str(raised.value)
