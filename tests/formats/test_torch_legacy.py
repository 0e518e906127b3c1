"""The stream format: five pickles and then the storages, each of which can be missing, cut, or not what it says."""

from __future__ import annotations

import io
import struct

import pytest
import torch
from tests import forge
from tests.each import each
from tests.forge import (
    DANGEROUS,
    FLOATS,
    Legacy,
    dictionary,
    legacy,
    listing,
    number,
    ordered,
    pickled,
    storage_id,
    tensor,
)

from transload.checkpoint import Checkpoint
from transload.judge import inspect

STAGES = ("magic", "protocol", "facts", "object", "keys")
ONE = struct.pack("<q", 4) + FLOATS


def codes(told: Checkpoint) -> list[str]:
    return [problem.code for problem in told.problems]


def saved() -> bytes:
    buffer = io.BytesIO()
    held = {f"w{i}": torch.arange(count, dtype=torch.float32) for i, count in enumerate((40, 0, 7, 300))}
    torch.save(held, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_what_torch_saves_has_no_problem() -> None:
    data = saved()
    told = inspect(data)
    assert (told.format, told.safety, told.integrity, told.problems) == ("torch-legacy", "data-only", "unchecked", ())
    for name, value in torch.load(io.BytesIO(data)).items():
        mine = told.tensor(name)
        assert mine.file_offset is not None
        assert data[mine.file_offset : mine.file_offset + mine.nbytes] == value.numpy().tobytes()


def test_a_stream_cut_anywhere_claims_exactly_what_it_holds() -> None:
    whole = saved()
    truth = {storage.key: storage for storage in inspect(whole).storages}
    for length in range(4, len(whole)):
        told = inspect(whole[:length])
        assert (told.format, told.integrity) == ("torch-legacy", "damaged"), length
        assert "legacy-trailing-bytes" not in codes(told), length
        for storage in told.storages:
            mine = truth[storage.key]
            assert mine.offset is not None
            expected = max(0, min(mine.nbytes, length - mine.offset)) if "legacy-cut" not in codes(told) else 0
            assert storage.stored == expected, (length, storage.key)


@each("stage", range(5), ids=list(STAGES))
def test_the_stage_of_a_cut_is_told(stage: int) -> None:
    parts = Legacy().parts()
    data = b"".join(parts[:stage]) + parts[stage][:-1]
    told = inspect(data)
    assert (told.format, told.integrity) == ("torch-legacy", "damaged")
    problem = next(problem for problem in told.problems if problem.code == "legacy-cut")
    assert problem.detail.startswith(f"part {stage + 1} of 5 breaks off")
    assert told.safety in ("data-only", "unknown")


@each("stage", STAGES)
def test_c20_a_call_in_any_of_the_five_pickles_is_seen(stage: str) -> None:
    data = legacy(**{stage: pickled(DANGEROUS)})
    assert inspect(data).safety == "dangerous"


@pytest.mark.parametrize("stage", STAGES[1:])
def test_c20_a_call_is_seen_when_the_stream_breaks_right_after_it(stage: str) -> None:
    data = legacy(**{stage: pickled(DANGEROUS)[:-1]})
    assert inspect(data[: data.index(b"getcwd") + 9]).safety == "dangerous"


def test_c21_the_magic_number_is_spelt_in_one_way() -> None:
    told = inspect(legacy(magic=b"\x80\x02N0" + forge.MAGIC[2:]))
    assert told.safety == "dangerous"
    assert "legacy-odd-magic" in codes(told)


def test_c21_a_computed_magic_number_is_a_call() -> None:
    assert inspect(legacy(magic=pickled(forge.call(forge.name("builtins", "print"))))).safety == "dangerous"


def test_a_storage_that_is_not_listed_would_be_invented() -> None:
    data = legacy(keys=pickled(listing("0")), storages=(ONE,))
    told = inspect(data)
    assert (told.safety, told.integrity) == ("unknown", "damaged")
    assert [(p.code, p.where) for p in told.problems] == [("legacy-unlisted", "storage 1")]
    assert "needed by w1" in told.problems[0].detail
    assert torch.load(io.BytesIO(data))["w1"].shape == (4,)


@each(
    ("keys", "code"),
    [
        (listing("0", "1", "2"), "legacy-unknown-key"),
        (listing("0", None), "legacy-unknown-key"),
        (listing("0", forge.tuple_of("1")), "legacy-unknown-key"),
        (number(5), "legacy-unlisted"),
        (b"N", "legacy-unlisted"),
        (dictionary({"0": 1}), "legacy-unlisted"),
    ],
    ids=["one too many", "None", "a tuple", "a number", "nothing", "a dictionary"],
)
def test_a_list_of_keys_that_is_none_is_told(keys: bytes, code: str) -> None:
    told = inspect(legacy(keys=pickled(keys)))
    assert told.integrity == "damaged"
    assert code in codes(told)


@each("count", [3, 5, 0, -1, 1 << 62])
def test_an_element_count_that_is_wrong_loses_all_that_follows(count: int) -> None:
    data = legacy(storages=(struct.pack("<q", count) + FLOATS, ONE))
    told = inspect(data)
    assert told.integrity == "damaged"
    first = told.problems[0]
    assert (first.code, first.where) == ("storage-size", "storage 0")
    assert f"there are {count} elements, the object needs 4" in first.detail
    lost = {problem.where for problem in told.problems if problem.code == "storage-cut"}
    assert lost == {"storage 0", "storage 1"}
    with pytest.raises(RuntimeError, match=r"wrong byte size|numel|negative"):
        torch.load(io.BytesIO(data))


def test_an_empty_storage_needs_its_count_too() -> None:
    held = ordered({"w": tensor(storage=storage_id("0", 0, "FloatStorage", "cpu", None), shape=(0,))})
    data = legacy(object=pickled(held), keys=pickled(listing("0")), storages=(struct.pack("<q", 0),))
    assert inspect(data).integrity == "unchecked"
    assert inspect(data[:-1]).integrity == "damaged"


@pytest.mark.parametrize("after", [b"\0", b"junk" * 100, pickled(b"N")])
def test_bytes_after_the_last_storage_are_told(after: bytes) -> None:
    told = inspect(legacy(after=after))
    assert (told.integrity, codes(told)) == ("repairable", ["legacy-trailing-bytes"])
    assert torch.load(io.BytesIO(legacy(after=after)))["w0"].shape == (4,)


def test_a_storage_cut_short_is_named() -> None:
    data = legacy()
    told = inspect(data[:-5])
    assert [(p.code, p.where) for p in told.problems] == [("storage-cut", "storage 1")]
    assert told.problems[0].detail == "11 of 16 bytes are in the file; needed by w1"


def test_another_protocol_version_is_told() -> None:
    told = inspect(legacy(protocol=pickled(number(1002))))
    assert (told.integrity, codes(told)) == ("damaged", ["legacy-bad-protocol"])


@each("value", [b")" + b"\x85" * 100_000, b"L0x" + b"f" * 4290 + b"L\n"], ids=["nested", "huge"])
def test_a_protocol_version_that_cannot_be_printed(value: bytes) -> None:
    assert codes(inspect(legacy(protocol=pickled(value)))) == ["legacy-bad-protocol"]


def test_views_of_a_storage_begin_where_they_say() -> None:
    """Before torch 0.4 a storage could be a view of another: its id says from which element on, and how many."""
    view = storage_id("0", 4, "FloatStorage", "cpu", forge.tuple_of("9", 1, 3))
    held = ordered(
        {
            "base": tensor(storage=storage_id("0", 4, "FloatStorage", "cpu", None)),
            "view": tensor(storage=view, shape=(3,)),
        }
    )
    data = legacy(object=pickled(held), keys=pickled(listing("0")), storages=(ONE,))
    told = inspect(data)
    assert told.problems == ()
    assert told.tensor("view").offset == 1
    assert torch.load(io.BytesIO(data))["view"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("magic", [b"\x80\x02", b"\x80\x02\x8a\n", forge.MAGIC[:-1], forge.MAGIC])
def test_the_first_few_bytes_do_not_fail(magic: bytes) -> None:
    told = inspect(magic)
    assert told.safety in ("unknown", "data-only")
    assert told.integrity in ("damaged", "not-a-checkpoint")
    if len(magic) >= 4:
        assert told.format == "torch-legacy"


def test_the_list_of_keys_may_be_of_python_2() -> None:
    data = legacy(keys=pickled(b"](U\x010U\x011e"))
    assert inspect(data).problems == ()


@pytest.mark.filterwarnings("ignore:pickle_load_args only works")  # it works
def test_bytes_that_python_2_wrote_as_text_want_another_encoding() -> None:
    data = legacy(object=pickled(b"}U\x03ab\xffK\x01s"), keys=pickled(b"]"), storages=())
    told = inspect(data)
    assert (told.integrity, codes(told)) == ("unchecked", ["pickle-python2-bytes"])
    with pytest.raises(UnicodeDecodeError):
        torch.load(io.BytesIO(data))
    assert torch.load(io.BytesIO(data), encoding="latin1") == {"ab\xff": 1}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_magic_number_in_any_protocol_is_torchs_own(protocol: int) -> None:
    file = io.BytesIO()
    torch.save({"w": torch.ones(2)}, file, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    assert inspect(file.getvalue()).ok
