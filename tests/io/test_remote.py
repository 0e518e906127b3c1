"""Files and folders by URL, from servers on this machine that behave well, and that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.file_server import FileServer, serve
from tests.makers import saved

import transload
from transload.io import http

PRIVATE = "hush"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once."""
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    monkeypatch.setattr(http, "_TIMEOUT", 5.0)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def weights(count: int = 12, size: int = 40_000) -> dict[str, torch.Tensor]:
    """A state dict of a few megabytes at most."""
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{index}.weight": torch.randn(size + index, generator=generator) for index in range(count)}


def as_safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    data: bytes = save(tensors)
    return data


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


WEIGHTS = weights()
FILES = {"a.pt": saved(WEIGHTS), "a.safetensors": as_safetensors(WEIGHTS)}


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve(dict(FILES)) as server:
        yield server


@pytest.mark.parametrize("name", FILES)
def test_load_open_and_inspect(server: FileServer, name: str) -> None:
    url = f"{server.url}/{name}"
    checkpoint = transload.inspect(url)
    assert (checkpoint.path, checkpoint.ok, len(checkpoint.tensors)) == (url, True, len(WEIGHTS))
    assert len(server.log) == (2 if name == "a.pt" else 1)
    server.log.clear()
    with transload.open(url) as handle:
        before, sent = len(server.log), server.sent
        assert torch.equal(handle["layers.5.weight"], WEIGHTS["layers.5.weight"])
        assert torch.equal(handle.slice("layers.7.weight")[10:20], WEIGHTS["layers.7.weight"][10:20])
    assert len(server.log) - before <= 4
    assert server.sent - sent < 200_000
    assert same(transload.load(url), WEIGHTS)
    if name == "a.pt":
        assert dict(checkpoint.facts)["headers of records"].endswith("when they are read")
