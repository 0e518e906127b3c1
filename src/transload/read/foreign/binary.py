"""Binary formats by their first bytes: other frameworks' models, programs, pictures, tables."""

from __future__ import annotations

import re
from collections.abc import Callable

from transload.read.foreign.kinds import Foreign, View, clean, listed

__all__ = ["LOOKS", "magic", "pickled"]

_ASIDE = "Check the path: this is another kind of file."

# (offset, bytes, format, title, fix). The first match counts.
_MAGIC: tuple[tuple[int, bytes, str, str, str], ...] = (
    (0, b"lmgg", "ggml", "a GGML model (older than GGUF)", "Convert it with llama.cpp's scripts."),
    (0, b"fmgg", "ggml", "a GGML model (ggmf, older than GGUF)", "Convert it with llama.cpp's scripts."),
    (0, b"tjgg", "ggml", "a GGML model (ggjt, older than GGUF)", "Convert it with llama.cpp's scripts."),
    (4, b"TFL3", "tflite", "a TensorFlow Lite model", "Run it with the TensorFlow Lite interpreter."),
    (
        4,
        b"PTMF",
        "torch-mobile",
        "a PyTorch mobile model (flatbuffer)",
        "torch.jit.load may read it; its program runs.",
    ),
    (0, b"ftrt", "tensorrt", "a TensorRT engine", "Load it with the TensorRT release and GPU it was built for."),
    (0, b"SQLite format 3\0", "sqlite", "an SQLite database", "sqlite3 {file} .tables"),
    (0, b"PAR1", "parquet", "a Parquet table", "pandas.read_parquet({path!r})"),
    (0, b"ARROW1", "arrow", "an Arrow table", "pyarrow.ipc.open_file({path!r})"),
    (0, b"FEA1", "arrow", "a Feather table", "pandas.read_feather({path!r})"),
    (0, b"MATLAB 5.0 MAT-file", "matlab", "a MATLAB file", "scipy.io.loadmat({path!r})"),
    (0, b"MATLAB 7.3 MAT-file", "matlab", "a MATLAB 7.3 file", "h5py.File({path!r})"),
    (0, b"\x12\x01\0\0\0\0\0\0", "mxnet", "an MXNet parameter file", "mxnet.nd.load({path!r})"),
    (0, b"\x7fELF", "elf", "a Linux program or library (ELF)", _ASIDE),
    (0, b"\xfe\xed\xfa\xce", "mach-o", "a macOS program or library", _ASIDE),
    (0, b"\xfe\xed\xfa\xcf", "mach-o", "a macOS program or library", _ASIDE),
    (0, b"\xce\xfa\xed\xfe", "mach-o", "a macOS program or library", _ASIDE),
    (0, b"\xcf\xfa\xed\xfe", "mach-o", "a macOS program or library", _ASIDE),
    (0, b"\xca\xfe\xba\xbe", "mach-o", "a macOS universal program, or a Java class", _ASIDE),
    (0, b"%PDF-", "pdf", "a PDF document", _ASIDE),
    (0, b"\x89PNG\r\n\x1a\n", "image", "a PNG picture", _ASIDE),
    (0, b"\xff\xd8\xff", "image", "a JPEG picture", _ASIDE),
    (0, b"GIF8", "image", "a GIF picture", _ASIDE),
    (8, b"WEBP", "image", "a WebP picture", _ASIDE),
    (8, b"WAVE", "audio", "a sound file (WAV)", _ASIDE),
    (0, b"OggS", "audio", "a sound file (Ogg)", _ASIDE),
    (0, b"fLaC", "audio", "a sound file (FLAC)", _ASIDE),
    (0, b"ID3", "audio", "a sound file (MP3)", _ASIDE),
    (4, b"ftyp", "video", "a video (MP4)", _ASIDE),
    (0, b"\x1aE\xdf\xa3", "video", "a video (Matroska)", _ASIDE),
    (0, b"\0\x05\x16\x07", "apple-double", "a macOS side file (AppleDouble)", "Take the file without ._ in its name."),
    (0, b"book\0\0\0\0mark", "alias", "a macOS alias, not the file", "Copy the file it points to."),
    (0, b"L\0\0\0\x01\x14\x02\0", "alias", "a Windows shortcut, not the file", "Copy the file it points to."),
    (0, b"Salted__", "encrypted", "a file encrypted with OpenSSL", "Decrypt it first: openssl enc -d …"),
    (0, b"age-encryption.org/v1", "encrypted", "a file encrypted with age", "Decrypt it first: age -d {file}"),
    (0, b"-----BEGIN PGP MESSAGE", "encrypted", "a file encrypted with PGP", "Decrypt it first: gpg -d {file}"),
    (0, b"bplist00", "plist", "an Apple property list", _ASIDE),
    (0, b"ORC", "orc", "an ORC table", "pandas.read_orc({path!r})"),
)

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
# A user block may stand before an HDF5 file; its sizes are powers of two.
HDF5_OFFSETS = (0, 512, 1024, 2048, 4096)
# https://github.com/google/leveldb: the last eight bytes of a table.
TABLE_MAGIC = bytes.fromhex("57fb808b247547db")

# The bytes that can be an opcode: what may follow the protocol number of a pickle.
_OPCODES = frozenset(b"()+.012FGIJKLMNPQRSTUVXabcdeghijlopqrstu]}") | frozenset(range(0x80, 0x99))
NEWEST_PROTOCOL = 5


def magic(view: View) -> Foreign | None:
    """Formats that their first bytes name outright."""
    for offset, mark, format_, title, fix in _MAGIC:
        if view.head.startswith(mark, offset):
            return Foreign(format_, f"{title}, not a checkpoint", (), (fix.format(file=view.file, path=view.path),))
    return None


def _gguf(view: View) -> Foreign | None:
    if view.head[:4] != b"GGUF" or len(view.head) < 24:  # its fixed header
        return None
    raw = view.head[4:8]
    order = "little" if raw[0] or raw[1] else "big"
    version = int.from_bytes(raw, order)  # type: ignore[arg-type]
    # Version 1 counted in 32 bits.
    width = 4 if version == 1 else 8
    tensors = int.from_bytes(view.head[8 : 8 + width], order)  # type: ignore[arg-type]
    architecture = re.search(rb"general\.architecture\x08\0\0\0(.)\0{7}([\w.-]+)", view.head[:4096], re.DOTALL)
    details = (f"architecture {clean(architecture[2][: architecture[1][0]])}",) if architecture else ()
    title = f"a GGUF model (version {version}, {tensors:,} tensors), not a PyTorch checkpoint"
    return Foreign("gguf", title, details, _GGUF_FIX)


_GGUF_FIX = (
    "Run it with llama.cpp.",
    "Or with transformers: AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=NAME)",
)


def _hdf5(view: View) -> Foreign | None:
    if not any(view.head.startswith(HDF5_MAGIC, offset) for offset in HDF5_OFFSETS):
        return None
    if any(mark in view.head for mark in (b"keras_version", b"layer_names", b"model_weights")):
        fix = f"keras.models.load_model({view.path!r})"
        return Foreign("hdf5", "a Keras model (HDF5), not a PyTorch checkpoint", (), (fix,))
    return Foreign("hdf5", "an HDF5 file, not a PyTorch checkpoint", (), (f"h5py.File({view.path!r})",))


def _npy(view: View) -> Foreign | None:
    if not view.head.startswith(b"\x93NUMPY"):
        return None
    shown = re.search(rb"\{[^\n}]{0,400}\}", view.head[6:1024])
    fix = f"torch.from_numpy(numpy.load({view.path!r}, allow_pickle=False))"
    return Foreign("npy", "a NumPy array, not a checkpoint", (clean(shown[0]),) if shown else (), (fix,))


def _executorch(view: View) -> Foreign | None:
    if not re.match(rb"ET\d\d", view.head[4:8]):
        return None
    fix = "Run it with the ExecuTorch runtime."
    return Foreign("executorch", "an ExecuTorch program, not a checkpoint", (), (fix,))


def _windows_program(view: View) -> Foreign | None:
    at = int.from_bytes(view.head[60:64], "little")
    if view.head[:2] != b"MZ" or view.head[at : at + 4] != b"PE\0\0":
        return None
    return Foreign("pe", "a Windows program or library, not a checkpoint", (), (_ASIDE,))


def _table(view: View) -> Foreign | None:
    if not view.tail.endswith(TABLE_MAGIC):
        return None
    fix = "Give tf.train.load_checkpoint the name without .index; PyTorch cannot read it."
    return Foreign("tensorflow", "the index of a TensorFlow checkpoint (or a LevelDB table)", (), (fix,))


def _msgpack(view: View) -> Foreign | None:
    """Flax writes one map; its first key is text."""
    found = re.match(rb"[\x81-\x8f]([\xa3-\xbf])([A-Za-z_][\w./-]+)", view.head)
    if not found or len(found[2]) < found[1][0] - 0xA0:
        return None
    key = clean(found[2][: found[1][0] - 0xA0])
    fix = "Load it with flax.serialization.msgpack_restore, or from_pretrained(…, from_flax=True)."
    return Foreign("msgpack", "a MessagePack file (Flax weights?), not a checkpoint", (f"first key: {key}",), (fix,))


def pickled(view: View) -> Foreign | None:
    """A bare pickle, by its protocol mark or, in the oldest protocols, by its shape."""
    head = view.head
    if head[:1] == b"\x80" and len(head) > 2 and head[1] <= NEWEST_PROTOCOL and head[2] in _OPCODES:
        return _pickle(view, f"protocol {head[1]}")
    old = re.match(rb"\(?[dl]p\d+\r?\n|\(?c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n[(pq)]|[\]}]q\0|\([dl]q\0", head)
    if old and view.tail.endswith((b".", b".\n")):
        return _pickle(view, "protocol 0 or 1")
    return None


def _pickle(view: View, protocol: str) -> Foreign:
    writer = next((name for mark, name in _PICKLERS if mark in view.head), "")
    title = f"a {writer} pickle ({protocol})" if writer else f"a bare pickle ({protocol})"
    fix = "Unpickling runs what the file says: look at the names it imports before anything loads it."
    return Foreign("pickle", f"{title}, not written by torch.save", (), (fix,))


_PICKLERS = (
    (b"joblib.numpy_pickle", "joblib"),
    (b"sklearn.", "scikit-learn"),
    (b"xgboost.", "XGBoost"),
    (b"pandas.core", "pandas"),
)


def _protobuf(view: View) -> Foreign | None:
    """ONNX, Core ML and TensorFlow files have no magic: they are told apart by which fields follow each other."""
    fields = _fields(view)
    numbers = {number for number, _, _ in fields}
    for format_, title, fits, fix in _PROTOBUFS:
        if fields and fits(fields, numbers):
            return Foreign(format_, f"{title}, not a PyTorch checkpoint", _producer(format_, fields), (fix,))
    return None


_Field = tuple[int, int, bytes]
"""A field's number, its value or length, and the first bytes of a length-delimited one."""


def _fields(view: View, most: int = 24) -> list[_Field]:
    """The first top-level fields of a protobuf message; empty if it cannot be one."""
    fields: list[_Field] = []
    offset = 0
    while offset < view.size and len(fields) < most:
        data = view.source.read(offset, 128)
        tag, used = _varint(data, 0)
        value, after = _varint(data, used)
        if not used or not after or tag & 7 not in (0, 2) or not tag >> 3:
            return []
        fields.append((tag >> 3, value, data[after : after + value] if tag & 7 else b""))
        offset += after + (value if tag & 7 else 0)
    return fields if offset <= view.size or not view.whole else []


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A base-128 number and where it ends; ``0, 0`` if there is none."""
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:  # the last byte of the number
            return value, at + index + 1
    return 0, 0


def _is_onnx(fields: list[_Field], numbers: set[int]) -> bool:
    number, version, _ = fields[0]
    return number == 1 and 1 <= version <= 50 and 7 in numbers and numbers <= {*range(1, 9), 14, 20, 25, 26}


def _is_coreml(fields: list[_Field], numbers: set[int]) -> bool:
    number, version, _ = fields[0]
    return number == 1 and 1 <= version <= 50 and any(200 <= n <= 3000 for n in numbers)


def _is_saved_model(fields: list[_Field], numbers: set[int]) -> bool:
    return fields[0][:2] == (1, 1) and numbers == {1, 2} and fields[1][2][:1] == b"\x0a"


def _is_graph(fields: list[_Field], _numbers: set[int]) -> bool:
    """A frozen GraphDef: nodes, each beginning with a name and an operator."""
    return fields[0][0] == 1 and bool(re.match(rb"\x0a.[\w./:-]+\x12.[A-Z]\w+", fields[0][2], re.DOTALL))


_PROTOBUFS: tuple[tuple[str, str, Callable[[list[_Field], set[int]], bool], str], ...] = (
    ("onnx", "an ONNX model", _is_onnx, "Run it with onnxruntime, or convert it with onnx2torch."),
    ("coreml", "a Core ML model", _is_coreml, "Open it with coremltools."),
    ("tensorflow", "a TensorFlow SavedModel (.pb)", _is_saved_model, "tf.saved_model.load its directory."),
    ("tensorflow", "a frozen TensorFlow graph (.pb)", _is_graph, "Load it with tf.compat.v1.GraphDef."),
)


def _producer(format_: str, fields: list[_Field]) -> tuple[str, ...]:
    """Who wrote an ONNX file: its second and third fields are text."""
    said = [clean(data, 60) for number, _, data in fields if number in (2, 3) and data.isascii()]
    return (f"written by {listed(said)}",) if format_ == "onnx" and said else ()


LOOKS: tuple[Callable[[View], Foreign | None], ...] = (
    magic,
    _gguf,
    _hdf5,
    _npy,
    _executorch,
    _windows_program,
    pickled,
)
# Without a magic number of their own, so tried last.
WEAK_LOOKS: tuple[Callable[[View], Foreign | None], ...] = (_table, _protobuf, _msgpack)
