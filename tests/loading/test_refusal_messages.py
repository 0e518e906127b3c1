"""A refusal contains the phrases of torch that programs search for in its message."""

from __future__ import annotations

import argparse
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests import forge
from tests.makers import saved
from tests.release import RELEASE, needs_torch

import transload


@pytest.mark.parametrize(
    ("module", "name", "shown"),
    [
        ("mymodel", "Net", "mymodel.Net"),
        ("os", "system", "os.system"),
        ("__builtin__", "getattr", "getattr"),
        ("torch.some.thing", "evaluate", "torch.some.thing.evaluate"),
    ],
)
def test_refusal_names_the_global_in_the_words_of_torch(module: str, name: str, shown: str) -> None:
    data = forge.checkpoint(forge.pickled(forge.name(module, name)))
    with pytest.raises(pickle.UnpicklingError) as ours:
        transload.load(data)
    assert "Weights only load failed" in str(ours.value)
    assert f"Unsupported global: GLOBAL {shown} was not an allowed global by default." in str(ours.value)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed") as theirs:
        torch.load(io.BytesIO(data), weights_only=True)
    if module != "os" and RELEASE >= (2, 11):
        assert f"Unsupported global: GLOBAL {shown} was not" in str(theirs.value)


class BuiltByMethod:
    @classmethod
    def make(cls) -> BuiltByMethod:
        return cls()

    def __reduce__(self) -> Any:
        return BuiltByMethod.make, ()


REFUSED: dict[str, tuple[object, list[object], str]] = {
    "an array of objects": (np.array([None], dtype=object), [], "numpy._core.multiarray._reconstruct"),
    "the name of a plain value": (argparse.Namespace, [], "argparse.Namespace"),
    "a method": (BuiltByMethod(), [getattr, BuiltByMethod], ""),
}


@needs_torch(2, 6)
@pytest.mark.parametrize("case", REFUSED)
def test_object_refused_while_it_is_rebuilt_is_reported_in_the_words_of_torch(case: str) -> None:
    value, allowed, refused_name = REFUSED[case]
    data = saved(value)
    if not hasattr(np, "_core"):
        refused_name = refused_name.replace("numpy._core", "numpy.core")
    for load in (torch.load, transload.load):
        with torch.serialization.safe_globals(allowed), pytest.raises(pickle.UnpicklingError) as caught:
            load(io.BytesIO(data), weights_only=True)
        assert "Weights only load failed" in str(caught.value)
        assert not refused_name or f"Unsupported global: GLOBAL {refused_name} was not an allowed global" in str(
            caught.value
        )
