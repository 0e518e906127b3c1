"""What plain ``torch.load(path)`` would do with a file here, and say, without running it.

Both of torch's unpicklers work through the stream from its beginning, and a storage is put on its device when the
stream comes to it. So the first thing they cannot do decides, and its place in the stream is known. The words are those
of the releases from 2.1 to 2.15; a test compares them with the real ones.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from transload.checking.needs import raw_bytes
from transload.devices import split
from transload.diagnose.tables import numbers_of
from transload.judge.names import TORCH_DEFAULT, torch_spelling

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.devices import Devices
    from transload.diagnose.report import Diagnosis
    from transload.nodes import Persistent, Pickle

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Installed:
    """The torch of an environment, as far as ``torch.load`` depends on it."""

    version: str
    """``2.13.0+cu130``; empty where there is no torch, or none whose version could be read."""
    counts: dict[str, int] = field(default_factory=dict)
    """Devices of each kind that torch has: ``{"cuda": 1}``; a kind that does not work is left out."""
    sure: bool = True
    """Whether the counts are certain."""
    environ: Mapping[str, str] = field(default_factory=dict)
    absent: Collection[str] = ()
    """Packages a file asks for that are not installed."""

    @property
    def weights_only(self) -> bool:
        """What ``weights_only`` is where the caller of ``torch.load`` does not say.

        >>> Installed("2.5.1").weights_only, Installed("2.13.0+cpu").weights_only
        (False, True)
        """
        forced, forbidden = (
            self.environ.get(f"TORCH_FORCE_{name}_LOAD", "0").lower() in ("1", "y", "yes", "true")
            for name in ("WEIGHTS_ONLY", "NO_WEIGHTS_ONLY")
        )
        return forced or (numbers_of(self.version) >= (2, 6) and not forbidden)


def installed(
    diagnosis: Diagnosis, devices: Devices, environ: Mapping[str, str], absent: Collection[str] = ()
) -> Installed:
    """The torch that the doctor found, with the devices it would have."""
    machine = diagnosis.machine
    first, cuda = machine.torch.first, machine.driver.cuda
    counts = Counter(split(device.name)[0] for device in devices.available if device.name != "cpu")
    version = first.version if first is not None and first.known else ""
    # Whether it is known what torch.cuda.is_available() says: a card that computes nothing may still be there.
    sure = not machine.torch.shadow and cuda.answer.state not in ("hung", "crashed")
    sure = sure and (first is None or first.cpu_only or not cuda.works or diagnosis.status != "broken")
    return Installed(version, dict(counts), sure, environ, absent)


@dataclass(frozen=True, slots=True)
class Said:
    """What ``torch.load`` does: ``loads``, ``raises``, or ``unknown`` where that cannot be predicted.

    ``error`` is the class of what it raises and ``text`` its words. ``exact`` says that they are word for word what
    release ``torch`` says; otherwise they are the nearest known words, or empty.
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


_OLDEST, _NEWEST = (2, 1), (2, 15)
"""The releases whose words are known."""


def torch_says(checkpoint: Checkpoint, torch: Installed) -> Said:
    """The outcome of ``torch.load(checkpoint.path)``."""
    said = _Prediction(checkpoint, torch)
    return said.outcome() if _OLDEST <= said.release[:2] <= _NEWEST else said.unknown()


# -- what decides

_WEIGHTS_ONLY = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.")
"""The opcodes that torch's unpickler knows, in every release from 2.1 to 2.15."""
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
# Before 2.11 a tag that only begins like a device was taken for one.
_LOOKS_LIKE = re.compile(r"(cuda|hpu|xpu|mtia|privateuseone)(?!:|[0-9]|$)")
_LONGEST_SCAN = 1 << 24
_MOST_INDEX = 127  # torch takes a greater number for a negative one


class _Event(NamedTuple):
    """Something in the stream that ends the reading; without an error it is not known whether it does."""

    position: int
    error: str = ""
    text: str = ""
    exact: bool = True


class _Prediction:
    def __init__(self, checkpoint: Checkpoint, torch: Installed) -> None:
        self.checkpoint = checkpoint
        self.torch = torch
        self.release = numbers_of(torch.version)
        self.weights_only = torch.weights_only
        self.records = {record.name for record in checkpoint.records}
        self.intact = checkpoint.integrity in ("whole", "unchecked")

    def raises(self, error: str, text: str, warnings: tuple[str, ...] = (), *, exact: bool = True) -> Said:
        return Said("raises", error, text, exact, self.torch.version, warnings)

    def unknown(self, warnings: tuple[str, ...] = ()) -> Said:
        return Said("unknown", torch=self.torch.version, warnings=warnings)

    def outcome(self) -> Said:
        path, kind = self.checkpoint.path, self.checkpoint.format
        strict = self.weights_only and self.release >= (2, 6)  # older ones word their refusals in other ways
        if os.path.isdir(path):  # noqa: PTH112  a path is text here
            error = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            return self.raises("IsADirectoryError", str(error), exact=os.name == "posix")
        if path.endswith(".safetensors") and self.release >= (2, 13):
            if "safetensors" in self.torch.absent:
                return self.raises("RuntimeError", _NO_SAFETENSORS)
            if kind == "safetensors" and self.intact:
                return Said("loads", exact=True, torch=self.torch.version)
            codes = {problem.code for problem in self.checkpoint.problems} if kind == "safetensors" else set()
            text = next((_SAFETENSORS[code] for code in _SAFETENSORS if code in codes), "")
            return self.raises("SafetensorError", text, exact=False) if text else self.unknown()
        if kind == "torchscript" and "constants.pkl" in self.records:
            text = _unsafe("TorchScript archives passed to ``torch.load``")
            return self.raises("RuntimeError", text, (_SCRIPT_WARNING,)) if strict else self.unknown((_SCRIPT_WARNING,))
        if kind in ("torchscript", "torch-export", "aotinductor", "torch-package"):
            # An archive that torch opens and finds no object in. One without a folder it does not even open.
            opens = self.intact and "folder" in dict(self.checkpoint.facts) and "data.pkl" not in self.records
            return self.raises("RuntimeError", _no_record("data.pkl", self.release)) if opens else self.unknown()
        if kind == "torch-tar":
            text = _unsafe("files saved in the legacy .tar format")
            return self.raises("RuntimeError", text) if strict else self.unknown()
        return self.stream() if kind in ("torch-zip", "torch-legacy", "pickle") else self.foreign()

    def foreign(self) -> Said:
        """A file that is not a checkpoint is taken for a pickle, and its first byte for an opcode."""
        head = raw_bytes(self.checkpoint.path, 0, 4)
        if not self.checkpoint.nbytes and not head:
            return self.raises("EOFError", "" if self.weights_only else "Ran out of input")
        if not head or head == b"PK\x03\x04" or (self.weights_only and self.release < (2, 6)):
            return self.unknown()
        byte = head[0]
        if self.weights_only:
            opcodes, text = _WEIGHTS_ONLY, _refusal(f"Unsupported operand {byte}", self.release)
        else:
            import pickletools

            opcodes = frozenset(ord(each.code) for each in pickletools.opcodes)
            shown = chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}"
            text = f"invalid load key, '{shown}'."
        return self.unknown() if byte in opcodes else self.raises("UnpicklingError", text)

    def stream(self) -> Said:
        """The first event in the main pickle decides; without one the file loads, if it is intact."""
        main = next((pickle for pickle in self.checkpoint.pickles if pickle.main), None)
        if any(problem.code == "zip-no-directory" for problem in self.checkpoint.problems):
            text = "PytorchStreamReader failed reading zip archive: failed finding central directory"
            return self.raises("RuntimeError", text + _miniz(self.release), exact=False)
        if main is None:
            return self.unknown()
        plain = self.checkpoint.format == "pickle"
        intact = not main.broken if plain else self.intact
        # Not every release allows the same names.
        names = {torch_spelling(*key) for key in main.globals}
        varies = self.release[:2] != _LISTED and not _VARYING.isdisjoint(names)
        warnings: tuple[str, ...] = ()
        if self.weights_only and main.protocol > 2:
            warnings = (_PROTOCOL.format(main.protocol),)
        elif not self.weights_only and (2, 4) <= self.release < (2, 6):
            warnings = (_IMPLICIT,)
        first = min(self.events(main), key=lambda event: event.position, default=None)
        if first and first.error:
            return self.raises(first.error, first.text, warnings, exact=first.exact and intact and not varies)
        if plain and not first:
            return self.raises("RuntimeError", "Invalid magic number; corrupt file?", warnings, exact=intact)
        # Allowed names may be used in ways that do not work, and others may do anything.
        odd = any(finding.code in ("dangerous-use", "odd-use", "trusted-use") for finding in self.checkpoint.findings)
        if first or not intact or odd:
            return self.unknown(warnings)
        return Said("loads", exact=not varies, torch=self.torch.version, warnings=warnings)

    def events(self, main: Pickle) -> Iterator[_Event]:
        stored = next(filter(None, map(self.stored, main.persistent)), None)  # they are in the order of the stream
        if stored:
            yield stored
        for (module, name), node in main.globals.items():
            full = torch_spelling(module, name)
            if self.weights_only:
                owner = full[: -len(name) - 1] if full.endswith(f".{name}") else full.rpartition(".")[0]
                if owner in ("sys", "os", "posix", "nt"):
                    message = f"Trying to load unsupported GLOBAL {full} whose module {owner} is blocked."
                elif full in TORCH_DEFAULT:
                    continue
                elif full in _REGISTERED and (self.release < (2, 15) or "_dynamo" not in full):
                    message = _REGISTERED[full]
                else:
                    shown = full.removeprefix("builtins.") if self.release >= (2, 7) else full
                    # 2.6 advises to allow it by its last part only.
                    message = _UNSUPPORTED.format(shown, shown if self.release >= (2, 7) else name)
                yield self.refused(node.position, message)
            elif full not in TORCH_DEFAULT and "Storage" not in name:
                # The standard unpickler imports it: what happens then is known only where there is no such package.
                package = module.partition(".")[0]
                absent = package in self.torch.absent
                text = f"No module named '{package}'" if absent else ""
                yield _Event(node.position, "ModuleNotFoundError" if absent else "", text, absent)
        if self.weights_only and main.rare:
            yield self.unknown_opcode(main)

    def stored(self, node: Persistent) -> _Event | None:
        """A storage on a device that is not here, or without its record; or an id that is not a storage's."""
        pid = node.id
        if type(pid) is not tuple or len(pid) < 4:
            return _Event(node.position, exact=False)
        if _text(pid[0]) != "storage":
            got = type(pid[0]) if self.release >= (2, 10) else pid[0]
            message = f"Only persistent_load of storage is allowed, but got {got}"
            return self.refused(node.position, message) if self.weights_only else _Event(node.position, exact=False)
        record = f"data/{_text(pid[2])}"
        if self.checkpoint.format == "torch-zip" and record not in self.records:
            return _Event(node.position, "RuntimeError", _no_record(record, self.release))
        tag = _text(pid[3])
        error, text = _device_error(tag, self.release, self.torch.counts)
        if not error:
            return None
        kind, _, index = tag.partition(":")
        plain = tag.isascii() and tag.isprintable() and not (index.isdigit() and int(index[:9]) > _MOST_INDEX)
        usual = self.release >= (2, 11) or _LOOKS_LIKE.match(tag) is None
        exact = plain and usual and self.torch.sure and tag != "mtia" and (self.release >= (2, 4) or kind == "cuda")
        return _Event(node.position, error, text, exact)

    def unknown_opcode(self, main: Pickle) -> _Event:
        """The first opcode that weights_only does not know, if the bytes of the pickle are stored as they are."""
        import pickletools

        data = b""
        if self.checkpoint.format != "torch-zip":  # one pickle after the other
            before = self.checkpoint.pickles[: self.checkpoint.pickles.index(main)]
            start = sum(pickle.end for pickle in before) + main.start
            data = raw_bytes(self.checkpoint.path, start, min(main.end - main.start, _LONGEST_SCAN))
        else:
            record = next((each for each in self.checkpoint.records if each.name == main.name), None)
            if record is not None and record.offset is not None and not record.method:
                data = raw_bytes(self.checkpoint.path, record.offset, min(record.size, _LONGEST_SCAN))
        try:
            for _, _, at in pickletools.genops(data):
                if at is not None and data[at] not in _WEIGHTS_ONLY:
                    return self.refused(main.start + at, f"Unsupported operand {data[at]}")
        except ValueError:  # the pickle ends before
            pass
        return _Event(main.start, "UnpicklingError", exact=False)

    def refused(self, position: int, message: str) -> _Event:
        """What weights_only refuses; the words around it are known from 2.6 on, where it is the default."""
        return _Event(position, "UnpicklingError", _refusal(message, self.release), self.release >= (2, 6))


def _text(value: object) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""


# -- torch's words

_SCRIPT_WARNING = (
    "'torch.load' received a zip file that looks like a TorchScript archive dispatching to 'torch.jit.load' "
    "(call 'torch.jit.load' directly to silence this warning)"
)
_NO_SAFETENSORS = (
    "Attempting to load a safetensors file but safetensors is not installed. "
    "Please install safetensors with: pip install safetensors"
)
# What safetensors 0.8 says of a file, by the problem found in it.
_HEADER = "Error while deserializing header:"
_SAFETENSORS = {
    "safetensors-header-too-large": f"{_HEADER} header too large",
    "safetensors-header-cut": f"{_HEADER} invalid header length",
    "safetensors-truncated": f"{_HEADER} incomplete metadata, file not fully covered",
    "safetensors-trailing": f"{_HEADER} incomplete metadata, file not fully covered",
}
_UNSAFE = (
    "In PyTorch 2.6, we changed the default value of the `weights_only` argument in `torch.load` from `False` to "
    "`True`. Re-running `torch.load` with `weights_only` set to `False` will likely succeed, but it can result in "
    "arbitrary code execution. Do it only if you got the file from a trusted source."
)
_OPTIONS = (
    "Weights only load failed. This file can still be loaded, to do so you have two options, "
    "\033[1mdo those steps only if you trust the source of the checkpoint\033[0m. "
    f"\n\t(1) {_UNSAFE}\n\t(2) Alternatively, to load with `weights_only=True` please check the recommended steps in "
    "the following error message.\n\tWeightsUnpickler error: "
)
_DOCS = (
    "\n\nCheck the documentation of torch.load to learn more about types accepted by default with weights_only "
    "https://pytorch.org/docs/stable/generated/torch.load.html."
)
_ISSUE = (
    "Please file an issue with the following so that we can make `weights_only=True` compatible with your use case: "
    "WeightsUnpickler error: "
)
_IMPLICIT = (
    "You are using `torch.load` with `weights_only=False` (the current default value), which uses the default pickle "
    "module implicitly. It is possible to construct malicious pickle data which will execute arbitrary code during "
    "unpickling (See https://github.com/pytorch/pytorch/blob/main/SECURITY.md#untrusted-models for more details). In a "
    "future release, the default value for `weights_only` will be flipped to `True`. This limits the functions that "
    "could be executed during unpickling. Arbitrary objects will no longer be allowed to be loaded via this mode "
    "unless they are explicitly allowlisted by the user via `torch.serialization.add_safe_globals`. We recommend you "
    "start setting `weights_only=True` for any use case where you don't have full control of the loaded file. Please "
    "open an issue on GitHub for any issues related to this experimental feature."
)
_MINIZ = (
    ". This is an internal miniz error. If you are seeing this error, there is a high likelihood that your checkpoint "
    "file is corrupted. This can happen if the checkpoint was not saved properly, was transferred incorrectly, or the "
    "file was modified after saving."
)
_TO_CPU = (
    "If you are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your "
    "storages to the CPU."
)

_REGISTERED: dict[str, str] = {
    **dict.fromkeys(
        (
            "torch.distributed.device_mesh.DeviceMesh",
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.tensor._dtensor_spec.TensorMeta",
            "torch.distributed.tensor.DTensor",
            "torch.distributed.tensor.placement_types.Partial",
            "torch.distributed.tensor.placement_types.Replicate",
            "torch.distributed.tensor.placement_types.Shard",
        ),
        "``torch.distributed.tensor`` must be imported to load DTensors",
    ),
    "torch._dynamo.decorators._DimRange": (
        "``torch.nested`` and ``torch._dynamo`` must be imported to load nested jagged tensors (NJTs)"
    ),
}
"""Names that another module allows when it is imported, and what is said where it was not."""
_UNSUPPORTED = (
    "Unsupported global: GLOBAL {0} was not an allowed global by default. Please use "
    "`torch.serialization.add_safe_globals([{1}])` or the `torch.serialization.safe_globals([{1}])` context manager to "
    "allowlist this global if you trust this class/function."
)
_PROTOCOL = (
    "Detected pickle protocol {} in the checkpoint, which was not the default pickle protocol used by "
    "`torch.load` (2). The weights_only Unpickler might not support all instructions implemented by this protocol, "
    "please file an issue for adding support if you encounter this."
)
_SINCE: dict[str, Version] = {"cuda": (2, 1), "privateuseone": (2, 1), "hpu": (2, 1), "xpu": (2, 5), "mtia": (2, 10)}
"""Kinds of devices that storages are restored to, and since when."""


def _unsafe(what: str) -> str:
    """A kind of file that is refused as a whole."""
    return f"Cannot use ``weights_only=True`` with {what}. {_UNSAFE}"


def _refusal(message: str, version: Version) -> str:
    """The frame torch 2.6 and later put around the unpickler's own words."""
    if "was not an allowed global by default." in message:
        return f"{_OPTIONS}{message}{_DOCS}"
    if re.search(r"(\S+) must be (\S+) to load", message):
        return f"Weights only load failed. {message}\n {_UNSAFE}\n"
    asked = "" if "is blocked" in message else _ISSUE
    gap = "\n\n" if version >= (2, 9) else ""
    return f"Weights only load failed. {_UNSAFE}\n{asked}{gap}{message}{_DOCS}"


def _miniz(version: Version) -> str:
    return _MINIZ if version >= (2, 11) else ""


def _no_record(name: str, version: Version) -> str:
    return f"PytorchStreamReader failed locating file {name}: file not found{_miniz(version)}"


def _device_error(tag: str, version: Version, counts: dict[str, int]) -> tuple[str, str]:
    """The error of restoring a storage to a tag: its class and words; both empty where it is restored.

    ``counts`` are the devices torch has of each kind; none of a kind means that its ``is_available()`` is false.

    >>> _device_error("cuda:1", (2, 13), {"cuda": 1})[1][:66]
    'Attempting to deserialize object on CUDA device 1 but torch.cuda.d'
    >>> _device_error("cuda:0", (2, 13), {"cuda": 1})
    ('', '')
    """
    if tag in ("cpu", "meta") or (tag.startswith("mps") and counts.get("mps")):
        return "", ""
    if tag.startswith("mps"):
        return "RuntimeError", "torch.UntypedStorage(): Storage device not recognized: mps"
    known = [kind for kind, since in _SINCE.items() if version >= since]
    if version >= (2, 11):
        kind = next((kind for kind in known if re.match(rf"{kind}(:|[0-9]|\Z)", tag)), "")
    else:
        kind = next((kind for kind in known if tag.startswith(kind)), "")
    if not kind:
        lost = f"don't know how to restore data location of torch.storage.UntypedStorage (tagged with {tag})"
        return "RuntimeError", lost
    count = counts.get(kind, 0)
    error = "AssertionError" if version < (2, 4) and kind == "hpu" else "RuntimeError"
    if kind in ("hpu", "privateuseone") and not count:
        if version >= (2, 4):
            return error, f"The {kind.upper()} device module is not registered. {_TO_CPU}"
        return error, "HPU device module is not loaded"
    if not re.fullmatch(rf"{kind}(:(0|[1-9][0-9]*))?", tag):
        return error, f"Invalid device string: '{tag}'"
    if not count:
        tried = f"Attempting to deserialize object on a {kind.upper()} device"
        return error, f"{tried} but torch.{kind}.is_available() is False. {_TO_CPU}"
    index = int(tag.partition(":")[2][:4] or 0)
    if index < count:
        return "", ""
    return error, (
        f"Attempting to deserialize object on {kind.upper()} device {index} but "
        f"torch.{kind}.device_count() is {count}. "
        "Please use torch.load with map_location to map your storages to an existing device."
    )
