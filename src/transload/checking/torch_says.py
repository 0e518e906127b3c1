"""What plain ``torch.load(path)`` would do with a file here, and say, without running it.

Both of torch's unpicklers work through the stream from its beginning, and a storage is put on its device when the
stream comes to it. So the first thing they cannot do decides, and its place in the stream is known.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from transload.checking import torch_words as words
from transload.checking.raw import raw_bytes
from transload.judge.names import TORCH_DEFAULT, torch_spelling

if TYPE_CHECKING:
    from transload.checking.packages import Installed
    from transload.checkpoint import Checkpoint
    from transload.nodes import Persistent, Pickle

__all__ = ["WEIGHTS_ONLY", "Said", "all_opcodes", "first_unknown", "torch_says"]


WEIGHTS_ONLY = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.")
"""Those that torch's unpickler knows, in every release from 2.1 to 2.15."""


def all_opcodes() -> frozenset[int]:
    """Those that Python's own knows."""
    import pickletools

    return frozenset(ord(code.code) for code in pickletools.opcodes)


def first_unknown(data: bytes) -> tuple[int, int] | None:
    r"""Place and code of the first opcode in a pickle that ``weights_only`` does not know; ``None`` without one.

    >>> first_unknown(b"\x80\x02}."), first_unknown(b"\x80\x02I1\n.")
    (None, (2, 73))
    """
    import pickletools

    try:
        for _, _, at in pickletools.genops(data):
            if at is not None and data[at] not in WEIGHTS_ONLY:
                return at, data[at]
    except ValueError:  # it breaks off before
        return None
    return None


OLDEST, NEWEST = (2, 1), (2, 15)
"""The releases whose words are known."""
_LISTED = (2, 13)
"""The release that ``TORCH_DEFAULT`` lists."""

# Names that some of the releases from 2.6 to 2.15 allow and others do not.
_VARYING = frozenset(
    {
        *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2", "torch.bcomplex32", "torch._utils._rebuild_nested_tensor"),
        *(f"torch.nested._internal.nested_tensor.{name}" for name in ("NestedTensor", "_rebuild_njt")),
        "torch._dynamo.decorators._DimRange",
        *(f"torch.distributed._mesh_layout.{name}" for name in ("_FlatLayout", "_MeshLayout")),
    }
)
_PROGRAMS = frozenset({"torch-export", "aotinductor", "torch-package"})
_STREAMS = frozenset({"torch-zip", "torch-legacy", "pickle"})
# Before 2.11 a tag that only begins as a device does was taken for one.
_LOOKS_LIKE = re.compile(r"(cuda|hpu|xpu|mtia|privateuseone)(?!:|[0-9]|$)")
_LONGEST_SCAN = 1 << 24
_MOST_INDEX = 127  # above it, torch takes the number for a negative one


@dataclass(frozen=True, slots=True)
class Said:
    """What ``torch.load`` does: ``loads``, ``raises``, or ``unknown`` where that cannot be told from here.

    ``error`` is the class of what it raises and ``text`` its words. ``exact`` says that they are word for word what
    release ``torch`` says; else they are what comes nearest, or empty.
    """

    outcome: Literal["loads", "raises", "unknown"]
    error: str = ""
    text: str = ""
    exact: bool = False
    torch: str = ""
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "outcome": self.outcome,
            "error": self.error,
            "text": self.text,
            "exact": self.exact,
            "torch": self.torch,
            "warnings": list(self.warnings),
        }


def torch_says(checkpoint: Checkpoint, torch: Installed) -> Said:
    """The outcome of ``torch.load(checkpoint.path)``."""
    if not OLDEST <= torch.release[:2] <= NEWEST:
        return Said("unknown", torch=torch.version)
    return _Reading(checkpoint, torch).outcome()


@dataclass(frozen=True, slots=True)
class _Event:
    """Something in the stream that ends the reading."""

    position: int
    error: str = ""
    """Empty where it is not known whether it does."""
    text: str = ""
    exact: bool = True


class _Reading:
    def __init__(self, checkpoint: Checkpoint, torch: Installed) -> None:
        self.checkpoint = checkpoint
        self.torch = torch
        self.release = torch.release
        self.weights_only = torch.weights_only
        self.records = {record.name for record in checkpoint.records}

    def outcome(self) -> Said:
        kind = self.checkpoint.format
        if os.path.isdir(self.checkpoint.path):  # noqa: PTH112  a path is text here
            told = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.checkpoint.path)
            return self.raises("IsADirectoryError", str(told), exact=os.name == "posix")
        if self.checkpoint.path.endswith(".safetensors") and self.release >= (2, 13):
            return self.safetensors()
        if kind == "torchscript":
            return self.script()
        if kind in _PROGRAMS:
            return self.without_pickle()
        if kind == "torch-tar":
            return self.tar()
        return self.stream() if kind in _STREAMS else self.foreign()

    def raises(self, error: str, text: str, *, exact: bool = True, warnings: tuple[str, ...] = ()) -> Said:
        return Said("raises", error, text, exact, self.torch.version, warnings)

    def unknown(self) -> Said:
        return Said("unknown", torch=self.torch.version)

    # -- whole files

    def safetensors(self) -> Said:
        if "safetensors" in self.torch.absent:
            text = (
                "Attempting to load a safetensors file but safetensors is not installed. "
                "Please install safetensors with: pip install safetensors"
            )
            return self.raises("RuntimeError", text)
        if self.checkpoint.format != "safetensors":
            return self.unknown()
        if self.checkpoint.integrity in ("whole", "unchecked"):
            return Said("loads", exact=True, torch=self.torch.version)
        codes = {problem.code for problem in self.checkpoint.problems}
        text = next((words.SAFETENSORS_TEXTS[code] for code in words.SAFETENSORS_TEXTS if code in codes), "")
        return self.raises("SafetensorError", text, exact=False) if text else self.unknown()

    def without_pickle(self) -> Said:
        """An archive that torch opens and finds no object in. One without a folder it does not even open."""
        sound = self.checkpoint.integrity in ("whole", "unchecked") and "folder" in dict(self.checkpoint.facts)
        if "data.pkl" in self.records or not sound:
            return self.unknown()
        return self.raises("RuntimeError", words.no_record("data.pkl", self.release))

    def script(self) -> Said:
        if "constants.pkl" not in self.records:
            return self.without_pickle()
        if not self.weights_only or self.release < (2, 6):
            return Said("unknown", torch=self.torch.version, warnings=(words.SCRIPT_WARNING,))
        text = words.unsafe("TorchScript archives passed to ``torch.load``")
        return self.raises("RuntimeError", text, warnings=(words.SCRIPT_WARNING,))

    def tar(self) -> Said:
        if not self.weights_only or self.release < (2, 6):
            return self.unknown()
        return self.raises("RuntimeError", words.unsafe("files saved in the legacy .tar format"))

    def foreign(self) -> Said:
        """What is no checkpoint is taken for a pickle, and its first byte for an opcode."""
        head = raw_bytes(self.checkpoint.path, 0, 4)
        if not head or head == b"PK\x03\x04" or (self.weights_only and self.release < (2, 6)):
            empty = not self.checkpoint.nbytes
            return self.raises("EOFError", "" if self.weights_only else "Ran out of input") if empty else self.unknown()
        if head[0] in (WEIGHTS_ONLY if self.weights_only else all_opcodes()):
            return self.unknown()
        refused = words.refusal(f"Unsupported operand {head[0]}", self.release)
        return self.raises("UnpicklingError", refused if self.weights_only else words.load_key(head[0]))

    # -- the stream

    def stream(self) -> Said:
        """The first event in the main pickle decides; without one the file loads, if it is whole."""
        main = next((pickle for pickle in self.checkpoint.pickles if pickle.main), None)
        endless = any(problem.code == "zip-no-directory" for problem in self.checkpoint.problems)
        if endless or main is None:
            text = words.no_directory(self.release)
            return self.raises("RuntimeError", text, exact=False) if endless else self.unknown()
        events = sorted(self.events(main), key=lambda event: event.position)
        plain = self.checkpoint.format == "pickle"
        sound = not main.broken if plain else self.checkpoint.integrity in ("whole", "unchecked")
        warnings = self.warned(main)
        if events and events[0].error:
            first = events[0]
            exact = first.exact and sound and not self.varies(main)
            return self.raises(first.error, first.text, exact=exact, warnings=warnings)
        if events:
            return Said("unknown", torch=self.torch.version, warnings=warnings)
        if plain:
            return self.raises("RuntimeError", "Invalid magic number; corrupt file?", exact=sound, warnings=warnings)
        if not sound or self.odd():
            return Said("unknown", torch=self.torch.version, warnings=warnings)
        return Said("loads", exact=not self.varies(main), torch=self.torch.version, warnings=warnings)

    def warned(self, main: Pickle) -> tuple[str, ...]:
        if not self.weights_only:
            return words.implicit_pickle(self.release)
        return (words.protocol_warning(main.protocol),) if main.protocol > 2 else ()

    def varies(self, main: Pickle) -> bool:
        """Whether the answer hangs on a name that not every release allows."""
        names = {torch_spelling(*key) for key in main.globals}
        return self.release[:2] != _LISTED and not _VARYING.isdisjoint(names)

    def odd(self) -> bool:
        """Whether allowed names are used in ways that may not work, or names are called that may do anything."""
        return any(finding.code in ("dangerous-use", "odd-use", "trusted-use") for finding in self.checkpoint.findings)

    def events(self, main: Pickle) -> Iterator[_Event]:
        yield from self.ids(main)
        yield from self.names(main) if self.weights_only else self.imports(main)
        if self.weights_only and main.rare:
            yield self.opcode(main)

    def names(self, main: Pickle) -> Iterator[_Event]:
        """Names that are not allowed."""
        for (module, name), node in main.globals.items():
            full = torch_spelling(module, name)
            owner = full[: -len(name) - 1] if full.endswith(f".{name}") else full.rpartition(".")[0]
            if owner in words.BLOCKED:
                message = words.blocked(full, owner)
            elif full in TORCH_DEFAULT:
                continue
            elif full in words.REGISTERED_TEXTS and (self.release < (2, 15) or "_dynamo" not in full):
                message = words.REGISTERED_TEXTS[full]
            else:
                message = words.unsupported_global(full, name, self.release)
            yield self.refused(node.position, message)

    def imports(self, main: Pickle) -> Iterator[_Event]:
        """Names the standard unpickler would import: what happens then is known only where there is no such package."""
        for (module, name), node in main.globals.items():
            full = torch_spelling(module, name)
            if full in TORCH_DEFAULT or "Storage" in name:
                continue
            package = module.partition(".")[0]
            absent = package in self.torch.absent
            text = f"No module named '{package}'" if absent else ""
            yield _Event(node.position, "ModuleNotFoundError" if absent else "", text, absent)

    def ids(self, main: Pickle) -> Iterator[_Event]:
        """Storages on devices that are not here, or without their record; and ids that are no storage's."""
        for node in main.persistent:
            found = self.stored(node)
            if found is not None:
                yield found
                return  # they are in the order of the stream

    def stored(self, node: Persistent) -> _Event | None:
        pid = node.id
        if type(pid) is not tuple or len(pid) < 4:
            return _Event(node.position, exact=False)
        if _text(pid[0]) != "storage":
            message = words.foreign_id(pid[0], self.release)
            if not self.weights_only:
                return _Event(node.position, exact=False)
            return _Event(
                node.position, "UnpicklingError", words.refusal(message, self.release), self.release >= (2, 6)
            )
        record = f"data/{_text(pid[2])}"
        if self.checkpoint.format == "torch-zip" and record not in self.records:
            return _Event(node.position, "RuntimeError", words.no_record(record, self.release))
        tag = _text(pid[3])
        error, text = words.device_error(tag, self.release, self.torch.counts)
        return _Event(node.position, error, text, self.told(tag)) if error else None

    def told(self, tag: str) -> bool:
        """Whether the words on a tag are certain."""
        kind, _, index = tag.partition(":")
        plain = tag.isascii() and tag.isprintable() and not (index.isdigit() and int(index[:9]) > _MOST_INDEX)
        usual = self.release >= (2, 11) or _LOOKS_LIKE.match(tag) is None
        return plain and usual and self.torch.sure and tag != "mtia" and (self.release >= (2, 4) or kind == "cuda")

    def opcode(self, main: Pickle) -> _Event:
        """The first opcode that weights_only does not know."""
        found = first_unknown(self.pickled(main))
        if found is None:
            return _Event(main.start, "UnpicklingError", exact=False)
        at, code = found
        return self.refused(main.start + at, f"Unsupported operand {code}")

    def refused(self, position: int, message: str) -> _Event:
        """What weights_only refuses; the frame around its words is known from 2.6 on, where it is the default."""
        return _Event(position, "UnpicklingError", words.refusal(message, self.release), self.release >= (2, 6))

    def pickled(self, main: Pickle) -> bytes:
        """The bytes of the main pickle, where they lie in the file as they are."""
        if self.checkpoint.format != "torch-zip":  # one pickle after the other
            before = self.checkpoint.pickles[: self.checkpoint.pickles.index(main)]
            start = sum(pickle.end for pickle in before) + main.start
            return raw_bytes(self.checkpoint.path, start, min(main.end - main.start, _LONGEST_SCAN))
        record = next((each for each in self.checkpoint.records if each.name == main.name), None)
        if record is None or record.offset is None or record.method:
            return b""
        return raw_bytes(self.checkpoint.path, record.offset, min(record.size, _LONGEST_SCAN))


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""
