"""Elements as numbers of little-endian order, where a file holds them in another order, or negated, or conjugated."""

from __future__ import annotations

from array import array

from transload.content.axes import FORMATS

__all__ = ["component", "resolved"]

_OTHER_SIGN = bytes(value ^ 0x80 for value in range(256))
_COMPLEX = {"complex32", "bcomplex32", "complex64", "complex128"}
_FLOATING = ("float", "bfloat")


def component(dtype: str, itemsize: int) -> int:
    """Bytes of one number: a complex element is two of them."""
    return itemsize // 2 if dtype in _COMPLEX else itemsize


def resolved(data: memoryview, dtype: str, itemsize: int, *, swapped: bool, flags: tuple[str, ...]) -> memoryview:
    """The same elements as plain little-endian numbers; ``data`` may be changed for it."""
    width = component(dtype, itemsize)
    if swapped and width > 1:
        turned = array(FORMATS[width], data.tobytes())
        turned.byteswap()
        data = memoryview(turned).cast("B")
    if dtype in _COMPLEX:
        if "neg" in flags:
            _change_sign(data, width - 1, 2 * width)
        if ("neg" in flags) != ("conj" in flags):
            _change_sign(data, 2 * width - 1, 2 * width)
    elif "neg" in flags:
        data = _negated(data, dtype, width)
    return data


def _change_sign(data: memoryview, first: int, every: int) -> None:
    """The sign is the highest bit of the last byte of a number."""
    data[first::every] = data[first::every].tobytes().translate(_OTHER_SIGN)


def _negated(data: memoryview, dtype: str, width: int) -> memoryview:
    if dtype.startswith(_FLOATING):
        _change_sign(data, width - 1, width)
        return data
    mask = (1 << 8 * width) - 1
    values = (int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width))
    return memoryview(b"".join((-value & mask).to_bytes(width, "little") for value in values))
