"""An encrypted archive is reported as password-protected, not as dangerous."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import pytest
from tests import forge

import transload

RECORDS = {
    "archive/data.pkl": forge.pickled(b"}"),
    "archive/byteorder": b"little",
    "archive/version": b"3\n",
}
_TABLE = [0] * 256
for _at in range(256):
    _value = _at
    for _ in range(8):
        _value = _value >> 1 ^ 0xEDB88320 if _value & 1 else _value >> 1
    _TABLE[_at] = _value


def encrypt(data: bytes, password: bytes) -> bytes:
    """The cipher of PKZIP 2, as in APPNOTE.TXT, 6.1."""
    keys = [0x12345678, 0x23456789, 0x34567890]

    def update(byte: int) -> None:
        keys[0] = keys[0] >> 8 ^ _TABLE[(keys[0] ^ byte) & 255]
        keys[1] = ((keys[1] + (keys[0] & 255)) * 134775813 + 1) & 0xFFFFFFFF
        keys[2] = keys[2] >> 8 ^ _TABLE[(keys[2] ^ keys[1] >> 24) & 255]

    for byte in password:
        update(byte)
    out = bytearray()
    for byte in data:
        mixed = (keys[2] | 2) & 0xFFFF
        out.append(byte ^ (mixed * (mixed ^ 1) >> 8 & 255))
        update(byte)
    return bytes(out)


def encrypted(method: int) -> bytes:
    out, directory = io.BytesIO(), b""
    for name, data in RECORDS.items():
        crc, at = zlib.crc32(data), out.tell()
        compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
        compressed = compressor.compress(data) + compressor.flush() if method else data
        body = encrypt(bytes(11) + bytes([crc >> 24]) + compressed, b"secret")
        numbers = struct.pack("<HHHHIIIH", 1, method, 0, 33, crc, len(body), len(data), len(name))
        out.write(b"PK\3\4" + struct.pack("<H", 20) + numbers + bytes(2) + name.encode() + body)
        directory += (
            b"PK\1\2" + struct.pack("<HH", 20, 20) + numbers + bytes(12) + struct.pack("<I", at) + name.encode()
        )
    end = struct.pack("<HHHHIIH", 0, 0, len(RECORDS), len(RECORDS), len(directory), out.tell(), 0)
    return out.getvalue() + directory + b"PK\5\6" + end


@pytest.mark.parametrize("method", [0, 8])
def test_encrypted_archive_is_reported_as_password_protected(method: int) -> None:
    data = encrypted(method)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("archive/data.pkl", pwd=b"secret") == RECORDS["archive/data.pkl"]
    checkpoint = transload.inspect(data)
    assert (checkpoint.safety, checkpoint.integrity) == ("unknown", "damaged")
    (finding,) = checkpoint.findings
    assert finding.title == "the archive is protected by a password"
    assert "password" in finding.fix[0]
    assert "protected by a password" in checkpoint.prediction
    with pytest.raises(transload.BrokenFileError, match="protected by a password"):
        transload.load(data)


def test_stored_entry_with_two_different_sizes_is_dangerous() -> None:
    """Neither compressed nor flagged as encrypted, so both sizes should be equal."""
    data = encrypted(0)
    data = data.replace(b"PK\1\2\x14\0\x14\0\1\0", b"PK\1\2\x14\0\x14\0\0\0").replace(
        b"PK\3\4\x14\0\1\0", b"PK\3\4\x14\0\0\0"
    )
    assert transload.inspect(data).safety == "dangerous"
