"""Statistics of every tensor of an open checkpoint, in one pass over its bytes, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from transload.contents import Tensor, TensorStats
from transload.errors import TransloadError
from transload.io import pool
from transload.opening.digests import leaves
from transload.opening.elements import Allowance, ElementReader
from transload.opening.numbers import MOST_THREADS, NUMERIC, Statistics

PIECE = 1 << 20
"""Bytes of a tensor that are read at once."""


def statistics(
    reader: ElementReader, report_progress: Callable[[int], None] = lambda _: None
) -> tuple[TensorStats, ...]:
    """The statistics of all tensors, in order; what cannot be read or counted has a note."""
    checkpoint = reader.checkpoint
    entries: list[TensorStats] = []
    jobs: list[tuple[int, Tensor]] = []
    allowance = Allowance(checkpoint)
    for tensor, why in leaves(checkpoint.tensors, several=checkpoint.traits.several):
        dtype = f"{tensor.dtype} {tensor.kind}" if why else tensor.dtype
        note = why or ("" if tensor.dtype in NUMERIC else f"elements of {tensor.dtype} are not decoded")
        try:
            if not note:
                allowance.spend(tensor)
                jobs.append((len(entries), tensor))
        except TransloadError as error:
            note = error.what
        entries.append(TensorStats(tensor.name, dtype, tensor.shape, note=note))

    def position(job: tuple[int, Tensor]) -> tuple[str, int]:
        storage = reader.storage(job[1])
        return (storage.file, job[1].file_offset or 0) if storage is not None else ("", 0)

    lock = Lock()
    threads = pool.threads_for((tensor.nbytes for _, tensor in jobs), reader.sources(), MOST_THREADS)

    def do(job: tuple[int, Tensor]) -> None:
        place, tensor = job
        numbers = Statistics(tensor.dtype, threads)
        try:
            for chunk in reader.chunks(tensor, PIECE):
                numbers.add(chunk)
                with lock:
                    report_progress(len(chunk))
        except TransloadError as error:
            reader.refuse_fault(error)
            entries[place] = entries[place]._replace(note=error.what)
            return
        result = numbers.result()
        entries[place] = result._replace(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)

    pool.each(sorted(jobs, key=position), lambda: do, threads)
    return tuple(entries)
