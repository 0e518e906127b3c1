"""How a file would be brought in, without bringing anything: for those who ask before they load."""

from __future__ import annotations

import os

from transload.io.pool import cores
from transload.loading.transfer.cached import cached_share
from transload.loading.transfer.choice import LITTLE, Choice, Facts, choose
from transload.loading.transfer.memory import huge_pages_pay

__all__ = ["forecast"]


def forecast(path: str, host: int, cuda: int) -> Choice:
    """The choice for so many bytes of a file; of a directory, as for a file that lies nowhere yet."""
    if host + cuda < LITTLE:
        return choose(Facts(host, cuda, 1, None))
    return choose(Facts(host, cuda, cores(), _cached(path), huge=host >= LITTLE and huge_pages_pay(host)))


def _cached(path: str) -> float | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError:
        return None
    try:
        return cached_share(descriptor, 0, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
