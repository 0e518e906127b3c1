"""Predict what plain ``torch.load(path)`` would do with a file here, and its error message, without running it.

Both of torch's unpicklers process the stream in order, and restore a storage to its device when they reach it. So the
first thing they cannot do decides, and its position in the stream is known. The messages of releases 2.1 to 2.15 are in
``torch_words.md``; a test compares them with the real ones.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import field
from functools import cache
from math import inf
from typing import Literal

from transload.checkpoint import Checkpoint
from transload.diagnose.tables import numbers_of
from transload.errors import TransloadError
from transload.findings import packaged
from transload.formats.rare_opcodes import REFUSED, WEIGHTS_ONLY
from transload.frozen import Frozen, Plain, replace
from transload.io.paths import is_folder, open_source
from transload.io.sources import refuse_fault
from transload.judge.names import TORCH_DEFAULT, torch_spelling
from transload.judge.torch_releases import NESTED, NESTED_REFUSED, needs_nested_of_2_15
from transload.nodes import Pickle, short
from transload.steps import sections, tables

Version = tuple[int, ...]
_OLDEST, _NEWEST = (2, 1), (2, 15)  # the releases whose messages are known
_LISTED = (2, 13)  # the release whose names ``TORCH_DEFAULT`` lists
_NAMES = tables("transload.judge", "names")
_VARYING, _DTENSOR = _NAMES["not in every release"].keys(), _NAMES["distributed tensors"].keys()
# A name that ``torch._dynamo`` allows when it is imported; from 2.15 on it is not special.
_DIM_RANGE = "torch._dynamo.decorators._DimRange"
# Before 2.11 torch accepted a tag that only begins like a device.
_LOOKS_LIKE = re.compile(r"(cuda|hpu|xpu|mtia|privateuseone)(?!:|[0-9]|$)")
_SINCE: dict[str, Version] = {"cuda": (2, 1), "privateuseone": (2, 1), "hpu": (2, 1), "xpu": (2, 5), "mtia": (2, 10)}
"""The first release that restores storages to each kind of device."""
_MAX_INDEX = 127  # torch keeps an index in a signed byte


class InstalledTorch(Frozen):
    """The torch of an environment, as far as ``torch.load`` depends on it."""

    version: str  # ``2.13.0+cu130``; empty if there is no torch, or its version could not be read
    counts: dict[str, int] = field(default_factory=dict)  # working devices by kind: ``{"cuda": 1}``
    sure: bool = True  # whether the counts are certain
    environ: Mapping[str, str] = field(default_factory=dict)
    absent: Collection[str] = ()  # packages the file needs that are not installed

    def is_forced(self, name: str) -> bool:
        """Whether a variable forces ``WEIGHTS_ONLY`` or ``NO_WEIGHTS_ONLY``."""
        return self.environ.get(f"TORCH_FORCE_{name}_LOAD", "0").lower() in ("1", "y", "yes", "true")

    @property
    def weights_only(self) -> bool:
        """The default of ``weights_only`` in ``torch.load``.

        >>> InstalledTorch("2.5.1").weights_only, InstalledTorch("2.13.0+cpu").weights_only
        (False, True)
        """
        default = numbers_of(self.version) >= (2, 6) and not self.is_forced("NO_WEIGHTS_ONLY")
        return default or self.is_forced("WEIGHTS_ONLY")


def read_bytes(path: str, start: int, count: int) -> bytes:
    """Up to ``count`` bytes of a file from ``start`` on; empty if it cannot be read."""
    try:
        with closing(open_source(path)) as source:
            return source.read(start, count)
    except TransloadError as error:
        refuse_fault(error, path)
        return b""


class Prediction(Plain):
    """What ``torch.load`` does: ``loads``, ``raises``, or ``unknown`` if that cannot be predicted.

    ``error`` is the class of the exception and ``text`` its message. ``exact`` means that the message is word for word
    that of release ``torch``; otherwise it is the nearest known one, or empty.
    """

    outcome: Literal["loads", "raises", "unknown"]
    error: str = ""
    text: str = ""
    exact: bool = False
    torch: str = ""
    warnings: tuple[str, ...] = ()


def torch_says(checkpoint: Checkpoint, torch: InstalledTorch) -> Prediction:
    """Predict the outcome of ``torch.load(checkpoint.path)``."""
    predictor = _Predictor(checkpoint, torch)
    return predictor.outcome() if _OLDEST <= predictor.release[:2] <= _NEWEST else predictor.unknown()


@cache
def _texts() -> dict[str, list[tuple[Version, str]]]:
    """The messages by name, each with the first release that has it; fragments of messages have no release."""
    out: dict[str, list[tuple[Version, str]]] = {}
    for heading, text in sections(packaged(__package__, "torch_words.md")):
        name, _, release = heading.partition(" ")
        words = " ".join(text.split()).replace(r"\n", "\n").replace(r"\t", "\t").replace(r"\e", "\033")
        out.setdefault(name, []).append((numbers_of(release), words))
    return out


class _Predictor:
    def __init__(self, checkpoint: Checkpoint, torch: InstalledTorch) -> None:
        self.checkpoint = checkpoint
        self.torch = torch
        self.release = numbers_of(torch.version)
        self.weights_only = torch.weights_only
        self.records = {record.name: record for record in checkpoint.records}
        self.intact = checkpoint.integrity in ("whole", "unchecked")
        self.usable: set[str] = set()  # device tags

    def words(self, name: str, /, **values: object) -> str:
        """A message of this release."""
        parts = {part: texts[0][1] for part, texts in _texts().items() if not texts[0][0]}
        return [words for since, words in _texts()[name] if since <= self.release][-1].format(**parts, **values)

    def raises(self, error: str, text: str, warnings: tuple[str, ...] = (), *, exact: bool = True) -> Prediction:
        return Prediction("raises", error, text, exact, self.torch.version, warnings)

    def unknown(self, warnings: tuple[str, ...] = ()) -> Prediction:
        return Prediction("unknown", torch=self.torch.version, warnings=warnings)

    def outcome(self) -> Prediction:
        path, form = self.checkpoint.path, self.checkpoint.traits
        container = form.container
        strict = self.weights_only and self.release >= (2, 6)  # older releases refuse with other messages
        if strict and self.torch.is_forced("NO_WEIGHTS_ONLY"):
            return self.raises("RuntimeError", self.words("forced-twice"))
        if is_folder(path):
            number = errno.EISDIR if os.name == "posix" else errno.EACCES
            error = OSError(number, os.strerror(number), path)  # of the subclass for the number
            return self.raises(type(error).__name__, str(error))
        if path.endswith(".safetensors") and self.release >= (2, 13):
            if "safetensors" in self.torch.absent:
                return self.raises("RuntimeError", self.words("no-safetensors"))
            if form.suffix == ".safetensors" and self.intact:
                return Prediction("loads", exact=True, torch=self.torch.version)
            codes = {problem.code for problem in self.checkpoint.problems} if form.suffix == ".safetensors" else set()
            text = next((self.words(code) for code in _texts() if code in codes), "")  # what safetensors 0.8 says
            return self.raises("SafetensorError", text, exact=False) if text else self.unknown()
        if form.runs == "torch.jit" and "constants.pkl" in self.records:
            warnings = (self.words("script-warning"),)
            return self.raises("RuntimeError", self.words("script"), warnings) if strict else self.unknown(warnings)
        if form.program:
            # torch opens the archive and finds no object in it; without a top-level directory it does not open it.
            opens = self.intact and "folder" in dict(self.checkpoint.facts) and "data.pkl" not in self.records
            text = self.words("no-record", record="data.pkl")
            return self.raises("RuntimeError", text) if opens else self.unknown()
        if container == "tar":
            return self.raises("RuntimeError", self.words("tar")) if strict else self.unknown()
        if container in ("zip", "stream", "bare") and "compression" not in dict(self.checkpoint.facts):
            return self.stream()
        # It is not a checkpoint, or joblib compressed it: torch reads it as a pickle, and its first byte as an opcode.
        head = read_bytes(self.checkpoint.path, 0, 4)
        if not self.checkpoint.nbytes and not head:
            return self.raises("EOFError", "" if self.weights_only else "Ran out of input")
        if not head or head == b"PK\x03\x04" or (self.weights_only and self.release < (2, 6)):
            return self.unknown()
        byte = head[0]
        if self.weights_only:
            opcodes, text = WEIGHTS_ONLY, self.words("unsupported", message=f"Unsupported operand {byte}")
        else:
            opcodes = WEIGHTS_ONLY.union(REFUSED)
            shown = chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
            text = f"invalid load key, '{shown}'."
        return self.unknown() if byte in opcodes else self.raises("UnpicklingError", text)

    def stream(self) -> Prediction:
        """Predict for a pickle stream: its first event decides; without one the file loads if it is intact."""
        main = next((pickle for pickle in self.checkpoint.pickles if pickle.main), None)
        if any(problem.code == "zip-no-directory" for problem in self.checkpoint.problems):
            # torch searches 16 blocks of 4096 bytes from the end, which overlap by 3 bytes. Unless one begins at the
            # start of the file, the next would begin before it, and cannot be read.
            steps, rest = divmod(self.checkpoint.nbytes - 4096, 4093)
            if 0 <= steps < 16 and rest:
                error = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return self.raises("OSError", str(error), exact=False)
            return self.raises("RuntimeError", self.words("no-directory"), exact=False)
        if main is None:
            return self.unknown()
        plain = self.checkpoint.traits.container == "bare"
        intact = not main.broken if plain else self.intact
        where, first = min(self.events(main), key=lambda event: event[0], default=(inf, None))
        # Releases differ in the names they allow. What follows the first error is not read.
        names = {torch_spelling(*key) for key, node in main.globals.items() if node.position <= where}
        certain = {*NESTED, _DIM_RANGE} if self.release >= NESTED_REFUSED else set()
        varies = self.release[:2] != _LISTED and not _VARYING.isdisjoint(names - certain)
        warnings: tuple[str, ...] = ()
        if self.weights_only and main.protocol > 2:
            warnings = (self.words("protocol-warning", protocol=main.protocol),)
        elif not self.weights_only and (2, 4) <= self.release < (2, 6):
            warnings = (self.words("default-warning"),)
        if first and first.error:
            return replace(first, exact=first.exact and intact and not varies, warnings=warnings)
        if plain and not first:
            return self.raises("RuntimeError", "Invalid magic number; corrupt file?", warnings, exact=intact)
        # Allowed names may be used in ways that fail, and other names may do anything.
        unusual = any(
            finding.code in ("dangerous-use", "odd-use", "trusted-use") for finding in self.checkpoint.findings
        )
        if first or not intact or unusual:
            return self.unknown(warnings)
        if self.release < NESTED_REFUSED and needs_nested_of_2_15(self.checkpoint):
            text = "'Tensor' object has no attribute '_dynamo_dynamic_range'"
            return self.raises("AttributeError", text, warnings, exact=False)
        return Prediction("loads", exact=not varies, torch=self.torch.version, warnings=warnings)

    def events(self, main: Pickle) -> Iterator[tuple[int, Prediction]]:
        """What may stop the unpickler, and where in the stream; ``unknown`` if it may or may not stop."""
        for storage in main.persistent:  # in the order of the stream
            if prediction := self.stored(storage.id):
                yield storage.position, prediction
                break
        for node in (*main.globals.values(), *([main.loader] if main.loader else [])):
            module, name = node.module, node.name
            full = torch_spelling(module, name)
            if self.weights_only:
                if text := self.refused_name(full, name):
                    yield node.position, self.refused(text)
            elif full not in TORCH_DEFAULT and "Storage" not in name:
                # The standard unpickler imports it: the outcome is known only if the package is not installed.
                package = module.partition(".")[0]
                missing = self.raises("ModuleNotFoundError", f"No module named '{package}'")
                yield node.position, missing if package in self.torch.absent else self.unknown()
        if self.weights_only and main.rare:
            name, position = next(iter(main.rare.items()))
            operand = next(code for code, opcode in REFUSED.items() if opcode == name)
            yield position, self.refused(self.words("unsupported", message=f"Unsupported operand {operand}"))

    def refused_name(self, full: str, name: str) -> str:
        """The message with which weights_only refuses a name; empty if it allows the name."""
        owner = full[: -len(name) - 1] if full.endswith(f".{name}") else full.rpartition(".")[0]
        if owner in ("sys", "os", "posix", "nt"):
            return self.words("blocked", name=full, module=owner)
        if full in TORCH_DEFAULT and not (full in NESTED and self.release >= NESTED_REFUSED):
            return ""
        if full in _DTENSOR:
            return self.words("dtensor")
        if full == _DIM_RANGE and self.release < NESTED_REFUSED:
            return self.words("nested")
        if self.release < (2, 7):  # its advice names only the last component
            return self.words("not-allowed", name=full, call=name)
        shown = full.removeprefix("builtins.")
        return self.words("not-allowed", name=shown, call=shown)

    def stored(self, pid: object) -> Prediction | None:
        """The error for a persistent id that is not a storage, has no record, or names an unavailable device."""
        if type(pid) is not tuple or len(pid) < 4:
            return self.unknown()
        if _text(pid[0]) != "storage":
            got = type(pid[0]) if self.release >= (2, 10) else pid[0] if type(pid[0]) in (str, bytes) else short(pid[0])
            text = self.words("unsupported", message=f"Only persistent_load of storage is allowed, but got {got}")
            return self.refused(text) if self.weights_only else self.unknown()
        record = f"data/{_text(pid[2])}"
        if self.checkpoint.traits.container == "zip" and record not in self.records:
            return self.raises("RuntimeError", self.words("no-record", record=record))
        tag = _text(pid[3])
        if tag in self.usable or (prediction := self.restored(tag)) is None:
            self.usable.add(tag)
            return None
        kind, _, index = tag.partition(":")
        plain = tag.isascii() and tag.isprintable() and not (index.isdigit() and int(index[:9]) > _MAX_INDEX)
        usual = self.release >= (2, 11) or _LOOKS_LIKE.match(tag) is None
        exact = plain and usual and self.torch.sure and tag != "mtia" and (self.release >= (2, 4) or kind == "cuda")
        return replace(prediction, exact=exact)

    def restored(self, tag: str) -> Prediction | None:
        """The error for restoring a storage to the device of its tag; ``None`` if that works."""
        counts, release = self.torch.counts, self.release  # a kind without devices has is_available() == False
        if tag in ("cpu", "meta") or (tag.startswith("mps") and counts.get("mps")):
            return None
        if tag.startswith("mps"):
            return self.raises("RuntimeError", self.words("no-mps"))
        end = r"(:|[0-9]|\Z)" if release >= (2, 11) else ""
        kinds = (kind for kind, since in _SINCE.items() if release >= since and re.match(kind + end, tag))
        kind = next(kinds, "")
        if not kind:
            return self.raises("RuntimeError", self.words("no-such-tag", tag=tag))
        count, index = counts.get(kind, 0), tag.partition(":")[2]
        values = {"kind": kind.upper(), "module": kind, "tag": tag, "count": count}
        if kind in ("hpu", "privateuseone") and not count:
            name = "no-module"
        elif not re.fullmatch(rf"{kind}(:(0|[1-9][0-9]*))?", tag):
            name = "no-device-string"
        elif not count:
            name = "no-device"
        elif (number := int(index[:4] or 0)) < count:
            return None
        else:
            name, values["index"] = "no-index", number
        error = "AssertionError" if release < (2, 4) and kind == "hpu" else "RuntimeError"
        return self.raises(error, self.words(name, **values))

    def refused(self, text: str) -> Prediction:
        """The error of weights_only; its message is known from 2.6 on, where it is the default."""
        return self.raises("UnpicklingError", text, exact=self.release >= (2, 6))


def _text(value: object) -> str:
    if type(value) is str:
        return value
    return value.decode("ascii", "replace") if isinstance(value, bytes) else ""
