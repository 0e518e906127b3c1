"""The garbage collector, held off while a graph is built, and what becomes of a program's own garbage."""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref
from typing import Any

import pytest
import torch

from transload.formats import gc_paused
from transload.loading import load


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def saved() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(3)}, buffer)
    return buffer.getvalue()


def test_garbage_of_the_program_is_not_kept(saved: bytes) -> None:
    """It would lie in the oldest generation, which is looked through when much has come there that was counted."""
    gc.collect()
    ring = weakref.ref(Ring())
    load(saved)
    gc.collect(1)
    assert ring() is None


def test_objects_of_a_trusted_file_are_collected_as_any_others() -> None:
    buffer = io.BytesIO()
    torch.save(Ring(), buffer)
    gc.collect()
    made = load(buffer, weights_only=False)
    held = weakref.ref(made)
    del made
    gc.collect(1)
    assert held() is None


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_it_was(saved: bytes, *, before: bool) -> None:
    (gc.enable if before else gc.disable)()
    try:
        load(saved)
        assert gc.isenabled() is before
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_process_collects_though_a_thread_of_its_parent_was_loading() -> None:
    begun, done = threading.Event(), threading.Event()

    def loading() -> None:
        with gc_paused():
            begun.set()
            done.wait()

    thread = threading.Thread(target=loading)
    thread.start()
    begun.wait()
    try:
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        status: Any = os.waitpid(child, 0)[1]
    finally:
        done.set()
        thread.join()
    assert status == 0


def test_a_file_object_that_only_reads_and_seeks(saved: bytes) -> None:
    class Least:
        def __init__(self, data: bytes) -> None:
            held = io.BytesIO(data)
            self.read, self.readline, self.seek, self.tell = held.read, held.readline, held.seek, held.tell

    file: Any = Least(saved)
    assert torch.equal(load(file)["a"], torch.ones(3))


def test_a_program_that_has_frozen_its_objects_is_asked_once(saved: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts them one by one, which took three times as long as the reading in a program with two million."""
    counts = iter([1])
    monkeypatch.setattr("transload.formats._has_frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: next(counts))
    load(saved)
    load(saved)
    assert next(counts, None) is None
