"""The patterns build the same graph as the machine does opcode by opcode, for intact and damaged streams."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.each import each
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from transload.formats.pickle_machine import run
from transload.formats.record_pattern import RecordPattern
from transload.formats.tensor_pattern import TensorPattern
from transload.nodes import Big, Call, Dict, Extension, Global, OutOfBand, Persistent, Pickle, Set

FUZZ = int(os.environ.get("TRANSLOAD_FUZZ", "1"))
DATA = Path(__file__).parent.parent / "data"


def pickle_in(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    if not zipfile.is_zipfile(buffer):
        return buffer.getvalue()
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def weights(count: int = 60) -> dict[str, torch.Tensor]:
    """Similar layers, as in a model, with tensors of several ranks and dtypes."""
    shapes = ((3, 300), (300,), (), (2, 1, 3, 2), (2, 2, 2), (0, 3), (70000,))
    kinds = (torch.float32, torch.float32, torch.int64, torch.float16)
    return {
        f"layers.{i}.{len(shapes[i % 7])}.weight": torch.zeros(shapes[i % 7], dtype=kinds[i % 4]) for i in range(count)
    }


def shared() -> dict[str, torch.Tensor]:
    base = torch.zeros(90, 4)
    return {f"part.{i}": base[i:, : i % 3 + 1] for i in range(60)}


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 3 - i % 2) for i in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(i % 5 + 1, 2)) for i in range(60)]


def with_gradients() -> list[torch.Tensor]:
    return [torch.zeros(2, requires_grad=i % 3 == 0) for i in range(60)]


def legacy_pickle() -> bytes:
    """The pickle of the object in the legacy format, whose storage ids have a sixth item."""
    data = pickle_in(weights(), _use_new_zipfile_serialization=False)
    position = 0
    for _ in range(3):  # after the magic number, the protocol and the system facts
        position = run(data, position).end
    return data[position : run(data, position).end]


def index(pieces: int = 500, *, protocol: int = 4) -> bytes:
    """The index of a DCP directory, with numbers of all lengths, and texts that are new or known."""
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for number in range(pieces):
        name, sizes = f"layers.{number // 8}.weight", ((3 * number, 2), (70_000, 1, 5, 6), (9,))[number // 8 % 3]
        offsets = torch.Size([number % 8 * sizes[0], *([0] * (len(sizes) - 1))])
        chunk = metadata.ChunkStorageMetadata(offsets, torch.Size(sizes))
        entry = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size(sizes), [])
        described.setdefault(name, entry).chunks.append(chunk)
        key = metadata.MetadataIndex("".join(name) if number % 2 else str(name.encode(), "ascii"), offsets, number)
        places[key] = _StorageInfo(f"__{number % 3}_0.distcp", number**4, 1 << number % 40)
        if number % 9 == 0:
            described[f"steps.{number}"] = metadata.BytesStorageMetadata()
            places[metadata.MetadataIndex(f"steps.{number}")] = _StorageInfo("\xe9.distcp", number, 1)
    return pickle.dumps(metadata.Metadata(described, storage_data=places), protocol)


STREAMS: dict[str, Callable[[], bytes]] = {
    "weights": lambda: pickle_in(weights()),
    "shared": lambda: pickle_in(shared()),
    "trained": lambda: pickle_in(trained()),
    "parameters": lambda: pickle_in(parameters()),
    "gradients": lambda: pickle_in(with_gradients()),
    "legacy": legacy_pickle,
    "protocol 4": lambda: pickle_in(weights(), pickle_protocol=4),
    "index": index,
}


@pytest.fixture(scope="module", params=list(STREAMS))
def stream(request: pytest.FixtureRequest) -> bytes:
    return STREAMS[request.param]()


@pytest.fixture
def run_without_pattern(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Pickle]:
    """Run the machine without the patterns."""

    def run_slowly(data: bytes) -> Pickle:
        with monkeypatch.context() as patch:
            patch.setattr(TensorPattern, "read", lambda *_: 0)
            patch.setattr(RecordPattern, "read", lambda *_: 0)
            return run(data)

    return run_slowly


def _is_plain(node: Any) -> bool:
    """Whether it is a plain value, or a tuple of numbers, perhaps in another: sharing it changes nothing."""
    if type(node) is tuple and len(node) == 1:
        (node,) = node
    return type(node) in (bool, int, float, str, bytes, type(None)) or (
        type(node) is tuple and all(type(part) is int for part in node)
    )


class GraphText:
    """A graph as text, which is equal only for graphs with the same nodes, values, positions and sharing."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.lines: list[str] = []
        self.waiting: list[Any] = []
        self.kept: list[Any] = []  # alive, so that no id is reused

    def number(self, node: Any) -> str:
        if _is_plain(node):
            return repr(node)
        if id(node) not in self.numbers:
            self.numbers[id(node)] = len(self.numbers)
            self.waiting.append(node)
            self.kept.append(node)
        return f"#{self.numbers[id(node)]}"

    def parts(self, node: Any) -> tuple[Any, ...]:
        if type(node) in (Call, Persistent, Global, Dict, Set, Big, Extension, OutOfBand):
            return tuple(getattr(node, slot) for slot in type(node).__slots__)
        return tuple(node)

    def add(self, node: Any) -> None:
        self.lines.append(self.number(node))
        while self.waiting:
            node = self.waiting.pop()
            parts = [self.number(part) for part in self.parts(node)]
            self.lines.append(f"{self.numbers[id(node)]}: {type(node).__name__} {' '.join(parts)}")


def graph_text(pickle: Pickle) -> list[str]:
    text = GraphText()
    for slot in vars(Pickle("")):
        value = getattr(pickle, slot)
        text.add(list(value.items()) if slot in ("globals", "rare") else value)
    return text.lines


def test_pattern_reads_nearly_all_tensors_of_ordinary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    read = TensorPattern.read

    def counting(self: TensorPattern, *args: Any) -> int:
        ends.append(read(self, *args))
        return ends[-1]

    monkeypatch.setattr(TensorPattern, "read", counting)
    for data in (pickle_in(weights(400)), pickle_in(shared()), pickle_in(trained()), legacy_pickle()):
        run(data)
    assert sum(end > 0 for end in ends) > 500
    assert sum(end > 0 for end in ends) > 0.95 * len(ends)


@each("protocol", [4, 5])
def test_pattern_reads_nearly_all_objects_of_an_index(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    read = RecordPattern.read

    def counting(self: RecordPattern, *args: Any) -> int:
        ends.append(read(self, *args))
        return ends[-1]

    monkeypatch.setattr(RecordPattern, "read", counting)
    assert not run(index(2000, protocol=protocol)).broken
    assert sum(end > 0 for end in ends) > 4000
    assert sum(end > 0 for end in ends) > 0.9 * len(ends)


def test_graph_is_the_same_with_and_without_the_pattern(
    stream: bytes, run_without_pattern: Callable[[bytes], Pickle]
) -> None:
    assert graph_text(run(stream)) == graph_text(run_without_pattern(stream))


@each("path", sorted(DATA.glob("torch-releases/**/*.pt*")), ids=lambda path: path.name)
def test_graph_of_files_of_torch_releases_is_the_same(
    path: Path, run_without_pattern: Callable[[bytes], Pickle]
) -> None:
    data = path.read_bytes()
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            streams = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    else:
        streams = [data]
    for stream in streams:
        assert graph_text(run(stream)) == graph_text(run_without_pattern(stream))


def damaged(data: bytes, random: Random) -> bytes:
    """A stream with a few bytes changed, removed or repeated, mostly within the tensors."""
    raw = bytearray(data)
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(len(raw) // 4, len(raw))
        span = random.randrange(1, 9)
        match random.randrange(5):
            case 0:
                raw[at] = random.randrange(256)
            case 1:
                raw[at] = random.choice(b"hjKMJqrXtQR()ub}\x81\x85\x86\x87\x88\x89\x8a\x8c\x94N.")
            case 2:
                del raw[at : at + span]
            case 3:
                raw[at:at] = raw[at : at + span]
            case _:
                raw[at] = (raw[at] + random.choice((-1, 1))) % 256
    return bytes(raw)


@each("seed", range(6 * FUZZ))
def test_graph_of_a_damaged_stream_is_the_same(
    stream: bytes, run_without_pattern: Callable[[bytes], Pickle], seed: int
) -> None:
    random = Random(seed if FUZZ == 1 else None)  # noqa: S311 - test data, not secrets
    for _ in range(12):
        data = damaged(stream, random)
        assert graph_text(run(data)) == graph_text(run_without_pattern(data)), data


# -- cases that random damage hardly ever hits -------------------------------------------------------------------------


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def tensor(first: int, key: bytes = b"7", location: bytes = b"h\x02", **changed: int) -> bytes:
    """A call as torch writes it; memo entries 0 to 4 are the function, ``'storage'`` … ``OrderedDict``."""
    names = ("key", "pid", "size", "stride", "hooks", "args", "call")
    index = {name: first + position for position, name in enumerate(names)} | changed
    text = b"X" + struct.pack("<I", len(key)) + key + put(index["key"])
    pid = b"(h\x01h\x03" + text + location + b"K@t" + put(index["pid"]) + b"Q"
    sizes = b"K\x00K@\x85" + put(index["size"]) + b"K\x01\x85" + put(index["stride"])
    end = b"\x89h\x04)R" + put(index["hooks"]) + b"t" + put(index["args"]) + b"R" + put(index["call"])
    return b"(" + pid + sizes + end


def list_of_calls(*calls: bytes) -> bytes:
    """The pickle of a list of calls, whose memo indexes begin at 5."""
    names = (
        b"ctorch._utils\n_rebuild_tensor_v2\nq\x00X\x07\0\0\0storageq\x01X\x03\0\0\0cpuq\x02"
        b"ctorch\nFloatStorage\nq\x03ccollections\nOrderedDict\nq\x04"
    )
    return b"\x80\x02" + names + b"(" + b"".join(b"h\x00" + call for call in calls) + b"l."


CASES: dict[str, bytes] = {
    "plain": list_of_calls(tensor(5), tensor(12), tensor(19)),
    "a key with letters": list_of_calls(tensor(5), tensor(12, b"x"), tensor(19)),
    "a key that is not text": list_of_calls(tensor(5), tensor(12, b"\xff"), tensor(19)),
    "a longer key": list_of_calls(tensor(5), tensor(12, b"12"), tensor(19)),
    "a gap in the memo indexes": list_of_calls(tensor(5), tensor(13), tensor(20)),
    "distant memo indexes": list_of_calls(tensor(5), tensor(5000), tensor(5007)),
    "memo indexes out of order": list_of_calls(tensor(5), tensor(12, size=15, stride=14), tensor(19)),
    "a duplicate memo index": list_of_calls(tensor(5), tensor(12, args=16), tensor(19)),
    "the location is rewritten": list_of_calls(
        tensor(5), tensor(12), b"X\x04\0\0\0metaq\x020" + tensor(19), b"h\x02" + put(19) + b"0" + tensor(26)
    ),
    "the function is rewritten": list_of_calls(tensor(5), b"h\x04q\x000" + tensor(12), tensor(19)),
    "the location is the key": list_of_calls(tensor(5), tensor(12, location=b"h\x0c"), tensor(19, location=b"h\x0c")),
    "a location that comes later": list_of_calls(tensor(5), tensor(12, location=b"h\x20"), tensor(19)),
    "entries are read later": list_of_calls(
        tensor(5), tensor(12), b"0" + bytes(b for i in range(19) for b in (0x68, i))
    ),
    "nothing is called later": list_of_calls(*(tensor(i) for i in (5, 12, 19, 26)), b"((" + tensor(33)),
    "nothing is called": b"\x80\x02" + tensor(0) + b".",
    "cut short": list_of_calls(tensor(5), tensor(12), tensor(19))[:-30],
    "cut at the last index": list_of_calls(tensor(5), tensor(12))[:-3],
    "two sizes for one": list_of_calls(tensor(5), tensor(12).replace(b"K@\x85", b"K@K@\x85"), tensor(19)),
    "one size for two": list_of_calls(tensor(5), tensor(12).replace(b"K@\x85", b"K@\x86"), tensor(19)),
    "a tensor with a state": list_of_calls(tensor(5), tensor(12) + b"}b", tensor(19) + b"h\x10}b0"),
}


def record(*values: bytes, names: tuple[bytes, ...] = (b"h\2", b"h\3", b"h\4"), end: bytes = b"ub") -> bytes:
    """An object as an index has it; memo entries 0 to 4 are two classes, and the names of three attributes."""
    attributes = b"".join(name + value for name, value in zip(names, values, strict=False))
    return b"h\0)\x81\x94}\x94(" + attributes + end


def list_of_records(*records: bytes, first: bytes = b"\x8c\1a") -> bytes:
    """The pickle of a list of objects, in the long memo of a large file."""
    classes = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n\x94ctorch\nSize\n\x94"
    names = first + b"\x94X\1\0\0\0b\x94X\1\0\0\0c\x94N" + b"\x94" * 5000
    return b"\x80\4" + classes + names + b"(" + b"".join(records) + b"l."


SIZE = b"h\1K\1M\1\1\x86\x94\x85\x94R\x94"
USUAL = record(b"K\1", b"\x8c\4name\x94", SIZE)
RECORDS: dict[str, bytes] = {
    "plain": list_of_records(USUAL, USUAL, USUAL),
    "entries are read later": list_of_records(USUAL, USUAL, *(b"j" + struct.pack("<I", 5000 + i) for i in range(20))),
    "an object that gets a second state": list_of_records(USUAL, USUAL + b"}b", USUAL + b"j\x8d\x13\0\0}b0"),
    "a size that gets a state": list_of_records(USUAL, USUAL + b"j\x98\x13\0\0}b0", USUAL),
    "a text with another length": list_of_records(USUAL, record(b"K\1", b"\x8c\3name\x94", SIZE), USUAL),
    "a text beyond the next opcode": list_of_records(USUAL, record(b"K\1", b"\x8c\6name\x94\x94", SIZE), USUAL),
    "an entry that comes later": list_of_records(USUAL, record(b"j\0\1\1\0", b"\x8c\4name\x94", SIZE), USUAL),
    "two sizes for one": list_of_records(USUAL, USUAL.replace(b"\x86\x94\x85", b"\x85\x94\x85"), USUAL),
    "one size for two": list_of_records(USUAL, USUAL.replace(b"K\1M\1\1\x86", b"K\1\x86"), USUAL),
    "more values than names": list_of_records(USUAL, record(b"K\1", b"K\2", SIZE, end=b"K\1ub"), USUAL),
    "a name that is not a text": list_of_records(*[record(b"K\1", b"K\2", names=(b"h\2", b"h\5"))] * 3),
    "a name that cannot be hashed": list_of_records(b"]\x94", *[record(b"K\1", names=(b"j\x8d\x13\0\0",))] * 3),
    "the same name twice": list_of_records(*[record(b"K\1", b"K\2", names=(b"h\2", b"h\2"))] * 3),
    "a call of the loader of storages": list_of_records(
        b"ctorch.storage\n_load_from_bytes\n\x94", *[record(SIZE.replace(b"h\1", b"j\x8d\x13\0\0"))] * 3
    ),
    "a call of a number": list_of_records(*[record(SIZE.replace(b"h\1", b"h\5"))] * 3),
    "the first short text": list_of_records(USUAL, USUAL, first=b"X\1\0\0\0a"),
    "memo entries out of order": list_of_records(USUAL, b"Nr\0\0\1\0", USUAL, USUAL),
    "a memo entry is rewritten": list_of_records(USUAL, USUAL, b"h\3q\x020", USUAL, USUAL),
    "objects of many shapes": list_of_records(
        *(record(*(b"K\1" if i >> bit & 1 else SIZE for bit in range(3))) for i in range(8)), *[USUAL] * 3
    ),
    "cut short": list_of_records(USUAL, USUAL)[:-4],
}


@each("name", list(CASES | RECORDS))
def test_graph_of_an_odd_stream_is_the_same(name: str, run_without_pattern: Callable[[bytes], Pickle]) -> None:
    data = (CASES | RECORDS)[name]
    assert graph_text(run(data)) == graph_text(run_without_pattern(data))


def test_tensors_do_not_share_their_sizes() -> None:
    calls = [call for call in run(CASES["plain"]).calls if call.callee.name == "_rebuild_tensor_v2"]  # type: ignore[attr-defined]
    sizes: list[Any] = [call.args[position] for call in calls for position in (2, 3)]  # type: ignore[index]
    assert len({id(size) for size in sizes}) == 6
