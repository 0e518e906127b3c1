"""Bytes of CUDA devices, fetched into pinned memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from transload.loading.transfer.driver import Driver, DriverError, cuda_driver
from transload.saving.contents import Ring, Span
from transload.saving.desk import Stored
from transload.saving.errors import SaveError

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

        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return made, made.data_ptr()

    def fetch(self, slot: Any, parts: Sequence[Span]) -> Any:
        """Begin to copy; what is returned waits until it is done."""
        import torch

        driver = cuda_driver()
        if driver is None:
            self._by_torch(slot, parts)
        else:
            self._by_driver(driver, slot, parts)
        event = torch.cuda.Event()
        event.record(self.stream)
        return event.synchronize

    def _by_driver(self, driver: Driver, slot: Any, parts: Sequence[Span]) -> None:
        """In one call, which costs a tenth of what torch's would."""
        ends = accumulate((part.nbytes for part in parts), initial=slot.data_ptr())
        copies = [(to, storage.data_ptr() + start, count) for to, (storage, start, count) in zip(ends, parts)]  # noqa: B905 - there is an end more
        try:
            before = driver.current()
            try:
                driver.enter(self._device.index)
                driver.copy(copies, self.stream.cuda_stream)
            finally:
                driver.back(before)
        except DriverError as reason:
            raise SaveError(reason.what, fix="`transload doctor` looks for the cause.") from reason

    def _by_torch(self, slot: Any, parts: Sequence[Span]) -> None:
        """Many are put together on the device first."""
        import torch

        with torch.no_grad(), torch.cuda.stream(self.stream):
            views = [as_bytes(part) for part in parts] or [slot[:0]]
            joined = torch.cat(views) if len(views) > 1 else views[0]
            slot[: len(joined)].copy_(joined, non_blocking=True)

    def finish(self) -> None:
        """Wait until nothing is under way any more."""
        self.stream.synchronize()


def as_bytes(span: Span) -> Any:
    """Some bytes of a storage as a tensor, without a copy."""
    import torch

    storage, start, nbytes = span
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def rings_for(storages: Sequence[Stored]) -> dict[str, Ring]:
    """A ring for each CUDA device that has storages here."""
    import torch

    cpu = torch.device("cpu")
    found = {each.storage.device for each in storages if each.storage.device != cpu}
    return {str(device): Ring(CudaFetcher(device)) for device in found if device.type == "cuda"}
