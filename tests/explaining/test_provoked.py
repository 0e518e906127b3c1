"""Errors provoked from the installed torch are explained."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.explaining.provoke import PROVOCATIONS, Provocation
from tests.release import RELEASE

import transload
from transload.explaining.matching import known_errors

provoked = pytest.mark.parametrize(
    "provocation", PROVOCATIONS, ids=lambda provocation: f"{provocation.code}: {provocation.name}"
)


@pytest.fixture(autouse=True)
def quiet() -> None:
    for name in ("torch.export", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


@provoked
def test_provoked_error_is_explained(provocation: Provocation, tmp_path: Path) -> None:
    if provocation.since > RELEASE:
        pytest.skip(f"torch reports this from {'.'.join(map(str, provocation.since))} on")
    if provocation.code.startswith("safetensors"):
        pytest.importorskip("safetensors")
    if provocation.code == "unknown-architecture":
        pytest.importorskip("setuptools")  # torch.utils.cpp_extension imports it
    error = provocation.error(tmp_path)
    assert error, "torch reported nothing"
    explanation = transload.explain(error, checks=False)
    assert [answer.code for answer in explanation.answers] == [provocation.code]
    assert explanation.known
    assert not explanation.unknown


def test_every_provocation_has_a_known_code() -> None:
    assert {provocation.code for provocation in PROVOCATIONS} <= {known.code for _, known in known_errors()}
