"""Garbage collection is paused while objects are built, without keeping the garbage of the calling program alive."""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref
from typing import Any

import pytest
import torch
from tests import makers

from transload.io import gc_paused
from transload.loading import load


class Cycle:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def saved() -> bytes:
    return makers.saved({"a": torch.ones(3)})


def test_load_does_not_move_existing_garbage_to_the_oldest_generation(saved: bytes) -> None:
    """In the oldest generation it would stay until a full collection."""
    gc.collect()
    garbage = weakref.ref(Cycle())
    load(saved)
    gc.collect(1)
    assert garbage() is None


def test_loaded_objects_are_garbage_collected_like_any_others() -> None:
    buffer = io.BytesIO(makers.saved(Cycle()))
    gc.collect()
    loaded = load(buffer, weights_only=False)
    reference = weakref.ref(loaded)
    del loaded
    gc.collect(1)
    assert reference() is None


@pytest.mark.parametrize("before", [True, False])
def test_load_restores_the_state_of_the_collector(saved: bytes, *, before: bool) -> None:
    (gc.enable if before else gc.disable)()
    try:
        load(saved)
        assert gc.isenabled() is before
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_gc_is_enabled_in_a_child_forked_while_another_thread_loads() -> None:
    paused, done = threading.Event(), threading.Event()

    def hold_gc_paused() -> None:
        with gc_paused():
            paused.set()
            done.wait()

    thread = threading.Thread(target=hold_gc_paused)
    thread.start()
    paused.wait()
    try:
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        status: Any = os.waitpid(child, 0)[1]
    finally:
        done.set()
        thread.join()
    assert status == 0


def test_load_from_a_minimal_file_object(saved: bytes) -> None:
    class MinimalFile:
        def __init__(self, data: bytes) -> None:
            buffer = io.BytesIO(data)
            self.read, self.readline, self.seek, self.tell = buffer.read, buffer.readline, buffer.seek, buffer.tell

    file: Any = MinimalFile(saved)
    assert torch.equal(load(file)["a"], torch.ones(3))


def test_frozen_objects_are_counted_only_once(saved: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gc.get_freeze_count`` counts one by one: with two million objects it took three times as long as the load."""
    counts = iter([1])
    monkeypatch.setattr("transload.io._has_frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: next(counts))
    load(saved)
    load(saved)
    assert next(counts, None) is None
