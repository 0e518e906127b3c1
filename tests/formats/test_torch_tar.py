"""The tar format of torch before 0.1.10: four members, and every trick by which ``tarfile`` reads another file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from tests import forge
from tests.each import each
from tests.forge import DANGEROUS, FLOATS, dictionary, name, number, pickled, tar, tar_member, tuple_of
from tests.makers import codes

from transload.opening import inspect

HOSTILE = pickled(DANGEROUS)
PLAIN = pickled(dictionary({"w0": b"P100\n"}))


def loaded(data: bytes, folder: Path) -> object:
    path = folder / "old.pt"
    path.write_bytes(data)
    return torch.load(path, weights_only=False)


def pax(*records: bytes) -> bytes:
    """An extended header with these records, each preceded by its length."""
    body = b""
    for record in records:
        length = len(record) + 2
        length += len(str(length + len(str(length))))
        body += b"%d %s\n" % (length, record)
    return tar_member(b"pax", body, b"x")


def test_intact_archive_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    data = tar()
    checkpoint = inspect(data)
    assert (checkpoint.format, checkpoint.safety, checkpoint.integrity, checkpoint.problems) == (
        "torch-tar",
        "data-only",
        "unchecked",
        (),
    )
    tensor = checkpoint.tensor("w0")
    assert tensor.file_offset is not None
    assert data[tensor.file_offset : tensor.file_offset + 16] == FLOATS
    values = loaded(data, tmp_path)
    assert isinstance(values, dict)
    assert values["w0"].tolist() == [1, 2, 3, 4]


def test_storage_view_shares_its_storage_and_has_an_offset(tmp_path: Path) -> None:
    one = pickled(tuple_of(0, "cpu", name("torch", "FloatStorage"))) + struct.pack("<q", 4) + FLOATS
    storages = pickled(number(1)) + one + pickled(forge.list_of(tuple_of(1, 0, 1, 3)))
    fields = [(100, 0, 4, 0), (101, 1, 2, 1)]
    tensors = pickled(number(2)) + b"".join(
        pickled(tuple_of(key, storage, name("torch", "FloatTensor"))) + struct.pack("<i4x3q", 1, size, 1, offset)
        for key, storage, size, offset in fields
    )
    root = pickled(dictionary({"all": b"P100\n", "some": b"P101\n"}))
    data = tar({"storages": storages, "tensors": tensors, "pickle": root})
    checkpoint = inspect(data)
    assert checkpoint.problems == ()
    assert checkpoint.shared == (("all", "some"),)
    assert (checkpoint.tensor("some").offset, checkpoint.tensor("some").shape) == (2, (2,))
    values = loaded(data, tmp_path)
    assert isinstance(values, dict)
    assert values["some"].tolist() == [3, 4]


@pytest.mark.parametrize("member", ["pickle", "tensors", "storages", "sys_info"])
def test_call_in_any_member_is_dangerous(member: str) -> None:
    checkpoint = inspect(tar({member: HOSTILE}))
    assert (checkpoint.format, checkpoint.safety) == ("torch-tar", "dangerous")


# Each has a harmless and a hostile pickle, and tarfile reads the hostile one.
AMBIGUOUS = {
    "two members of one name": tar(None, tar_member(b"pickle", HOSTILE)),
    "the same name with a leading dot": tar(None, tar_member(b"./pickle", HOSTILE)),
    "renamed by an extended header": tar(None, pax(b"path=pickle"), tar_member(b"other", HOSTILE)),
    "renamed by one of many records": tar(None, pax(b"mtime=1", b"path=pickle"), tar_member(b"other", HOSTILE)),
    "renamed by a record inside a record": tar(
        None, tar_member(b"pax", b"11 mtime=1 15 path=pickle\n", b"x"), tar_member(b"other", HOSTILE)
    ),
    "renamed by a global header": tar(
        None, tar_member(b"pax", b"15 path=pickle\n", b"g"), tar_member(b"a", HOSTILE), tar_member(b"b", HOSTILE)
    ),
    "a long name": tar(None, tar_member(b"././@LongLink", b"pickle\0", b"L"), tar_member(b"other", HOSTILE)),
    "a link": tar(None, tar_member(b"other", HOSTILE), tar_member(b"pickle", b"", b"1", link=b"other")),
    "a symbolic link": tar(None, tar_member(b"other", HOSTILE), tar_member(b"pickle", b"", b"2", link=b"other")),
    "a contiguous file": tar(None, tar_member(b"pickle", HOSTILE, b"7")),
}


@each("trick", AMBIGUOUS)
def test_member_that_tarfile_reads_differently_is_dangerous(trick: str) -> None:
    assert inspect(AMBIGUOUS[trick]).safety == "dangerous"


def test_member_with_a_prefix_does_not_replace_the_pickle() -> None:
    """tarfile joins the prefix and the name: only the hostile member is called ``pickle``."""
    data = tar({"pickle": HOSTILE}, tar_member(b"pickle", PLAIN, prefix=b"inner"))
    assert inspect(data).safety == "dangerous"


def test_times_and_owners_in_an_extended_header_are_accepted() -> None:
    checkpoint = inspect(tar(None, pax(b"mtime=1.25", b"uname=somebody"), tar_member(b"note", b"x")))
    assert set(codes(checkpoint)) == {"record-foreign"}
    assert checkpoint.safety == "data-only"


def test_header_with_a_signed_checksum_is_accepted() -> None:
    """tarfile accepts signed and unsigned checksums, so torch also reads such a file as tar."""
    raw = tar_member(b"\xff" * 4, b"")
    signed = sum(raw[:148] + b" " * 8 + raw[156:512]) - 256 * 4
    odd = tar_member(b"\xff" * 4, b"", checksum=b"%06o\0 " % signed)
    checkpoint = inspect(odd + tar({"pickle": HOSTILE}))
    assert (checkpoint.format, checkpoint.safety) == ("torch-tar", "dangerous")


@pytest.mark.parametrize(
    "begins", [b"cos\ngetcwd\n(tR.", forge.MAGIC + b"\x80\x02M\xe9\x03."], ids=["a call", "the magic"]
)
def test_header_that_is_also_a_pickle_is_dangerous(begins: bytes) -> None:
    """torch falls back to reading pickles from the start if tarfile fails, here on the last member."""
    unreadable = tar_member(b"more", b"", size=b"77777777777\0")
    data = tar_member(begins, b"") + tar(None, unreadable, end=b"")
    checkpoint = inspect(data)
    assert (checkpoint.format, checkpoint.safety) == ("torch-tar", "dangerous")


def test_torch_falls_back_to_pickles_if_tarfile_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unreadable = tar_member(b"more", b"", size=b"77777777777\0")
    data = tar_member(b"cbuiltins\nprint\n(Vhello\ntR.", b"") + tar(None, unreadable, end=b"")
    with pytest.raises(RuntimeError, match="magic number"):
        loaded(data, tmp_path)
    assert capsys.readouterr().out == "hello\n"


def test_truncated_unknown_member_is_damage() -> None:
    checkpoint = inspect(tar(None, tar_member(b"note", b"x", size=b"77777777777\0"), end=b""))
    assert (checkpoint.integrity, set(codes(checkpoint))) == ("damaged", {"tar-cut", "record-foreign"})


@pytest.mark.parametrize("member", ["pickle", "tensors", "storages"])
def test_tar_without_a_member_is_not_a_checkpoint(member: str) -> None:
    members = {"sys_info": PLAIN, "pickle": PLAIN, "tensors": forge.tar_tensors(), "storages": forge.tar_storages()}
    del members[member]
    data = b"".join(tar_member(title.encode(), content) for title, content in members.items()) + bytes(1024)
    checkpoint = inspect(data)
    assert (checkpoint.format, checkpoint.integrity) == ("tar", "not-a-checkpoint")


def test_every_prefix_of_an_archive_is_inspected() -> None:
    data = tar(end=b"")
    for length in range(512, len(data) - 1, 7):
        checkpoint = inspect(data[:length])
        assert checkpoint.safety in ("data-only", "unknown"), length
        assert checkpoint.integrity in ("damaged", "not-a-checkpoint", "unchecked"), length
        if checkpoint.integrity == "unchecked":  # only the padding after the last member is cut
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
        ({"storages": forge.tar_storages()[:-4] + pickled(forge.list_of(tuple_of(1, 9, 0, 1)))}, "tar-broken"),
        ({"tensors": forge.tar_tensors()[:-3]}, "tar-broken"),
        ({"tensors": pickled(number(2)) + pickled(b"N")}, "tar-broken"),
        ({"tensors": forge.tar_tensors().replace(struct.pack("<i4x", 1), struct.pack("<i4x", -1))}, "tar-broken"),
        ({"tensors": forge.tar_tensors().replace(struct.pack("<i4x", 1), struct.pack("<i4x", 9999))}, "tar-broken"),
        ({"pickle": PLAIN[:-2]}, "pickle-broken"),
    ],
)
def test_damaged_member_is_reported(parts: dict[str, bytes], code: str) -> None:
    checkpoint = inspect(tar(parts))
    assert checkpoint.format == "torch-tar"
    assert code in codes(checkpoint)
    assert checkpoint.integrity == "damaged"


NESTED = b")" + b"\x85" * 100_000
KIND = name("torch", "FloatStorage")
NUMBERS = struct.pack("<i4x3q", 1, 4, 1, 0)


@each(
    ("parts", "code"),
    [
        ({"storages": pickled(number(1)) + pickled(tuple_of(NESTED, "cpu", KIND))}, "tar-broken"),
        ({"storages": forge.tar_storages()[:-4] + pickled(forge.list_of(tuple_of(1, NESTED, 0, 1)))}, "tar-broken"),
        ({"storages": forge.tar_storages()[:-4] + pickled(forge.list_of(tuple_of(NESTED, 0, 0, 1)))}, "tar-broken"),
        ({"tensors": pickled(number(1)) + pickled(tuple_of(NESTED, 0, KIND))}, "tar-broken"),
        ({"tensors": pickled(number(1)) + pickled(tuple_of(100, NESTED, KIND)) + NUMBERS}, "tensor-broken"),
        ({"pickle": pickled(NESTED + b"Q")}, ""),
    ],
)
def test_deeply_nested_tuple_as_an_id_is_reported(parts: dict[str, bytes], code: str) -> None:
    checkpoint = inspect(tar(parts))
    assert checkpoint.format == "torch-tar"
    assert not code or code in codes(checkpoint)


def test_invalid_header_is_reported() -> None:
    checkpoint = inspect(tar(None, b"x" * 512, tar_member(b"pickle", HOSTILE)))
    assert checkpoint.safety == "unknown"
    assert "tar-broken" in codes(checkpoint)


@pytest.mark.parametrize("size", [b"-0000005000\0", b"\xff" * 2 + bytes(10)])
def test_negative_member_size_is_rejected(size: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(tar(None, tar_member(b"note", b"", size=size)))
    checkpoint = inspect(path)
    assert (checkpoint.format, checkpoint.safety) == ("torch-tar", "unknown")
    assert "tar-broken" in codes(checkpoint)
    path.write_bytes(tar_member(b"storages", b"", size=size) + bytes(1024))
    assert inspect(path).integrity == "not-a-checkpoint"


def test_tensor_without_a_storage_is_broken() -> None:
    tensors = (
        pickled(number(1)) + pickled(tuple_of(100, 7, name("torch", "FloatTensor"))) + struct.pack("<i4x3q", 1, 4, 1, 0)
    )
    checkpoint = inspect(tar({"tensors": tensors}))
    assert (checkpoint.integrity, set(codes(checkpoint))) == ("damaged", {"tensor-broken"})


def test_tar_with_too_many_members_has_unknown_safety() -> None:
    checkpoint = inspect(tar(None, tar_member(b"x", b"") * 10_001))
    assert checkpoint.safety == "unknown"
