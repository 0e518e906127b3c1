"""Archives that are not torch's: zip by its names, tar by its headers, packers by what comes out of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from transload.read.foreign.kinds import SCAN, Foreign, View, clean, listed, quoted, taken_out

__all__ = ["CHECKPOINT_NAME", "identify_zip", "packed", "tar", "zip_names", "zipped"]

# How much a packer may unpack to, and what its window may take: 1 KiB of xz can ask for 4 GiB.
UNPACKED = 64 * 1024
LZMA_MEMORY = 64 << 20
# Members of a tar looked at; each costs one small read.
TAR_MEMBERS = 64
TAR_BLOCK = 512
# Names of a zip that are looked at, and how much of its directory: a zip can hold millions of empty records.
MAX_NAMES = 10_000
MAX_DIRECTORY = 256 * 1024
MAX_NAME = 4096

CHECKPOINT_NAME = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|pt2|ptl|pkl|pickle|distcp|gguf)(\.tar)?$", re.IGNORECASE)

# As above, of what has been packed: model.pt.zst.
CHECKPOINT_INSIDE = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|pt2)\.\w+$", re.IGNORECASE)


class _ZipKind(NamedTuple):
    """``all_of``: patterns that each must match a name. ``fix`` may use ``{file}`` (shell) and ``{path}``."""

    format: str
    title: str
    all_of: tuple[str, ...]
    fix: str


_ASIDE = "Check the path: this is another kind of file."

# The first that matches is the answer, so the special ones come before the general.
_ZIPS = (
    _ZipKind("torch-zip", "a PyTorch checkpoint (zip)", (r"^[^/]+/data\.pkl$",), ""),
    _ZipKind("torch-zip-flat", "a PyTorch checkpoint zipped again without its top folder", (r"^data\.pkl$",), ""),
    _ZipKind(
        "torchserve",
        "a TorchServe model archive (.mar)",
        (r"^MAR-INF/MANIFEST\.json$",),
        "Unpack it and take the weights: unzip {file}",
    ),
    _ZipKind(
        "stable-baselines3",
        "a Stable-Baselines3 model",
        (r"(^|/)policy\.pth$", r"(^|/)pytorch_variables\.pth$"),
        "Load it with stable_baselines3, or take the weights out: unzip {file} policy.pth",
    ),
    _ZipKind("npz", "a NumPy archive (.npz)", (r"\.npy$",), "numpy.load({path!r}, allow_pickle=False)"),
    _ZipKind(
        "keras",
        "a Keras model (.keras)",
        (r"^config\.json$", r"\.weights\.h5$"),
        "keras.models.load_model({path!r}), or export it to PyTorch from there",
    ),
    _ZipKind("apk", "an Android package", (r"^AndroidManifest\.xml$",), _ASIDE),
    _ZipKind("jar", "a Java archive", (r"^META-INF/MANIFEST\.MF$",), _ASIDE),
    _ZipKind("docx", "a Word document", (r"^\[Content_Types\]\.xml$", r"^word/"), _ASIDE),
    _ZipKind("xlsx", "an Excel workbook", (r"^\[Content_Types\]\.xml$", r"^xl/"), _ASIDE),
    _ZipKind("pptx", "a PowerPoint presentation", (r"^\[Content_Types\]\.xml$", r"^ppt/"), _ASIDE),
    _ZipKind("epub", "an electronic book (EPUB)", (r"^META-INF/container\.xml$",), _ASIDE),
    _ZipKind("odf", "an OpenDocument file", (r"^META-INF/manifest\.xml$", r"^content\.xml$"), _ASIDE),
    _ZipKind("wheel", "a Python wheel", (r"^[^/]+\.dist-info/WHEEL$",), "Install it instead: pip install {file}"),
    _ZipKind("coreml", "a Core ML package", (r"com\.apple\.CoreML|\.mlmodel$",), "Open it with coremltools."),
    _ZipKind(
        "tensorflow",
        "a TensorFlow SavedModel, zipped",
        (r"(^|/)saved_model\.pb$",),
        "unzip {file} and load the folder with tf.saved_model.load",
    ),
)


def identify_zip(names: list[str], path: str = "FILE") -> Foreign:
    """What a zip archive is, from the names of its records; ``path`` is for the commands in the fix.

    >>> identify_zip(["readme.txt", "weights/ok.pt"]).title
    'a zip archive with a checkpoint inside: weights/ok.pt'
    """
    ours = [name for name in names[:MAX_NAMES] if not re.search(r"(^|/)(__MACOSX/|\.DS_Store$|\._)", name)]
    for kind in _ZIPS:
        if all(any(re.search(pattern, name) for name in ours) for pattern in kind.all_of):
            fix = (kind.fix.format(file=quoted(path), path=path),) if kind.fix else ()
            holds = ".pt" if kind.format.startswith("torch-zip") else ""
            return Foreign(kind.format, kind.title, _records(ours), fix or _rescued(holds, path), holds)
    inside = [name for name in ours if CHECKPOINT_NAME.search(name)]
    if inside:
        found = _holding("zip", "a zip archive", inside, ours, f"unzip {quoted(path)}")
        ending = _RESCUED.get(inside[0].lower().rpartition(".")[2], "")
        member = inside[0] if len(inside) > 1 else ""
        usual = not member or _is_usual(member)
        return replace(found, fix=taken_out(path, ending, member), holds=ending) if ending and usual else found
    title = "a zip archive, but not one of PyTorch's" if ours else "an empty zip archive"
    return Foreign("zip", title, _records(ours), (f"See what it holds: unzip -l {quoted(path)}",))


# The endings of members that a rescue takes out, and what it makes of them.
_RESCUED = {
    **dict.fromkeys(("pt", "pth", "ckpt", "bin", "pt2"), ".pt"),
    "safetensors": ".safetensors",
}


def _rescued(holds: str, path: str) -> tuple[str, ...]:
    return taken_out(path, holds) if holds else ()


def _is_usual(member: str) -> bool:
    """Whether a name can stand in a command: one called --checkpoint-action=exec=… must not, for somebody pastes it."""
    return bool(re.fullmatch(r"\w[\w./ +=-]*", member))


def _records(names: list[str]) -> tuple[str, ...]:
    count = "1 record" if len(names) == 1 else f"{len(names):,} records"
    return (f"{count}: {listed(names)}",) if names else ()


def _holding(format_: str, title: str, inside: list[str], names: list[str], unpack: str) -> Foreign:
    """An archive with checkpoints in it: name them, and give the command that takes them out."""
    several = "a checkpoint" if len(inside) == 1 else f"{len(inside):,} checkpoints"
    fix = f"{unpack} {quoted(inside[0])}" if _is_usual(inside[0]) else unpack
    return Foreign(format_, f"{title} with {several} inside: {listed(inside, 3)}", _records(names), (fix,))


def zip_names(data: bytes, most: int = 1000) -> list[str]:
    r"""Names in the local headers and directory entries that lie in ``data``, whatever else is broken.

    >>> zip_names(b"PK\x03\x04" + bytes(22) + b"\x05\x00\x00\x00a.txt")
    ['a.txt']
    """
    names: dict[str, None] = {}
    for found in re.finditer(rb"PK(?:\x03\x04|\x01\x02)", data):
        at = found.start()
        length_at, name_at = (at + 28, at + 46) if data[at + 2] == 1 else (at + 26, at + 30)
        length = int.from_bytes(data[length_at : length_at + 2], "little")
        if 0 < length <= MAX_NAME and name_at + length <= len(data):
            names[clean(data[name_at : name_at + length], 400)] = None
        if len(names) >= most:
            break
    return list(names)


def zipped(view: View) -> Foreign | None:
    """A zip archive, by its directory; without one, by the names in its first bytes."""
    if not view.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return None
    end = view.tail.rfind(b"PK\x05\x06")
    if end >= 0:
        size, offset = (int.from_bytes(view.tail[end + at : end + at + 4], "little") for at in (12, 16))
        names = zip_names(view.source.read(offset, min(size, MAX_DIRECTORY)), MAX_NAMES)
        if names or not size:
            return identify_zip(names, view.path)
    names = zip_names(view.head)
    if not names:
        return Foreign("zip", "the first bytes of a zip archive and nothing more", (), ("Save or download it again.",))
    # A stored archive shows the records of the archives inside it: the first name is its own.
    return identify_zip(names[:1] if CHECKPOINT_NAME.search(names[0]) and "/" not in names[0] else names, view.path)


def tar(view: View) -> Foreign | None:
    """A tar archive: the first header's checksum is right."""
    names = _tar_names(view)
    if not names:
        return None
    if {"pickle", "storages", "tensors"} <= {name.removeprefix("./") for name in names}:
        return Foreign("torch-tar", "a PyTorch checkpoint of the oldest kind (tar)")
    inside = [name for name in names if CHECKPOINT_NAME.search(name)]
    if inside:
        return _holding("tar", "a tar archive", inside, names, f"tar xf {view.file}")
    return Foreign("tar", "a tar archive", _records(names), (f"Unpack it: tar xf {view.file}",))


def _tar_names(view: View) -> list[str]:
    names: list[str] = []
    offset = 0
    while len(names) < TAR_MEMBERS:
        block = view.source.read(offset, TAR_BLOCK)
        size = _tar_size(block)
        if size is None:
            break
        names.append(clean(block[:100].split(b"\0")[0], 100))
        offset += TAR_BLOCK + -(-size // TAR_BLOCK) * TAR_BLOCK
    return names


def _tar_size(block: bytes) -> int | None:
    """The size of the member that this header describes; ``None`` if it is no header."""
    if len(block) < TAR_BLOCK or not block[0]:
        return None
    total = sum(block[:148]) + 8 * ord(" ") + sum(block[156:])
    try:
        if _octal(block[148:156]) != total:
            return None
        # A size that sets the top bit is a binary number: a member of 8 GiB or more.
        return int.from_bytes(block[125:136], "big") if block[124] & 0x80 else _octal(block[124:136])
    except ValueError:
        return None


def _octal(field: bytes) -> int:
    return int(field.strip(b" \0") or b"0", 8)


class _Packer(NamedTuple):
    format: str
    magic: bytes
    command: str
    """The shell command that unpacks to standard output."""
    unpack: Callable[[View], bytes] | None = None
    rescued: bool = False
    """Whether a rescue unpacks it, too."""


class _Decompressor(Protocol):
    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


def _gunzip(view: View) -> bytes:
    import zlib

    return zlib.decompressobj(31).decompress(view.head, UNPACKED)


def _inflate(view: View) -> bytes:
    import zlib

    return zlib.decompressobj(15).decompress(view.head, UNPACKED)


def _bunzip2(view: View) -> bytes:
    import bz2

    # One block of bz2 is up to 900 kB unpacked, and nothing comes out before all of it is in.
    unpacker: _Decompressor = bz2.BZ2Decompressor()
    return unpacker.decompress(view.wide[:SCAN], UNPACKED)


def _unxz(view: View) -> bytes:
    import lzma

    return lzma.LZMADecompressor(memlimit=LZMA_MEMORY).decompress(view.head, UNPACKED)


_ZLIB = 'python -c "import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))" <'

_PACKERS = (
    _Packer("gzip", b"\x1f\x8b\x08", "gunzip -c", _gunzip, rescued=True),
    _Packer("bzip2", b"BZh", "bunzip2 -c", _bunzip2, rescued=True),
    _Packer("xz", b"\xfd7zXZ\0", "xz -dc", _unxz, rescued=True),
    _Packer("zstd", b"\x28\xb5\x2f\xfd", "zstd -dc", rescued=True),
    _Packer("lz4", b"\x04\x22\x4d\x18", "lz4 -dc"),
    _Packer("7z", b"7z\xbc\xaf\x27\x1c", "7z x -so"),
    _Packer("rar", b"Rar!\x1a\x07", "unrar p -inul"),
    _Packer("compress", b"\x1f\x9d", "uncompress -c"),
    *(_Packer("zlib", b"\x78" + level, _ZLIB, _inflate) for level in (b"\x01", b"\x5e", b"\x9c", b"\xda")),
)


def packed(view: View, look: Callable[[bytes], Foreign]) -> Foreign | None:
    """Something compressed, and what ``look`` makes of the beginning of its content."""
    packer = next((packer for packer in _PACKERS if view.head.startswith(packer.magic)), None)
    if packer is None:
        return None
    inner = _opened(view, packer)
    if inner is None:
        return None
    fix: tuple[str, ...] = (f"Unpack it first: {packer.command} {view.file} > {view.beside('.unpacked')}",)
    if not inner:
        ending = ".safetensors" if ".safetensors" in view.path else ".pt"
        unseen = packer.rescued and packer.unpack is None
        fix = taken_out(view.path, ending) if unseen and CHECKPOINT_INSIDE.search(view.path) else fix
        return Foreign(packer.format, f"a file compressed with {packer.format}", (), fix)
    content = look(inner)
    fix = taken_out(view.path, content.holds) if content.holds and packer.rescued else (*fix, *content.fix[:1])
    return Foreign(packer.format, f"{packer.format} around {content.title}", content.details, fix, content.holds)


def _opened(view: View, packer: _Packer) -> bytes | None:
    """The beginning of the content; empty if it cannot be had, ``None`` if this is no such file after all."""
    # zlib's two bytes and bzip2's three occur by chance: there the data must really unpack.
    weak = len(packer.magic) <= 3 and packer.format != "gzip"
    if packer.unpack is None:
        return b""
    try:
        inner = packer.unpack(view)
    except Exception:  # noqa: BLE001 (zlib.error, LZMAError, OSError, EOFError …: a stranger's stream)
        inner = b""
    return None if weak and not inner and not view.head.startswith(b"BZh") else inner
