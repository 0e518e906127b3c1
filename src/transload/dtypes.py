"""torch's dtypes as data: their sizes, and what each format calls them."""

from __future__ import annotations

__all__ = ["ITEMSIZE", "QUANTIZED", "SAFETENSORS", "SCALAR_TYPES", "STORAGES", "itemsize"]

# Bytes an element of a storage takes. Of the sub-byte dtypes torch stores one element a byte, except the packed
# ones (x2, 4x2, 2x4), whose storage element is the byte itself.
ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
    "bcomplex32": 4,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"uint{bits}": 1 for bits in range(1, 8)},
    **{f"int{bits}": 1 for bits in range(1, 8)},
}

QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})

# Bits an element takes where that is no whole byte, while shape and numel count elements. F4 and F6 are names of
# safetensors.
_BITS = {"quint4x2": 4, "quint2x4": 2, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def itemsize(dtype: str, numel: int = 1) -> int:
    """Bytes that ``numel`` elements of ``dtype`` take; an unknown dtype counts as one byte each.

    >>> itemsize("float32", 10), itemsize("quint4x2", 3)
    (40, 2)
    """
    bits = _BITS.get(dtype)
    if bits:
        return -(-numel * bits // 8)
    return ITEMSIZE.get(dtype, 1) * numel


# Storage classes by name, whatever module they are said to live in (torch, torch.cuda, torch.storage): torch
# itself looks only at the last component. The untyped ones count bytes.
STORAGES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
    "_UntypedStorage": "uint8",
}

# https://github.com/huggingface/safetensors: the names in its headers.
SAFETENSORS: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}

# torch.export writes the ordinal of its own ScalarType enum (torch/_export/serde/schema.py).
SCALAR_TYPES: dict[int, str] = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    9: "complex32",
    10: "complex64",
    11: "complex128",
    12: "bool",
    13: "bfloat16",
    28: "uint16",
    29: "float8_e4m3fn",
    30: "float8_e5m2",
    31: "float8_e4m3fnuz",
    32: "float8_e5m2fnuz",
    33: "float8_e8m0fnu",
    34: "uint32",
    35: "uint64",
}
