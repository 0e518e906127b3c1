"""Programs: TorchScript archives and ``torch.export`` files, loaded by torch itself onto the devices that are here."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transload.errors import TransloadError
from transload.loading.errors import LoadError
from transload.loading.streams import as_file

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Checkpoint
    from transload.io.sources import Source

__all__ = ["load_exported", "load_script"]

DeviceOf = Callable[[str], str]
_ZIP = b"PK\x03\x04"

_OPERATORS = {"fbgemm": "fbgemm_gpu", "tensorrt": "torch_tensorrt"}
"""The package that brings the operators of a namespace, where it has another name."""


def load_script(source: Source, checkpoint: Checkpoint, device_of: DeviceOf = str, *, path: str = "") -> Any:
    """What ``torch.jit.load`` makes of a TorchScript archive, with its tensors where ``device_of`` says.

    torch moves the tensors of a program all together or not at all: where some land elsewhere than they were, all go
    to the accelerator among their destinations. Devices that the code itself names stay as they are. ``path`` is set
    where the source is a file of the system.
    """
    import torch

    with _in_our_words(checkpoint, "torch.jit.load"):
        return torch.jit.load(path or as_file(source), map_location=_one_device(checkpoint, device_of))


def load_exported(source: Source, checkpoint: Checkpoint, device_of: DeviceOf = str, *, path: str = "") -> Any:
    """What ``torch.export.load`` makes of a file, as if it had been exported on the devices ``device_of`` gives.

    ``torch.export.load`` has no ``map_location`` and fails where a device is absent. So where something moves, the
    devices are replaced in a copy of the archive in memory: those of the weights, of the example inputs and in the
    graph. ``path`` is set where the source is a file of the system.
    """
    import torch

    with _in_our_words(checkpoint, "torch.export.load"):
        if _stays(source, checkpoint, device_of):
            return torch.export.load(path if path.endswith(".pt2") else as_file(source))
        return torch.export.load(_moved(source, device_of))


def _one_device(checkpoint: Checkpoint, device_of: DeviceOf) -> str | None:
    """The device for all tensors of a program; ``None`` where each stays where it was."""
    landed = {use.device: device_of(use.device) for use in checkpoint.devices}
    if all(tag == device for tag, device in landed.items()):
        return None
    return next((device for device in landed.values() if device != "cpu"), "cpu")


# -- an exported program on other devices ------------------------------------------------------------------------------


def _stays(source: Source, checkpoint: Checkpoint, device_of: DeviceOf) -> bool:
    """Whether every device that the weights or the graph name is where it lands."""
    import json
    from zipfile import ZipFile

    asked = {use.device: device_of(use.device) for use in checkpoint.devices}

    def note(device: str) -> str:
        return asked.setdefault(device, device_of(device))

    with ZipFile(as_file(source)) as archive:
        for name in archive.namelist():
            data = archive.read(name) if name.endswith(".json") else _ZIP
            if not data.startswith(_ZIP):
                _moved_json(json.loads(data), note)
    return all(device == landed for device, landed in asked.items())


def _moved(source: Source, device_of: DeviceOf) -> io.BytesIO:
    """The archive with every device replaced; records keep their names and order."""
    from zipfile import ZipFile

    out = io.BytesIO()
    with ZipFile(as_file(source)) as old, ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, _moved_record(name, old.read(name), device_of))
    out.seek(0)
    return out


def _moved_record(name: str, data: bytes, device_of: DeviceOf) -> bytes:
    import json

    # Example inputs, and in older files the weights, are checkpoints inside the archive, whatever they are called.
    if data.startswith(_ZIP):
        return _moved_checkpoint(data, device_of)
    return json.dumps(_moved_json(json.loads(data), device_of)).encode() if name.endswith(".json") else data


def _moved_json(value: Any, device_of: DeviceOf) -> Any:
    """The value with each device in it replaced.

    >>> _moved_json([{"device": {"type": "cuda", "index": 1}}, {"type": "x"}], lambda device: "cpu")
    [{'device': {'type': 'cpu', 'index': None}}, {'type': 'x'}]
    """
    if isinstance(value, list):
        return [_moved_json(each, device_of) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _moved_device(each, device_of)
        if key in ("device", "as_device") and isinstance(each, dict) and "type" in each
        else _moved_json(each, device_of)
        for key, each in value.items()
    }


def _moved_device(value: dict[str, Any], device_of: DeviceOf) -> dict[str, Any]:
    index = value.get("index")
    kind, _, number = device_of(value["type"] if index is None else f"{value['type']}:{index}").partition(":")
    return {**value, "type": kind, "index": int(number) if number else None}


def _moved_checkpoint(data: bytes, device_of: DeviceOf) -> bytes:
    import torch

    def land(storage: torch.UntypedStorage, tag: str) -> Any:
        return torch.serialization.default_restore_location(storage, device_of(tag))

    out = io.BytesIO()
    torch.save(torch.load(io.BytesIO(data), map_location=land, weights_only=False), out)
    return out.getvalue()


# -- words -------------------------------------------------------------------------------------------------------------


@contextmanager
def _in_our_words(checkpoint: Checkpoint, function: str) -> Iterator[None]:
    """What torch says when it cannot load a program, with the first of its many lines and what helps."""
    try:
        yield
    except TransloadError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = f"{function} cannot load this program: {lines[0] if lines else type(error).__name__}"
        raise LoadError(what, where=checkpoint.path, fix=_fix(str(error))) from error


def _fix(text: str) -> str:
    namespace = _between(text, "Unknown builtin op: ", "::")
    if namespace:
        package = _OPERATORS.get(namespace, namespace)
        return f"It uses operators of {package}: `import {package}` before loading it."
    import torch

    return f"It may need another release than torch {torch.__version__}; the one it was made with loads it."


def _between(text: str, before: str, after: str) -> str:
    """What stands between two texts, empty if they are not there.

    >>> _between("Unknown builtin op: torchvision::nms.", "op: ", "::")
    'torchvision'
    """
    _, found, rest = text.partition(before)
    word, ended, _ = rest.partition(after)
    return word if found and ended else ""
