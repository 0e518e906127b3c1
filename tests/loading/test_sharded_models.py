"""``load_into`` where the parameters of the model are spread over ranks: each rank reads what it has, and all agree."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.loading import sharded_models
from tests.loading.sharded_models import seeded
from tests.loading.test_torchrun import pytestmark, run
from torch import nn

from transload.errors import LoadError
from transload.loading.into import load_into
from transload.loading.into.ranks import Seen

__all__ = ["pytestmark"]

SCRIPT = """
from tests.loading import sharded_models
warnings.simplefilter("ignore")
tell(failures=sharded_models.main({cases}))
"""
NEEDS_FSDP2 = {"two_dimensions", "hsdp", "a_part_of_the_ranks", "one_rank_fails_while_it_reads"}
NEEDS_FSDP2 |= {"one_rank_fails_before_anything_is_written"}


def run_cases(folder: Path, ranks: int) -> None:
    """Run the cases for this many ranks, as far as this torch has what they need."""
    every = {name.removeprefix("case_"): case for name, case in vars(sharded_models).items() if name[:5] == "case_"}
    cases = [name for name, case in every.items() if ("On four ranks" in (case.__doc__ or "")) == (ranks == 4)]
    if not sharded_models.HAS_FSDP2:
        cases = [name for name in cases if not name.startswith("fsdp2") and name not in NEEDS_FSDP2]
    sharded_models.write_files(folder)
    reports = run(folder, SCRIPT.format(cases=cases), ranks) if cases else []
    texts = [f"{name}: {text}" for name, each in (reports[0]["failures"] if reports else {}).items() for text in each]
    assert not texts, "\n".join(texts)


def test_two_ranks_load_into_sharded_models_and_agree_on_errors(tmp_path: Path) -> None:
    run_cases(tmp_path, 2)


def test_four_ranks_load_into_models_on_meshes_of_two_dimensions(tmp_path: Path) -> None:
    run_cases(tmp_path, 4)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not sharded_models.HAS_FSDP2, reason="this torch has no FSDP2")
@pytest.mark.usefixtures("alone")
def test_a_process_group_of_one_needs_no_other_rank(tmp_path: Path) -> None:
    torch.save(seeded().state_dict(), tmp_path / "model.pt")
    model = sharded_models.sharded(meta=True)
    load_into(model, tmp_path / "model.pt")
    sharded_models.assert_filled(model)


@pytest.mark.skipif(sys.version_info < (3, 11) or torch.__version__ < "2.6", reason="DTensors had other names")
@pytest.mark.usefixtures("alone")
def test_a_tensor_that_is_summed_over_ranks_is_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "model.pt")
    model = nn.Linear(2, 2, bias=False)
    weight = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Partial()])
    model.weight = nn.Parameter(weight)
    with pytest.raises(LoadError, match="weight is a sum over ranks"):
        load_into(model, tmp_path / "model.pt")


def test_ranks_of_one_host_must_see_the_same_file_and_those_of_others_the_same_content() -> None:
    first = Seen(7, "a", (("model.pt", (100, 1)),))
    assert first.agrees(Seen(7, "a", (("model.pt", (100, 1)),)))
    assert not first.agrees(Seen(7, "a", (("model.pt", (100, 2)),)))
    assert first.agrees(Seen(7, "b", (("model.pt", (100, 2)),)))  # a copy of it
    assert not first.agrees(Seen(8, "b", (("model.pt", (100, 1)),)))
