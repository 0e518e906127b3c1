"""Reading single tensors and slices onto a GPU, and loading into models on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.loading.test_load_into import assert_same_state, file_of, seeded_net
from tests.loading.test_open import raw
from torch import nn

from transload.loading.handles import open as open_
from transload.loading.into import load_into


@pytest.mark.parametrize("saved_on", ["cpu", "cuda"])
def test_tensors_and_slices_are_read_onto_the_gpu(saved_on: str) -> None:
    state = {name: torch.randn(3000, 3000) for name in "ab"} | {"t": torch.randn(30, 40).t(), "n": torch.arange(7)}
    state |= {"bits": torch.randn(9).to(torch.float8_e4m3fn), "late": torch.randn(40, 50)[:, ::7]}
    file = file_of({name: tensor.to(saved_on) for name, tensor in state.items()})
    for device in ("cuda:0", "auto" if saved_on == "cuda" else "cuda"):
        with open_(file, device=device) as handle:
            for name, tensor in state.items():
                assert handle[name].device == torch.device("cuda:0")
                assert raw(handle[name].cpu()) == raw(tensor)
            rows = handle.slice("a")[10:20, ::3]
            assert rows.device == torch.device("cuda:0")
            assert torch.equal(rows.cpu(), state["a"][10:20, ::3])


def test_load_into_fills_gpu_parameters_in_place() -> None:
    model = seeded_net(1).cuda()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_into(model, file_of(seeded_net().state_dict()))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert_same_state(model.cpu(), seeded_net())


def test_load_into_casts_on_the_gpu() -> None:
    model = nn.Linear(3000, 3000, dtype=torch.bfloat16, device="cuda")
    state = nn.Linear(3000, 3000).state_dict()
    load_into(model, file_of(state), cast=True)
    assert torch.equal(model.weight.cpu(), state["weight"].bfloat16())


def test_load_into_materializes_meta_parameters_on_the_gpu() -> None:
    model = nn.Linear(3000, 3000, device="meta")
    state = nn.Linear(3000, 3000).cuda().state_dict()
    load_into(model, file_of(state))
    assert model.weight.device.type == "cuda"
    assert torch.equal(model.weight, state["weight"])
    other = nn.Linear(3000, 3000, device="meta")
    load_into(other, file_of(nn.Linear(3000, 3000).state_dict()), device="cuda")
    assert other.weight.device.type == "cuda"


@pytest.mark.filterwarnings("ignore::transload.loading.into.KeysWarning")
def test_load_into_fills_a_data_parallel_model() -> None:
    """Its names have a prefix that those in the file lack, and its parameters are on the GPU."""
    model = nn.DataParallel(nn.Linear(30, 20))
    state = nn.Linear(30, 20).state_dict()
    load_into(model.cuda(), file_of(state))
    assert torch.equal(model.module.weight.cpu(), state["weight"])
