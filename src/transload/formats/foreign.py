"""Name a file that is not a checkpoint: a web page, an LFS pointer, another framework's model, a compressed file.

``identify`` calls a function for each kind of file in turn; each gets an ``Excerpt`` of the first and last bytes.
``foreign.md`` lists the formats that a pattern detects.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from functools import cache, cached_property

from transload.findings import is_named, packaged, quoted, rescue_command
from transload.formats.safetensors import looks_like_safetensors
from transload.formats.torch_legacy import MAGIC_PICKLE, members
from transload.formats.zip import read_index
from transload.frozen import NamedTuple
from transload.io.packed import UNWRAPPED, packed_as, unpack
from transload.io.sources import BytesSource, Slice, Source
from transload.render.words import plural
from transload.steps import sections

HEAD = 64 * 1024  # bytes read of each end, and decompressed: a terabyte takes no longer than a small file
SCAN = 1 << 20  # how far to search for a checkpoint after other bytes
TAR_MEMBERS = 64  # how many members of a tar archive are listed; each costs one small read
MAX_NAMES = 10_000  # how many names of a zip archive are compared: it can have millions of empty records
LONGEST_ANSWER = 512  # a server's error message is a line or two; longer text is a document
LONGEST_JSON = 64 * 1024  # longer JSON is not parsed, but described by its first bytes
DEEPEST = 2  # a gzip file can decompress to itself
SAMPLES, SAMPLE = 16, 4096  # how many blocks of a file that begins with zeros are read, and their size
ZERO_RUN = 512  # many formats begin with fewer zeros
# The longest header of a zip record up to the end of its name, which ends in "data.pkl".
RECORD_NAME = 30 + 255 + len("/data.pkl")
TABLE_MAGIC = bytes.fromhex("57fb808b247547db")  # https://github.com/google/leveldb: the last eight bytes of a table
# The opcodes of pickle, one of which follows the protocol number.
_OPCODES = frozenset(b"()+.012FGIJKLMNPQRSTUVXabcdeghijlopqrstu]}") | frozenset(range(0x80, 0x99))
NEWEST_PROTOCOL = 5

CHECKPOINT_NAME = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|pt2|ptl|pkl|pickle|distcp|gguf)(\.tar)?$", re.IGNORECASE)
# The name of a compressed checkpoint: model.pt.zst.
CHECKPOINT_INSIDE = re.compile(r"\.(pt|pth|ckpt|bin|safetensors|pt2)\.\w+$", re.IGNORECASE)
# The suffixes of members that ``rescue`` extracts, and the suffix of the new file.
_RESCUED = {**dict.fromkeys(("pt", "pth", "ckpt", "bin", "pt2"), ".pt"), "safetensors": ".safetensors"}

_OTHER_FILE = "Check the path: this is another kind of file."
_AGAIN = "Save or download it again, and compare the sizes."
_DOWNLOAD_AGAIN = "Download it again from the direct link, and compare the size with the one the server lists."
_WEIGHTS = ("The weights are beside it: model.safetensors or pytorch_model.bin.",)
_BINARY = "Copy it again in binary mode (scp, rsync; in ftp: binary; in Git: '*.pt binary' in .gitattributes)."
_UNDONE = "If there is no other copy, this undoes it."


class Foreign(NamedTuple):
    """What a file is that is not a checkpoint.

    ``format`` is a short, stable name; ``title`` completes "this is …"; ``details`` are the evidence; ``fix`` is what
    to do, each a sentence or a command. ``holds`` is the suffix for the checkpoint inside it; empty if there is none.
    """

    format: str
    title: str
    details: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    holds: str = ""


class Excerpt:
    """The first and last bytes of a source. ``whole`` is false if only its beginning was decompressed.

    ``depth`` counts the layers around it, each of which may be a compressed file or an HTTP response. ``path`` is for a
    command, ``file`` is the same, quoted for a shell.
    """

    def __init__(self, source: Source, *, depth: int = 0, whole: bool = True) -> None:
        self.source, self.size = source, source.size
        self.depth, self.whole = depth, whole
        self.head = source.read(0, HEAD)
        self.tail = source.read(max(0, self.size - HEAD), HEAD)  # in a small file it overlaps the head
        self.path = source.name if is_named(source.name) else "FILE"
        self.file = quoted(self.path)

    @cached_property
    def wide(self) -> bytes:
        """The first ``SCAN`` bytes."""
        return self.head if self.size <= len(self.head) else self.source.read(0, SCAN)


def rescue_advice(path: str, ending: str, member: str = "") -> tuple[str, ...]:
    """How to extract a checkpoint from another file."""
    which = "This extracts one of them." if member else "This extracts the checkpoint, as far as it is complete."
    return (which, rescue_command(path, ending, member))


def clean(text: str | bytes, limit: int = 160) -> str:
    r"""Untrusted text on one line, shortened, without control characters.

    >>> clean("404\x1b[31m  Not\nFound")
    '404[31m Not Found'
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "" for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def listed(names: list[str], most: int = 5) -> str:
    """The first names, cleaned."""
    shown = ", ".join(clean(name, 80) for name in names[:most])
    return f"{shown}, …" if len(names) > most else shown


def match(pattern: str, text: str) -> str:
    """The first group of the first match, cleaned; empty if there is none."""
    hit = re.search(pattern, text, re.IGNORECASE | re.DOTALL)
    return clean(hit[1]) if hit else ""


@cache
def _rows(section: str, fields: int) -> list[list[str]]:
    """The rows of a list in ``foreign.md``."""
    _, *rows = dict(sections(packaged(__package__, "foreign.md")))[section].replace("\n  ", " ").split("\n- ")
    return [[field.strip() for field in row.split(";", fields - 1)] for row in rows]


def identify_zip(names: list[str], path: str = "FILE") -> Foreign:
    """Identify a zip archive by the names of its records; ``path`` is for the commands in the fix."""
    relevant = [name for name in names[:MAX_NAMES] if not re.search(r"(^|/)(__MACOSX/|\.DS_Store$|\._)", name)]
    for format_, title, patterns, advice in _rows("zip archives", 4):
        if all(any(re.search(pattern, name) for name in relevant) for pattern in patterns.split()):
            holds = "" if advice else ".pt"
            words = _OTHER_FILE if advice == "!" else advice.format(file=quoted(path), path=path)
            return Foreign(format_, title, _records(relevant), rescue_advice(path, holds) if holds else (words,), holds)
    inside = [name for name in relevant if CHECKPOINT_NAME.search(name)]
    if inside:
        foreign = _with_checkpoints("zip", "a zip archive", inside, relevant, f"unzip {quoted(path)}")
        ending = _RESCUED.get(inside[0].lower().rpartition(".")[2], "")
        member = inside[0] if len(inside) > 1 else ""
        if ending and (not member or _can_be_pasted(member)):
            return foreign._replace(fix=rescue_advice(path, ending, member), holds=ending)
        return foreign
    title = "a zip archive, but not one of PyTorch's" if relevant else "an empty zip archive"
    return Foreign("zip", title, _records(relevant), (f"List its content: unzip -l {quoted(path)}",))


def _can_be_pasted(member: str) -> bool:
    """Whether a name is safe in a command that somebody pastes: ``--checkpoint-action=exec=…`` is not."""
    return bool(re.fullmatch(r"\w[\w./ +=-]*", member))


def _records(names: list[str]) -> tuple[str, ...]:
    count = "1 record" if len(names) == 1 else f"{len(names):,} records"
    return (f"{count}: {listed(names)}",) if names else ()


def _with_checkpoints(format_: str, title: str, inside: list[str], names: list[str], unpack: str) -> Foreign:
    """An archive that contains checkpoints; ``unpack`` is the command that extracts them."""
    several = "a checkpoint" if len(inside) == 1 else f"{len(inside):,} checkpoints"
    fix = f"{unpack} {quoted(inside[0])}" if _can_be_pasted(inside[0]) else unpack
    return Foreign(format_, f"{title} with {several} inside: {listed(inside, 3)}", _records(names), (fix,))


def _zipped(view: Excerpt) -> Foreign | None:
    """A zip archive, by the names in its directory or, without a directory, in the headers of its records."""
    if not view.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return None
    from transload.formats.zip_scan import walk_index

    index = read_index(view.source)
    names = (index if index.ok else walk_index(BytesSource(view.head), index)).names
    if not names and view.head.startswith(b"PK\x03\x04"):
        return Foreign("zip", "the first bytes of a zip archive and nothing more", (), ("Save or download it again.",))
    return identify_zip(names, view.path)


def _tar(view: Excerpt) -> Foreign | None:
    """A tar archive: the checksum of the first header is right."""
    names = [clean(name, 100) for name, *_ in members(view.source, TAR_MEMBERS)[0]]
    if not names:
        return None
    if {"pickle", "storages", "tensors"} <= {name.removeprefix("./") for name in names}:
        return Foreign("torch-tar", "a PyTorch checkpoint of the oldest kind (tar)")
    inside = [name for name in names if CHECKPOINT_NAME.search(name)]
    if inside:
        return _with_checkpoints("tar", "a tar archive", inside, names, f"tar xf {view.file}")
    return Foreign("tar", "a tar archive", _records(names), (f"Unpack it: tar xf {view.file}",))


def _packed(view: Excerpt) -> Foreign | None:
    """A compressed file, and what its decompressed beginning is."""
    packers = (row for row in _rows("compressed files", 3) if re.match(row[1].encode(), view.head, re.DOTALL))
    format_, _, command = next(packers, ("", "", ""))
    if not format_:
        return None
    # A block of bz2 is up to 900 kB when unpacked, and nothing of it is available before all of it is read.
    head = view.wide[:SCAN] if format_ == "bzip2" else view.head
    kind = packed_as(head)
    inner = b"".join(unpack(BytesSource(head), kind, HEAD)) if kind else b""
    if format_ == "zlib" and not inner:  # its two bytes occur by chance, so the data must decompress
        return None
    fix: tuple[str, ...] = (f"Unpack it first: {command} {view.file} > {quoted(view.path + '.unpacked')}",)
    if not inner:
        if format_ == "zstd" and CHECKPOINT_INSIDE.search(view.path):
            fix = rescue_advice(view.path, ".safetensors" if ".safetensors" in view.path else ".pt")
        return Foreign(format_, f"a file compressed with {format_}", (), fix)
    content = Foreign("unknown", "something compressed again and again")
    if view.depth < DEEPEST:
        content = identify(BytesSource(inner, view.path + ".unpacked"), depth=view.depth + 1, whole=False)
    fix = (*fix, *content.fix[:1])
    if content.holds and format_ in UNWRAPPED:
        fix = rescue_advice(view.path, content.holds)
    return Foreign(format_, f"{format_} around {content.title}", content.details, fix, content.holds)


def _by_magic(view: Excerpt) -> Foreign | None:
    head = view.head
    for format_, title, pattern, advice in _rows("first bytes", 4):
        if re.match(pattern.encode(), head, re.DOTALL):
            what = title if title.endswith("checkpoint") else f"{title}, not a checkpoint"
            fix = _OTHER_FILE if advice == "!" else advice.format(file=view.file, path=view.path)
            return Foreign(format_, what, (), (fix,))
    at = int.from_bytes(head[60:64], "little")
    if head[:2] == b"MZ" and head[at : at + 4] == b"PE\0\0":
        return Foreign("pe", "a Windows program or library, not a checkpoint", (), (_OTHER_FILE,))
    # A bare pickle: it begins with its protocol or, in the oldest protocols, with typical opcodes.
    old = re.match(rb"\(?[dl]p\d+\r?\n|\(?c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n[(pq)]|[\]}]q\0|\([dl]q\0", head)
    if head[:1] == b"\x80" and len(head) > 2 and head[1] <= NEWEST_PROTOCOL and head[2] in _OPCODES:
        protocol = f"protocol {head[1]}"
    elif old and view.tail.endswith((b".", b".\n")):
        protocol = "protocol 0 or 1"
    else:
        return None
    writer = next((name for pattern, name in _rows("pickles", 2) if re.search(pattern.encode(), head)), "bare")
    fix = "Unpickling runs what the file says: look at the names it imports before anything loads it."
    return Foreign("pickle", f"a {writer} pickle ({protocol}), not written by torch.save", (), (fix,))


def _by_structure(view: Excerpt) -> Foreign | None:
    if view.tail.endswith(TABLE_MAGIC):
        fix = "Give tf.train.load_checkpoint the name without .index; PyTorch cannot read it."
        return Foreign("tensorflow", "the index of a TensorFlow checkpoint (or a LevelDB table)", (), (fix,))
    # ONNX, Core ML and TensorFlow files are detected by their protobuf fields.
    fields = _fields(view)
    numbers = {number for number, _, _ in fields}
    first, version, data = fields[0] if fields else (0, 0, b"")
    versioned = first == 1 and 1 <= version <= 50
    by: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    if versioned and 7 in numbers and numbers <= {*range(1, 9), 14, 20, 25, 26}:
        # Fields 2 and 3 are the name and version of the producer.
        producer = [clean(raw, 60) for number, _, raw in fields if number in (2, 3) and raw.isascii()]
        by = (f"written by {listed(producer)}",) if producer else ()
        kind = ("onnx", "an ONNX model", "Run it with onnxruntime, or convert it with onnx2torch.")
    elif versioned and any(200 <= number <= 3000 for number in numbers):
        kind = ("coreml", "a Core ML model", "Open it with coremltools.")
    elif (first, version) == (1, 1) and numbers == {1, 2} and fields[1][2][:1] == b"\x0a":
        kind = ("tensorflow", "a TensorFlow SavedModel (.pb)", "tf.saved_model.load its directory.")
    elif first == 1 and re.match(rb"\x0a.[\w./:-]+\x12.[A-Z]\w+", data, re.DOTALL):
        # A frozen GraphDef consists of nodes, each of which begins with a name and an operator.
        kind = ("tensorflow", "a frozen TensorFlow graph (.pb)", "Load it with tf.compat.v1.GraphDef.")
    if kind:
        return Foreign(kind[0], f"{kind[1]}, not a PyTorch checkpoint", by, (kind[2],))
    key = first_key(view.head)
    if not key:
        return None
    fix = "Load it with flax.serialization.msgpack_restore, or from_pretrained(…, from_flax=True)."
    return Foreign("msgpack", "a MessagePack file (Flax weights?), not a checkpoint", (f"first key: {key}",), (fix,))


def first_key(head: bytes) -> str:
    """The first key of a MessagePack map, as Flax writes it, if it is text; else empty.

    >>> first_key(bytes([0x82, 0xA6]) + b"params")
    'params'
    """
    key = re.match(rb"[\x81-\x8f]([\xa3-\xbf])([A-Za-z_][\w./-]+)", head)
    size = key[1][0] - 0xA0 if key else 0
    return clean(key[2][:size]) if key and len(key[2]) >= size else ""


def _fields(view: Excerpt) -> list[tuple[int, int, bytes]]:
    """The first top-level fields of a protobuf message; empty if it cannot be one.

    Each has a number, its value or length, and the first bytes if it is length-delimited.
    """
    fields: list[tuple[int, int, bytes]] = []
    offset = 0
    while offset < view.size and len(fields) < 24:
        data = view.source.read(offset, 128)
        tag, used = _varint(data, 0)
        value, after = _varint(data, used)
        if not used or not after or tag & 7 not in (0, 2) or not tag >> 3:
            return []
        fields.append((tag >> 3, value, data[after : after + value] if tag & 7 else b""))
        offset += after + (value if tag & 7 else 0)
    return fields if offset <= view.size or not view.whole else []


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint and where it ends; ``0, 0`` if there is none."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:  # the last byte of the number
            return value, at + index + 1
    return 0, 0


def as_text(head: bytes) -> str:
    """The bytes as text; empty if they are not text."""
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    if b"\0" in head and encoding != "utf-16":
        return ""
    text = _decoded(head, encoding)
    if encoding == "utf-16" and 2 * len(text.encode("latin-1", "ignore")) < len(text):
        return ""  # almost any bytes decode to Chinese in UTF-16
    return "" if re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]", text) else text


def _decoded(head: bytes, encoding: str) -> str:
    """Text whose last character may be incomplete, because only the first bytes were read; empty if it is not text."""
    try:
        return getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return ""


def _advice(message: str) -> tuple[str, ...]:
    fixes = (fix for pattern, fix in _rows("answers", 2) if re.search(pattern, message, re.IGNORECASE))
    return (next(fixes, _DOWNLOAD_AGAIN),)


def _text(view: Excerpt) -> Foreign | None:
    text = as_text(view.head)
    if not text.strip():
        return None
    if text.startswith("version https://git-lfs.github.com/spec/"):
        size, oid = match(r"\nsize (\d{1,20})\s", text + "\n"), match(r"\noid (\S+)", text)
        of = f" for a file of {int(size):,} bytes" if size else ""
        fix = f"git lfs install && git lfs pull --include={view.file}"
        return Foreign("git-lfs", f"a Git LFS pointer{of}, not the file", (f"oid {oid}",) if oid else (), (fix,))
    for format_, title, pattern, fix in _rows("pointers", 4):
        if view.size <= LONGEST_ANSWER and re.search(pattern, text):
            return Foreign(format_, title, (clean(text),), (fix.format(file=view.file),))
    if re.match(r"\s*(<!--.{0,500}?-->\s*)?(<!doctype html|<html|<head|<body)", text, re.IGNORECASE | re.DOTALL):
        title = match(r"<title[^>]{0,200}>(.{0,300}?)</title", text)
        shown = f"a web page (title: {title}), not a checkpoint" if title else "a web page, not a checkpoint"
        return Foreign("html", shown, (), _advice(title or text[:4000]))
    if re.match(r"\s*<(\?xml|[A-Za-z][\w:.-]*[\s/>])", text):
        root = match(r"<([A-Za-z][\w:.-]{0,80})", text)
        code, message = match(r"<Code>(.{0,500}?)</Code>", text), match(r"<Message>(.{0,2000}?)</Message>", text)
        answer = ": ".join(part for part in (code, message) if part)
        if answer:
            return Foreign("xml-error", f"a storage server's error ({answer}), not a checkpoint", (), _advice(answer))
        title = f"an XML document (root element {root or 'unknown'}), not a checkpoint"
        return Foreign("xml", title, (), _advice(root))
    if re.match(r'\s*(\{\s*["}]|\[)', text) and (foreign := _json(view, text)) is not None:
        return foreign
    first_line = text.strip().split("\n", 1)[0]
    if text.startswith("#!"):
        return Foreign("script", f"a script ({clean(first_line, 80)}), not a checkpoint", (), (_OTHER_FILE,))
    lines = re.findall(r"(?m)^(?:import [\w.]+|from [\w.]+ import |def \w+\(|class \w+[(:]|@\w+)", text)
    if len(lines) >= 2:  # a single line may be prose
        return Foreign("python", "Python source, not a checkpoint", (clean(lines[0]),), (_OTHER_FILE,))
    if view.whole and view.size <= LONGEST_ANSWER and text.strip().count("\n") <= 2:  # as servers send
        answer = clean(text)
        advice, kind = _advice(answer), ", probably a server's answer"
        if advice == (_DOWNLOAD_AGAIN,):  # not the words of a known server
            advice, kind = (_OTHER_FILE, f"Or, if it was downloaded, d{_DOWNLOAD_AGAIN[1:]}"), ""
        return Foreign("text-answer", f'{plural(view.size, "byte")} of text{kind}: "{answer}"', (), advice)
    lines = [line for line in text.splitlines()[:200] if line.strip() and not line.lstrip().startswith("#")]
    shaped = sum(bool(re.match(r"\s*(- )?[\w.\"'-]+:(\s|$)|\s*- |---", line)) for line in lines)
    if len(lines) >= 3 and shaped >= 0.8 * len(lines):  # most lines are keys or items
        return Foreign("yaml", "a YAML document (a configuration?), not a checkpoint", (clean(lines[0]),), _WEIGHTS)
    begins = f"it begins: {clean(first_line)}"
    return Foreign("text", "a text file, not a checkpoint", (begins,), (_OTHER_FILE,))


def _json(view: Excerpt, text: str) -> Foreign | None:
    """A JSON document; only a short one is parsed."""
    import json

    try:
        parsed = json.loads(text) if view.size <= LONGEST_JSON else None
    except (ValueError, RecursionError):
        parsed = None
    fields: dict[str, object] = parsed if isinstance(parsed, dict) else {}
    # Where servers put their error messages.
    for key in ("error", "errors", "message", "detail", "error_description", "Message", "msg"):
        value = fields.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict):
            value = value.get("message") or value.get("status") or value.get("code")
        error = clean(value) if isinstance(value, str) else ""
        if error:
            return Foreign("json-error", f"a server's error in JSON ({error}), not a checkpoint", (), _advice(error))
    if "weight_map" in fields or '"weight_map"' in text:
        return Foreign("index-json", "the index of a sharded checkpoint; the tensors are in other files")
    if "nbformat" in fields:
        return Foreign("notebook", "a Jupyter notebook, not a checkpoint", (), (_OTHER_FILE,))
    keys = [str(key) for key in fields]
    details = (f"keys: {listed(keys, 8)}",) if keys else ()
    if "model_type" in fields or "architectures" in fields:
        return Foreign("json", "a model's configuration (config.json), not its weights", details, _WEIGHTS)
    return Foreign("json", "a JSON document, not a checkpoint", details) if keys or view.size > LONGEST_JSON else None


def identify(source: Source, *, depth: int = 0, whole: bool = True) -> Foreign:
    """Identify a source that could not be read as a checkpoint; for ``depth`` and ``whole`` see ``Excerpt``."""
    view = Excerpt(source, depth=depth, whole=whole)
    if start := getattr(source, "start", 0) if not view.size else 0:
        title = f"the end of a file object: nothing follows its position, byte {start:,}"
        return Foreign("empty", title, (), ("To read it from its beginning, call seek(0) first.",))
    if not view.size:
        return Foreign("empty", "an empty file: the save or the download never wrote anything", (), (_AGAIN,))
    # Exact tests come first, guesses last, and a container before what it may contain.
    exact = (_zeros, _http, mangled, _checkpoint, _zipped, _packed, _tar, _by_magic)
    for detect in (*exact, _embedded, _zeros_first, _text, _by_structure):
        if (foreign := detect(view)) is not None:
            return foreign
    details = [f"first bytes: {view.head[:16].hex(' ')}"]
    if b"PK\x03\x04" in view.tail or b"PK\x01\x02" in view.tail:
        details.append("its end looks like that of a zip archive: the beginning may be lost")
    return Foreign("unknown", "a binary file of no known format", tuple(details), (_AGAIN,))


def _zeros(view: Excerpt) -> Foreign | None:
    """Nothing but zeros, at least in all samples."""
    if view.head.strip(b"\0") or view.tail.strip(b"\0"):
        return None
    step = max(1, view.size // SAMPLES)
    if any(view.source.read(at, SAMPLE).strip(b"\0") for at in range(0, view.size, step)):
        return None
    title = f"{view.size:,} bytes of zeros: the space was reserved and never written (disk full, download not begun)"
    return Foreign("zeros", title, (), (_AGAIN,))


def _zeros_first(view: Excerpt) -> Foreign | None:
    """A file that begins with zeros: its first pages were lost or never written."""
    if view.head[:ZERO_RUN].strip(b"\0") or view.size < ZERO_RUN:
        return None
    zeros = len(view.wide) - len(view.wide.lstrip(b"\0"))
    more = " or more" if zeros == len(view.wide) else ""
    details = ("the zip directory at its end is still there",) if b"PK\x05\x06" in view.tail else ()
    title = f"a file whose first {zeros:,} bytes{more} are zero; the rest is not"
    return Foreign("zeros-first", title, details, (_AGAIN,))


def _http(view: Excerpt) -> Foreign | None:
    """An HTTP response saved with its header, as ``curl -i`` does."""
    status = re.match(rb"HTTP/\d(?:\.\d)? (\d{3}[^\r\n]{0,80})", view.head)
    if not status:
        return None
    end = re.search(rb"\r?\n\r?\n", view.head)
    body = end.end() if end else view.size
    if body >= view.size or view.depth >= DEEPEST:
        return Foreign("http", f"the header of an HTTP response ({clean(status[1])}), not a checkpoint", (), (_AGAIN,))
    body_source = Slice(view.source, body, view.size - body, view.source.name)
    inner = identify(body_source, depth=view.depth + 1, whole=view.whole)
    title = f"an HTTP response ({clean(status[1])}) with its header in front of {inner.title}"
    cut = f"Cut the first {body:,} bytes off: tail -c +{body + 1} {view.file} > {quoted(view.path + '.cut')}"
    fix = (cut,) if inner.format in ("torch-tar", "pickle") else inner.fix
    fix = rescue_advice(view.path, inner.holds) if inner.holds else fix
    return Foreign("http", title, inner.details, fix, inner.holds)


def mangled(view: Excerpt) -> Foreign | None:
    """A binary file that was copied as text: line feeds became CR LF, or bytes became U+FFFD; ``None`` for another."""
    head = view.head
    zipped_or_pickled = _torch_record(head) == 0 or re.match(rb"\x80[\x02-\x05]", head)
    if zipped_or_pickled and head.count(b"\n") == head.count(b"\r\n") >= 3:  # chance is 1 in 2**24
        title = "a checkpoint copied in text mode: every line feed has become CR LF"
        seen = f"{head.count(bytes((13, 10))):,} CR LF and no bare LF"
        return Foreign("crlf", title, (seen,), (_BINARY, _UNDONE, rescue_command(view.path)), ".pt")
    may_be = head.startswith((b"PK\x03\x04", b"\xef\xbf\xbd", b"\xc2\x80"))
    decoded = _decoded(head, "utf-8") if may_be else ""  # of binary data only a few bytes would decode
    if decoded.count("\ufffd") >= 4:
        title = "a binary file that was read and written as text: its bytes above 127 are lost"
        return Foreign("utf8-lossy", title, (f"{decoded.count(chr(0xFFFD)):,} replacement characters",), (_BINARY,))
    if sum(0x80 <= ord(c) <= 0xFF for c in decoded) >= 4:
        title = "a binary file that was re-encoded from Latin-1 to UTF-8"
        is_known = head.startswith((b"PK\x03\x04", MAGIC_PICKLE.decode("latin-1").encode()))
        undo = (_UNDONE, rescue_command(view.path)) if is_known else ()
        return Foreign("utf8", title, (), (_BINARY, *undo), ".pt" if is_known else "")
    return None


def _checkpoint(view: Excerpt) -> Foreign | None:
    """A checkpoint, when the source is a layer inside another file."""
    if view.head.startswith(MAGIC_PICKLE):
        return Foreign("torch-legacy", "a PyTorch checkpoint (legacy)", holds=".pt")
    if looks_like_safetensors(view.source):
        return Foreign("safetensors", "a safetensors file", holds=".safetensors")
    return None


def _embedded(view: Excerpt) -> Foreign | None:
    """A checkpoint after other bytes: torch looks for its magic at byte 0 only."""
    starts = [start for start in (_torch_record(view.wide), view.wide.find(MAGIC_PICKLE)) if start > 0]
    if not starts:
        return None
    start = min(starts)
    details = (f"it begins: {clean(view.head[: min(start, 60)])}",) if as_text(view.head[: min(start, 1000)]) else ()
    title = f"{start:,} foreign bytes with a checkpoint after them: it starts at byte {start:,}"
    return Foreign("prefixed", title, details, rescue_advice(view.path, ".pt"), ".pt")


def _torch_record(data: bytes) -> int:
    """The offset of the zip record of the first ``data.pkl``; -1 if there is none."""
    name = data.find(b"data.pkl")
    while name >= 0:
        start = data.rfind(b"PK\x03\x04", max(0, name - RECORD_NAME), name)
        length = int.from_bytes(data[start + 26 : start + 28], "little")
        if start >= 0 and start + 30 + length == name + len("data.pkl"):
            return start
        name = data.find(b"data.pkl", name + 1)
    return -1
