"""The tar format of torch before 0.1.10: four members, and everything that tarfile would read otherwise than we."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from tests import forge
from tests.each import each
from tests.forge import DANGEROUS, FLOATS, dictionary, name, number, pickled, tar, tar_member, tuple_of

from transload.checkpoint import Checkpoint
from transload.judge import inspect

HOSTILE = pickled(DANGEROUS)
PLAIN = pickled(dictionary({"w0": b"P100\n"}))


def codes(told: Checkpoint) -> set[str]:
    return {problem.code for problem in told.problems}


def loaded(data: bytes, folder: Path) -> object:
    path = folder / "old.pt"
    path.write_bytes(data)
    return torch.load(path, weights_only=False)


def pax(*records: bytes) -> bytes:
    """An extended header with these records, each with its length before it."""
    body = b""
    for record in records:
        length = len(record) + 2
        length += len(str(length + len(str(length))))
        body += b"%d %s\n" % (length, record)
    return tar_member(b"pax", body, b"x")


def test_a_sound_archive_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    data = tar()
    told = inspect(data)
    assert (told.format, told.safety, told.integrity, told.problems) == ("torch-tar", "data-only", "unchecked", ())
    mine = told.tensor("w0")
    assert mine.file_offset is not None
    assert data[mine.file_offset : mine.file_offset + 16] == FLOATS
    held = loaded(data, tmp_path)
    assert isinstance(held, dict)
    assert held["w0"].tolist() == [1, 2, 3, 4]


def test_tensors_share_storages_and_views_begin_inside_them(tmp_path: Path) -> None:
    one = pickled(tuple_of(0, "cpu", name("torch", "FloatStorage"))) + struct.pack("<q", 4) + FLOATS
    storages = pickled(number(1)) + one + pickled(forge.listing(tuple_of(1, 0, 1, 3)))
    held = [(100, 0, 4, 0), (101, 1, 2, 1)]
    tensors = pickled(number(2)) + b"".join(
        pickled(tuple_of(key, storage, name("torch", "FloatTensor"))) + struct.pack("<i4x3q", 1, size, 1, offset)
        for key, storage, size, offset in held
    )
    root = pickled(dictionary({"all": b"P100\n", "some": b"P101\n"}))
    data = tar({"storages": storages, "tensors": tensors, "pickle": root})
    told = inspect(data)
    assert told.problems == ()
    assert told.shared == (("all", "some"),)
    assert (told.tensor("some").offset, told.tensor("some").shape) == (2, (2,))
    values = loaded(data, tmp_path)
    assert isinstance(values, dict)
    assert values["some"].tolist() == [3, 4]


@pytest.mark.parametrize("member", ["pickle", "tensors", "storages", "sys_info"])
def test_c19_a_call_in_any_member_is_seen(member: str) -> None:
    told = inspect(tar({member: HOSTILE}))
    assert (told.format, told.safety) == ("torch-tar", "dangerous")


# Each holds a harmless and a hostile pickle, and tarfile takes the hostile one.
TWO_FACED = {
    "two members of one name": tar(None, tar_member(b"pickle", HOSTILE)),
    "the same with a dot before it": tar(None, tar_member(b"./pickle", HOSTILE)),
    "renamed by an extended header": tar(None, pax(b"path=pickle"), tar_member(b"other", HOSTILE)),
    "renamed by one of many records": tar(None, pax(b"mtime=1", b"path=pickle"), tar_member(b"other", HOSTILE)),
    "renamed by a record inside a record": tar(
        None, tar_member(b"pax", b"11 mtime=1 15 path=pickle\n", b"x"), tar_member(b"other", HOSTILE)
    ),
    "renamed for all that follows": tar(
        None, tar_member(b"pax", b"15 path=pickle\n", b"g"), tar_member(b"a", HOSTILE), tar_member(b"b", HOSTILE)
    ),
    "a long name": tar(None, tar_member(b"././@LongLink", b"pickle\0", b"L"), tar_member(b"other", HOSTILE)),
    "a link": tar(None, tar_member(b"other", HOSTILE), tar_member(b"pickle", b"", b"1", link=b"other")),
    "a symbolic link": tar(None, tar_member(b"other", HOSTILE), tar_member(b"pickle", b"", b"2", link=b"other")),
    "a contiguous file": tar(None, tar_member(b"pickle", HOSTILE, b"7")),
}


@each("trick", TWO_FACED)
def test_a_member_that_another_reader_sees_otherwise_is_dangerous(trick: str) -> None:
    assert inspect(TWO_FACED[trick]).safety == "dangerous"


def test_a_name_may_be_split_in_two() -> None:
    """tarfile puts the prefix before the name: this is no member ``pickle``, and the hostile one is."""
    data = tar({"pickle": HOSTILE}, tar_member(b"pickle", PLAIN, prefix=b"inner"))
    assert inspect(data).safety == "dangerous"


def test_times_and_owners_in_an_extended_header_are_usual() -> None:
    told = inspect(tar(None, pax(b"mtime=1.25", b"uname=somebody"), tar_member(b"note", b"x")))
    assert codes(told) == {"record-foreign"}
    assert told.safety == "data-only"


def test_a_header_summed_up_with_signs_is_a_header() -> None:
    """tarfile takes both sums; a stream that begins like the legacy format and sums up so is a tar to torch."""
    raw = tar_member(b"\xff" * 4, b"")
    signed = sum(raw[:148] + b" " * 8 + raw[156:512]) - 256 * 4
    odd = tar_member(b"\xff" * 4, b"", checksum=b"%06o\0 " % signed)
    told = inspect(odd + tar({"pickle": HOSTILE}))
    assert (told.format, told.safety) == ("torch-tar", "dangerous")


@pytest.mark.parametrize(
    "begins", [b"cos\ngetcwd\n(tR.", forge.MAGIC + b"\x80\x02M\xe9\x03."], ids=["a call", "the magic"]
)
def test_a_header_that_is_a_pickle_too_is_dangerous(begins: bytes) -> None:
    """torch falls back to reading pickles from the start as soon as tarfile stumbles, here over the last member."""
    stumbling = tar_member(b"more", b"", size=b"77777777777\0")
    data = tar_member(begins, b"") + tar(None, stumbling, end=b"")
    told = inspect(data)
    assert (told.format, told.safety) == ("torch-tar", "dangerous")


def test_torch_does_fall_back_to_pickles_when_tarfile_stumbles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stumbling = tar_member(b"more", b"", size=b"77777777777\0")
    data = tar_member(b"cbuiltins\nprint\n(Vhello\ntR.", b"") + tar(None, stumbling, end=b"")
    with pytest.raises(RuntimeError, match="magic number"):
        loaded(data, tmp_path)
    assert capsys.readouterr().out == "hello\n"


def test_any_member_may_be_cut() -> None:
    told = inspect(tar(None, tar_member(b"note", b"x", size=b"77777777777\0"), end=b""))
    assert (told.integrity, codes(told)) == ("damaged", {"tar-cut", "record-foreign"})


@pytest.mark.parametrize("member", ["pickle", "tensors", "storages"])
def test_a_missing_member_makes_it_another_tar(member: str) -> None:
    held = {"sys_info": PLAIN, "pickle": PLAIN, "tensors": forge.tar_tensors(), "storages": forge.tar_storages()}
    del held[member]
    data = b"".join(tar_member(title.encode(), content) for title, content in held.items()) + bytes(1024)
    told = inspect(data)
    assert (told.format, told.integrity) == ("tar", "not-a-checkpoint")


def test_an_archive_cut_anywhere_is_told() -> None:
    data = tar(end=b"")
    for length in range(512, len(data) - 1, 7):
        told = inspect(data[:length])
        assert told.safety in ("data-only", "unknown"), length
        assert told.integrity in ("damaged", "not-a-checkpoint", "unchecked"), length
        if told.integrity == "unchecked":  # only the padding after the last member is cut
            assert length >= len(data.rstrip(b"\0"))


@each(
    ("parts", "code"),
    [
        ({"storages": forge.tar_storages()[:-3]}, "pickle-broken"),
        ({"storages": forge.tar_storages()[:60]}, "storage-cut"),
        ({"storages": pickled(number(3)) + pickled(b"N")}, "tar-broken"),
        ({"storages": pickled(b"N")}, "tar-broken"),
        ({"tensors": pickled(b"N")}, "tar-broken"),
        ({"storages": pickled(number(1 << 40))}, "tar-broken"),
        ({"storages": pickled(number(1)) + pickled(tuple_of(0, "cpu", name("torch", "OddStorage")))}, "tar-broken"),
        ({"storages": forge.tar_storages().replace(struct.pack("<q", 4), struct.pack("<q", -4))}, "storage-cut"),
        ({"storages": forge.tar_storages().replace(struct.pack("<q", 4), struct.pack("<q", 1 << 60))}, "storage-cut"),
        ({"storages": forge.tar_storages()[:-4] + pickled(forge.listing(tuple_of(1, 9, 0, 1)))}, "tar-broken"),
        ({"tensors": forge.tar_tensors()[:-3]}, "tar-broken"),
        ({"tensors": pickled(number(2)) + pickled(b"N")}, "tar-broken"),
        ({"tensors": forge.tar_tensors().replace(struct.pack("<i4x", 1), struct.pack("<i4x", -1))}, "tar-broken"),
        ({"tensors": forge.tar_tensors().replace(struct.pack("<i4x", 1), struct.pack("<i4x", 9999))}, "tar-broken"),
        ({"pickle": PLAIN[:-2]}, "pickle-broken"),
    ],
)
def test_a_damaged_member_is_told_and_the_rest_is_read(parts: dict[str, bytes], code: str) -> None:
    told = inspect(tar(parts))
    assert told.format == "torch-tar"
    assert code in codes(told)
    assert told.integrity == "damaged"


NESTED = b")" + b"\x85" * 100_000
KIND = name("torch", "FloatStorage")
NUMBERS = struct.pack("<i4x3q", 1, 4, 1, 0)


@each(
    ("parts", "code"),
    [
        ({"storages": pickled(number(1)) + pickled(tuple_of(NESTED, "cpu", KIND))}, "tar-broken"),
        ({"storages": forge.tar_storages()[:-4] + pickled(forge.listing(tuple_of(1, NESTED, 0, 1)))}, "tar-broken"),
        ({"storages": forge.tar_storages()[:-4] + pickled(forge.listing(tuple_of(NESTED, 0, 0, 1)))}, "tar-broken"),
        ({"tensors": pickled(number(1)) + pickled(tuple_of(NESTED, 0, KIND))}, "tar-broken"),
        ({"tensors": pickled(number(1)) + pickled(tuple_of(100, NESTED, KIND)) + NUMBERS}, "tensor-broken"),
        ({"pickle": pickled(NESTED + b"Q")}, ""),
    ],
)
def test_an_id_is_text_or_a_number(parts: dict[str, bytes], code: str) -> None:
    told = inspect(tar(parts))
    assert told.format == "torch-tar"
    assert not code or code in codes(told)


def test_a_header_that_is_none_stops_us_and_says_so() -> None:
    told = inspect(tar(None, b"x" * 512, tar_member(b"pickle", HOSTILE)))
    assert told.safety == "unknown"
    assert "tar-broken" in codes(told)


@pytest.mark.parametrize("size", [b"-0000005000\0", b"\xff" * 2 + bytes(10)])
def test_a_negative_size_is_not_that_of_a_member(size: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(tar(None, tar_member(b"note", b"", size=size)))
    told = inspect(path)
    assert (told.format, told.safety) == ("torch-tar", "unknown")
    assert "tar-broken" in codes(told)
    path.write_bytes(tar_member(b"storages", b"", size=size) + bytes(1024))
    assert inspect(path).integrity == "not-a-checkpoint"


def test_a_tensor_of_no_storage_is_broken() -> None:
    tensors = (
        pickled(number(1)) + pickled(tuple_of(100, 7, name("torch", "FloatTensor"))) + struct.pack("<i4x3q", 1, 4, 1, 0)
    )
    told = inspect(tar({"tensors": tensors}))
    assert (told.integrity, codes(told)) == ("damaged", {"tensor-broken"})


def test_ten_thousand_members_are_enough() -> None:
    told = inspect(tar(None, tar_member(b"x", b"") * 10_001))
    assert told.safety == "unknown"
