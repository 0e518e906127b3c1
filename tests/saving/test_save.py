"""``transload.save``: tags, targets, arguments, warnings, and what it does not change."""

from __future__ import annotations

import contextlib
import copyreg
import errno
import importlib
import inspect
import io
import json
import os
import pickle
import socket
import stat
import threading
import types
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import makers
from tests.loading.equal import assert_same
from tests.loading.zoo import save_with_tag
from torch import nn

from transload.errors import CannotPickleError, CannotWriteError, SaveError, SaveWarning, UsageError
from transload.formats import zip_writer as writing
from transload.io import atomic
from transload.opening import inspect as read
from transload.saving import save, save_async


def saved(obj: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    save(obj, file, **options)
    return file.getvalue()


def loaded(data: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(data), **{"weights_only": False, **options})


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {info.filename: archive.read(info) for info in archive.infolist()}


def through_torch(value: Any) -> Any:
    """The value after it was saved and loaded by torch."""
    return loaded(makers.saved(value))


def tags(data: bytes) -> set[str]:
    return {storage.device for storage in read(data).storages}


# -- tags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["cuda:1", "mps", "npu:3"])
def test_storages_on_any_device_are_tagged_cpu(tag: str) -> None:
    value = {"w": nn.Parameter(torch.rand(3)), "s": torch.rand(2).untyped_storage()}
    with save_with_tag(tag):
        assert tags(saved(value)) == {"cpu"}
        assert tags(saved(value, device="keep")) == {tag}


def rebuilt_by(function: str, *arguments: Any) -> type[torch.Tensor]:
    """A tensor class that torch saves like tensors of a device without storages."""

    class DeviceTensor(torch.Tensor):
        def __reduce_ex__(self, _: Any) -> Any:
            return getattr(torch._utils, function), arguments

    return DeviceTensor


@pytest.mark.parametrize("grad", [False, True])
def test_tensor_of_a_device_without_storages_is_saved_as_a_plain_one(grad: bool) -> None:
    import numpy as np

    numbers = torch.arange(4.0)
    contents = {"_rebuild_device_tensor_from_numpy": np.arange(4, dtype=np.float32)}
    if hasattr(torch._utils, "_rebuild_device_tensor_from_cpu_tensor"):
        contents["_rebuild_device_tensor_from_cpu_tensor"] = numbers.clone()
    for function, content in contents.items():
        tensor_class = rebuilt_by(function, content, torch.float32, "xla:0", grad)
        data = saved({"w": torch.rand(1).as_subclass(tensor_class)})
        assert_same(through_torch({"w": numbers.clone().requires_grad_(grad)}), loaded(data, weights_only=True))
        assert b"xla" not in records(data)["archive/data.pkl"]
        assert (
            b"xla:0"
            in records(saved({"w": torch.rand(1).as_subclass(tensor_class)}, device="keep"))["archive/data.pkl"]
        )


class Wrapper(torch.Tensor):
    """A tensor around another one, which reports that it is on a GPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, device: str = "cuda:1") -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        del args, kwargs
        if function is torch.ops.aten.detach.default:
            raise NotImplementedError
        raise NotImplementedError(str(function))


def test_wrapper_is_saved_with_the_device_of_its_storages() -> None:
    wrapper = Wrapper(torch.arange(3.0))
    result = loaded(saved(wrapper))
    assert (type(result), result.device.type) == (Wrapper, "cpu")
    assert torch.equal(result.inner, wrapper.inner)
    assert loaded(saved(wrapper, device="keep")).device == torch.device("cuda:1")
    assert wrapper.device == torch.device("cuda:1")


def test_device_names_and_objects_are_saved_unchanged() -> None:
    value = {"device": "cuda:0", "place": torch.device("cuda", 1), "w": torch.rand(2)}
    result = loaded(saved(value))
    assert (result["device"], result["place"]) == ("cuda:0", torch.device("cuda", 1))


# -- the model in memory -----------------------------------------------------------------------------------------------


def test_save_does_not_move_the_model_while_cpu_does() -> None:
    model = nn.Linear(2, 2).to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: (id(value), value.data_ptr(), value.device) for name, value in model.named_parameters()}
    saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert {name: (id(value), value.data_ptr(), value.device) for name, value in model.named_parameters()} == before
    meta_model = nn.Linear(2, 2, device="meta")  # stands for any device other than the CPU
    meta_optimizer = torch.optim.SGD(meta_model.parameters(), lr=0.1)
    meta_model.to_empty(device="cpu").state_dict()  # moves the model itself, as .cpu() does
    assert {value.device.type for value in meta_model.parameters()} == {"cpu"}
    assert {value.device.type for value in meta_optimizer.param_groups[0]["params"]} == {"meta"}


# -- targets -----------------------------------------------------------------------------------------------------------


def test_path_may_be_a_path_a_str_or_bytes(tmp_path: Path) -> None:
    value = {"w": torch.rand(3)}
    paths: list[Any] = [tmp_path / "a.pt", str(tmp_path / "b.pt"), os.fsencode(tmp_path / "ç.pt")]
    for number, path in enumerate(paths):
        save(value, path)
        assert len(list(tmp_path.iterdir())) == number + 1
        assert_same(through_torch(value), torch.load(os.fsdecode(path)))


def test_file_objects_and_buffers(tmp_path: Path) -> None:
    import gzip

    value = {"w": torch.rand(3), "large": torch.rand(300_000)}
    with (tmp_path / "a.pt").open("wb") as file:
        save(value, file)
    with (tmp_path / "raw.pt").open("wb", buffering=0) as raw:
        save(value, raw)
    with gzip.open(tmp_path / "a.gz", "wb") as gzip_file:
        save(value, gzip_file)
    for path in (tmp_path / "a.pt", tmp_path / "raw.pt"):
        assert_same(through_torch(value), torch.load(path))
    with gzip.open(tmp_path / "a.gz", "rb") as gzip_file:
        assert_same(through_torch(value), torch.load(io.BytesIO(gzip_file.read())))
    assert_same(through_torch(value), loaded(saved(value)))


class ShortWrites:
    """A file object that accepts at most 1000 bytes at a time, and has only ``write``."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: Any) -> int:
        part = bytes(data[:1000])
        self.content += part
        return len(part)


def test_short_writes_of_a_file_object_are_continued() -> None:
    value = {"w": torch.rand(30_000)}
    file = ShortWrites()
    save(value, file)
    assert_same(through_torch(value), loaded(bytes(file.content)))


class FixedAnswer:
    def __init__(self, answer: Any) -> None:
        self.content = bytearray()
        self._answer = answer

    def write(self, data: Any) -> Any:
        self.content += data
        return self._answer


@pytest.mark.parametrize("answer", [None, True], ids=str)
def test_write_that_returns_no_count_has_written_everything(answer: Any) -> None:
    file = FixedAnswer(answer)
    save({"w": torch.arange(30_000)}, file)
    assert torch.equal(torch.arange(30_000), loaded(bytes(file.content))["w"])


def test_write_that_returns_zero_is_an_error() -> None:
    with pytest.raises(OSError, match="accepts no more bytes"):
        save({"w": torch.rand(3)}, FixedAnswer(0))


@pytest.mark.skipif(os.name == "nt", reason="Windows pipes always block")
def test_full_non_blocking_pipe_raises_blocking_io_error() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(read, "rb"), open(write, "wb", buffering=0) as file, pytest.raises(BlockingIOError):
        save({"w": torch.rand(1_000_000)}, file)


@pytest.mark.parametrize("call", [save, lambda *args: save_async(*args).result(30)], ids=["save", "save_async"])
def test_path_with_a_trailing_slash_is_an_error(call: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"old")
    for name in ("new", "a.pt"):
        with pytest.raises(CannotWriteError, match="it is a directory"):
            call({}, f"{tmp_path}/{name}/")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]
    assert (tmp_path / "a.pt").read_bytes() == b"old"


def test_invalid_file_name_is_an_error() -> None:
    for name in ("", "a\0b", "a\ud800b"):
        with pytest.raises(UsageError, match="no file can have the name"):
            save({}, name)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no POSIX directory permissions")
@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY], ids=["directory", "mount"])
def test_file_that_cannot_be_replaced_can_be_saved_without_atomic(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        if number == errno.EACCES:
            patched.setattr(atomic, "hidden_name", refuse)
        else:
            patched.setattr(os, "replace", refuse)
        with pytest.raises(CannotWriteError, match="atomic=False writes into the file itself"):
            save({"w": torch.ones(3)}, path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1
    save({"w": torch.ones(3)}, path, atomic=False)
    assert torch.equal(torch.ones(3), torch.load(path)["w"])


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd_create is Linux-only")
def test_file_without_a_name_is_written_directly() -> None:
    descriptor = os.memfd_create("a")
    try:
        save({"w": torch.ones(3)}, f"/proc/self/fd/{descriptor}")
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            assert torch.equal(torch.ones(3), torch.load(file)["w"])
    finally:
        os.close(descriptor)


def test_invalid_target_is_an_error() -> None:
    with pytest.raises(UsageError, match="cannot save to an object of type int"):
        save({}, 7)


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace a mapped file: see tests/io/test_windows.py")
def test_mapped_file_can_be_overwritten(tmp_path: Path) -> None:
    """torch.save would write into the memory it is saving."""
    path = tmp_path / "a.pt"
    value = {"w": torch.rand(100_000)}
    save(value, path)
    mapped = torch.load(str(path), mmap=True)
    save({"w": mapped["w"], "more": torch.rand(3)}, path)
    assert_same(value["w"], torch.load(path)["w"].clone())
    assert_same(value["w"], mapped["w"].clone())


def test_non_atomic_save_keeps_hard_links(tmp_path: Path) -> None:
    path, link = tmp_path / "a.pt", tmp_path / "b.pt"
    path.write_bytes(b"old" * 10_000)
    link.hardlink_to(path)
    save({"w": torch.rand(3)}, path, atomic=False)
    assert path.samefile(link)
    torch.load(link)


def test_save_to_devnull_keeps_the_device() -> None:
    save({"w": torch.rand(3)}, os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_exception_of_the_file_object_is_not_wrapped() -> None:
    class Broken:
        def write(self, _: Any) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save({"w": torch.rand(3)}, Broken())


# -- equal files -------------------------------------------------------------------------------------------------------


def checkpoint() -> Any:
    torch.default_generator.manual_seed(0)
    return OrderedDict(model=nn.Linear(30, 400).state_dict(), step=7, big=torch.rand(3_000_000))


def test_equal_objects_give_equal_files(tmp_path: Path) -> None:
    save(checkpoint(), tmp_path / "a.pt", origin=False)
    save(checkpoint(), tmp_path / "another name.pth", origin=False)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "another name.pth").read_bytes()
    assert (tmp_path / "a.pt").read_bytes() == saved(checkpoint(), origin=False)


def test_serialization_id_depends_on_the_contents_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def id_of(data: bytes) -> bytes:
        return records(data)["archive/.data/serialization_id"]

    one, two = checkpoint(), checkpoint()
    two["big"][5] += 1
    assert id_of(saved(one)) == id_of(saved(one, origin=False, device="keep")) != id_of(saved(two))
    assert len(id_of(saved(one))) == 40
    file = io.BytesIO()
    torch.save(one, file)
    if b".format_version" in file.getvalue():
        assert id_of(saved(one))[20:] == id_of(file.getvalue())[20:]  # as torch computes it for the same contents
    monkeypatch.setattr(writing, "PIECE", 1 << 16)
    assert id_of(saved(one)) == id_of(saved(checkpoint()))


def test_storages_have_the_offsets_that_torch_calculates() -> None:
    """torch can calculate the offsets of storages instead of reading them, if the order is the one it writes."""
    config = pytest.importorskip("torch.utils.serialization").config
    if not hasattr(getattr(config, "load", None), "calculate_storage_offsets"):
        pytest.skip("this torch has no calculate_storage_offsets")
    value = [torch.rand(number * 10_007) for number in range(6)]
    config.load.calculate_storage_offsets = True
    try:
        assert_same(through_torch(value), loaded(saved(value)))
    finally:
        config.load.calculate_storage_offsets = False


@pytest.fixture
def setting() -> Iterator[Any]:
    """The save settings of torch, reset after the test."""
    config = pytest.importorskip("torch.utils.serialization").config
    if not hasattr(getattr(config, "save", None), "storage_alignment"):
        pytest.skip("this torch has no storage_alignment setting")
    yield config.save
    config.save.storage_alignment = 64


@pytest.mark.parametrize("alignment", [1, 63, 4096, 65536])
def test_storage_alignment_setting_of_torch_is_honoured(alignment: int, setting: Any) -> None:
    setting.storage_alignment = alignment
    value = [torch.rand(10), torch.rand(10_000)]
    data = saved(value)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("archive/.storage_alignment") == b"%d" % alignment
    for storage in read(data).storages:
        assert storage.offset is not None
        assert storage.offset % alignment == 0
    assert_same(through_torch(value), loaded(data))


@pytest.mark.parametrize("alignment", [0, -64, 65537, "64"])
def test_invalid_storage_alignment_is_an_error(alignment: Any, setting: Any) -> None:
    """torch crashes with a floating point exception, or writes what it cannot read."""
    setting.storage_alignment = alignment
    with pytest.raises(SaveError, match="storage_alignment"):
        saved({})


# -- views -------------------------------------------------------------------------------------------------------------


def test_small_views_of_large_storages_are_named_in_a_warning() -> None:
    base = torch.zeros(1_000_000)
    value = {"model": {"head": base[:10]}, "rest": [torch.rand(5), base[20:30]]}
    with pytest.warns(SaveWarning, match=r"4 of 4 MB .* views of larger storages \(model.head, rest\[1\]\)"):
        assert len(saved(value)) > 4_000_000


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.zeros(1000)[:10],
        lambda: [torch.zeros(1_000_000), torch.zeros(10_000_000)[:9_900_000]],
        lambda: [*((base := torch.zeros(1_000_000)), base[:10])],
        lambda: list(torch.zeros(1_000_000).split(1000)),
        lambda: torch.zeros(1_000_000).view(1000, 1000).t(),
    ],
    ids=["small storage", "small unused part", "base is saved too", "all of it is used", "transposed"],
)
def test_views_that_waste_little_give_no_warning(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved(value())


def test_compact_writes_only_the_bytes_in_use() -> None:
    base = torch.arange(1_000_000.0)
    value = {"a": base[10:20], "b": base[15:30], "far": base[-5:], "again": base[10:20]}
    data = saved(value, compact=True)
    assert len(data) < 4000
    result = loaded(data, weights_only=True)
    assert {name: tensor.tolist() for name, tensor in result.items()} == {
        name: tensor.tolist() for name, tensor in value.items()
    }
    result["a"][9] = -1.0
    assert result["b"][4] == result["again"][9] == -1.0
    assert result["far"].tolist() == base[-5:].tolist()
    assert len(read(data).storages) == 2


def test_compact_gathers_a_view_with_gaps() -> None:
    column = torch.arange(1_000_000).view(1000, 1000)[:, 7]
    data = saved(
        {"c": column, "tied": column, "conj": torch.zeros(9000, dtype=torch.complex64)[::900].conj()}, compact=True
    )
    assert len(data) < 14_000
    result = loaded(data)
    assert torch.equal(result["c"], column)
    assert result["c"].data_ptr() == result["tied"].data_ptr()
    assert result["conj"].is_conj()


def test_compact_keeps_expanded_tensors() -> None:
    wide = torch.rand(3, 1).expand(3, 100_000)
    data = saved(wide, compact=True)
    assert len(data) < 3000
    assert_same(through_torch(wide), loaded(data))


def test_compact_of_parameters_empty_views_and_storages() -> None:
    base = torch.zeros(1_000_000)
    value = {"p": nn.Parameter(base[5:9]), "none": base[3:3], "whole": torch.rand(4)}
    data = saved(value, compact=True)
    assert len(data) < 5000
    result = loaded(data)
    assert [tensor.shape for tensor in result.values()] == [tensor.shape for tensor in value.values()]
    assert len(saved({**value, "storage": base._typed_storage()}, compact=True)) > 4_000_000


def test_compact_does_not_grow_a_storage_smaller_than_its_tensor() -> None:
    """torch writes the bytes that exist; memory behind them must not be read, and the storage must not grow."""
    for step in (1, 10):
        tensor = torch.arange(100.0)[::step]
        tensor.untyped_storage().resize_(200)
        data = saved(tensor, compact=True)
        assert len(records(data)["archive/data/0"]) == tensor.untyped_storage().nbytes() == 200


# -- pickling ----------------------------------------------------------------------------------------------------------


def test_storage_used_as_two_dtypes_is_refused() -> None:
    base = torch.rand(4)
    with pytest.raises(SaveError, match=r"used as torch.float32 and as torch.int32"):
        saved([base, base.view(torch.int32)])


def test_error_names_the_object_that_cannot_be_pickled() -> None:
    value = {"model": {"w": torch.rand(3)}, "hooks": [1, {"f": lambda: 1}]}
    with pytest.raises(CannotPickleError, match=r"obj\['hooks'\]\[1\]\['f'\]") as caught:
        saved(value)
    for error_class in (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        assert isinstance(caught.value, error_class)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nested too deep": (lambda: nested(50_000), "sys.setrecursionlimit"),
    "an mkldnn tensor": (lambda: {"a": torch.ones(3).to_mkldnn()}, "to_dense"),
    "a TorchScript function": (lambda: [torch.jit.script(identity)], "Leave it out"),
    "a parametrized module": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "its state_dict"),
    "a meta storage": (lambda: torch.empty(3, device="meta").untyped_storage(), "Save the tensor"),
}


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_object_that_torch_refuses_raises_the_same_kind_of_error(name: str) -> None:
    make, fix = REFUSED[name]
    value = make()
    with pytest.raises((TypeError, RuntimeError, pickle.PickleError)) as torch_error:
        torch.save(value, io.BytesIO())
    with pytest.raises(CannotPickleError, match=fix) as our_error:
        saved(value)
    assert isinstance(our_error.value, torch_error.type)


def test_error_names_the_object_that_raised_and_not_its_attribute() -> None:
    class Stubborn:
        def __init__(self) -> None:
            self.hook = lambda: 1

        def __getstate__(self) -> Any:
            raise RuntimeError("not me")

    with pytest.raises(CannotPickleError, match=r"obj\['a'\] \(a .*Stubborn\) cannot be pickled: not me"):
        saved({"a": Stubborn()})


def test_object_that_stands_for_something_outside_gets_no_advice_about_names(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    with path.open() as text, path.open("rb") as file, socket.socket() as connection:
        outside: dict[str, list[Any]] = {
            "file objects": [text, file],
            "locks": [threading.Lock(), threading.RLock()],
            "modules": [os],
            "generators": [(number for number in range(3))],
            "sockets": [connection],
        }
        for words, values in outside.items():
            for value in values:
                with pytest.raises(CannotPickleError) as caught:
                    saved({"a": value})
                assert caught.value.fix == f"Leave it out: {words} cannot be pickled."
                assert caught.value.what.startswith("obj['a'] (")


def test_error_names_a_tensor_that_cannot_be_saved() -> None:
    zeros = torch._efficientzerotensor((3,))
    with pytest.raises(CannotPickleError, match=r"obj\['a'\]\[1\]") as raised:
        saved({"a": [torch.rand(2), zeros]})
    assert "clone() makes one" in raised.value.fix
    saved({"a": zeros.clone()})


def test_meta_storage_is_refused() -> None:
    with pytest.raises(SaveError, match="meta device"):
        saved(torch.empty(3, device="meta").untyped_storage())


def test_nothing_is_written_when_pickling_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with pytest.raises(CannotPickleError):
        save({"f": lambda: 1}, path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_pickle_module_with_a_python_pickler() -> None:
    class Pickler(pickle._Pickler):
        """Like those of other packages: in Python, with a ``reducer_override``."""

        def reducer_override(self, obj: Any) -> Any:
            return (int, (42,)) if getattr(obj, "__name__", "") == "<lambda>" else NotImplemented

    module = types.SimpleNamespace(Pickler=Pickler)
    value = {"w": nn.Parameter(torch.rand(3)), "f": lambda: 1}
    result = loaded(saved(value, pickle_module=module))
    assert result["f"] == 42
    assert torch.equal(result["w"], value["w"])


@pytest.mark.parametrize("name", ["dill", "cloudpickle"])
@pytest.mark.parametrize("make", [dict, nn.Linear], ids=["dict", "module"])
def test_dill_and_cloudpickle_save_functions(name: str, make: Any) -> None:
    module: Any = importlib.import_module(name)
    value = make() if make is dict else make(2, 3)
    attributes = value if make is dict else value.__dict__
    attributes["twice"], attributes["tensor"] = lambda number: 2 * number, torch.arange(4.0)
    reader = module if hasattr(module, "Unpickler") else pickle  # pickle reads what cloudpickle writes
    result = loaded(saved(value, pickle_module=module), pickle_module=reader)
    loaded_attributes = result if make is dict else result.__dict__
    assert loaded_attributes["twice"](21) == 42
    assert torch.equal(loaded_attributes["tensor"], torch.arange(4.0))


@contextlib.contextmanager
def registered(kind: type, reducer: Any) -> Iterator[None]:
    copyreg.pickle(kind, reducer)
    try:
        yield
    finally:
        del copyreg.dispatch_table[kind]


def test_registered_reducers_are_used() -> None:
    with registered(torch.Tensor, lambda _: (str, ("a tensor",))):
        assert loaded(saved([torch.rand(3)])) == ["a tensor"]


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cuda:0"},
        {"pickle_protocol": 1},
        {"pickle_protocol": 99},
        {"origin": 3},
        {"origin": {"x": object()}},
        {"origin": {"x": float("nan")}},
        {"origin": {1: "x"}},
        {"origin": {"x": "y" * 70_000}},
        {"origin": {"x": "\ud800"}},
        {"origin": {"x": 10**5000}},
        {"device": ["cpu"]},
        {"pickle_protocol": "2"},
        {"pickle_module": json},
        {"progress": 5},
    ],
    ids=[
        "device", "old protocol", "new protocol", "origin number", "origin object", "origin nan", "origin key",
        "long origin", "origin surrogate", "huge origin number",
        "list of devices", "protocol as text", "module without a pickler", "progress not callable",
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_before_anything_is_written(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save({"w": torch.rand(3)}, tmp_path / "a.pt", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("protocol", "expected"), [(None, pickle.DEFAULT_PROTOCOL), (-1, pickle.HIGHEST_PROTOCOL)])
def test_protocols_none_and_minus_one_mean_default_and_highest(protocol: int | None, expected: int) -> None:
    value = {"w": torch.arange(3), "text": "a" * 300}
    assert saved(value, pickle_protocol=protocol, origin=False) == saved(value, pickle_protocol=expected, origin=False)


def test_progress_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, int]] = []
    saved([torch.rand(4_000_000), torch.rand(5)], progress=lambda done, total: calls.append((done, total)))
    assert len(calls) >= 2
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] > 16_000_020
    calls.clear()
    saved([torch.rand(5) for _ in range(300)], progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    saved([torch.rand(5)], progress=True)
    assert capsys.readouterr() == ("", "")


def test_save_under_skip_data_writes_no_contents() -> None:
    if not hasattr(torch.serialization, "skip_data"):
        pytest.skip("this torch has no skip_data")
    with torch.serialization.skip_data():
        data = saved({"w": torch.ones(3)})
        with pytest.raises(SaveError, match="skip_data"):
            save_async({"w": torch.rand(3)}, io.BytesIO())
    assert torch.load(io.BytesIO(data))["w"].tolist() == [0, 0, 0]


# -- origin ------------------------------------------------------------------------------------------------------------


def origin(data: bytes) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(records(data)["archive/.transload/origin.json"])
    return record


def test_origin_is_recorded() -> None:
    from transload import __version__

    record = origin(saved([torch.rand(3), torch.rand(2)], origin={"run": {"id": 7}, "note": "ü"}))
    assert (record["schema"], record["transload"], record["torch"]) == (1, __version__, str(torch.__version__))
    assert record["entries"] == {"run": {"id": 7}, "note": "ü"}
    assert record["storages"] == [["cpu", 2]]
    assert record["time"].endswith("Z")
    assert "archive/.transload/origin.json" not in records(saved([], origin=False))


def test_origin_does_not_identify_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass
    import platform

    save([torch.rand(3)], tmp_path / "secret-name.pt")
    data = (tmp_path / "secret-name.pt").read_bytes()
    for word in (getpass.getuser(), platform.node(), "secret-name", str(tmp_path), os.path.expanduser("~")):
        if len(word) > 4:  # "root" is in any archive
            assert word.encode() not in data
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    properties = types.SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert origin(saved([]))["gpus"] == [{"name": "A GPU", "capability": "9.0", "memory": 1 << 30}]


def test_origin_leaves_out_gpus_that_cannot_be_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    assert "gpus" not in origin(saved([torch.rand(1)]))


def test_safetensors_file_name_gives_a_warning(tmp_path: Path) -> None:
    """torch chooses the format by the name from 2.13 on."""
    with pytest.warns(SaveWarning, match=r"model\.safetensors: because of its name, torch 2\.13 .* Name it \.pt"):
        save({"w": torch.ones(3)}, tmp_path / "model.safetensors")


# -- the arguments of torch.save that begin with an underscore


def test_every_argument_of_torch_save_is_accepted() -> None:
    torch_parameters = inspect.signature(torch.save).parameters
    assert list(inspect.signature(save).parameters)[: len(torch_parameters)] == list(torch_parameters)
    assert list(inspect.signature(save_async).parameters)[: len(torch_parameters)] == list(torch_parameters)


def test_save_without_the_byteorder_record() -> None:
    assert "archive/byteorder" in records(saved({"w": torch.ones(2)}))
    data = saved({"w": torch.ones(2)}, _disable_byteorder_record=True)
    assert "archive/byteorder" not in records(data)
    assert torch.equal(loaded(data)["w"], torch.ones(2))


def test_tensors_can_be_pickled_where_torch_save_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", save)
    tensor = torch.arange(6.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, view = pickle.loads(pickle.dumps((tensor, tensor[2:])))
    assert torch.equal(result, tensor)
    assert torch.equal(view, tensor[2:])


class Fitted(torch.nn.Module):
    pass


def test_legacy_format_has_the_source_of_modules_and_no_directory() -> None:
    data = saved([Fitted(), Fitted()], _use_new_zipfile_serialization=False)
    assert data.count(b"class Fitted(torch.nn.Module):") == 1
    assert b"test_save.py" in data
    assert str(Path(__file__).parent).encode() not in data
    assert [type(module) for module in loaded(data)] == [Fitted, Fitted]


@pytest.mark.parametrize("in_background", [False, True])
def test_large_storages_in_the_legacy_format(in_background: bool, tmp_path: Path) -> None:
    value: Any = {"large": torch.arange(2_000_000), "small": [torch.full((3,), float(n)) for n in range(50)]}
    path, reported = tmp_path / "old.pt", [0, 0]

    def report(done: int, total: int) -> None:
        reported[:] = done, total

    if in_background:
        save_async(value, path, _use_new_zipfile_serialization=False, progress=report).result()
    else:
        save(value, path, _use_new_zipfile_serialization=False, progress=report)
    result = torch.load(path)
    assert torch.equal(result["large"], value["large"])
    assert torch.equal(torch.stack(result["small"]), torch.stack(value["small"]))
    assert reported == [16_000_600, 16_000_600]
    assert read(path).format == "torch-legacy"
