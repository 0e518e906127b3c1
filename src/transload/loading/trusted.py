"""Loading a file that the caller trusts: the standard unpickler runs its pickle, over storages that were already read.

This runs any code the file asks for, and only ``weights_only=False`` leads here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from transload.checkpoint import Checkpoint
from transload.errors import (
    BrokenFileError,
    LoadError,
    Malformed,
    MissingClassError,
    MissingModuleError,
    TransloadError,
    UsageError,
)
from transload.formats.pickle_state import LOADER
from transload.io.sources import Source
from transload.loading.build import entries
from transload.loading.placement import DeviceMap
from transload.loading.rebuild_tensors import Rebuilder, sparse_tensor
from transload.nodes import REBUILDS, Persistent
from transload.opening import CheckpointFile

if TYPE_CHECKING:
    import torch

_DEVICE_AT = {name: rebuild.device for name, rebuild in REBUILDS.items() if rebuild.device < rebuild.most}
"""Functions that take a device as an argument, and the position of that argument."""

DeviceOf = Callable[[str], str]
_ZIP = b"PK\x03\x04"

_OPERATORS = {"fbgemm": "fbgemm_gpu", "tensorrt": "torch_tensorrt"}
"""The package that has the operators of a namespace, if its name differs."""


class _SourceStream(io.RawIOBase):
    """A source as a raw file object."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = self._source.readinto(self._at, memoryview(buffer))
        self._at += count
        return count


def as_file(source: Source) -> io.BufferedReader:
    """A binary file over a source; closing it leaves the source open.

    >>> from transload.io.paths import open_source
    >>> as_file(open_source(b"abc")).read(2)
    b'ab'
    """
    return io.BufferedReader(_SourceStream(source), 1 << 20)


def unpickler_of(pickle_module: Any) -> type[Any]:
    """A subclass of a module's ``Unpickler`` that finds storages, and names that have moved.

    Set ``device_of`` and ``load_from_bytes``, which loads the storages of a plain pickle, on its instances, not on the
    class: a class is always part of a reference cycle, so what it refers to lives until the garbage collector runs.
    """
    import torch

    class Unpickler(pickle_module.Unpickler):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            if "Storage" in name:  # a storage class, in any module
                try:
                    return torch.serialization.StorageType(name)
                except KeyError:
                    if name in ("UntypedStorage", "_UntypedStorage"):
                        return torch.UntypedStorage
            if module == "torch.tensor":  # its name until https://github.com/pytorch/pytorch/pull/51633
                module = "torch._tensor"
            if (module, name) == LOADER and self.load_from_bytes is not None:
                return self.load_from_bytes
            if module == "torch._utils" and name in ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor"):
                return sparse_tensor  # which validates it
            function = _imported(super().find_class, module, name)
            at = _DEVICE_AT.get(f"{module}.{name}")
            if at is None:
                return function
            device_of = self.device_of

            def rebuild(*args: Any) -> Any:
                """Call the function with the device that the tensor goes to."""
                device = args[at]
                return function(*args[:at], type(device)(device_of(str(device))), *args[at + 1 :])

            return rebuild

    return Unpickler


def _imported(find: Callable[[str, str], Any], module: str, name: str) -> Any:
    try:
        return find(module, name)
    except ImportError as error:
        if f"{module}.".startswith("numpy._core."):  # numpy 1 has it in numpy.core
            return _imported(find, f"numpy.core{module.removeprefix('numpy._core')}", name)
        missing = error.name or module
        what = f"the file needs {module}.{name}, and `import {module}` fails here: {error}"
        fix = f"Make `import {missing}` work: install its package, or add the folder of its source to PYTHONPATH."
        raised = MissingModuleError(what, fix=fix)
        raised.name = missing
        raise raised from error
    except AttributeError as error:
        if module in ("__main__", "__mp_main__"):
            what = f"the file needs {name}, which was defined in the script that saved it"
            fix = f"Define or import {name} in the script that loads the file."
        else:
            what = f"the file needs {module}.{name}, and {module} has no {name} here"
            fix = f"Install the version of {module.partition('.')[0]} that the file was saved with."
        raise MissingClassError(what, fix=fix) from error


def load_program(file: CheckpointFile, device_of: DeviceOf) -> Any:
    """What ``torch.jit.load`` or ``torch.export.load`` makes of a program, with its tensors where ``device_of`` says.

    Any error of torch becomes a ``LoadError`` with the first of its many lines and a fix.
    """
    import torch

    checkpoint, is_script = file.checkpoint, file.checkpoint.traits.runs == "torch.jit"
    if file.index:
        fix = "Zip the folder itself, without compression, and load the archive."
        raise LoadError("this program is unpacked", where=checkpoint.path, fix=fix)
    try:
        if not is_script:
            return _load_exported(file, device_of)
        # torch moves the tensors of a script all together or not at all: if some go to another device, all go to the
        # accelerator among the destinations. Devices named in the code stay as they are.
        devices = {use.device: device_of(use.device) for use in checkpoint.devices}
        target = None  # each stays where it was
        if any(tag != device for tag, device in devices.items()):
            target = next((device for device in devices.values() if device != "cpu"), "cpu")
        return torch.jit.load(file.path or as_file(file.open("")), map_location=target)
    except TransloadError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        function = "torch.jit.load" if is_script else "torch.export.load"
        what = f"{function} cannot load this program: {lines[0] if lines else type(error).__name__}"
        fix = f"It may need a different release than torch {torch.__version__}; the one it was made with loads it."
        if operator := re.search(r"Unknown builtin op: (.*?)::", str(error), re.DOTALL):
            package = _OPERATORS.get(operator[1], operator[1])
            fix = f"It uses operators of {package}: `import {package}` before loading it."
        raise LoadError(what, where=checkpoint.path, fix=fix) from error


def _load_exported(file: CheckpointFile, device_of: DeviceOf) -> Any:
    """What ``torch.export.load`` makes of a file, as if it had been exported on the devices ``device_of`` gives.

    ``torch.export.load`` has no ``map_location``, and fails if a device is absent. So if anything moves, devices are
    replaced in a copy of the archive in memory: those of the weights, of the example inputs and in the graph.
    """
    import json
    from zipfile import ZipFile

    import torch

    devices = {use.device: device_of(use.device) for use in file.checkpoint.devices}
    source = file.open("")

    def note(device: str) -> str:
        return devices.setdefault(device, device_of(device))

    def restore(storage: torch.UntypedStorage, tag: str) -> Any:
        return torch.serialization.default_restore_location(storage, device_of(tag))

    with ZipFile(as_file(source)) as old:
        named = {name: old.read(name) for name in old.namelist() if name.endswith(".json")}
        parsed = {name: json.loads(data) for name, data in named.items() if not data.startswith(_ZIP)}
        moved = {name: _moved_json(value, note) for name, value in parsed.items()}
        if all(tag == device for tag, device in devices.items()):
            return torch.export.load(file.path if file.path.endswith(".pt2") else as_file(source))
        out = io.BytesIO()
        with ZipFile(out, "w") as new:
            for name in old.namelist():
                data = json.dumps(moved[name]).encode() if name in moved else old.read(name)
                if data.startswith(_ZIP):
                    # Example inputs, and in older files the weights, are checkpoints inside, under any name.
                    inner = io.BytesIO()
                    torch.save(torch.load(io.BytesIO(data), restore, weights_only=False), inner)
                    data = inner.getvalue()
                new.writestr(name, data)
        out.seek(0)
        return torch.export.load(out)


def _moved_json(value: Any, device_of: DeviceOf) -> Any:
    """The value with each device in it replaced.

    >>> _moved_json([{"device": {"type": "cuda", "index": 1}}, {"type": "x"}], lambda device: "cpu")
    [{'device': {'type': 'cpu', 'index': None}}, {'type': 'x'}]
    """
    if isinstance(value, list):
        return [_moved_json(item, device_of) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {}
    for key, item in value.items():
        if key in ("device", "as_device") and isinstance(item, dict) and "type" in item:
            index = item.get("index")
            kind, _, number = device_of(item["type"] if index is None else f"{item['type']}:{index}").partition(":")
            moved[key] = {**item, "type": kind, "index": int(number) if number else None}
        else:
            moved[key] = _moved_json(item, device_of)
    return moved


def load_trusted(
    file: CheckpointFile,
    storages: dict[str, torch.UntypedStorage],
    device_map: DeviceMap,
    pickle_module: Any = None,
    node: object = None,
    **arguments: Any,
) -> Any:
    """What ``torch.load(weights_only=False)`` makes of a file, over storages that were read; or of a ``node`` in it.

    ``pickle_module`` and ``arguments`` (``encoding``, ``errors``, ``fix_imports``) are those of ``torch.load``. What
    the file's code raises is raised unchanged, with a note that says where it comes from.
    """
    import inspect
    import pickle
    import warnings

    import torch

    if pickle_module is not None and not hasattr(pickle_module, "Unpickler"):
        raise UsageError(f"pickle_module has no Unpickler: {pickle_module!r}")
    try:  # torch needs a recent dill
        getattr(torch.serialization, "_check_dill_version", bool)(pickle_module)
    except ValueError as error:
        raise UsageError(str(error)) from error
    kind, checkpoint, path = unpickler_of(pickle_module or pickle), file.checkpoint, file.checkpoint.path
    source = file.open(file.index)  # the pickle of an unpacked archive, else the file
    load_from_bytes: Callable[[bytes], Any] | None = None
    container = checkpoint.traits.container
    tar = container == "tar"

    def find(pid: Any) -> Any:
        """What an id names: a storage, a class with its source, or in a tar archive a tensor."""
        if isinstance(pid, tuple) and (tar or pid[0] in ("module", b"module")):
            cls, place, code = pid if tar else pid[1:]
            try:
                here = inspect.getsource(cls)
            except (OSError, TypeError):
                here = code
            if place and code and here != code:  # torch warns, too
                text = f"source code of class '{torch.typename(cls)}' has changed since the file was saved"
                warnings.warn(text, torch.serialization.SourceChangeWarning, stacklevel=2)
            return cls
        if isinstance(pid, tuple) and pid[0] not in ("storage", b"storage"):
            raise Malformed(f"a persistent id of unknown kind: {pid[0]!r}")
        return rebuilder.persistent(Persistent(pid, 0))

    def unpickled(stream: Any, persistent: Callable[[Any], Any] | None = None) -> Any:
        """Load one pickle, and leave the stream at its end."""
        unpickler = kind(stream, **{"encoding": "utf-8", **arguments})
        unpickler.device_of = device_map.device
        unpickler.load_from_bytes = load_from_bytes
        if persistent is not None:
            unpickler.persistent_load = persistent
        return unpickler.load()

    try:
        rebuilder = Rebuilder(file, entries(checkpoint.storages, storages, device_map), device_map, fake=False)
        if node is not None:
            from transload.formats.pickle_writer import dumps

            return unpickled(io.BytesIO(dumps(node, checkpoint.pickles[0].protocol)), find)
        if tar:
            from transload.formats.torch_legacy import TarReader

            return unpickled(as_file(TarReader(source).members["pickle"]), find)
        if container == "stream":
            stream = as_file(source)
            for _ in range(3):  # skip the magic number, the protocol version and the system info
                unpickled(stream)
            return unpickled(stream, find)
        if container == "bare":
            main = checkpoint.pickles[0]
            if main.raw:  # pickle cannot read joblib's arrays, but the same calls in protocol 5
                from transload.formats.pickle_writer import dumps

                return unpickled(io.BytesIO(dumps(main.root, main.protocol)), find)
            if main.loader is not None:  # its calls load the storages in this order
                ids = iter([node.id for node in main.persistent])
                load_from_bytes = lambda _: find(next(ids))  # noqa: E731 - used by unpickled() above
            return unpickled(as_file(source))
        return unpickled(io.BytesIO(_main_pickle(source, checkpoint)), find)
    except TransloadError as error:
        error.where = error.where or path
        raise
    except UnicodeDecodeError as error:
        what = f"a text that Python 2 wrote is not {error.encoding}: {error.reason}"
        raise LoadError(what, where=path, fix="Pass encoding='latin1', or encoding='bytes'.") from error
    except (UnpicklingError, EOFError) as error:
        raise BrokenFileError(f"its pickle is damaged or ends too early: {error}", where=path) from error
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"{path}: code that the file calls raised this; weights_only=False runs it")
        raise


def _main_pickle(source: Source, checkpoint: Checkpoint) -> bytes:
    """The content of the record data.pkl; torch ignores the case of its name."""
    from transload.formats.zip import read_payload

    records = checkpoint.records
    named = {**{record.name.lower(): record for record in records}, **{record.name: record for record in records}}
    if "data.pkl" not in named:
        raise BrokenFileError("the record data.pkl, which says what the file holds, is missing")
    record = named["data.pkl"]
    payload = read_payload(source, record, max(record.size, record.stored))
    if payload.problem:
        raise BrokenFileError(f"data.pkl cannot be read: {payload.problem}")
    return payload.data
