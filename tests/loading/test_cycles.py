"""Objects that lead back to themselves: every command reads them, and ``load`` returns the same cycles."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests import makers
from tests.each import each
from tests.loading.zoo import IGNORED_WARNINGS
from torch import nn

import transload

pytestmark = IGNORED_WARNINGS


class Holder:
    """An object with attributes, whose state is set after it is made."""


class Slotted:
    __slots__ = ("tensor", "this")


class Subclass(torch.Tensor):
    pass


def dictionary() -> Any:
    made: Any = {"w": torch.zeros(3), "v": nn.Parameter(torch.ones(2))}
    made["w"].parent = made["v"].parent = made
    return made


def ordered() -> Any:
    made: Any = OrderedDict(w=torch.zeros(3))
    made["w"].parent = made
    return made


def tuple_in_a_list() -> Any:
    made: Any = []
    made.append((made, torch.ones(1)))
    made[0][1].parent = made
    return made


def module() -> Any:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in made.parameters():
        parameter.owner = made
    return made


def holder() -> Any:
    made: Any = Holder()
    made.tensor = torch.ones(2)
    made.members, made.tensor.parent = {made}, made
    return made


def slotted() -> Any:
    made: Any = Slotted()
    made.this, made.tensor = made, torch.ones(2)
    made.tensor.parent = [made]
    return made


def subclass() -> Any:
    made: Any = {"w": torch.ones(2).as_subclass(Subclass)}
    made["w"].parent = made
    return made


CYCLES: dict[str, tuple[Callable[[], Any], Callable[[Any], bool], int]] = {
    "dictionary": (dictionary, lambda made: made["w"].parent is made and made["v"].parent is made, 2),
    "OrderedDict": (ordered, lambda made: made["w"].parent is made, 1),
    "tuple in a list": (tuple_in_a_list, lambda made: made[0][0] is made and made[0][1].parent is made, 1),
    "module": (module, lambda made: all(each.owner is made for each in made.parameters()), 4),
    "object and set": (holder, lambda made: made.tensor.parent is made and made.members == {made}, 1),
    "slots": (slotted, lambda made: made.this is made and made.tensor.parent[0] is made, 1),
    "tensor subclass": (subclass, lambda made: made["w"].parent is made, 1),
}


@each("case", CYCLES)
def test_tensor_whose_attribute_leads_back_to_it(case: str, tmp_path: Path) -> None:
    make, is_cyclic, tensors = CYCLES[case]
    path = tmp_path / "a.pt"
    for zipped in (True, False):
        torch.save(make(), path, _use_new_zipfile_serialization=zipped)
        checkpoint = transload.inspect(path)
        assert (checkpoint.problems, len(checkpoint.tensors)) == ((), tensors)
        assert is_cyclic(transload.load(path, weights_only=False))
        if case != "module" and hasattr(torch.serialization, "safe_globals"):  # from torch 2.5 on
            with torch.serialization.safe_globals([Holder, Slotted, Subclass]):
                assert is_cyclic(transload.load(path))
        with transload.open(path) as opened:
            assert len({name: opened[name] for name in opened}) == tensors
        assert transload.verify(path).ok
        for target in ("converted.pt", "converted.safetensors"):
            transload.convert(path, tmp_path / target, overwrite=True)
            assert len(transload.inspect(tmp_path / target).tensors) == tensors
        transload.rescue(path, tmp_path / "rescued.pt", overwrite=True)
        assert not transload.inspect(tmp_path / "rescued.pt").problems


def test_model_is_filled_from_a_cyclic_state_dict() -> None:
    model, saved = nn.Linear(2, 2), io.BytesIO()
    state: Any = {name: nn.Parameter(torch.ones_like(value)) for name, value in model.state_dict().items()}
    for parameter in state.values():
        parameter.parent = state
    torch.save(state, saved)
    transload.load_into(model, saved.getvalue())
    assert model.weight.eq(1).all()


def test_long_chain_of_tensor_attributes_is_not_damage() -> None:
    chain: list[Any] = [torch.ones(1)]
    for _ in range(40):
        chain.append(torch.ones(1))
        chain[-1].before = chain[-2]
    for order in (1, -1):
        checkpoint = transload.inspect(makers.saved(chain[::order]))
        assert (checkpoint.problems, len(checkpoint.tensors)) == ((), 81)


def test_shared_attributes_are_read_once() -> None:
    """Each of these tensors leads to all others: under every name that would be a million."""
    group: dict[str, Any] = {"all": []}
    for _ in range(1000):
        tensor: Any = torch.ones(1)
        tensor.group = group
        group["all"].append(tensor)
    checkpoint = transload.inspect(makers.saved([*group["all"], group]))
    assert checkpoint.problems == ()
    assert len(checkpoint.tensors) <= 3000
