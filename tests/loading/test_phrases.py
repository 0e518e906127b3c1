"""What programs look for in the text of a refusal, as torch writes it."""

from __future__ import annotations

import argparse
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests import forge
from tests.release import RELEASE, needs_torch

import transload


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        ("mymodel", "Net", "mymodel.Net"),
        ("os", "system", "os.system"),
        ("__builtin__", "getattr", "getattr"),
        ("torch.some.thing", "evaluate", "torch.some.thing.evaluate"),
    ],
)
def test_a_refused_name_is_said_as_torch_says_it(module: str, name: str, said: str) -> None:
    data = forge.checkpoint(forge.pickled(f"c{module}\n{name}\n".encode()))
    with pytest.raises(pickle.UnpicklingError) as caught:
        transload.load(data)
    assert "Weights only load failed" in str(caught.value)
    assert f"Unsupported global: GLOBAL {said} was not an allowed global by default." in str(caught.value)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed") as theirs:
        torch.load(io.BytesIO(data), weights_only=True)
    if module != "os" and RELEASE >= (2, 11):
        assert f"Unsupported global: GLOBAL {said} was not" in str(theirs.value)


class Made:
    @classmethod
    def make(cls) -> Made:
        return cls()

    def __reduce__(self) -> Any:
        return Made.make, ()


REFUSED: dict[str, tuple[object, list[object], str]] = {
    "an array of objects": (np.array([None], dtype=object), [], "numpy._core.multiarray._reconstruct"),
    "the name of a plain value": (argparse.Namespace, [], "argparse.Namespace"),
    "a method": (Made(), [getattr, Made], ""),
}


@needs_torch(2, 6)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_while_it_is_built(case: str) -> None:
    value, allowed, said = REFUSED[case]
    held = io.BytesIO()
    torch.save(value, held)
    if not hasattr(np, "_core"):
        said = said.replace("numpy._core", "numpy.core")
    for load in (torch.load, transload.load):
        with torch.serialization.safe_globals(allowed), pytest.raises(pickle.UnpicklingError) as caught:
            load(io.BytesIO(held.getvalue()), weights_only=True)
        assert "Weights only load failed" in str(caught.value)
        assert not said or f"Unsupported global: GLOBAL {said} was not an allowed global" in str(caught.value)
