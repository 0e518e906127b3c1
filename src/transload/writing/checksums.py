"""CRC-32 in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from transload.read.checksum import combined, fastest_crc32

if TYPE_CHECKING:
    from types import TracebackType

    from transload.writing.archive import Chunk

__all__ = ["Checksums"]


class _Task:
    """The checksums of some chunks, which a thread computes."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._sums: list[int] = []
        self._error: BaseException | None = None
        self._over = Event()

    def run(self) -> None:
        compute = fastest_crc32()
        try:
            for chunk in self._chunks:
                if chunk.ready is not None:
                    chunk.ready()
                self._sums.append(compute(memoryview(chunk.view), 0))
        except BaseException as error:  # noqa: BLE001 - raised again where the checksums are asked for
            self._error = error
        self._over.set()
        del self  # an error holds the frames it went through: those must not hold the error, and with it the chunks

    def now(self) -> list[int]:
        self.run()
        return self.result()

    def result(self) -> list[int]:
        self._over.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # as above
        return self._sums


class Checksums:
    """Threads that compute checksums; with none, they are computed when they are asked for.

    When it is left, no thread reads anything any more.
    """

    def __init__(self, threads: int) -> None:
        self._wanted = threads
        self._threads: list[Thread] = []
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._given_up = False

    def __enter__(self) -> Any:  # typing.Self is younger than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._given_up = kind is not None
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def start(self, chunks: Sequence[Chunk]) -> Callable[[], list[int]]:
        """Begin with some chunks; what is returned gives their checksums."""
        task = _Task(chunks)
        if len(self._threads) < self._wanted:
            self._hire()
        if not self._threads:
            return task.now
        self._queue.put(task)
        return task.result

    def _hire(self) -> None:
        """One more thread, if there can be one: none starts while a program ends (from Python 3.12 on)."""
        thread = Thread(target=self._work, name="transload checksums", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._wanted = len(self._threads)
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            if not self._given_up:
                task.run()

    @staticmethod
    def joined(first: int, second: int, length: int) -> int:
        """The checksum of two runs of bytes one after the other."""
        return combined(first, second, length)
