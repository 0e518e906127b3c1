"""The legacy format: five pickles and then the storages, any of which can be missing, truncated or wrong."""

from __future__ import annotations

import io
import struct

import pytest
import torch
from tests import forge, makers
from tests.each import each
from tests.forge import (
    DANGEROUS,
    FLOATS,
    Legacy,
    dictionary,
    legacy,
    list_of,
    number,
    ordered,
    pickled,
    storage_id,
    tensor,
)
from tests.makers import codes

from transload.opening import inspect

STAGES = ("magic", "protocol", "facts", "object", "keys")
ONE = struct.pack("<q", 4) + FLOATS


def saved() -> bytes:
    state = {f"w{i}": torch.arange(count, dtype=torch.float32) for i, count in enumerate((40, 0, 7, 300))}
    return makers.saved(state, _use_new_zipfile_serialization=False)


def test_file_saved_by_torch_has_no_problems() -> None:
    data = saved()
    checkpoint = inspect(data)
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity, checkpoint.problems) == (
        "torch-legacy",
        "data-only",
        "unchecked",
        (),
    )
    for name, value in torch.load(io.BytesIO(data)).items():
        tensor = checkpoint.tensor(name)
        assert tensor.file_offset is not None
        assert data[tensor.file_offset : tensor.file_offset + tensor.nbytes] == value.numpy().tobytes()


def test_every_prefix_reports_exactly_the_bytes_it_has() -> None:
    complete = saved()
    complete_storages = {storage.key: storage for storage in inspect(complete).storages}
    for length in range(4, len(complete)):
        checkpoint = inspect(complete[:length])
        assert (checkpoint.format, checkpoint.integrity) == ("torch-legacy", "damaged"), length
        assert "legacy-trailing-bytes" not in codes(checkpoint), length
        for storage in checkpoint.storages:
            complete_storage = complete_storages[storage.key]
            assert complete_storage.offset is not None
            expected = (
                max(0, min(complete_storage.nbytes, length - complete_storage.offset))
                if "legacy-cut" not in codes(checkpoint)
                else 0
            )
            assert storage.stored == expected, (length, storage.key)


@each("stage", range(5), ids=list(STAGES))
def test_truncated_pickle_is_named_by_its_number(stage: int) -> None:
    parts = Legacy().parts()
    data = b"".join(parts[:stage]) + parts[stage][:-1]
    checkpoint = inspect(data)
    assert (checkpoint.format, checkpoint.integrity) == ("torch-legacy", "damaged")
    problem = next(problem for problem in checkpoint.problems if problem.code == "legacy-cut")
    assert problem.detail.startswith(f"part {stage + 1} of 5 breaks off")
    assert checkpoint.safety in ("data-only", "unknown")


@each("stage", STAGES)
def test_call_in_any_of_the_five_pickles_is_dangerous(stage: str) -> None:
    data = legacy(**{stage: pickled(DANGEROUS)})
    assert inspect(data).safety == "dangerous"


@pytest.mark.parametrize("stage", STAGES[1:])
def test_call_is_dangerous_if_the_stream_breaks_right_after_it(stage: str) -> None:
    data = legacy(**{stage: pickled(DANGEROUS)[:-1]})
    assert inspect(data[: data.index(b"getcwd") + 9]).safety == "dangerous"


def test_magic_number_in_other_opcodes_is_dangerous() -> None:
    checkpoint = inspect(legacy(magic=b"\x80\x02N0" + forge.MAGIC[2:]))
    assert checkpoint.safety == "dangerous"
    assert "legacy-odd-magic" in codes(checkpoint)


def test_computed_magic_number_is_dangerous() -> None:
    assert inspect(legacy(magic=pickled(forge.call(forge.name("builtins", "print"))))).safety == "dangerous"


def test_storage_missing_from_the_keys_is_reported() -> None:
    data = legacy(keys=pickled(list_of("0")), storages=(ONE,))
    checkpoint = inspect(data)
    assert (checkpoint.safety, checkpoint.integrity) == ("unknown", "damaged")
    assert [(p.code, p.where) for p in checkpoint.problems] == [("legacy-unlisted", "storage 1")]
    assert "needed by w1" in checkpoint.problems[0].detail
    assert torch.load(io.BytesIO(data))["w1"].shape == (4,)


@each(
    ("keys", "code"),
    [
        (list_of("0", "1", "2"), "legacy-unknown-key"),
        (list_of("0", None), "legacy-unknown-key"),
        (list_of("0", forge.tuple_of("1")), "legacy-unknown-key"),
        (number(5), "legacy-unlisted"),
        (b"N", "legacy-unlisted"),
        (dictionary({"0": 1}), "legacy-unlisted"),
    ],
    ids=["one too many", "None", "a tuple", "a number", "nothing", "a dictionary"],
)
def test_malformed_list_of_keys_is_reported(keys: bytes, code: str) -> None:
    checkpoint = inspect(legacy(keys=pickled(keys)))
    assert checkpoint.integrity == "damaged"
    assert code in codes(checkpoint)


@each("count", [3, 5, 0, -1, 1 << 62])
def test_wrong_element_count_loses_all_following_storages(count: int) -> None:
    data = legacy(storages=(struct.pack("<q", count) + FLOATS, ONE))
    checkpoint = inspect(data)
    assert checkpoint.integrity == "damaged"
    first = checkpoint.problems[0]
    assert (first.code, first.where) == ("storage-size", "storage 0")
    assert f"there are {count} elements, the object needs 4" in first.detail
    lost = {problem.where for problem in checkpoint.problems if problem.code == "storage-cut"}
    assert lost == {"storage 0", "storage 1"}
    with pytest.raises(RuntimeError, match=r"wrong byte size|numel|negative"):
        torch.load(io.BytesIO(data))


def test_empty_storage_without_its_count_is_damage() -> None:
    state = ordered({"w": tensor(storage=storage_id("0", 0, "FloatStorage", "cpu", None), shape=(0,))})
    data = legacy(object=pickled(state), keys=pickled(list_of("0")), storages=(struct.pack("<q", 0),))
    assert inspect(data).integrity == "unchecked"
    assert inspect(data[:-1]).integrity == "damaged"


@pytest.mark.parametrize("after", [b"\0", b"junk" * 100, pickled(b"N")])
def test_bytes_after_the_last_storage_are_repairable(after: bytes) -> None:
    checkpoint = inspect(legacy(after=after))
    assert (checkpoint.integrity, codes(checkpoint)) == ("repairable", ["legacy-trailing-bytes"])
    assert torch.load(io.BytesIO(legacy(after=after)))["w0"].shape == (4,)


def test_truncated_storage_is_named() -> None:
    data = legacy()
    checkpoint = inspect(data[:-5])
    assert [(p.code, p.where) for p in checkpoint.problems] == [("storage-cut", "storage 1")]
    assert checkpoint.problems[0].detail == "11 of 16 bytes are in the file; needed by w1"


def test_other_protocol_version_is_reported() -> None:
    checkpoint = inspect(legacy(protocol=pickled(number(1002))))
    assert (checkpoint.integrity, codes(checkpoint)) == ("damaged", ["legacy-bad-protocol"])


@each("value", [b")" + b"\x85" * 100_000, b"L0x" + b"f" * 4290 + b"L\n"], ids=["nested", "huge"])
def test_protocol_version_that_cannot_be_printed(value: bytes) -> None:
    assert codes(inspect(legacy(protocol=pickled(value)))) == ["legacy-bad-protocol"]


def test_storage_view_begins_at_its_offset() -> None:
    """Before torch 0.4 a storage could be a view of another: its id has the first element and the count."""
    view = storage_id("0", 4, "FloatStorage", "cpu", forge.tuple_of("9", 1, 3))
    state = ordered(
        {
            "base": tensor(storage=storage_id("0", 4, "FloatStorage", "cpu", None)),
            "view": tensor(storage=view, shape=(3,)),
        }
    )
    data = legacy(object=pickled(state), keys=pickled(list_of("0")), storages=(ONE,))
    checkpoint = inspect(data)
    assert checkpoint.problems == ()
    assert checkpoint.tensor("view").offset == 1
    assert torch.load(io.BytesIO(data))["view"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("magic", [b"\x80\x02", b"\x80\x02\x8a\n", forge.MAGIC[:-1], forge.MAGIC])
def test_first_few_bytes_are_inspected_without_an_error(magic: bytes) -> None:
    checkpoint = inspect(magic)
    assert checkpoint.safety in ("unknown", "data-only")
    assert checkpoint.integrity in ("damaged", "not-a-checkpoint")
    if len(magic) >= 4:
        assert checkpoint.format == "torch-legacy"


def test_list_of_keys_written_by_python_2() -> None:
    data = legacy(keys=pickled(b"](U\x010U\x011e"))
    assert inspect(data).problems == ()


@pytest.mark.filterwarnings("ignore:pickle_load_args only works")  # but it works here, too
def test_python_2_string_that_is_not_utf8_needs_another_encoding() -> None:
    data = legacy(object=pickled(b"}U\x03ab\xffK\x01s"), keys=pickled(b"]"), storages=())
    checkpoint = inspect(data)
    assert (checkpoint.integrity, codes(checkpoint)) == ("unchecked", ["pickle-python2-bytes"])
    with pytest.raises(UnicodeDecodeError):
        torch.load(io.BytesIO(data))
    assert torch.load(io.BytesIO(data), encoding="latin1") == {"ab\xff": 1}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_magic_number_in_every_pickle_protocol_is_accepted(protocol: int) -> None:
    data = makers.saved({"w": torch.ones(2)}, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    assert inspect(data).ok
