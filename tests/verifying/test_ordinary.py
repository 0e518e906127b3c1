"""Verifying without listing the tensors gives the same result as with a list."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forge
from tests.each import each
from tests.rescuing.makers import ARCHIVES, ident

from transload.opening import OpenCheckpoint
from transload.verifying import tensor_count, verify


def verified(data: bytes | Path) -> dict[str, Any]:
    return {key: value for key, value in verify(data).to_dict().items() if key != "seconds"}


def verified_with_list(data: bytes | Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same, with every tensor listed first."""
    with monkeypatch.context() as patch:
        patch.setattr("transload.verifying.OpenCheckpoint", lambda f, **_: OpenCheckpoint(f))
        return verified(data)


def quick_count(data: bytes) -> int | None:
    with OpenCheckpoint(data, tree=False) as light:
        return tensor_count(light.checkpoint) if light.checkpoint.counted else -1


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@each("path", ARCHIVES, ids=ident)
def test_fixtures_give_the_same_result_intact_and_with_a_flipped_bit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verified(path) == verified_with_list(path, monkeypatch)
    data = path.read_bytes()
    for at in range(100, len(data), len(data) // 8):
        damaged = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        assert verified(damaged) == verified_with_list(damaged, monkeypatch), at


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
def test_ordinary_checkpoints_are_verified_without_a_list(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(STATES[state])
    expected = verified_with_list(data, monkeypatch)
    monkeypatch.setattr(OpenCheckpoint, "list_tensors", lambda _: pytest.fail("the tensors were listed"))
    assert verified(data) == expected
    assert verify(data).integrity == "whole"


def test_tensor_with_several_names_is_counted_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(3)
    shared = {"x": tensor}
    data = saved({"a": tensor, "b": tensor, "c": tensor.view(3, 1), "d": shared, "e": shared})
    assert quick_count(data) == verify(data).tensor_count == 5
    assert verified(data) == verified_with_list(data, monkeypatch)


def test_cyclic_checkpoint_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    cyclic: list[Any] = [torch.ones(3)]
    cyclic.append(cyclic)
    data = saved(cyclic)
    assert quick_count(data) is None
    assert verified(data) == verified_with_list(data, monkeypatch)


UNUSUAL: dict[str, bytes] = {
    "beyond the storage": forge.tensor(shape=(4,), offset=1),
    "stride beyond the storage": forge.tensor(shape=(2,), stride=(4,)),
    "negative size": forge.tensor(shape=(-1,)),
    "boolean size": forge.tensor(shape=(True,)),
    "no shape": forge.tensor(shape=None),
    "ranks differ": forge.tensor(shape=(2, 2)),
    "too many elements": forge.tensor(shape=(1 << 62, 4), stride=(0, 0)),
    "huge stride": forge.tensor(shape=(1,), stride=(1 << 63,)),
    "huge stride without elements": forge.tensor(shape=(0, 1), stride=(1, 1 << 63)),
    "overflow without elements": forge.tensor(shape=(1 << 62, 4, 0), stride=(0, 0, 0)),
    "negative offset": forge.tensor(offset=-1),
    "no storage": forge.rebuild_call("_rebuild_tensor_v2", None, 0, (4,), (1,), False, forge.ordered()),
    "too few arguments": forge.rebuild_call("_rebuild_tensor_v2", forge.storage_id()),
    "gradients": forge.rebuild_call("_rebuild_tensor_v2", forge.storage_id(), 0, (4,), (1,), True, forge.ordered()),
    "a parameter": forge.rebuild_call("_rebuild_parameter", forge.tensor(), True, forge.ordered()),
    "a storage by itself": forge.storage_id(),
    "a list of pairs": forge.call(
        forge.name("collections", "OrderedDict"), forge.list_of(forge.tuple_of("x", forge.tensor()))
    ),
}


@each("case", list(UNUSUAL))
@each("beside", [True, False], ids=["beside another", "alone"])
def test_unusual_tensors_are_listed_and_give_the_same_result(
    case: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checksum shows that a tensor extends beyond its storage."""
    state = {"odd": UNUSUAL[case], "w1": forge.tensor("1")} if beside else {"odd": UNUSUAL[case]}
    keys = ["0", "1"] if beside else ["0"]
    storages = {key: bytes(range(16)) for key in keys if case != "no storage" or key != "0"}
    data = forge.checkpoint(forge.pickled(forge.ordered(state)), storages)
    assert quick_count(data) in (None, -1)
    assert verified(data) == verified_with_list(data, monkeypatch)


@pytest.mark.parametrize("key", ["w0", "w1"])
def test_checkpoint_with_a_repeated_key_needs_a_list(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = b"".join((forge.text("w0"), forge.tensor("0"), forge.text(key), forge.tensor("1")))
    data = forge.checkpoint(forge.pickled(b"}(" + pairs + b"u"))
    assert quick_count(data) == (None if key == "w0" else 2)
    assert verified(data) == verified_with_list(data, monkeypatch)


@pytest.mark.parametrize("kind", ["QUInt4x2Storage", "QInt8Storage"])
def test_quantized_storages_give_the_same_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = forge.storage_id("0", 16, kind)
    data = forge.checkpoint(forge.pickled(forge.ordered({"x": forge.tensor(storage=storage)})), {"0": bytes(range(16))})
    assert verified(data) == verified_with_list(data, monkeypatch)
