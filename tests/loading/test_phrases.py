"""What programs look for in the text of a refusal, as torch writes it."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from tests import forge

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
    assert module == "os" or f"Unsupported global: GLOBAL {said} was not" in str(theirs.value)
