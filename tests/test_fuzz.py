"""Files damaged at random: ``inspect`` always returns a result, which never calls a file better than it is.

Files of every format are cut, zeroed, flipped, spliced, re-zipped. Whatever the outcome, the reader must return a
``Checkpoint``, in reasonable time, that can be displayed in every form. The result is compared with the loaders
themselves: C's unpickler with its imports recorded, torch's own reader, and ``torch.load``.

TRANSLOAD_FUZZ multiplies the number of examples; ``--hypothesis-profile=explore`` uses new ones in each run. Without it
the examples are the same in every run, so the files that they start from must be, too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests import forge
from tests.each import each
from tests.forge import DANGEROUS, FUZZ, ordered, pickled, tensor
from tests.makers import saved
from tests.release import RELEASE, SAVES_NEW_DTYPES

from transload.checkpoint import Checkpoint
from transload.errors import CannotReadError
from transload.geometry import contiguous
from transload.opening import inspect

DATA = Path(__file__).parent / "data"
SMALL = 24 << 10

tries = functools.partial(
    settings, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
)


# -- files -------------------------------------------------------------------------------------------------------------


def streamed(value: object) -> bytes:
    """Saved in the stream format, with fixed numbers in place of the addresses by which it names storages."""
    address_of, numbers = torch.UntypedStorage._cdata, dict[int, int]()

    def numbered(storage: Any) -> int:
        return numbers.setdefault(address_of.__get__(storage), 94_000_000_000_000 + len(numbers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "_cdata", property(numbered), raising=False)
        return saved(value, _use_new_zipfile_serialization=False)


def state_dict() -> dict[str, Any]:
    weight = torch.arange(24, dtype=torch.float32)
    return {
        "weight": weight.view(4, 6),
        "tied": weight,
        "row": weight[6:12],
        "transposed": weight.view(4, 6).t(),
        "half": torch.ones(3, dtype=torch.float16),
        **({"fp8": torch.ones(5).to(torch.float8_e4m3fn)} if SAVES_NEW_DTYPES else {}),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "epoch": 3,
        "args": {"lr": 0.1, "name": "x"},
    }


def typed() -> dict[str, Any]:
    """The same without the dtype that the stream format cannot store."""
    state = state_dict()
    state.pop("fp8", None)
    return state


def hostile_entries() -> bytes:
    return pickled(ordered({"w0": tensor("0"), "bad": DANGEROUS, "w1": tensor("1")}))


def hostile_stream(count: int = 2) -> bytes:
    tensors = {f"w{i}": tensor(storage=forge.storage_id(str(i), 4, "FloatStorage", "cpu", None)) for i in range(count)}
    return forge.legacy(object=pickled(ordered({**tensors, "bad": DANGEROUS})))


@functools.cache
def hostile_files() -> dict[str, bytes]:
    return {
        "hostile zip": forge.checkpoint(hostile_entries()),
        "hostile zip, re-zipped": rezip(forge.checkpoint(hostile_entries()), zipfile.ZIP_DEFLATED),
        "hostile stream": hostile_stream(),
        "hostile keys": forge.legacy(keys=pickled(forge.list_of("0", "1", DANGEROUS))),
        "hostile tar": forge.tar({"pickle": pickled(forge.dictionary({"w0": b"P100\n", "bad": DANGEROUS}))}),
        "hostile pickle": pickle.dumps([1, 2, 3]) + pickled(DANGEROUS),
        "hostile pickle of tensors": pickle.dumps(torch.ones(2), 3)[:-1] + DANGEROUS + b"\x86.",
        "hostile stray": forge.checkpoint(extra={"more.pkl": pickled(DANGEROUS)}),
    }


def rezip(data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as out:
        for title, content in forge.records(data).items():
            out.writestr(zipfile.ZipInfo(title), content, method)  # without a timestamp
    return buffer.getvalue()


@functools.cache
def sound_files() -> dict[str, bytes]:
    """Files that torch loads, by name."""
    files = {
        "zip": saved(state_dict()),
        "zip, stored again": rezip(saved(state_dict())),
        "zip, deflated": rezip(saved(state_dict()), zipfile.ZIP_DEFLATED),
        "stream": streamed(typed()),
        "forged zip": forge.checkpoint(),
        "forged stream": forge.legacy(),
    }
    chosen = ("torch-1.6.0-py3.7.16", "torch-1.4.0-py3.7.16", "torch-2.13.0-py3.11.7", "torch-1.0.0-py2.7.18")
    for release in chosen:
        for title in ("state_dict_cpu.pt", "zoo_cuda0.pt", "train_cuda0.ckpt"):
            path = DATA / "torch-releases" / release / title
            if path.exists():
                files[f"{release}/{title}"] = path.read_bytes()
    return files


@functools.cache
def all_files() -> dict[str, bytes]:
    paths = [path for path in sorted(DATA.rglob("*.p*t*")) if path.is_file() and path.stat().st_size < SMALL]
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths if path.suffix != ".py"}
    pickles = {f"tensors in a pickle, protocol {protocol}": pickle.dumps(typed(), protocol) for protocol in (2, 4)}
    return {**files, **sound_files(), **hostile_files(), **pickles, "tar": forge.tar(), "pickle": pickle.dumps(typed)}


# -- random damage -----------------------------------------------------------------------------------------------------

Mutation = Callable[[st.DrawFn, bytes], bytes]


def place(draw: st.DrawFn, data: bytes) -> int:
    """A position, as often near a boundary or a signature as anywhere."""
    start = draw(st.integers(0, max(0, len(data) - 1)))
    hits = [data.find(signature, start) for signature in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")]
    marks = [0, len(data) // 2, max(0, len(data) - 22), *(max(0, at) for at in hits)]
    near = st.builds(lambda mark, by: min(max(0, mark + by), len(data)), st.sampled_from(marks), st.integers(-40, 60))
    return draw(near | st.integers(0, len(data)))


def span(draw: st.DrawFn, data: bytes) -> tuple[int, int]:
    begin = place(draw, data)
    return begin, begin + draw(st.sampled_from([1, 2, 4, 16, 46, 64, 512, 4096]))


def cut(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: place(draw, data)]


def cut_front(draw: st.DrawFn, data: bytes) -> bytes:
    return data[draw(st.sampled_from([1, 4, 64])) :]


def zero(draw: st.DrawFn, data: bytes) -> bytes:
    begin, end = span(draw, data)
    return data[:begin] + bytes(len(data[begin:end])) + data[end:]


def flip(draw: st.DrawFn, data: bytes) -> bytes:
    at = min(place(draw, data), len(data) - 1)
    return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :] if data else data


def overwrite(draw: st.DrawFn, data: bytes) -> bytes:
    at = place(draw, data)
    number = draw(st.sampled_from([0, 1, 3, 0x7F, 0xFF, 0xFFFF, 0xFFFFFFFF]) | st.integers(0, len(data)))
    raw = struct.pack("<I", number)[: draw(st.sampled_from([1, 2, 4]))]
    return data[:at] + raw + data[at + len(raw) :]


def repeat(draw: st.DrawFn, data: bytes) -> bytes:
    begin, end = span(draw, data)
    return data[:end] + data[begin:end] + data[end:]


def drop(draw: st.DrawFn, data: bytes) -> bytes:
    begin, end = span(draw, data)
    return data[:begin] + data[end:]


def swap(draw: st.DrawFn, data: bytes) -> bytes:
    first, second = sorted((span(draw, data), span(draw, data)))
    if first[1] > second[0]:
        return data
    parts = data[: first[0]], data[slice(*first)], data[first[1] : second[0]], data[slice(*second)], data[second[1] :]
    return parts[0] + parts[3] + parts[2] + parts[1] + parts[4]


def splice(draw: st.DrawFn, data: bytes) -> bytes:
    other = draw(st.sampled_from(sorted(all_files().values(), key=len)))
    return data[: place(draw, data)] + other[place(draw, other) :]


def append(draw: st.DrawFn, data: bytes) -> bytes:
    junk = st.sampled_from([b"\0", b"junk" * 9, bytes(600), b"PK\x05\x06", pickled(b"N")])
    other = st.sampled_from(sorted(all_files().values(), key=len))
    return data + draw(junk | other)


def prepend(draw: st.DrawFn, data: bytes) -> bytes:
    return draw(st.sampled_from([b"\0", b"JUNK" * 8, b"\xef\xbb\xbf", b"HTTP/1.1 200 OK\r\n\r\n"])) + data


def as_text(draw: st.DrawFn, data: bytes) -> bytes:
    if draw(st.booleans()):
        return data.replace(b"\n", b"\r\n")
    return data.decode("utf-8", "replace").encode()


def zip_again(draw: st.DrawFn, data: bytes) -> bytes:
    method = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    try:
        return rezip(data, method)
    except Exception:  # noqa: BLE001 - a file that zipfile cannot read stays as it is
        return data


MUTATIONS: tuple[Mutation, ...] = (
    *(cut, cut_front, zero, flip, flip, overwrite, overwrite, repeat, drop, swap, splice, append, prepend, as_text),
    zip_again,
)


@st.composite
def damaged(draw: st.DrawFn, files: Callable[[], dict[str, bytes]], most: int = 3) -> bytes:
    """A file after a few random mutations."""
    data = files()[draw(st.sampled_from(sorted(files())))]
    for _ in range(draw(st.integers(1, most))):
        data = draw(st.sampled_from(MUTATIONS))(draw, data)
    return data[: 4 * SMALL]


def inspected(data: bytes, **options: bool) -> Checkpoint:
    """The result of ``inspect``; an error instead of a checkpoint is a bug."""
    try:
        return inspect(data, **options)
    except CannotReadError:
        pytest.fail("bytes can always be read")


# -- inspect always returns a result -----------------------------------------------------------------------------------


@tries(max_examples=300 * FUZZ)
@given(damaged(all_files), st.booleans())
@example(b"", False)
@example(b"PK\x03\x04", True)
def test_inspect_always_returns_a_result_that_can_be_displayed(data: bytes, verify: bool) -> None:
    result = inspected(data, verify=verify)
    assert json.loads(json.dumps(result.to_dict()))["schema"] == 1
    assert repr(result)
    assert result._repr_html_()
    for storage in result.storages:
        assert storage.stored >= 0
        assert storage.offset is None or 0 <= storage.offset <= len(data)
        assert storage.compressed or storage.offset is None or storage.offset + storage.stored <= len(data)


@tries(max_examples=60 * FUZZ)
@given(damaged(all_files))
def test_inspect_is_deterministic(data: bytes) -> None:
    assert json.dumps(inspected(data).to_dict()) == json.dumps(inspected(data).to_dict())


@tries(max_examples=200 * FUZZ)
@given(st.binary(max_size=400) | st.binary(max_size=400).map(lambda tail: b"PK\x03\x04" + tail))
def test_random_bytes_are_only_ever_accepted_as_safetensors(data: bytes) -> None:
    assert not inspected(data).ok or inspected(data).format == "safetensors"


# -- safety: inspect finds every import that a loader would make -------------------------------------------------------


class Recorder(pickle.Unpickler):
    """C's unpickler without imports: each one is recorded, and replaced by an inert class."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.imports: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.imports.add((module, name))
        return Inert

    def persistent_load(self, pid: object) -> object:
        return pid


class Inert:
    """Accepts any call, and does nothing."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None: ...
    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...
    def append(self, value: object) -> None: ...
    def extend(self, values: object) -> None: ...
    def add(self, value: object) -> None: ...


def imports_of(data: bytes, pickles: int = 1) -> set[tuple[str, str]]:
    """What unpickling would import, until it fails."""
    file = io.BytesIO(data)
    imports: set[tuple[str, str]] = set()
    for _ in range(pickles):
        recorder = Recorder(file)
        try:
            recorder.load()
        except Exception:  # noqa: BLE001 - a damaged pickle may raise anything
            return imports | recorder.imports
        imports |= recorder.imports
    return imports


def streams(data: bytes) -> Iterator[bytes]:
    """Every pickle that a loader would find: torch's zip reader, ``zipfile``, ``tarfile``, or a plain unpickler."""
    with contextlib.suppress(Exception):
        yield bytes(torch._C.PyTorchFileReader(io.BytesIO(data)).get_record("data.pkl"))
    yield from zipped_pickles(data)
    yield from tarred_pickles(data)
    yield data


def zipped_pickles(data: bytes) -> list[bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            return [opened.read(info) for info in opened.infolist() if info.filename.endswith(".pkl")]
    except Exception:  # noqa: BLE001 - it cannot be read
        return []


def tarred_pickles(data: bytes) -> list[bytes]:
    import tarfile

    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as opened:
            members = [opened.extractfile(name) for name in ("storages", "tensors", "pickle")]
            return [file.read() for file in members if file is not None]
    except Exception:  # noqa: BLE001 - it cannot be read
        return []


def reaches(data: bytes) -> bool:
    """Whether some loader would still reach the hostile call."""
    return any(("os", "getcwd") in imports_of(stream, 6) for stream in streams(data))


@tries(max_examples=400 * FUZZ)
@given(damaged(hostile_files))
def test_damage_never_makes_a_hostile_file_look_safe(data: bytes) -> None:
    result = inspected(data)
    if reaches(data):
        assert result.safety not in ("data-only", "needs-trust"), result.problems


@each("name", hostile_files())
def test_undamaged_hostile_files_are_dangerous(name: str) -> None:
    data = hostile_files()[name]
    assert reaches(data)
    assert inspected(data).safety == "dangerous"


@tries(max_examples=150 * FUZZ)
@given(damaged(all_files))
def test_every_import_a_loader_would_make_is_listed(data: bytes) -> None:
    result = inspected(data)
    if result.safety not in ("data-only", "needs-trust"):
        return
    listed = {use.full_name for use in result.globals} | {use.spelling for use in result.globals}
    for stream in streams(data):
        for module, name in imports_of(stream):
            assert f"{module}.{name}" in listed


# -- integrity: torch loads the same bytes from a file that inspect calls sound ----------------------------------------


def same(ours: Checkpoint, data: bytes, theirs: Any) -> None:
    """Assert that both have the same tensors, and that their bytes are at the offsets that ``inspect`` reports."""
    loaded = dict(tensors_of(theirs))
    assert {tensor.name for tensor in ours.tensors} == set(loaded)
    storages = {storage.id: storage for storage in ours.storages}
    for tensor_ in ours.tensors:
        value = loaded[tensor_.name]
        assert (tensor_.dtype, tensor_.shape) == (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if tensor_.storage is None:
            continue
        storage = storages[tensor_.storage]
        assert (tensor_.stride, tensor_.offset) == (tuple(value.stride()), value.storage_offset())
        if storage.offset is not None:
            assert bytes(value.untyped_storage()) == data[storage.offset : storage.offset + storage.nbytes]
    for names in ours.shared:
        pointers = [loaded[name].untyped_storage().data_ptr() for name in names if name in loaded]
        assert len(set(pointers)) <= 1


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from tensors_of(child, f"{name}/{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from tensors_of(child, f"{name}/{index}" if name else str(index))


def load(data: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Before 2.6 weights_only=True allows less, and compares the indices of a sparse tensor before it has read them.
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=RELEASE >= (2, 6))


def too_new(result: Checkpoint) -> bool:
    """Whether this torch is too old to have the function that rebuilds tensors of newer dtypes."""
    name = "_rebuild_tensor_v3"
    return not hasattr(torch._utils, name) and any(use.name == name for use in result.globals)


# torch.load does not read these formats, damaged or not.
NOT_FOR_TORCH = frozenset({"torch-tar", "safetensors", "pickle", "torch-directory"})


@tries(max_examples=400 * FUZZ)
@given(damaged(sound_files, 2))
def test_torch_loads_the_same_tensors_from_a_file_that_is_called_sound(data: bytes) -> None:
    result = inspected(data, verify=True)
    old_form = any(storage.record.startswith("tensors/") for storage in result.storages)
    python2 = "pickle-python2-bytes" in {problem.code for problem in result.problems}  # needs another encoding
    if not result.ok or result.format in NOT_FOR_TORCH or old_form or python2 or "refuses" in result.prediction:
        return
    if too_new(result):
        return
    same(result, data, load(data))


@each("name", sound_files())
def test_undamaged_sound_files_are_data_only_and_torch_loads_the_same_tensors(name: str) -> None:
    data = sound_files()[name]
    result = inspected(data, verify=True)
    assert result.safety == "data-only"
    assert result.integrity in ("whole", "unchecked", "repairable")
    if "refuses" not in result.prediction and not too_new(result):  # weights_only refuses some opcodes of Python 2
        same(result, data, load(data))


@tries(max_examples=200 * FUZZ)
@given(damaged(sound_files, 1))
def test_zip_that_is_called_whole_has_only_undamaged_records(data: bytes) -> None:
    """With ``verify=True``, ``whole`` means that every record is identical to a record of some undamaged file."""
    if data[:4] != b"PK\x03\x04":
        return
    result = inspected(data, verify=True)
    if result.integrity == "whole" and result.safety == "data-only":
        zipped = [file for file in all_files().values() if file[:2] == b"PK"]
        known = {content for file in zipped for content in forge.records(file).values()}
        assert set(forge.records(data).values()) <= known


# -- generated tensors -------------------------------------------------------------------------------------------------

KINDS = (
    "FloatStorage",
    "LongStorage",
    "ByteStorage",
    "HalfStorage",
    "BoolStorage",
    "ComplexFloatStorage",
    "UntypedStorage",
)
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 8, -1, 1 << 40])
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
FLAGS = st.sampled_from([True, False, False, None, 0, 1])


@st.composite
def storage_ids(draw: st.DrawFn, extra: tuple[object, ...] = ()) -> bytes:
    key = draw(st.sampled_from(["0", "1", "2", "3", 0]))
    numel = draw(st.sampled_from([0, 4, 4, 4, 8, 16, 5, -4]))
    device = draw(st.sampled_from(["cpu", "cpu", "cpu", "cuda:0", "meta", "nowhere"]))
    return forge.storage_id(key, numel, draw(st.sampled_from(KINDS)), device, *extra)


@st.composite
def calls(draw: st.DrawFn, depth: int = 2) -> bytes:
    """A call of a rebuild function with arguments that may or may not be valid."""
    shape = draw(SHAPES)
    stride = draw(SHAPES | st.just(contiguous(shape)) | st.just(contiguous(shape)))
    placement = (draw(storage_ids()), draw(st.sampled_from([0, 0, 0, 1, 3, -1])), shape, stride)
    hooks = draw(st.sampled_from([ordered(), ordered(), b"}", b"N"]))
    kind = draw(st.sampled_from(["v1", "v2", "v2", "v2", "v3", "meta", *(["parameter"] if depth else [])]))
    if kind == "v1":
        return forge.rebuild_call("_rebuild_tensor", *placement)
    if kind == "meta":
        return forge.rebuild_call(
            "_rebuild_meta_tensor_no_storage", forge.name("torch", "float32"), *placement[2:], draw(FLAGS)
        )
    if kind == "parameter":
        return forge.rebuild_call("_rebuild_parameter", draw(calls(depth - 1)), draw(FLAGS), hooks)
    if kind == "v2":
        return forge.rebuild_call("_rebuild_tensor_v2", *placement, draw(FLAGS), hooks)
    dtype = draw(st.sampled_from(["float8_e5m2", "uint16", "float32", "uint64", "bits8", "layout", "nothing"]))
    return forge.rebuild_call("_rebuild_tensor_v3", *placement, draw(FLAGS), hooks, forge.name("torch", dtype))


@st.composite
def generated_checkpoints(draw: st.DrawFn) -> bytes:
    """A checkpoint of generated tensors over storages of a few sizes."""
    tensors = {f"t{i}": draw(calls()) for i in range(draw(st.integers(1, 3)))}
    sizes = draw(st.lists(st.sampled_from([0, 4, 8, 16, 32]), min_size=3, max_size=4))
    return forge.checkpoint(pickled(ordered(tensors)), {str(i): bytes(range(size)) for i, size in enumerate(sizes)})


SOUND = forge.checkpoint(pickled(ordered({"t0": tensor("0")})), {"0": bytes(16)})


@tries(max_examples=300 * FUZZ)
@given(generated_checkpoints())
@example(SOUND)
def test_generated_tensors_that_are_called_sound_are_what_torch_loads(data: bytes) -> None:
    result = inspected(data, verify=True)
    assert result.ok or data != SOUND
    if result.ok:
        same(result, data, load(data))
