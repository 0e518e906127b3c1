"""What a file is when it is no checkpoint: told by its content alone, never by its name.

Nothing here raises for content, and nothing reads more than about a mebibyte, whatever the size.
"""

from __future__ import annotations

import re

from transload.read.foreign.archives import identify_zip, packed, tar, zip_names, zipped
from transload.read.foreign.binary import LOOKS, WEAK_LOOKS
from transload.read.foreign.kinds import LEGACY_MAGIC, SCAN, Foreign, View, clean, rescue_command, taken_out
from transload.read.foreign.text import as_text, text
from transload.read.source import BytesSource, Slice, Source

__all__ = ["Foreign", "identify", "identify_zip", "mangled"]

# gzip in gzip in gzip … can be made to unpack to itself for ever.
DEEPEST = 2
# Blocks looked at in a file that begins with zeros.
SAMPLES = 16
SAMPLE = 4096

# A shorter run of zeros is how many formats begin.
ZERO_RUN = 512
# Bytes from a zip record's start to the end of its name, at most: what is looked back over from "data.pkl".
RECORD_NAME = 30 + 255 + len("/data.pkl")


def identify(source: Source) -> Foreign:
    r"""What ``source`` is, given that it could not be read as a checkpoint.

    >>> identify(BytesSource(b"Entry not found")).title
    '15 bytes of text, probably a server\'s answer: "Entry not found"'
    """
    return _identify(View(source))


def mangled(source: Source) -> Foreign | None:
    """How a checkpoint was spoilt by being copied as text, if it was; such a one still begins like a checkpoint."""
    return _mangled(View(source))


def _identify(view: View) -> Foreign:
    return next((foreign for look in _LOOKS if (foreign := look(view)) is not None), None) or _unknown(view)


def _empty(view: View) -> Foreign | None:
    if view.size:
        return None
    return Foreign("empty", "an empty file: the save or the download never wrote anything", (), (_AGAIN,))


_AGAIN = "Save or download it again, and compare the sizes."


def _zeros(view: View) -> Foreign | None:
    """Nothing but zeros, by all samples."""
    if view.head.strip(b"\0") or view.tail.strip(b"\0"):
        return None
    step = max(1, view.size // SAMPLES)
    if any(view.source.read(at, SAMPLE).strip(b"\0") for at in range(0, view.size, step)):
        return None
    title = f"{view.size:,} bytes of zeros: the space was reserved and never written (disk full, download not begun)"
    return Foreign("zeros", title, (), (_AGAIN,))


def _zeros_first(view: View) -> Foreign | None:
    """A file that begins with zeros: its first pages were lost or never written."""
    if view.head[:ZERO_RUN].strip(b"\0") or view.size < ZERO_RUN:
        return None
    zeros = len(view.wide) - len(view.wide.lstrip(b"\0"))
    more = " or more" if zeros == len(view.wide) else ""
    details = ("the zip directory at its end is still there",) if b"PK\x05\x06" in view.tail else ()
    title = f"a file whose first {zeros:,} bytes{more} are zero; the rest is not"
    return Foreign("zeros-first", title, details, (_AGAIN,))


def _http(view: View) -> Foreign | None:
    """A response saved with its header, as ``curl -i`` does."""
    status = re.match(rb"HTTP/\d(?:\.\d)? (\d{3}[^\r\n]{0,80})", view.head)
    if not status:
        return None
    end = re.search(rb"\r?\n\r?\n", view.head)
    body = end.end() if end else view.size
    if body >= view.size or view.depth >= DEEPEST:
        return Foreign("http", f"the header of an HTTP response ({clean(status[1])}), not a checkpoint", (), (_AGAIN,))
    rest = Slice(view.source, body, view.size - body, view.source.name)
    inner = _identify(View(rest, depth=view.depth + 1, whole=view.whole))
    title = f"an HTTP response ({clean(status[1])}) with its header in front of {inner.title}"
    fix = (_cut_front(view, body),) if inner.format in ("torch-tar", "pickle") else inner.fix
    fix = taken_out(view.path, inner.holds) if inner.holds else fix
    return Foreign("http", title, inner.details, fix, inner.holds)


def _cut_front(view: View, count: int) -> str:
    return f"Cut the first {count:,} bytes off: tail -c +{count + 1} {view.file} > {view.beside('.cut')}"


def _mangled(view: View) -> Foreign | None:
    """A binary file that was copied as text: line ends doubled, or bytes replaced by U+FFFD."""
    head = view.head
    zipped_or_pickled = _torch_record(head) == 0 or re.match(rb"\x80[\x02-\x05]", head)
    if zipped_or_pickled and head.count(b"\n") == head.count(b"\r\n") >= 3:  # chance is 1 in 2**24
        title = "a checkpoint copied in text mode: every line feed has become CR LF"
        seen = f"{head.count(bytes((13, 10))):,} CR LF and no bare LF"
        return Foreign("crlf", title, (seen,), (_BINARY, *_UNDONE, rescue_command(view.path)), ".pt")
    started = head.startswith((b"PK\x03\x04", b"\xef\xbf\xbd", b"\xc2\x80"))
    decoded = head[:-4].decode("utf-8", "replace") if started and _is_utf8(head) else ""
    if decoded.count("\ufffd") >= 4:
        title = "a binary file that was read and written as text: its bytes above 127 are lost"
        return Foreign("utf8-lossy", title, (f"{decoded.count(chr(0xFFFD)):,} replacement characters",), (_BINARY,))
    if sum(0x80 <= ord(c) <= 0xFF for c in decoded) >= 4:
        title = "a binary file that was re-encoded from Latin-1 to UTF-8"
        return Foreign("utf8", title, (), (_BINARY, _undo(view, _UNDO_UTF8)))
    return None


_BINARY = "Copy it again in binary mode (scp, rsync; in ftp: binary; in Git: '*.pt binary' in .gitattributes)."
_UNDONE = ("If there is no other copy, this undoes it.",)
_UNDO_UTF8 = "d.decode().encode('latin-1')"


def _undo(view: View, expression: str) -> str:
    code = f"import sys; d = open(sys.argv[1], 'rb').read(); open(sys.argv[2], 'xb').write({expression})"
    return f'Or try to undo it: python -c "{code}" {view.file} {view.beside(".mended")}'


def _is_utf8(data: bytes) -> bool:
    """Whether it decodes, the last character aside; binary data never does for long."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(data) - 4 and len(data) > 8
    return True


def _checkpoint(view: View) -> Foreign | None:
    """A checkpoint after all: asked about what lies inside something else."""
    from transload.read.safetensors import looks_like

    if view.head.startswith(LEGACY_MAGIC):
        return Foreign("torch-legacy", "a PyTorch checkpoint (legacy)", holds=".pt")
    if looks_like(view.source):
        return Foreign("safetensors", "a safetensors file", holds=".safetensors")
    return None


def _packed(view: View) -> Foreign | None:
    def look(data: bytes) -> Foreign:
        if view.depth >= DEEPEST:
            return Foreign("unknown", "something packed again and again")
        return _identify(View(BytesSource(data, view.path + ".unpacked"), depth=view.depth + 1, whole=False))

    return packed(view, look)


def _binary(view: View) -> Foreign | None:
    return next((foreign for look in LOOKS if (foreign := look(view)) is not None), None)


def _embedded(view: View) -> Foreign | None:
    """A checkpoint behind foreign bytes: torch looks for its magic at byte 0 only."""
    starts = [start for start in (_torch_record(view.wide), view.wide.find(LEGACY_MAGIC)) if start > 0]
    if not starts:
        return None
    start = min(starts)
    details = (f"it begins: {clean(view.head[: min(start, 60)])}",) if as_text(view.head[: min(start, 1000)]) else ()
    title = f"{start:,} foreign bytes with a checkpoint behind them: it starts at byte {start:,}"
    return Foreign("prefixed", title, details, taken_out(view.path, ".pt"), ".pt")


def _torch_record(data: bytes) -> int:
    """Where the zip record of the first ``data.pkl`` begins; -1 if there is none."""
    name = data.find(b"data.pkl")
    while name >= 0:
        start = data.rfind(b"PK\x03\x04", max(0, name - RECORD_NAME), name)
        length = int.from_bytes(data[start + 26 : start + 28], "little")
        if start >= 0 and start + 30 + length == name + len("data.pkl"):
            return start
        name = data.find(b"data.pkl", name + 1)
    return -1


def _weak(view: View) -> Foreign | None:
    return next((foreign for look in WEAK_LOOKS if (foreign := look(view)) is not None), None)


def _unknown(view: View) -> Foreign:
    first = view.head[:16].hex(" ")
    details = [f"first bytes: {first}"]
    if zip_names(view.tail[-SCAN:], 1):
        details.append("its end looks like that of a zip archive: the beginning may be lost")
    return Foreign("unknown", "a binary file of no known format", tuple(details), (_AGAIN,))


# The order matters: what is exact comes first, what is a guess last, and a container before what it may contain.
_LOOKS = (
    _empty,
    _zeros,
    _http,
    _mangled,
    _checkpoint,
    zipped,
    _packed,
    tar,
    _binary,
    _embedded,
    _zeros_first,
    text,
    _weak,
)
