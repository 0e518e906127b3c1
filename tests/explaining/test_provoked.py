"""Errors provoked from the installed torch are explained."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
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
    if sys.platform == "win32" and provocation.code in ("load-folder", "path-of-another-system"):
        pytest.skip("Windows says only that a folder may not be opened, and paths of Windows are its own")
    error = provocation.error(tmp_path)
    assert error, "torch reported nothing"
    explanation = transload.explain(error, checks=False)
    assert [answer.code for answer in explanation.answers] == [provocation.code]
    assert explanation.known
    assert not explanation.unknown


@pytest.mark.skipif(sys.platform != "win32", reason="needs a torch without libuv")
def test_torch_without_libuv_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, use_libuv=True)
    (answer,) = transload.explain(caught.value, checks=False).answers
    assert (answer.code, answer.fix[1]) == ("no-libuv", "$ $env:USE_LIBUV = '0'; torchrun program.py")


def test_every_provocation_has_a_known_code() -> None:
    assert {provocation.code for provocation in PROVOCATIONS} <= {known.code for _, known in known_errors()}
