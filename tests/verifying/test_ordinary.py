"""Verifying without a list of tensors gives the same result as with one."""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge
from tests.each import each
from tests.rescuing.makers import ARCHIVES, ident

from transload.tensors import content
from transload.verifying import tensor_count, verify

LISTED = content.open_content


def told(data: bytes | Path) -> dict[str, Any]:
    return {key: value for key, value in verify(data).to_dict().items() if key != "seconds"}


def told_by_list(data: bytes | Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same when every tensor is listed first."""
    with monkeypatch.context() as patch:
        patch.setattr("transload.verifying.open_content", lambda f, **_: LISTED(f))
        return told(data)


def count(data: bytes) -> int | None:
    with LISTED(data, tree=False) as light:
        return tensor_count(light.checkpoint) if light.checkpoint.counted else -1


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@each("path", ARCHIVES, ids=ident)
def test_every_archive_whole_and_with_a_flipped_bit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(path) == told_by_list(path, monkeypatch)
    data = path.read_bytes()
    for at in range(100, len(data), len(data) // 8):
        bad = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        assert told(bad) == told_by_list(bad, monkeypatch), at


STATES: dict[str, Any] = {
    "one": torch.ones(3),
    "plain": {"a": torch.ones(3), "b": torch.zeros(2, 3), "empty": torch.empty(0, 4), "scalar": torch.tensor(1)},
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "mean": torch.ones(4)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "none": None, "empty": ()}],
    },
    "views": [torch.arange(10)[2:5], torch.arange(12).view(3, 4).t(), torch.zeros(1).expand(1000)],
    "without tensors": {"epoch": 3},
}


@each("state", list(STATES))
def test_nothing_is_listed_that_is_ordinary(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(STATES[state])
    wanted = told_by_list(data, monkeypatch)
    asked: list[bool] = []

    def opened(f: Any, *, tree: bool = True) -> AbstractContextManager[content.Content]:
        asked.append(tree)
        return LISTED(f, tree=tree)

    monkeypatch.setattr("transload.verifying.open_content", opened)
    assert told(data) == wanted
    assert asked == [False]
    assert verify(data).integrity == "whole"


def test_a_tensor_with_two_names_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.ones(3)
    shared = {"x": one}
    data = saved({"a": one, "b": one, "c": one.view(3, 1), "d": shared, "e": shared})
    assert count(data) == verify(data).tensor_count == 5
    assert told(data) == told_by_list(data, monkeypatch)


def test_going_in_circles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: list[Any] = [torch.ones(3)]
    loop.append(loop)
    data = saved(loop)
    assert count(data) is None
    assert told(data) == told_by_list(data, monkeypatch)


ODD: dict[str, bytes] = {
    "one too far": forge.tensor(shape=(4,), offset=1),
    "a step too far": forge.tensor(shape=(2,), stride=(4,)),
    "a size below zero": forge.tensor(shape=(-1,)),
    "a size that is a flag": forge.tensor(shape=(True,)),
    "no shape": forge.tensor(shape=None),
    "ranks differ": forge.tensor(shape=(2, 2)),
    "more than can be counted": forge.tensor(shape=(1 << 62, 4), stride=(0, 0)),
    "an absurd stride": forge.tensor(shape=(1,), stride=(1 << 63,)),
    "an absurd stride of nothing": forge.tensor(shape=(0, 1), stride=(1, 1 << 63)),
    "overflow before none": forge.tensor(shape=(1 << 62, 4, 0), stride=(0, 0, 0)),
    "offset below zero": forge.tensor(offset=-1),
    "no storage": forge.rebuilt("_rebuild_tensor_v2", None, 0, (4,), (1,), False, forge.ordered()),
    "too few arguments": forge.rebuilt("_rebuild_tensor_v2", forge.storage_id()),
    "gradients": forge.rebuilt("_rebuild_tensor_v2", forge.storage_id(), 0, (4,), (1,), True, forge.ordered()),
    "a parameter": forge.rebuilt("_rebuild_parameter", forge.tensor(), True, forge.ordered()),
    "a storage by itself": forge.storage_id(),
    "a list of pairs": forge.call(
        forge.name("collections", "OrderedDict"), forge.listing(forge.tuple_of("x", forge.tensor()))
    ),
}


@each("case", list(ODD))
@each("beside", [True, False], ids=["beside another", "alone"])
def test_what_is_odd_is_listed(case: str, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checksum shows that a tensor reaches beyond its storage."""
    state = {"odd": ODD[case], "w1": forge.tensor("1")} if beside else {"odd": ODD[case]}
    keys = ["0", "1"] if beside else ["0"]
    stores = {key: bytes(range(16)) for key in keys if case != "no storage" or key != "0"}
    data = forge.checkpoint(forge.pickled(forge.ordered(state)), stores)
    assert count(data) in (None, -1)
    assert told(data) == told_by_list(data, monkeypatch)


@pytest.mark.parametrize("key", ["w0", "w1"])
def test_of_the_same_key_the_last_one_counts(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = b"".join((forge.text("w0"), forge.tensor("0"), forge.text(key), forge.tensor("1")))
    data = forge.checkpoint(forge.pickled(b"}(" + pairs + b"u"))
    assert count(data) == (None if key == "w0" else 2)
    assert told(data) == told_by_list(data, monkeypatch)


@pytest.mark.parametrize("kind", ["QUInt4x2Storage", "QInt8Storage"])
def test_elements_of_half_a_byte(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = forge.storage_id("0", 16, kind)
    data = forge.checkpoint(forge.pickled(forge.ordered({"x": forge.tensor(storage=held)})), {"0": bytes(range(16))})
    assert told(data) == told_by_list(data, monkeypatch)
