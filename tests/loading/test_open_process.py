"""An open checkpoint and its process: torch's modes, interrupts, other threads and processes."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.zoo import saved

from transload.errors import UsageError
from transload.io import packed as inflating
from transload.loading.handles import open as open_
from transload.loading.into import load_into

VALUE = torch.arange(64.0).reshape(8, 8)


class Buffers(torch.nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


# -- modes


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode], ids=["meta", "inference"])
def test_conversion_works_in_any_torch_mode(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """The intermediate buffer is on the CPU, whatever the default device is."""
    data = saved({"a": VALUE, "b": VALUE[:, ::2]})
    model = Buffers(a=torch.zeros(8, 8, dtype=torch.float64), b=torch.zeros(8, 4, dtype=torch.float64))
    with mode(), open_(data, dtype=torch.float64) as handle:
        tensors = dict(handle)
        load_into(model, data, cast=True)
    for result in (tensors, dict(model.named_buffers())):
        assert torch.equal(result["a"], VALUE.double())
        assert torch.equal(result["b"], VALUE[:, ::2].double())


def test_pieces_are_joined_under_a_meta_default_device(tmp_path: Path) -> None:
    from tests.loading.test_open import save_pieces

    save_pieces(tmp_path, "w", VALUE, {(0, 0): VALUE[:4], (4, 0): VALUE[4:]})
    with torch.device("meta"), open_(tmp_path) as handle:
        tensor = handle["w"]
    assert torch.equal(tensor, VALUE)


def test_fake_tensor_mode_gives_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    if not hasattr(torch._guards, "active_fake_mode"):
        pytest.skip("this torch has no active_fake_mode")
    data = io.BytesIO(saved({"weight": VALUE}))
    with FakeTensorMode():
        model = torch.nn.Linear(8, 8, bias=False)
        load_into(model, data)
        for dtype in (None, torch.float64):
            with open_(data, dtype=dtype) as handle:
                tensor = handle["weight"]
            assert type(tensor) is FakeTensor
            assert (tensor.shape, tensor.dtype, tensor.device.type) == ((8, 8), dtype or torch.float32, "cpu")


# -- lazily conjugated and negated buffers


def test_load_into_a_lazily_conjugated_buffer() -> None:
    expected = torch.complex(VALUE, -VALUE)
    model = Buffers(a=torch.zeros(8, 8, dtype=torch.complex64).conj())
    load_into(model, io.BytesIO(saved({"a": expected})))
    assert model.a.is_conj()
    assert torch.equal(model.a.resolve_conj(), expected)


def test_load_into_a_lazily_negated_buffer() -> None:
    model = Buffers(a=torch.zeros(8, 8, dtype=torch.complex64).conj().imag)
    load_into(model, io.BytesIO(saved({"a": VALUE})))
    assert model.a.is_neg()
    assert torch.equal(model.a.resolve_neg(), VALUE)


# -- interrupts, other threads and processes


def test_reads_after_an_interrupt_are_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes after bytes are decompressed and before they are counted, where most of the time is spent."""
    value, compressed = torch.arange(600_000.0), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({"a": value}))) as old, zipfile.ZipFile(compressed, "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    compressed.seek(0)

    class Interrupted(inflating.Inflating):
        calls = 0

        def _rewind(self) -> None:
            super()._rewind()
            self._pieces = self._interrupted(self._pieces)

        def _interrupted(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
            for piece in pieces:
                Interrupted.calls += 1
                if Interrupted.calls == 2:
                    raise KeyboardInterrupt
                yield piece

    monkeypatch.setattr("transload.opening.elements.Inflating", Interrupted)
    with open_(compressed) as handle:
        with pytest.raises(KeyboardInterrupt):
            handle["a"]
        assert torch.equal(handle.slice("a")[400_000:], value[400_000:])
        assert torch.equal(handle["a"], value)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_open_checkpoint_cannot_be_pickled_or_copied(duplicate: Callable[[object], object]) -> None:
    with open_(saved({"a": VALUE})) as handle:
        for original in (handle, handle.slice("a")) if duplicate is not copy.copy else (handle,):
            with pytest.raises(UsageError, match="cannot be pickled or copied\nPass its path"):
                duplicate(original)


def test_no_file_is_opened_after_close(tmp_path: Path) -> None:
    """Not even by a read that began before another thread closed it."""
    with zipfile.ZipFile(io.BytesIO(saved({"a": VALUE}))) as archive:
        archive.extractall(tmp_path)
    handle = open_(tmp_path)
    opened = handle._opened
    (storage,) = handle.checkpoint.storages
    handle.close()
    with pytest.raises(UsageError, match="was closed"):
        opened.file(storage.file)
