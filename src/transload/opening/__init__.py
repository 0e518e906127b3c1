"""``transload.open``: a checkpoint as a read-only mapping whose tensors are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from transload.errors import UsageError
from transload.opening.destinations import Destinations
from transload.opening.one import read_one
from transload.opening.opened import Opened, open_checkpoint

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from transload.checkpoint import Checkpoint, Key, Tensor
    from transload.io.sources import SourceLike
    from transload.opening.views import Index

__all__ = ["Handle", "Lazy", "open"]


def open(f: SourceLike, *, device: Any = "auto", dtype: Any = None) -> Handle:  # noqa: A001 - as torch has load
    """Open a checkpoint of any format; its tensors are read one by one, when they are asked for.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save({"model": {"fc.weight": torch.eye(3)}, "epoch": 7}, file)
    >>> with open(file) as handle:
    ...     list(handle), handle.metadata["epoch"], handle.slice("model/fc.weight")[1]
    (['model/fc.weight'], 7, tensor([0., 1., 0.]))

    ``device`` is what ``map_location`` is to ``transload.load``: ``"auto"`` lands each tensor where this machine can
    have it, ``None`` on the device of its tag. ``dtype`` casts what is floating point. Nothing in a file is run to
    read its tensors, so files that torch.load would only load on trust open too; of a damaged one every tensor whose
    bytes are there can be read.
    """
    return Handle(open_checkpoint(f), device, _dtype(dtype))


class Handle(Mapping[str, "torch.Tensor"]):
    """The tensors of an open checkpoint by name, in the order of the file.

    A name is the path joined by slashes, ``model/fc.weight``, as ``transload inspect`` shows it; a path itself, as a
    tuple, will do as well. Every access reads anew into memory of its own, so tensors that share storage in the file
    come as separate copies, without gradients. Reading from several threads is safe.
    """

    def __init__(self, opened: Opened, device: Any, dtype: torch.dtype | None) -> None:
        self._opened = opened
        self._landing = Destinations(opened.checkpoint, device)
        self._dtype = dtype
        self._metadata: dict[str, Any] | None = None
        self._names: dict[str, Tensor] = {}
        for tensor in opened.checkpoint.tensors:
            self._names.setdefault(tensor.name, tensor)

    @property
    def checkpoint(self) -> Checkpoint:
        """What ``transload.inspect`` says of it."""
        return self._opened.checkpoint

    @property
    def metadata(self) -> dict[str, Any]:
        """What the file holds beside tensors: ``__metadata__`` of safetensors, else plain values by name.

        A value that is not plain (a ``torch.device``, a date) is there as its text.
        """
        if self._metadata is None:
            from transload.opening.metadata import metadata_of

            self._opened.check_open()
            self._metadata = metadata_of(self._opened)
        return dict(self._metadata)

    def __getitem__(self, name: str | tuple[Key, ...]) -> torch.Tensor:
        return self._read(self._find(name), ())

    def slice(self, name: str | tuple[Key, ...]) -> Lazy:
        """A tensor that is read when it is indexed, and only what the index names.

        Whole rows are read exactly; of what is cut through its rows, the bytes from the first to the last one named,
        or row by row where little of each is wanted.
        """
        return Lazy(self, self._find(name))

    def _read(self, tensor: Tensor, index: Index) -> torch.Tensor:
        self._opened.check_open()
        return read_one(
            self._opened, tensor, index=index, device=self._landing.device(tensor.device), dtype=self._dtype
        )

    def _find(self, name: str | tuple[Key, ...]) -> Tensor:
        self._opened.check_open()
        found = self._paths.get(name) if isinstance(name, tuple) else self._names.get(name)
        if found is None:
            raise KeyError(self._unknown(name))
        return found

    @cached_property
    def _paths(self) -> dict[tuple[Key, ...], Tensor]:
        return {tensor.path: tensor for tensor in self.checkpoint.tensors}

    def _unknown(self, name: object) -> str:
        """Why there is no such tensor, and which are close."""
        text = "/".join(map(str, name)) if isinstance(name, tuple) else str(name)
        if any(leaf.name == text for leaf in self.checkpoint.leaves):
            return f"{text!r} is no tensor: its value is in metadata[{text!r}]"
        from difflib import get_close_matches

        below = [known for known in self._names if known.startswith(f"{text}/")]
        ending = [known for known in self._names if known.endswith((f"/{text}", f".{text}"))]
        near = below[:3] or ending[:3] or get_close_matches(text, self._names, 3)
        return f"no tensor {text!r}" + (f"; close: {', '.join(near)}" if near else "")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in (self._paths if isinstance(name, tuple) else self._names)

    __eq__ = object.__eq__  # a mapping would compare its tensors, and read them all for that
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        closed = ", closed" if self._opened.closed else ""
        return f"<{self.checkpoint.path}: {len(self):,} tensors{closed}>"

    def __reduce__(self) -> NoReturn:
        """An open file does not travel between processes."""
        fix = "Pass its path, and open it in each process."
        raise UsageError("an open checkpoint is not pickled or copied", where=self.checkpoint.path, fix=fix)

    def close(self) -> None:
        """Close the file; what was read stays."""
        self._opened.close()

    def __enter__(self) -> Handle:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lazy:
    """One tensor of an open checkpoint, not read yet: ``lazy[10:20]`` reads ten rows."""

    def __init__(self, handle: Handle, tensor: Tensor) -> None:
        self._handle = handle
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """Its dtype in the file, by name."""
        return self._tensor.dtype

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, index: Index) -> torch.Tensor:
        return self._handle._read(self._tensor, index)  # noqa: SLF001 - two faces of one object

    def __repr__(self) -> str:
        return f"<{self._tensor.name or 'tensor'}: {self.dtype} {list(self.shape)}, not read>"


def _dtype(dtype: Any) -> torch.dtype | None:
    """A dtype, or the name of one."""
    import torch

    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{dtype!r} is no dtype", fix="Pass one of torch's, such as torch.bfloat16.")
    return found
