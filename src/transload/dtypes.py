"""torch's dtypes as data: their sizes, and their names in each format."""

from __future__ import annotations

# Bytes of an element of a storage. For dtypes smaller than a byte, torch stores one element in each byte, except for
# the packed ones (x2, 4x2, 2x4), where an element of the storage is a byte.
_BY_SIZE = (
    (16, "complex128"),
    (8, "float64 int64 uint64 complex64"),
    (4, "float32 int32 uint32 complex32 bcomplex32 qint32"),
    (2, "float16 bfloat16 int16 uint16 bits16"),
    (1, "bool int8 uint8 qint8 quint8 quint4x2 quint2x4 bits8 bits1x8 bits2x4 bits4x2"),
    (1, "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"),
    (1, "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"),
)
ITEMSIZE: dict[str, int] = {name: size for size, names in _BY_SIZE for name in names.split()}

QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})

# ggml types by number (enum ggml_type in ggml.h): first those that torch has, then name, elements and bytes of a block.
GGML: dict[int, str] = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}
GGML.update({24: "int8", 25: "int16", 26: "int32", 27: "int64"})
_QUANTIZED_BLOCKS = """
    2 Q4_0 32 18; 3 Q4_1 32 20; 6 Q5_0 32 22; 7 Q5_1 32 24; 8 Q8_0 32 34; 9 Q8_1 32 40; 10 Q2_K 256 84; 11 Q3_K 256 110;
    12 Q4_K 256 144; 13 Q5_K 256 176; 14 Q6_K 256 210; 15 Q8_K 256 292; 16 IQ2_XXS 256 66; 17 IQ2_XS 256 74;
    18 IQ3_XXS 256 98; 19 IQ1_S 256 50; 20 IQ4_NL 32 18; 21 IQ3_S 256 110; 22 IQ2_S 256 82; 23 IQ4_XS 256 136;
    29 IQ1_M 256 56; 34 TQ1_0 256 54; 35 TQ2_0 256 66; 39 MXFP4 32 17; 40 NVFP4 64 36; 41 Q1_0 128 18
"""

# Elements and bytes of a block, for dtypes whose elements do not take whole bytes although shape and numel count
# elements. F4 and F6 are safetensors names.
BLOCKS = {"quint4x2": (2, 1), "quint2x4": (4, 1), "F4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3)}
for _row in _QUANTIZED_BLOCKS.split(";"):
    _number, _name, _elements, _bytes = _row.split()
    GGML[int(_number)] = _name
    BLOCKS[_name] = int(_elements), int(_bytes)


def itemsize(dtype: str, numel: int = 1) -> int:
    """The bytes of ``numel`` elements of ``dtype``; elements of an unknown dtype count as one byte.

    >>> itemsize("float32", 10), itemsize("quint4x2", 3)
    (40, 2)
    """
    block = BLOCKS.get(dtype)
    if block:
        return -(-numel * block[1] // block[0])
    return ITEMSIZE.get(dtype, 1) * numel


def named(table: str) -> dict[str, str]:
    """A table of ``name=dtype`` pairs as a dictionary.

    >>> named("BOOL=bool U8=uint8")
    {'BOOL': 'bool', 'U8': 'uint8'}
    """
    return {name: dtype for name, _, dtype in (pair.partition("=") for pair in table.split())}


# Storage classes by name, without their module (torch, torch.cuda, torch.storage): torch itself looks only at the last
# component. Untyped storages count bytes.
STORAGES: dict[str, str] = named("""
    DoubleStorage=float64 FloatStorage=float32 HalfStorage=float16 BFloat16Storage=bfloat16
    LongStorage=int64 IntStorage=int32 ShortStorage=int16 CharStorage=int8 ByteStorage=uint8 BoolStorage=bool
    ComplexDoubleStorage=complex128 ComplexFloatStorage=complex64
    QInt8Storage=qint8 QUInt8Storage=quint8 QInt32Storage=qint32 QUInt4x2Storage=quint4x2 QUInt2x4Storage=quint2x4
    UntypedStorage=uint8 _UntypedStorage=uint8
""")
STORAGE_CLASSES: dict[str, str] = {dtype: name for name, dtype in STORAGES.items() if "Untyped" not in name}

# https://github.com/huggingface/safetensors: the names in its headers.
SAFETENSORS: dict[str, str] = named("""
    BOOL=bool U8=uint8 I8=int8 U16=uint16 I16=int16 U32=uint32 I32=int32 U64=uint64 I64=int64
    F16=float16 BF16=bfloat16 F32=float32 F64=float64 C64=complex64
    F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2 F8_E4M3FNUZ=float8_e4m3fnuz F8_E5M2FNUZ=float8_e5m2fnuz
    F8_E8M0=float8_e8m0fnu F4=float4_e2m1fn_x2
""")

# numpy's type codes; ``NUMPY`` adds the byte order. Other dtypes are saved as opaque bytes of the same width, as numpy
# saves those of ``ml_dtypes``.
FROM_NUMPY: dict[str, str] = named("""
    f8=float64 f4=float32 f2=float16 i8=int64 i4=int32 i2=int16 i1=int8 u1=uint8 u2=uint16 u4=uint32 u8=uint64 b1=bool
    c8=complex64 c16=complex128
""")
NUMPY: dict[str, str] = {dtype: f"{'|' if code[1:] == '1' else '<'}{code}" for code, dtype in FROM_NUMPY.items()}

# torch.export writes the numbers of its ScalarType enum (torch/_export/serde/schema.py).
SCALAR_TYPES: dict[int, str] = {
    **dict(enumerate(["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"], 1)),
    **dict(enumerate(["complex32", "complex64", "complex128", "bool", "bfloat16"], 9)),
    **dict(enumerate(["uint16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"], 28)),
    **dict(enumerate(["float8_e8m0fnu", "uint32", "uint64"], 33)),
}

# torch counts bytes in signed 64-bit integers; Python's grow without bound.
MAX_SIZE = 1 << 63
