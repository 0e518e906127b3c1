"""Bytes of CUDA devices, fetched into pinned memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transload.saving.contents import Ring
from transload.saving.desk import Stored

__all__ = ["CudaFetcher", "rings_for"]


class CudaFetcher:
    """One device's side of a ring. Its stream begins when all that the current one was given before is done."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def slot(self, nbytes: int) -> tuple[Any, int]:
        """Pinned memory; torch keeps it for the next save when it is given back."""
        import torch

        made = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return made, made.data_ptr()

    def fetch(self, slot: Any, storage: Any, start: int, nbytes: int) -> Any:
        """Begin to copy; what is returned waits until it is done."""
        import torch

        with torch.no_grad(), torch.cuda.stream(self.stream):
            slot[:nbytes].copy_(as_bytes(storage, start, nbytes), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event.synchronize

    def gather(self, parts: Sequence[tuple[Any, int, int]]) -> bytes:
        """Put together on the device, and fetched at once."""
        import torch

        with torch.no_grad(), torch.cuda.stream(self.stream):
            views = [as_bytes(*part) for part in parts if part[2]]
            if not views:
                return b""
            made: bytes = torch.cat(views).cpu().numpy().tobytes()
            return made

    def finish(self) -> None:
        """Wait until nothing is under way any more."""
        self.stream.synchronize()


def as_bytes(storage: Any, start: int, nbytes: int) -> Any:
    """Some bytes of a storage as a tensor, without a copy."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def rings_for(storages: Sequence[Stored]) -> dict[str, Ring]:
    """A ring for each CUDA device that has storages here."""
    import torch

    cpu = torch.device("cpu")
    found = {each.storage.device for each in storages if each.storage.device != cpu}
    return {str(device): Ring(CudaFetcher(device)) for device in found if device.type == "cuda"}
