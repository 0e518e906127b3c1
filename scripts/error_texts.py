"""Print the error texts in the packages that people use with torch, one JSON object per line.

Usage: python scripts/error_texts.py [--every] [PATH...] > texts.jsonl

A PATH is a wheel, a source distribution, an unpacked one, or a site-packages folder; the default is that of this
Python. ``bench/explain.py`` passes the texts to ``explain``. Nothing is imported or run: Python is parsed for ``raise``
and ``assert``, C++ for TORCH_CHECK and similar calls, Rust for error messages, and compiled libraries are searched for
sentences. A text has blanks, ``{}``, for its values. Only files about loading, devices and processes count; with
``--every``, all Python files of any package: ``tests/explaining/unrelated_sources.txt`` has a part of that.
"""

from __future__ import annotations

import ast
import json
import re
import struct
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PROJECTS: dict[str, str] = {
    "torch": r"""
        (?:serialization|_weights_only_unpickler|storage|_utils|_utils_internal|hub|random|_tensor)\.py
        |(?:cuda|distributed|accelerator|mps|xpu|mtia|multiprocessing|package|amp|nn/parallel|backends)/.*\.py
        |(?:jit/_serialization|jit/_script|nn/modules/module|optim/optimizer|utils/cpp_extension)\.py
        |(?:utils/data|utils/serialization|utils/checkpoint|export/pt2_archive)\b.*\.py|export/__init__\.py
        |lib/lib(?:c10|c10_cuda|torch_cpu|torch_cuda|torch_python)\.so""",
    "safetensors": r".*\.(?:py|rs)",
    "transformers": r"""
        (?:modeling_utils|core_model_loading|conversion_mapping|trainer|trainer_utils|trainer_pt_utils|training_args)\.py
        |(?:integrations|quantizers|distributed)/.*\.py|modeling_gguf.*\.py
        |utils/(?:hub|import_utils|loading_report|quantization_config|generic|peft_utils)\.py""",
    "accelerate": r".*\.py",
    "lightning": r"(?:fabric|pytorch)/.*\.py",
    "deepspeed": r"(?:runtime|checkpoint|comm|launcher|accelerator|utils|op_builder|ops/op_builder|inference)\b.*\.py",
    "triton": r"(?:runtime|backends|compiler)/.*\.(?:py|c)|knobs\.py",
    "flash_attn": r"[^/]*\.py|(?:ops|modules|utils|layers)/.*\.py|csrc/flash_attn/.*\.cpp",
    "bitsandbytes": r".*\.py",
    "vllm": r"""
        (?:config|platforms|distributed|device_allocator|v1/worker|v1/executor|v1/engine|engine|utils|lora)\b.*\.py
        |(?:model_executor/model_loader|transformers_utils)/.*\.py|[^/]*\.py""",
    "nvidia/nccl": r"lib/libnccl\.so\.2",
}
"""For each project, by its import name: a pattern for the files that count, relative to its folder."""
SKIPPED = re.compile(r"(?:^|/)(?:tests?|testing|_internal/test|benchmarks?|examples?)/|(?:^|/)(?:test_|conftest)")


class Text(NamedTuple):
    """An error text, with ``{}`` for its blanks: its project, file, line and exception."""

    project: str
    where: str
    line: int
    error: str
    text: str


def main() -> int:
    """Print all texts."""
    paths = [path for path in sys.argv[1:] if path != "--every"]
    for path in paths or [sysconfig.get_paths()["platlib"]]:
        for entry in texts(Path(path), every="--every" in sys.argv):
            print(json.dumps(entry._asdict(), ensure_ascii=False))
    return 0


def texts(path: Path, *, every: bool = False) -> Iterator[Text]:
    """The error texts of a package, or of all packages in a folder; each once."""
    seen: set[tuple[str, str]] = set()
    for name, content in files(path):
        location = project_of(name)
        if every:
            location = (name.partition("/")[0], name) if name.endswith(".py") and not SKIPPED.search(name) else None
        if location is None:
            continue
        project, inside = location
        for line, error, text in READERS[Path(name).suffix](content()):
            flat_text = " ".join(text.split())
            if is_message(flat_text) and (project, flat_text) not in seen:
                seen.add((project, flat_text))
                yield Text(project, inside, line, error, flat_text)


def files(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The files of an archive or a folder: their relative paths, and functions that read them."""
    if path.is_dir():
        for file_path in sorted(path.rglob("*")):
            if file_path.is_file():
                yield file_path.relative_to(path).as_posix(), file_path.read_bytes
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield name, lambda name=name: archive.read(name)  # type: ignore[misc]
    else:
        with tarfile.open(path) as packed:
            for member in packed:
                if member.isfile():
                    file = packed.extractfile(member)
                    yield re.sub(r"^([^/]+?)-[\d.][^/]*", r"\1", member.name), file.read if file else bytes


def project_of(name: str) -> tuple[str, str] | None:
    """The project of a file, and its path from the folder of the project, if it counts."""
    if SKIPPED.search(name):
        return None
    for project, pattern in PROJECTS.items():
        for start in re.finditer(rf"(?:^|/)(?={project}/)", name):
            inside = name[start.end() + len(project) + 1 :]
            if Path(name).suffix in READERS and re.fullmatch(pattern, inside, re.VERBOSE):
                return project, f"{project}/{inside}"
    return None


_WORDS = re.compile(r"[A-Za-z]{2,}")
_FEWEST = 3


def is_message(text: str) -> bool:
    """Whether a text may be a message: it has some words besides its blanks, and is not a page long."""
    return len(_WORDS.findall(text.replace("{}", ""))) >= _FEWEST and len(text) < 2_000


Texts = Iterator[tuple[int, str, str]]

# -- Python


def python_texts(data: bytes) -> Texts:
    """The messages of ``raise`` and ``assert``."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            error = ast.unparse(node.exc.func).rpartition(".")[2]
            for argument in node.exc.args[:1] or [keyword.value for keyword in node.exc.keywords[:1]]:
                yield node.lineno, error, message(argument, named)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield node.lineno, "AssertionError", message(node.msg, named)


def message(node: ast.expr, named: dict[str, ast.expr], depth: int = 0) -> str:
    """An expression as a text with blanks."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(message(value, named, depth) for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return message(left, named, depth) + message(right, named, depth)
        case ast.BinOp(op=ast.Mod(), left=left):
            return re.sub(r"%[-\d.]*[sdrxf]", "{}", message(left, named, depth))
        case ast.Call(func=ast.Attribute(attr="format", value=value)):
            return re.sub(r"\{[^{}]*\}", "{}", message(value, named, depth))
        case ast.Name(id=name) if name in named and depth < 2:
            return message(named[name], named, depth + 1)
        case _:
            return "{}"


# -- C++ and Rust

_CHECK = re.compile(
    r"\b(TORCH_CHECK\w*|TORCH_INTERNAL_ASSERT|C10_THROW_ERROR|STD_TORCH_CHECK|CHECK|AT_ERROR|WARN|PyErr_SetString"
    r"|PyErr_Format|C10D_\w*THROW\w*|throw std::\w+)\s*\("
)
_VALUE = re.compile(r"\s*(?:,\s*|<<\s*|\+\s*)[^\s\"]")
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def c_texts(data: bytes) -> Texts:
    """The string literals in each call that reports an error, with a blank for each value between them."""
    source = data.decode("utf-8", "replace")
    for call in _CHECK.finditer(source):
        body: list[str] = []
        depth, at = 1, call.end()
        while depth and at < min(len(source), call.end() + 4_000):
            literal = _LITERAL.match(source, at)
            if literal:
                at = literal.end()
                body += literal[1], "{}" if _VALUE.match(source, at) else ""
                continue
            depth += {"(": 1, ")": -1}.get(source[at], 0)
            at += 1
        text = "".join(body).replace('\\"', '"').replace("\\n", " ")
        yield source.count("\n", 0, call.start()) + 1, "RuntimeError", re.sub(r"%[-\d.]*l*[sdupxf]", "{}", text)


_FORMAT = re.compile(
    r'Display for (?P<type>\w+)|(?P<call>new_err\(|format!\(|write!\(\s*f,|panic!\()\s*"(?P<text>(?:[^"\\]|\\.)*)"'
    r"[^;]*?\)(?P<more>\?;)?"
)
_BEFORE = {
    "SafeTensorError": "Error while deserializing header: ",  # by safe_open
    "InvalidSlice": "Error during slicing {} with shape {}: ",
    "MetalError": "MTLBuffer alloc for {}: ",
}
"""For error types of safetensors: what its Python bindings print before the message of the type."""


def rust_texts(data: bytes) -> Texts:
    """The format strings of errors. A message that is written in several steps is one text."""
    source = data.decode("utf-8", "replace").partition("#[cfg(test)]")[0]
    kind, prefix = "", ""
    for call in _FORMAT.finditer(source):
        if call["type"]:
            kind, prefix = call["type"], ""
            continue
        is_first = not prefix  # not a later step of a message
        text = prefix + re.sub(r"\{[^{}]*\}", "{}", call["text"]).replace('\\"', '"')
        written = call["call"].startswith("write")
        prefix = text if written and call["more"] else ""
        if not prefix:
            before = _BEFORE.get(kind, "") if written and is_first and is_message(text) else ""
            yield source.count("\n", 0, call.start()) + 1, "SafetensorError", before + re.sub(r"\\\n\s*", "", text)


# -- compiled libraries

_SENTENCE = re.compile(rb"[ -~\t\n]{20,800}(?=\0)")
_ABOUT = re.compile(
    r"\b(?:cuda|nccl|gloo|ucc|mps|xpu|hip|gpus?|devices?|storages?|checkpoints?|archive|zip|seriali[sz]\w*|pickle|ranks?"
    r"|process ?group|store|rendezvous|socket|pinned|pin_memory|streams?|events?|allocator|out of memory"
    r"|driver|accelerator|shared memory|mmap|file"
    r"|collectives?|timed? ?out|peer|nvlink|communicator|network|interface|backend)\b",
    re.IGNORECASE,
)
_PROSE = re.compile(r"\b(?:the|is|are|was|not|cannot|can't|failed|to|of|for|must|only|no|should|but|could)\b")
_NOT_PROSE = re.compile(r"::|^\S+$|\(\$|[{};]\s*$|^\s*(?:def |return |//|#)|->|\.cpp|%\{|\$\{|Tensor\(|\w\(Tensor")


def library_texts(data: bytes) -> Texts:
    """Sentences in a compiled library about devices, files and processes. Not all of them are errors."""
    for match in _SENTENCE.finditer(read_only_data(data)):
        text = re.sub(r"%[-\d.]*l*[sdupxf]", "{}", match[0].decode("ascii"))
        text = text.split("\0")[-1]
        if _ABOUT.search(text) and _PROSE.search(text) and not _NOT_PROSE.search(text) and text.count("\n") < 5:
            yield 0, "RuntimeError", text


def read_only_data(data: bytes) -> bytes:
    """The section ``.rodata`` of a 64-bit ELF file: the rest is code, mostly for the GPU."""
    table, size, count, names = (*struct.unpack_from("<Q", data, 0x28), *struct.unpack_from("<HHH", data, 0x3A))
    sections = [struct.unpack_from("<IIQQQQ", data, table + index * size) for index in range(count)]
    strings = sections[names][4]
    for name, *_, offset, length in sections:
        if data[strings + name : strings + name + 8] == b".rodata\0":
            return data[offset : offset + length]
    return b""


READERS: dict[str, Callable[[bytes], Texts]] = {
    ".py": python_texts,
    ".rs": rust_texts,
    **dict.fromkeys((".c", ".cpp", ".cu", ".h"), c_texts),
    **dict.fromkeys((".so", ".2"), library_texts),
}

if __name__ == "__main__":
    sys.exit(main())
