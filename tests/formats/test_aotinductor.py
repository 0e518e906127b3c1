"""AOTInductor packages: the compilation target, from the metadata and from the ELF headers of the code."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.each import each

from transload.checkpoint import Checkpoint, Part
from transload.formats.programs.aotinductor import HEADER, capability, read_elf
from transload.opening import inspect as read

FOLDER = "data/aotinductor/model/"


def elf(machine: int, flags: int = 0, abi: tuple[int, int] = (0, 0), bits: int = 64) -> bytes:
    ident = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1, 1, *abi]) + bytes(7)
    head = ident + struct.pack("<HHI", 2, machine, 1)
    return head + bytes((48 if bits == 64 else 36) - len(head)) + struct.pack("<I", flags) + bytes(32)


def package(records: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, record in {"archive_format": b"pt2", **records}.items():
            archive.writestr(f"m/{name}", record)
    return out.getvalue()


def part(checkpoint: Checkpoint, suffix: str) -> Part:
    return next(part for part in checkpoint.parts if part.name.endswith(suffix))


def codes(checkpoint: Checkpoint) -> list[str]:
    return [problem.code for problem in checkpoint.problems]


# -- ELF headers

# e_ident[7:9] and e_flags of the cubin that ptxas writes for an empty kernel.
CUBIN_HEADERS = [
    # CUDA 12.8 and 12.9
    ("sm_50", (0x33, 7), 0x320532),
    ("sm_75", (0x33, 7), 0x4B054B),
    ("sm_80", (0x33, 7), 0x500550),
    ("sm_89", (0x33, 7), 0x590559),
    ("sm_90", (0x33, 7), 0x5A055A),
    ("sm_90a", (0x33, 7), 0x5A0D5A),
    ("sm_100", (0x41, 8), 0x6006402),
    ("sm_100a", (0x41, 8), 0x600640A),
    ("sm_120", (0x41, 8), 0x6007802),
    # CUDA 13
    ("sm_75", (0x41, 8), 0x6004B04),
    ("sm_86", (0x41, 8), 0x6005604),
    ("sm_90", (0x41, 8), 0x6005A04),
    ("sm_120", (0x41, 8), 0x6007802),
]


@each(("sm", "abi", "flags"), CUBIN_HEADERS)
def test_cubin_target_is_read_from_both_header_layouts(sm: str, abi: tuple[int, int], flags: int) -> None:
    assert read_elf(elf(190, flags, abi)[:HEADER]) == ("NVIDIA GPU", sm)


def test_elf_machine_names_the_processor() -> None:
    assert [read_elf(elf(machine)) for machine in (62, 183, 999)] == [
        ("x86_64", ""),
        ("aarch64", ""),
        ("ELF machine 999", ""),
    ]
    assert read_elf(elf(190, 0x140114, (0x33, 7), bits=32)) == ("NVIDIA GPU", "sm_20")


@given(st.binary(max_size=80))
def test_read_elf_accepts_any_bytes(head: bytes) -> None:
    read_elf(head)
    read_elf(b"\x7fELF" + head)


def test_capability_of_target_names() -> None:
    assert [capability(text) for text in ("sm_75", "90", "sm_100a", "sm_121f", "compute_80")] == [
        "7.5",
        "9.0",
        "10.0",
        "12.1",
        "8.0",
    ]
    assert [capability(text) for text in ("", "gfx90a", "x" * 50)] == ["", "gfx90a", "x" * 50]


# -- packages


def test_cuda_package_reports_its_compute_capability(data: Path) -> None:
    checkpoint = read(data / "h200" / "aoti_cuda0.pt2")
    assert checkpoint.format == "aotinductor"
    facts = dict(checkpoint.facts)
    assert facts["device"] == "cuda"
    assert facts["compute capability"] == "9.0"
    assert (facts["platform"], facts["machine"]) == ("linux", "x86_64")
    assert facts["weights"] == "inside the compiled library, not listed"
    cubins = [part for part in checkpoint.parts if part.kind == "cubin"]
    assert len(cubins) == 4
    assert {part.facts for part in cubins} == {(("target", "sm_90"), ("compute capability", "9.0"))}
    assert part(checkpoint, ".so").facts == (("machine", "x86_64"),)
    assert checkpoint.tensors == ()
    assert codes(checkpoint) == ["aoti-architecture"]
    assert "sm_90 (compute capability 9.0)" in checkpoint.problems[0].detail


def test_cpu_package_has_no_compute_capability() -> None:
    metadata = {"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "aarch64", "AOTI_COMPUTE_CAPABILITY": ""}
    blob = package({f"{FOLDER}a.so": elf(183), f"{FOLDER}a_metadata.json": json.dumps(metadata).encode()})
    checkpoint = read(blob)
    assert dict(checkpoint.facts) | {"device": "cpu", "machine": "aarch64"} == dict(checkpoint.facts)
    assert "compute capability" not in dict(checkpoint.facts)
    assert part(checkpoint, ".so").facts == (("machine", "aarch64"),)
    assert codes(checkpoint) == []


def test_gpu_code_inside_a_shared_library_is_found() -> None:
    cubin = elf(190, 0x500550, (0x33, 7))
    blob = package({f"{FOLDER}a.so": elf(62) + b"x" * 100 + cubin, f"{FOLDER}b.so": elf(62) + b"\0.nv_fatbin\0"})
    checkpoint = read(blob)
    assert dict(part(checkpoint, "a.so").facts)["GPU code inside"] == "sm_80"
    assert "nv_fatbin" in dict(part(checkpoint, "b.so").facts)["GPU code inside"]


def test_ptx_target_is_read() -> None:
    source = b"//\n// Generated by LLVM\n//\n.version 8.7\n.target sm_90a\n.address_size 64\n"
    facts = part(read(package({f"{FOLDER}k.ptx": source})), ".ptx").facts
    assert facts == (("target", "sm_90a"), ("compute capability", "9.0"))


def test_weights_outside_the_library_are_listed() -> None:
    base = torch.arange(12.0)
    buffer = io.BytesIO()
    torch.save(base, buffer)
    config = {"fc.weight": ["weight_0", [2, 3], [3, 1], 0], "tail": ["weight_0", [2, 2], [1, 2], 8]}
    blob = package(
        {f"{FOLDER}weights_config.json": json.dumps(config).encode(), "data/weights/weight_0": buffer.getvalue()}
    )
    checkpoint = read(blob)
    assert codes(checkpoint) == []
    assert checkpoint.shared == (("fc.weight", "tail"),)
    for tensor in checkpoint.tensors:
        expected = base.as_strided(tensor.shape, tensor.stride, tensor.offset)
        assert tensor.file_offset is not None
        first = struct.unpack_from("<f", blob, tensor.file_offset)[0]
        assert first == expected.flatten()[0]
        assert [list(tensor.shape), list(tensor.stride), tensor.offset] == config[tensor.name][1:]


def test_missing_and_malformed_weights_are_reported() -> None:
    config = {"a": ["weight_0", [2], [1], 0], "b": [], "c": 3, "d": ["weight_0", ["x"], None, -1]}
    checkpoint = read(package({f"{FOLDER}weights_config.json": json.dumps(config).encode()}))
    assert set(codes(checkpoint)) == {"storage-missing", "tensor-broken"}


def test_package_with_exported_program_and_compiled_code() -> None:
    pytest.importorskip("torch.export.pt2_archive", reason="this torch writes an older format")
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{FOLDER}a.so", elf(62))
    checkpoint = read(buffer.getvalue())
    assert checkpoint.format == "aotinductor"
    assert [tensor.name for tensor in checkpoint.tensors] == ["weight", "bias"]
    assert checkpoint.written_by.recorded == (("torch", torch.__version__),)


# -- damaged packages

values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.just("weight_0"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=15,
)


@settings(max_examples=60)
@given(values, values)
def test_arbitrary_json_records_do_not_raise(config: object, metadata: object) -> None:
    files = {"weights_config.json": config, "a_metadata.json": metadata}
    records = {f"{FOLDER}{name}": json.dumps(value).encode() for name, value in files.items()}
    read(package({**records, "data/weights/weight_0": bytes(10)}))


@settings(max_examples=30)
@given(at=st.integers(0, 60_000), byte=st.integers(0, 255))
def test_damaged_byte_does_not_raise(data: Path, at: int, byte: int) -> None:
    blob = bytearray((data / "h200" / "aoti_cuda0.pt2").read_bytes())
    blob[-at - 1 if at % 2 else at] = byte
    read(bytes(blob))
