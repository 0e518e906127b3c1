"""``transload.save``: tags, targets, arguments, what it leaves alone, and what it warns of."""

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
import stat
import types
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.equal import same
from tests.loading.zoo import tagged
from torch import nn

from transload.errors import CannotPickleError, CannotWriteError, SaveError, SaveWarning, UsageError
from transload.formats import read
from transload.formats import zip_writer as writing
from transload.io import atomic
from transload.saving import save, save_async


def saved(obj: Any, **options: Any) -> bytes:
    held = io.BytesIO()
    save(obj, held, **options)
    return held.getvalue()


def loaded(data: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(data), **{"weights_only": False, **options})


def records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {info.filename: archive.read(info) for info in archive.infolist()}


def by_torch(value: Any) -> Any:
    """What torch itself makes of it, saved and loaded."""
    held = io.BytesIO()
    torch.save(value, held)
    return loaded(held.getvalue())


def tags(data: bytes) -> set[str]:
    return {storage.device for storage in read(data).storages}


# -- tags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["cuda:1", "mps", "npu:3"])
def test_storages_are_tagged_cpu_wherever_they_are(tag: str) -> None:
    value = {"w": nn.Parameter(torch.rand(3)), "s": torch.rand(2).untyped_storage()}
    with tagged(tag):
        assert tags(saved(value)) == {"cpu"}
        assert tags(saved(value, device="keep")) == {tag}


def rebuilt(function: str, *arguments: Any) -> type[torch.Tensor]:
    """A class of tensors that torch would save as those of a device without storages."""

    class Far(torch.Tensor):
        def __reduce_ex__(self, _: Any) -> Any:
            return getattr(torch._utils, function), arguments

    return Far


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_of_devices_without_storages_become_plain_ones(grad: bool) -> None:
    import numpy as np

    numbers = torch.arange(4.0)
    ways = {"_rebuild_device_tensor_from_numpy": np.arange(4, dtype=np.float32)}
    if hasattr(torch._utils, "_rebuild_device_tensor_from_cpu_tensor"):
        ways["_rebuild_device_tensor_from_cpu_tensor"] = numbers.clone()
    for function, held in ways.items():
        kind = rebuilt(function, held, torch.float32, "xla:0", grad)
        data = saved({"w": torch.rand(1).as_subclass(kind)})
        same(by_torch({"w": numbers.clone().requires_grad_(grad)}), loaded(data, weights_only=True))
        assert b"xla" not in records(data)["archive/data.pkl"]
        assert b"xla:0" in records(saved({"w": torch.rand(1).as_subclass(kind)}, device="keep"))["archive/data.pkl"]


class Wrapper(torch.Tensor):
    """A tensor made of another one, which says it is on a GPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, device: str = "cuda:1") -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        del args, kwargs
        if function is torch.ops.aten.detach.default:
            raise NotImplementedError
        raise NotImplementedError(str(function))


def test_the_device_of_a_wrapper_is_that_of_its_storages() -> None:
    made = Wrapper(torch.arange(3.0))
    again = loaded(saved(made))
    assert (type(again), again.device.type) == (Wrapper, "cpu")
    assert torch.equal(again.inner, made.inner)
    assert loaded(saved(made, device="keep")).device == torch.device("cuda:1")
    assert made.device == torch.device("cuda:1")


def test_other_words_for_a_device_stay_as_they_are() -> None:
    value = {"device": "cuda:0", "place": torch.device("cuda", 1), "w": torch.rand(2)}
    again = loaded(saved(value))
    assert (again["device"], again["place"]) == ("cuda:0", torch.device("cuda", 1))


# -- the live model ----------------------------------------------------------------------------------------------------


def test_the_model_is_not_touched_and_the_usual_advice_touches_it() -> None:
    model = nn.Linear(2, 2).to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: (id(value), value.data_ptr(), value.device) for name, value in model.named_parameters()}
    saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert {name: (id(value), value.data_ptr(), value.device) for name, value in model.named_parameters()} == before
    far = nn.Linear(2, 2, device="meta")  # which stands for any device but the CPU
    stepped = torch.optim.SGD(far.parameters(), lr=0.1)
    far.to_empty(device="cpu").state_dict()  # as .cpu() does where there are numbers: the model itself moves
    assert {value.device.type for value in far.parameters()} == {"cpu"}
    assert {value.device.type for value in stepped.param_groups[0]["params"]} == {"meta"}


# -- targets -----------------------------------------------------------------------------------------------------------


def test_paths_of_every_kind(tmp_path: Path) -> None:
    value = {"w": torch.rand(3)}
    paths: list[Any] = [tmp_path / "a.pt", str(tmp_path / "b.pt"), os.fsencode(tmp_path / "ç.pt")]
    for number, path in enumerate(paths):
        save(value, path)
        assert len(list(tmp_path.iterdir())) == number + 1
        same(by_torch(value), torch.load(os.fsdecode(path)))


def test_file_objects_and_buffers(tmp_path: Path) -> None:
    import gzip

    value = {"w": torch.rand(3), "large": torch.rand(300_000)}
    with (tmp_path / "a.pt").open("wb") as file:
        save(value, file)
    with (tmp_path / "raw.pt").open("wb", buffering=0) as raw:
        save(value, raw)
    with gzip.open(tmp_path / "a.gz", "wb") as packed:
        save(value, packed)
    for path in (tmp_path / "a.pt", tmp_path / "raw.pt"):
        same(by_torch(value), torch.load(path))
    with gzip.open(tmp_path / "a.gz", "rb") as packed:
        same(by_torch(value), torch.load(io.BytesIO(packed.read())))
    same(by_torch(value), loaded(saved(value)))


class Reluctant:
    """A file object that takes a few bytes at a time, and nothing but writing."""

    def __init__(self) -> None:
        self.held = bytearray()

    def write(self, data: Any) -> int:
        part = bytes(data[:1000])
        self.held += part
        return len(part)


def test_a_file_object_may_take_less_than_it_is_given() -> None:
    value = {"w": torch.rand(30_000)}
    file = Reluctant()
    save(value, file)
    same(by_torch(value), loaded(bytes(file.held)))


class Full:
    def __init__(self, answer: Any) -> None:
        self.held = bytearray()
        self._answer = answer

    def write(self, data: Any) -> Any:
        self.held += data
        return self._answer


@pytest.mark.parametrize("answer", [None, True], ids=str)
def test_a_file_object_that_does_not_tell_has_taken_all(answer: Any) -> None:
    file = Full(answer)
    save({"w": torch.arange(30_000)}, file)
    assert torch.equal(torch.arange(30_000), loaded(bytes(file.held))["w"])


def test_a_file_object_that_takes_nothing_is_not_asked_for_ever() -> None:
    with pytest.raises(OSError, match="accepts no more bytes"):
        save({"w": torch.rand(3)}, Full(0))


@pytest.mark.skipif(os.name == "nt", reason="Windows pipes always block")
def test_a_pipe_that_does_not_wait_loses_nothing_in_silence() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with open(read, "rb"), open(write, "wb", buffering=0) as file, pytest.raises(BlockingIOError):  # noqa: PTH123
        save({"w": torch.rand(1_000_000)}, file)


@pytest.mark.parametrize("call", [save, lambda *given: save_async(*given).result(30)], ids=["save", "save_async"])
def test_a_path_that_ends_with_a_slash_names_no_file(call: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"old")
    for name in ("new", "a.pt"):
        with pytest.raises(CannotWriteError, match="it is a directory"):
            call({}, f"{tmp_path}/{name}/")
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]
    assert (tmp_path / "a.pt").read_bytes() == b"old"


def test_a_name_no_file_can_have() -> None:
    for name in ("", "a\0b", "a\ud800b"):
        with pytest.raises(UsageError, match="no file can have the name"):
            save({}, name)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no POSIX directory permissions")
@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY], ids=["directory", "mount"])
def test_a_file_that_cannot_be_replaced_can_be_written_into(
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
def test_a_file_without_a_name_is_written_into() -> None:
    descriptor = os.memfd_create("a")
    try:
        save({"w": torch.ones(3)}, f"/proc/self/fd/{descriptor}")
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            assert torch.equal(torch.ones(3), torch.load(file)["w"])
    finally:
        os.close(descriptor)


def test_what_cannot_be_written_to_is_told() -> None:
    with pytest.raises(UsageError, match="cannot save to a int"):
        save({}, 7)


def test_a_file_that_is_mapped_can_be_saved_over(tmp_path: Path) -> None:
    """torch.save writes into the very memory it is saving then."""
    path = tmp_path / "a.pt"
    value = {"w": torch.rand(100_000)}
    save(value, path)
    mapped = torch.load(str(path), mmap=True)
    save({"w": mapped["w"], "more": torch.rand(3)}, path)
    same(value["w"], torch.load(path)["w"].clone())
    same(value["w"], mapped["w"].clone())


def test_not_atomic(tmp_path: Path) -> None:
    path, link = tmp_path / "a.pt", tmp_path / "b.pt"
    path.write_bytes(b"old" * 10_000)
    link.hardlink_to(path)
    save({"w": torch.rand(3)}, path, atomic=False)
    assert path.samefile(link)
    torch.load(link)


def test_to_nowhere() -> None:
    save({"w": torch.rand(3)}, os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)  # noqa: PTH116 - not a path to look into


def test_an_exception_of_the_file_object_is_its_own() -> None:
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


def test_the_id_is_of_the_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    def id_of(data: bytes) -> bytes:
        return records(data)["archive/.data/serialization_id"]

    one, two = checkpoint(), checkpoint()
    two["big"][5] += 1
    assert id_of(saved(one)) == id_of(saved(one, origin=False, device="keep")) != id_of(saved(two))
    assert len(id_of(saved(one))) == 40
    held = io.BytesIO()
    torch.save(one, held)
    if b".format_version" in held.getvalue():
        assert id_of(saved(one))[20:] == id_of(held.getvalue())[20:]  # torch's own, for the same contents
    monkeypatch.setattr(writing, "PIECE", 1 << 16)
    assert id_of(saved(one)) == id_of(saved(checkpoint()))


def test_records_lie_where_torch_expects_them() -> None:
    """torch can compute where storages lie instead of looking: only if they follow each other as it writes them."""
    config = pytest.importorskip("torch.utils.serialization").config
    if not hasattr(getattr(config, "load", None), "calculate_storage_offsets"):
        pytest.skip("this torch has no calculate_storage_offsets")
    value = [torch.rand(number * 10_007) for number in range(6)]
    config.load.calculate_storage_offsets = True
    try:
        same(by_torch(value), loaded(saved(value)))
    finally:
        config.load.calculate_storage_offsets = False


@pytest.fixture
def setting() -> Iterator[Any]:
    """What torch is set to."""
    config = pytest.importorskip("torch.utils.serialization").config
    if not hasattr(getattr(config, "save", None), "storage_alignment"):
        pytest.skip("this torch has no storage_alignment setting")
    yield config.save
    config.save.storage_alignment = 64


@pytest.mark.parametrize("alignment", [1, 63, 4096, 65536])
def test_the_alignment_torch_is_set_to(alignment: int, setting: Any) -> None:
    setting.storage_alignment = alignment
    value = [torch.rand(10), torch.rand(10_000)]
    data = saved(value)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("archive/.storage_alignment") == b"%d" % alignment
    for storage in read(data).storages:
        assert storage.offset is not None
        assert storage.offset % alignment == 0
    same(by_torch(value), loaded(data))


@pytest.mark.parametrize("alignment", [0, -64, 65537, "64"])
def test_an_alignment_no_archive_can_have(alignment: Any, setting: Any) -> None:
    """torch itself ends with a floating point exception, or writes what it cannot read."""
    setting.storage_alignment = alignment
    with pytest.raises(SaveError, match="storage_alignment"):
        saved({})


# -- views -------------------------------------------------------------------------------------------------------------


def test_a_view_that_bloats_the_file_is_named() -> None:
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
    ids=["little", "a small part", "the base is saved too", "all of it is used", "another order"],
)
def test_views_that_are_no_loss_are_not(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved(value())


def test_compact_writes_what_is_used() -> None:
    base = torch.arange(1_000_000.0)
    value = {"a": base[10:20], "b": base[15:30], "far": base[-5:], "again": base[10:20]}
    data = saved(value, compact=True)
    assert len(data) < 4000
    again = loaded(data, weights_only=True)
    assert {name: each.tolist() for name, each in again.items()} == {
        name: each.tolist() for name, each in value.items()
    }
    again["a"][9] = -1.0
    assert again["b"][4] == again["again"][9] == -1.0
    assert again["far"].tolist() == base[-5:].tolist()
    assert len(read(data).storages) == 2


def test_compact_gathers_a_view_with_gaps() -> None:
    column = torch.arange(1_000_000).view(1000, 1000)[:, 7]
    data = saved(
        {"c": column, "tied": column, "conj": torch.zeros(9000, dtype=torch.complex64)[::900].conj()}, compact=True
    )
    assert len(data) < 14_000
    again = loaded(data)
    assert torch.equal(again["c"], column)
    assert again["c"].data_ptr() == again["tied"].data_ptr()
    assert again["conj"].is_conj()


def test_compact_leaves_what_repeats_itself() -> None:
    wide = torch.rand(3, 1).expand(3, 100_000)
    data = saved(wide, compact=True)
    assert len(data) < 3000
    same(by_torch(wide), loaded(data))


def test_compact_of_parameters_empty_views_and_storages() -> None:
    base = torch.zeros(1_000_000)
    value = {"p": nn.Parameter(base[5:9]), "none": base[3:3], "whole": torch.rand(4)}
    data = saved(value, compact=True)
    assert len(data) < 5000
    again = loaded(data)
    assert [each.shape for each in again.values()] == [each.shape for each in value.values()]
    assert len(saved({**value, "storage": base._typed_storage()}, compact=True)) > 4_000_000


def test_compact_of_a_storage_that_became_smaller_than_its_tensor() -> None:
    """torch writes what there is; what lies behind it in memory is nobody's, and the storage must not grow."""
    for step in (1, 10):
        tensor = torch.arange(100.0)[::step]
        tensor.untyped_storage().resize_(200)
        data = saved(tensor, compact=True)
        assert len(records(data)["archive/data/0"]) == tensor.untyped_storage().nbytes() == 200


# -- pickling ----------------------------------------------------------------------------------------------------------


def test_one_storage_as_two_kinds_of_number_is_refused() -> None:
    base = torch.rand(4)
    with pytest.raises(SaveError, match=r"used as torch.float32 and as torch.int32"):
        saved([base, base.view(torch.int32)])


def test_what_cannot_be_pickled_is_named() -> None:
    value = {"model": {"w": torch.rand(3)}, "hooks": [1, {"f": lambda: 1}]}
    with pytest.raises(CannotPickleError, match=r"obj\['hooks'\]\[1\]\['f'\]") as caught:
        saved(value)
    for kind in (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        assert isinstance(caught.value, kind)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nested too deep": (lambda: nested(50_000), "sys.setrecursionlimit"),
    "a tensor without memory": (lambda: {"a": torch.ones(3).to_mkldnn()}, "to_dense"),
    "a function of TorchScript": (lambda: [torch.jit.script(lambda_free)], "Leave it out"),
    "a parametrized module": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "its state_dict"),
    "a storage of nothing": (lambda: torch.empty(3, device="meta").untyped_storage(), "Save the tensor"),
}


def lambda_free(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_with_the_same_kind_of_error(name: str) -> None:
    make, fix = REFUSED[name]
    value = make()
    with pytest.raises((TypeError, RuntimeError, pickle.PickleError)) as theirs:
        torch.save(value, io.BytesIO())
    with pytest.raises(CannotPickleError, match=fix) as ours:
        saved(value)
    assert isinstance(ours.value, theirs.type)


def test_a_part_that_fails_for_another_reason_is_not_blamed() -> None:
    class Stubborn:
        def __init__(self) -> None:
            self.hook = lambda: 1

        def __getstate__(self) -> Any:
            raise RuntimeError("not me")

    with pytest.raises(CannotPickleError, match=r"obj\['a'\] \(a .*Stubborn\) cannot be pickled: not me"):
        saved({"a": Stubborn()})


def test_what_torch_cannot_save_is_named_too() -> None:
    with pytest.raises(CannotPickleError, match=r"obj\['a'\]\[1\]"):
        saved({"a": [torch.rand(2), torch._efficientzerotensor((3,))]})


def test_a_storage_on_the_meta_device_is_refused() -> None:
    with pytest.raises(SaveError, match="meta device"):
        saved(torch.empty(3, device="meta").untyped_storage())


def test_nothing_is_written_when_pickling_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with pytest.raises(CannotPickleError):
        save({"f": lambda: 1}, path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_another_pickle_module() -> None:
    class Pickler(pickle._Pickler):
        """As other packages have one: in Python, with a reducer of its own."""

        def reducer_override(self, obj: Any) -> Any:
            return (int, (42,)) if getattr(obj, "__name__", "") == "<lambda>" else NotImplemented

    module = types.SimpleNamespace(Pickler=Pickler)
    value = {"w": nn.Parameter(torch.rand(3)), "f": lambda: 1}
    again = loaded(saved(value, pickle_module=module))
    assert again["f"] == 42
    assert torch.equal(again["w"], value["w"])


@pytest.mark.parametrize("name", ["dill", "cloudpickle"])
@pytest.mark.parametrize("make", [dict, nn.Linear], ids=["dict", "module"])
def test_packages_that_pickle_functions(name: str, make: Any) -> None:
    module: Any = importlib.import_module(name)
    value = make() if make is dict else make(2, 3)
    held = value if make is dict else value.__dict__
    held["twice"], held["tensor"] = lambda number: 2 * number, torch.arange(4.0)
    reader = module if hasattr(module, "Unpickler") else pickle  # what cloudpickle writes is read by pickle itself
    again = loaded(saved(value, pickle_module=module), pickle_module=reader)
    found = again if make is dict else again.__dict__
    assert found["twice"](21) == 42
    assert torch.equal(found["tensor"], torch.arange(4.0))


@contextlib.contextmanager
def registered(kind: type, reducer: Any) -> Iterator[None]:
    copyreg.pickle(kind, reducer)
    try:
        yield
    finally:
        del copyreg.dispatch_table[kind]


def test_reducers_that_the_program_has_registered_are_used() -> None:
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
        "device", "old", "new", "number", "object", "nan", "key", "long", "surrogate", "huge",
        "devices", "text", "no pickler", "no function",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_done(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        save({"w": torch.rand(3)}, tmp_path / "a.pt", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("given", "meant"), [(None, pickle.DEFAULT_PROTOCOL), (-1, pickle.HIGHEST_PROTOCOL)])
def test_protocols_that_pickle_chooses(given: int | None, meant: int) -> None:
    value = {"w": torch.arange(3), "text": "a" * 300}
    assert saved(value, pickle_protocol=given, origin=False) == saved(value, pickle_protocol=meant, origin=False)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_files_without_contents_are_left_to_torch() -> None:
    if not hasattr(torch.serialization, "skip_data"):
        pytest.skip("this torch has no skip_data")
    with torch.serialization.skip_data(), pytest.raises(SaveError, match="skip_data"):
        saved({"w": torch.rand(3)})


# -- origin ------------------------------------------------------------------------------------------------------------


def origin(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(records(data)["archive/.transload/origin.json"])
    return found


def test_the_origin_is_recorded() -> None:
    from transload import __version__

    found = origin(saved([torch.rand(3), torch.rand(2)], origin={"run": {"id": 7}, "note": "ü"}))
    assert (found["schema"], found["transload"], found["torch"]) == (1, __version__, str(torch.__version__))
    assert found["entries"] == {"run": {"id": 7}, "note": "ü"}
    assert found["storages"] == [["cpu", 2]]
    assert found["time"].endswith("Z")
    assert "archive/.transload/origin.json" not in records(saved([], origin=False))


def test_the_origin_tells_nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import getpass
    import platform

    save([torch.rand(3)], tmp_path / "secret-name.pt")
    data = (tmp_path / "secret-name.pt").read_bytes()
    for word in (getpass.getuser(), platform.node(), "secret-name", str(tmp_path), os.path.expanduser("~")):  # noqa: PTH111
        if len(word) > 4:  # "root" is in any archive
            assert word.encode() not in data
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    properties = types.SimpleNamespace(name="A GPU", major=9, minor=0, total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert origin(saved([]))["gpus"] == [{"name": "A GPU", "capability": "9.0", "memory": 1 << 30}]


def test_a_gpu_that_does_not_answer_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    assert "gpus" not in origin(saved([torch.rand(1)]))


def test_a_name_that_says_safetensors(tmp_path: Path) -> None:
    """torch goes by the name from 2.13 on."""
    with pytest.warns(SaveWarning, match=r"model\.safetensors: because of its name, torch 2\.13 .* Name it \.pt"):
        save({"w": torch.ones(3)}, tmp_path / "model.safetensors")


# -- the arguments of torch.save that begin with an underscore


def test_every_argument_of_torch_save_is_accepted() -> None:
    theirs = inspect.signature(torch.save).parameters
    assert list(inspect.signature(save).parameters)[: len(theirs)] == list(theirs)
    assert list(inspect.signature(save_async).parameters)[: len(theirs)] == list(theirs)


def test_without_the_record_of_the_byte_order() -> None:
    data = saved({"w": torch.ones(2)}, _disable_byteorder_record=True)
    assert "byteorder" not in records(data)
    assert torch.equal(loaded(data)["w"], torch.ones(2))


def test_tensors_pickle_where_torch_save_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", save)
    whole = torch.arange(6.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, view = pickle.loads(pickle.dumps((whole, whole[2:])))
    assert torch.equal(again, whole)
    assert torch.equal(view, whole[2:])


class Fitted(torch.nn.Module):
    pass


def test_the_legacy_form_has_the_source_of_modules_and_no_path() -> None:
    data = saved([Fitted(), Fitted()], _use_new_zipfile_serialization=False)
    assert data.count(b"class Fitted(torch.nn.Module):") == 1
    assert b"test_save.py" in data
    assert str(Path(__file__).parent).encode() not in data
    assert [type(each) for each in loaded(data)] == [Fitted, Fitted]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_legacy_form_of_large_storages(in_background: bool, tmp_path: Path) -> None:
    value: Any = {"large": torch.arange(2_000_000), "small": [torch.full((3,), float(n)) for n in range(50)]}
    path, told = tmp_path / "old.pt", [0, 0]

    def tell(done: int, total: int) -> None:
        told[:] = done, total

    if in_background:
        save_async(value, path, _use_new_zipfile_serialization=False, progress=tell).result()
    else:
        save(value, path, _use_new_zipfile_serialization=False, progress=tell)
    found = torch.load(path)
    assert torch.equal(found["large"], value["large"])
    assert torch.equal(torch.stack(found["small"]), torch.stack(value["small"]))
    assert told == [16_000_600, 16_000_600]
    assert read(path).format == "torch-legacy"
