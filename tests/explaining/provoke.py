"""Errors and warnings provoked from the installed torch, without a GPU."""

from __future__ import annotations

import argparse
import ctypes
import gzip
import io
import json
import pathlib
import pickle
import struct
import sys
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from urllib.request import urlopen

import torch
from tests import forge
from tests.release import RELEASE

__all__ = ["PROVOCATIONS", "Provocation"]

DATA = Path(__file__).parent.parent / "data"

Provoke = Callable[[Path], object]


class Provocation(NamedTuple):
    """A way to make torch raise or warn, the code of the answer, and the first release (``since``) that does so."""

    code: str
    name: str
    provoke: Provoke
    since: tuple[int, ...]

    def error(self, folder: Path) -> BaseException | str:
        """The exception; or, if torch only warns, the text of its warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.provoke(folder)
            except (Exception, _checkpoint_exception()) as error:  # noqa: BLE001  any exception is a result
                return error
        return "\n".join(f"{type(warning.message).__name__}: {warning.message}" for warning in caught)


def _checkpoint_exception() -> type[BaseException]:
    """The class in torch that does not derive from ``Exception``."""
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


PROVOCATIONS: list[Provocation] = []


def provokes(code: str, *, since: tuple[int, ...] = (2, 1)) -> Callable[[Provoke], Provoke]:
    def add(provoke: Provoke) -> Provoke:
        PROVOCATIONS.append(Provocation(code, provoke.__name__, provoke, since))
        return provoke

    return add


def load(folder: Path, data: bytes, **options: Any) -> object:
    """``torch.load`` of a file with these bytes."""
    path = folder / "model.pt"
    path.write_bytes(data)
    return torch.load(str(path), **options)  # torch 2.1 memory-maps only a str path


def saved(obj: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer, **options)
    return buffer.getvalue()


def big() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(100_000.0), "bias": torch.ones(1000)}


def tagged(tag: str) -> bytes:
    """A checkpoint with one tensor, which has this device tag."""
    return forge.checkpoint(forge.pickled(forge.ordered({"w": forge.tensor(storage=forge.storage_id(device=tag))})))


# -- devices


@provokes("cuda-not-available")
def cuda_tag(folder: Path) -> object:
    return load(folder, tagged("cuda:0"))


@provokes("device-not-available", since=(2, 5))
def xpu_tag(folder: Path) -> object:
    return load(folder, tagged("xpu:0"))


@provokes("device-index")
def cuda_index_too_large(folder: Path) -> object:
    """torch's own check, with one fake GPU."""
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
    ):
        return load(folder, tagged("cuda:1"))


@provokes("device-module-missing", since=(2, 4))
def hpu_tag(folder: Path) -> object:
    return load(folder, tagged("hpu:0"))


@provokes("device-tag-unknown" if RELEASE >= (2, 2) else "device-module-missing")
def npu_tag(folder: Path) -> object:
    return load(folder, tagged("npu:0"))


@provokes("device-tag-unknown" if RELEASE >= (2, 2) else "device-module-missing")
def gpu_as_map_location(folder: Path) -> object:
    return load(folder, tagged("cpu"), map_location="gpu")


@provokes("device-not-built-in")
def mps_tag(folder: Path) -> object:
    return load(folder, tagged("mps"))


@provokes("device-string", since=(2, 4))
def bad_tag(folder: Path) -> object:
    return load(folder, tagged("cuda:abc"))


@provokes("device-string")
def gpu_as_device(_: Path) -> object:
    return torch.device("gpu")


@provokes("devices-apart")
def meta_and_cpu(_: Path) -> object:
    return torch.nn.Linear(2, 2, device="meta")(torch.ones(2, 2, device="cpu"))


@provokes("rng-state-moved")
def rng_state_of_wrong_dtype(_: Path) -> object:
    return torch.set_rng_state(torch.empty(5056, dtype=torch.float32))


def code_without_gpu() -> str:
    """The code for what torch misses first: CUDA in its build, the driver, or a GPU, which the tests hide."""
    if torch.version.cuda is None:
        return "no-cuda-build"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no-driver"
    return "no-gpus"


@provokes(code_without_gpu())
def no_cuda(_: Path) -> object:
    return torch.zeros(1).cuda()


# -- archives


@provokes("archive-cut-off")
def cut_archive(folder: Path) -> object:
    data = saved(big())
    return load(folder, data[: len(data) // 2])


@provokes("archive-cut-off-small")
def cut_small_archive(folder: Path) -> object:
    return load(folder, saved({f"w{i}": torch.zeros(4) for i in range(20)})[:-600])


@provokes("archive-cut-off-small")
def cut_small_buffer(_: Path) -> object:
    return torch.load(io.BytesIO(saved({f"w{i}": torch.zeros(4) for i in range(20)})[:-600]))


@provokes("archive-directory-damaged")
def damaged_directory(folder: Path) -> object:
    data = bytearray(saved(big()))
    at = data.index(b"PK\x01\x02")
    data[at : at + 4] = b"XXXX"
    return load(folder, bytes(data))


@provokes("archive-none")
def jit_load_of_text(folder: Path) -> object:
    path = folder / "model.pt"
    path.write_bytes(b"no archive")
    return torch.jit.load(path)


@provokes("archive-record-damaged")
def damaged_record(folder: Path) -> object:
    data = bytearray(saved(big()))
    at = data.index(b"/data/0") - 30
    at = data.rindex(b"PK\x03\x04", 0, at + 31)
    data[at : at + 4] = b"XXXX"
    return load(folder, bytes(data))


@provokes("archive-other-kind")
def exported_program(_: Path) -> object:
    return torch.load(DATA / "h200" / "export_cuda0.pt2")


@provokes("archive-record-lost")
def lost_record(folder: Path) -> object:
    records = forge.entries()
    del records[forge.find(records, "data/1")]
    return load(folder, forge.archive(records))


@provokes("archive-not-script")
def jit_load_of_state_dict(folder: Path) -> object:
    path = folder / "model.pt"
    path.write_bytes(saved(big()))
    return torch.jit.load(path)


@provokes("archive-no-version")
def no_version(folder: Path) -> object:
    records = forge.entries()
    del records[forge.find(records, "version")]
    return load(folder, forge.archive(records))


@provokes("archive-no-folder")
def no_folder(folder: Path) -> object:
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", b"numbers")
    return torch.load(path)


@provokes("script-too-new")
def newer_version(folder: Path) -> object:
    return load(folder, forge.archive(forge.with_changes(forge.entries(), "version", data=b"99\n")))


@provokes("record-wrong-size", since=(2, 10))
def short_record(folder: Path) -> object:
    return load(folder, forge.archive(forge.with_changes(forge.entries(), "data/0", data=b"short")))


@provokes("mmap-not-plain")
def short_record_with_mmap(folder: Path) -> object:
    tensor = forge.tensor(shape=(100_000,), storage=forge.storage_id(numel=100_000))
    return load(folder, forge.checkpoint(forge.pickled(forge.ordered({"w": tensor}))), mmap=True)


@provokes("byte-order")
def odd_byte_order(folder: Path) -> object:
    return load(folder, forge.archive(forge.with_changes(forge.entries(), "byteorder", data=b"middle")))


# -- the legacy format, and ways to open a file


def legacy(obj: object) -> bytes:
    return saved(obj, _use_new_zipfile_serialization=False)


@provokes("legacy-cut-off")
def cut_legacy(folder: Path) -> object:
    return load(folder, legacy(big())[:-2176])


@provokes("legacy-wrong-size")
def legacy_storage_of_wrong_size(folder: Path) -> object:
    data = legacy({"w": torch.zeros(1000)})
    at = data.rindex(struct.pack("<q", 1000))
    return load(folder, data[:at] + struct.pack("<q", 999) + data[at + 8 :])


@provokes("magic-number")
def plain_pickle(folder: Path) -> object:
    return load(folder, pickle.dumps([1, 2, 3], 2), weights_only=False)


@provokes("legacy-protocol")
def damaged_header(folder: Path) -> object:
    data = legacy(big())
    return load(
        folder, data.replace(struct.pack("<2sH", b"\x80\x02", 0x4DE9)[:2] + b"M\xe9\x03.", b"\x80\x02M\xea\x03.", 1)
    )


@provokes("mmap-legacy")
def legacy_with_mmap(folder: Path) -> object:
    return load(folder, legacy(big()), mmap=True)


@provokes("mmap-no-path")
def buffer_with_mmap(_: Path) -> object:
    return torch.load(io.BytesIO(saved(big())), mmap=True)


@provokes("script-in-load", since=(2, 6))
def torch_load_of_script(_: Path) -> object:
    return torch.load(DATA / "h200" / "torchscript_cuda0.pt")


@provokes("script-in-load-warning")
def torch_load_of_script_warning(folder: Path) -> object:
    path = folder / "script.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    return torch.load(path, weights_only=False)


@provokes("not-seekable")
def stream_without_seek(_: Path) -> object:
    return torch.load(types.SimpleNamespace(read=lambda: b"", readline=lambda: b""))


@provokes("save-two-dtypes")
def two_dtypes(_: Path) -> object:
    tensor = torch.zeros(4)
    return saved([tensor, tensor.view(torch.int32)])


# -- pickles


@provokes("operand", since=(2, 6))
def html(folder: Path) -> object:
    return load(folder, b"<!DOCTYPE html><html><body>login</body></html>")


@provokes("operand", since=(2, 6))
def lfs_pointer(folder: Path) -> object:
    return load(folder, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


@provokes("operand", since=(2, 6))
def json_text(folder: Path) -> object:
    return load(folder, json.dumps({"error": "not found"}).encode())


@provokes("operand", since=(2, 6))
def gzipped(folder: Path) -> object:
    return load(folder, gzip.compress(saved(big())))


@provokes("operand", since=(2, 6))
def newer_protocol(folder: Path) -> object:
    return load(folder, saved({"weight": torch.zeros(2)}, pickle_protocol=4))


@provokes("load-key")
def html_without_weights_only(folder: Path) -> object:
    return load(folder, b"<!DOCTYPE html><html><body>login</body></html>", weights_only=False)


@provokes("load-key")
def lfs_pointer_without_weights_only(folder: Path) -> object:
    return load(folder, b"version https://git-lfs.github.com/spec/v1\n", weights_only=False)


@provokes("tar-of-something")
def zeros_without_weights_only(folder: Path) -> object:
    return load(folder, bytes(1000), weights_only=False)


@provokes("pickle-cut-off")
def empty_without_weights_only(folder: Path) -> object:
    return load(folder, b"", weights_only=False)


@provokes("pickle-cut-off")
def cut_pickle(folder: Path) -> object:
    return load(folder, legacy(big())[:200], weights_only=False)


@provokes("pickle-cut-off-silent", since=(2, 6))
def empty_weights_only(folder: Path) -> object:
    return load(folder, b"")


def pickle_of_missing_class(module: str, name: str) -> bytes:
    """The pickle of an object whose class no longer exists."""
    home = types.ModuleType(module)
    kind = type(name, (), {"__module__": module})
    setattr(home, name, kind)
    parts = module.split(".")
    with mock.patch.dict(sys.modules, {".".join(parts[:n]): home for n in range(1, len(parts) + 1)}):
        return saved(kind())


@provokes("class-not-defined")
def class_of_main_module(folder: Path) -> object:
    data = pickle_of_missing_class("__main__", "NetOfAScript")
    return load(folder, data, weights_only=False)


@provokes("class-module-missing")
def missing_module(folder: Path) -> object:
    return load(folder, pickle_of_missing_class("zzz_models", "Net"), weights_only=False)


@provokes("class-module-missing")
def missing_nested_module(folder: Path) -> object:
    return load(folder, pickle_of_missing_class("zzz.models.yolo", "Net"), weights_only=False)


@provokes("python-2-text")
def python_2(folder: Path) -> object:
    body = forge.pickled(b"}U\x01aU\x01\xbes")
    return load(folder, forge.checkpoint(body), weights_only=False)


@provokes("plain-unpickler")
def pickle_load(_: Path) -> object:
    data = forge.records(saved({"w": torch.zeros(2)}))
    return pickle.loads(next(data[name] for name in data if name.endswith("data.pkl")))


# -- weights_only


@provokes("name-not-allowed", since=(2, 4))
def namespace(folder: Path) -> object:
    return load(folder, saved({"args": argparse.Namespace(lr=1)}), weights_only=True)


@provokes("name-not-allowed", since=(2, 4))
def builtins_eval(folder: Path) -> object:
    return load(
        folder, forge.checkpoint(forge.pickled(forge.call(forge.name("builtins", "eval"), "1"))), weights_only=True
    )


@provokes("name-not-allowed", since=(2, 6))
def truncated_global(folder: Path) -> object:
    data = legacy(torch.nn.Linear(2, 2).state_dict())
    at = data.index(b"OrderedDict\n")
    return load(folder, data[:at] + b"OrderedDic\n" + data[at:])


@provokes("class-not-defined")
def truncated_class_name(folder: Path) -> object:
    data = legacy(torch.nn.Linear(2, 2).state_dict())
    return load(folder, data.replace(b"OrderedDict\n", b"OrderedDic\n"), weights_only=False)


@provokes("name-blocked", since=(2, 5))
def blocked_global(folder: Path) -> object:
    return load(folder, forge.checkpoint(forge.pickled(forge.call(forge.name("os", "getcwd")))), weights_only=True)


@provokes("build-not-allowed", since=(2, 5))
def build_of_list(folder: Path) -> object:
    return load(folder, forge.checkpoint(forge.pickled(b"]}b")), weights_only=True)


@provokes("call-not-allowed")
def call_of_string(folder: Path) -> object:
    return load(folder, forge.checkpoint(forge.pickled(forge.call(forge.text("print")))), weights_only=True)


@provokes("new-not-allowed", since=(2, 5))
def new_of_string(folder: Path) -> object:
    return load(folder, forge.checkpoint(forge.pickled(forge.text("Net") + b")\x81")), weights_only=True)


@provokes("id-not-allowed", since=(2, 6))
def foreign_persistent_id(folder: Path) -> object:
    body = forge.tuple_of("module", 1, 2, 3) + b"Q"
    return load(folder, forge.checkpoint(forge.pickled(body)), weights_only=True)


@provokes("import-first", since=(2, 6))
def distributed_tensor(folder: Path) -> object:
    name = forge.name("torch.distributed.tensor", "DTensor")
    with mock.patch("torch._weights_only_unpickler._get_user_allowed_globals", dict):
        return load(folder, forge.checkpoint(forge.pickled(name)), weights_only=True)


@provokes("pickle-module-given")
def pickle_module_with_weights_only(folder: Path) -> object:
    return load(folder, saved(big()), weights_only=True, pickle_module=pickle)


# -- state dicts


@provokes("state-dict-keys")
def module_prefix(_: Path) -> object:
    state = {f"module.{name}": value for name, value in torch.nn.Linear(2, 2).state_dict().items()}
    return torch.nn.Linear(2, 2).load_state_dict(state)


@provokes("state-dict-keys")
def whole_checkpoint(_: Path) -> object:
    return torch.nn.Linear(2, 2).load_state_dict({"state_dict": {}, "epoch": 3})


@provokes("state-dict-keys")
def other_shape(_: Path) -> object:
    return torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 3).state_dict())


@provokes("meta-tensor")
def meta_module_to_cpu(_: Path) -> object:
    return torch.nn.Linear(2, 2).to("meta").to("cpu")


@provokes("state-dict-kind")
def whole_model(_: Path) -> object:
    return torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 2))


@provokes("optimizer-group-size")
def optimizer_size(_: Path) -> object:
    small, large = (torch.optim.SGD(torch.nn.Linear(2, 2, bias=bias).parameters(), lr=1) for bias in (False, True))
    return large.load_state_dict(small.state_dict())


@provokes("optimizer-groups")
def optimizer_groups(_: Path) -> object:
    model = torch.nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), lr=1)
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1)
    return one.load_state_dict(two.state_dict())


# -- other formats


@provokes("script-no-file")
def jit_load_of_missing_file(folder: Path) -> object:
    return torch.jit.load(folder / "nope.pt")


@provokes("export-other-kind" if RELEASE >= (2, 8) else "export-no-zip")
def export_load_of_state_dict(folder: Path) -> object:
    path = folder / "model.pt2"
    path.write_bytes(saved(big()))
    return torch.export.load(path)


@provokes("export-no-zip", since=(2, 8))
def export_load_of_text(folder: Path) -> object:
    path = folder / "model.pt2"
    path.write_bytes(b"no program")
    return torch.export.load(path)


@provokes("distributed-metadata")
def no_metadata(folder: Path) -> object:
    import torch.distributed.checkpoint as dcp

    if RELEASE < (2, 3):
        return dcp.load_state_dict({"w": torch.zeros(2)}, dcp.FileSystemReader(folder), no_dist=True)
    return dcp.load({"w": torch.zeros(2)}, checkpoint_id=folder)


@provokes("distributed-missing-key", since=(2, 4))
def missing_key(folder: Path) -> object:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.zeros(2)}, checkpoint_id=folder / "run")
    return dcp.load({"other": torch.zeros(2)}, checkpoint_id=folder / "run")


def safetensors(folder: Path, data: bytes) -> object:
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    path.write_bytes(data)
    return load_file(path)


@provokes("safetensors-header")
def html_as_safetensors(folder: Path) -> object:
    return safetensors(folder, b"<!DOCTYPE html><html><body>login</body></html>")


@provokes("safetensors-header")
def empty_safetensors(folder: Path) -> object:
    return safetensors(folder, b"")


@provokes("safetensors-header-json")
def header_that_is_not_json(folder: Path) -> object:
    return safetensors(folder, struct.pack("<Q", 15) + b"not json at all")


@provokes("safetensors-offsets")
def header_with_gaps(folder: Path) -> object:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
    return safetensors(folder, struct.pack("<Q", len(header)) + header + bytes(8))


@provokes("safetensors-incomplete")
def cut_safetensors(folder: Path) -> object:
    from safetensors.torch import save

    return safetensors(folder, save({"w": torch.zeros(100)})[:-4])


@provokes("safetensors-shared")
def shared_tensors_in_safetensors(folder: Path) -> object:
    from safetensors.torch import save_file

    tensor = torch.zeros(4)
    return save_file({"a": tensor, "b": tensor}, folder / "x.safetensors")


@provokes("safetensors-strided")
def strided_tensor_in_safetensors(folder: Path) -> object:
    from safetensors.torch import save_file

    return save_file({"a": torch.zeros(4, 4).t()[1:]}, folder / "x.safetensors")


@provokes("safetensors-map-location", since=(2, 13))
def map_location_dict_for_safetensors(folder: Path) -> object:
    from safetensors.torch import save

    path = folder / "model.safetensors"
    path.write_bytes(save({"w": torch.zeros(4)}))
    return torch.load(path, map_location={"cpu": "cpu"})


@provokes("safetensors-no-tensor")
def missing_tensor_in_safetensors(folder: Path) -> object:
    from safetensors import safe_open
    from safetensors.torch import save

    path = folder / "model.safetensors"
    path.write_bytes(save({"w": torch.zeros(4)}))
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("b")


@provokes("safetensors-device")
def invalid_device_for_safetensors(folder: Path) -> object:
    from safetensors.torch import load_file, save

    path = folder / "model.safetensors"
    path.write_bytes(save({"w": torch.zeros(4)}))
    return load_file(path, device="gpu")


@provokes("load-folder")
def torch_load_of_folder(folder: Path) -> object:
    return torch.load(folder)


@provokes("write-no-folder")
def save_into_missing_folder(folder: Path) -> object:
    return torch.save({}, folder / "none" / "model.pt")


@provokes("state-dict-is-no-model")
def state_dict_used_as_model(folder: Path) -> Any:
    weights: Any = load(folder, saved(torch.nn.Linear(2, 2).state_dict()))
    return weights.eval()


@provokes("module-of-older-torch")
def module_of_older_torch(folder: Path) -> Any:
    gelu = torch.nn.GELU()
    del gelu.__dict__["approximate"]
    older: Any = load(folder, saved(gelu), weights_only=False)
    return older(torch.zeros(2))


@provokes("pickle-damaged")
def text_similar_to_a_pickle(folder: Path) -> object:
    return load(folder, b"0.98\n0.97\n", weights_only=False)


@provokes("torch-lacks-it")
def unknown_argument_of_torch_load(folder: Path) -> object:
    return load(folder, saved({}), weights_only=False, skip_data=True)


@provokes("map-location-kind")
def number_as_map_location(folder: Path) -> object:
    return load(folder, saved({"w": torch.zeros(2)}), map_location=0)


@provokes("map-location-kind")
def map_location_dict_of_devices(folder: Path) -> object:
    return load(folder, saved({"w": torch.zeros(2)}), map_location={"cpu": torch.device("cpu")})


class _WindowsPathPickle:
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return pathlib.WindowsPath, ("model",)


@provokes("path-of-another-system")
def pickled_windows_path(folder: Path) -> object:
    return load(folder, saved({"folder": _WindowsPathPickle()}), weights_only=False)


@provokes("archive-cut-off")
def jit_load_of_html(folder: Path) -> object:
    path = folder / "model.pt"
    path.write_bytes(b"<!DOCTYPE html><html>Not found</html>")
    return torch.jit.load(str(path))


@provokes("archive-none")
def jit_load_of_empty_file(folder: Path) -> object:
    path = folder / "model.pt"
    path.write_bytes(b"")
    return torch.jit.load(str(path))


@provokes("load-key")
def gguf(folder: Path) -> object:
    return load(folder, b"GGUF" + struct.pack("<IQQ", 3, 2, 5) + bytes(64), weights_only=False)


@provokes("mps-not-available")
def mps_device(_: Path) -> object:
    return torch.zeros(1, device="mps")


@provokes("backend-not-built")
def build_without_nccl(folder: Path) -> object:
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), 1)
    with mock.patch("torch.distributed.distributed_c10d.is_nccl_available", return_value=False):
        return dist.init_process_group("nccl", store=store, rank=0, world_size=1)


@provokes("rendezvous-variable")
def no_rendezvous_variables(_: Path) -> object:
    import torch.distributed as dist

    with mock.patch.dict("os.environ", clear=True):
        return dist.init_process_group("gloo")


@provokes("group-not-initialized")
def no_process_group(_: Path) -> object:
    import torch.distributed as dist

    return dist.all_reduce(torch.zeros(1))


@provokes("ddp-device-ids")
def device_ids_for_cpu_model(folder: Path) -> object:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0])
    finally:
        dist.destroy_process_group()


@provokes("group-twice", since=(2, 2))
def two_process_groups(folder: Path) -> object:
    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    finally:
        dist.destroy_process_group()


@provokes("port-in-use", since=(2, 4))
def port_in_use(_: Path) -> object:
    import socket

    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as server:
        port, libuv = server.getsockname()[1], sys.platform != "win32"  # the wheels for Windows have no libuv
        return dist.TCPStore("127.0.0.1", port, 1, is_master=True, use_libuv=libuv)


@provokes("cpu-memory-full")
def allocation_too_large(_: Path) -> object:
    return torch.empty(1 << 59, dtype=torch.uint8)


@provokes("safetensors-only-tensors")
def number_in_safetensors(folder: Path) -> object:
    from safetensors.torch import save_file

    tensors: Any = {"epoch": 3}
    return save_file(tensors, folder / "model.safetensors")


@provokes("meta-no-op")
def load_state_dict_into_meta_module(_: Path) -> object:
    return torch.nn.Linear(2, 2, device="meta").load_state_dict(torch.nn.Linear(2, 2).state_dict())


@provokes("scaler-state-empty", since=(2, 3))
def state_of_a_disabled_scaler(_: Path) -> object:
    return torch.amp.GradScaler("cpu").load_state_dict({})


@provokes("hub-hash")
def hub_download_with_wrong_hash(folder: Path) -> object:
    (folder / "published").write_bytes(b"?")
    source, target = (folder / "published").as_uri(), str(folder / "model.pt")
    # Older releases of torch do not close it.
    with urlopen(source) as page, mock.patch("torch.hub.urlopen", return_value=page):  # noqa: S310
        return torch.hub.download_url_to_file(source, target, hash_prefix="00", progress=False)


@provokes("unknown-architecture")
def unknown_cuda_architecture(_: Path) -> object:
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    with mock.patch.dict("os.environ", {"TORCH_CUDA_ARCH_LIST": "99.9"}):
        return _get_cuda_arch_flags()


@provokes("container-not-allowed", since=(2, 5))
def allowed_deque(folder: Path) -> object:
    from collections import deque

    with torch.serialization.safe_globals([deque]):
        return load(folder, saved(deque([1, 2])), weights_only=True)
