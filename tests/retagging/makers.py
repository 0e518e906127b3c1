"""Checkpoints with the tags of devices this machine does not have, as torch writes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from transload.io.journal import Changes
from transload.io.sources import FileSource
from transload.retagging import TagMap, plan_of

Tag = str | Callable[[Any], str]


def fresh(text: str) -> str:
    """An equal string that is another object: torch creates a new tag string for every CUDA storage."""
    return "".join(list(text))


def save(obj: object, path: Path, tag: Tag = "cuda:0", **options: Any) -> Path:
    """``torch.save``, with storages that claim to be on other devices."""

    def location(storage: Any) -> str:
        return tag(storage) if callable(tag) else fresh(tag)

    with mock.patch.object(torch.serialization, "location_tag", location):
        torch.save(obj, path, **options)
    return path


def state(layers: int = 2) -> dict[str, torch.Tensor]:
    """A small state dict, with a tied weight."""
    torch.default_generator.manual_seed(0)
    weights = {
        f"layers.{i}.{name}": torch.randn(shape) for i in range(layers) for name, shape in (("w", (3, 4)), ("b", 4))
    }
    return {**weights, "tied": weights["layers.0.w"]}


def planned(path: Path, to: str) -> tuple[Changes, os.stat_result]:
    """The changes a retag would make."""
    source = FileSource(path)
    try:
        return plan_of(source, TagMap(to))[1:]
    finally:
        source.close()


def same(left: Any, right: Any) -> bool:
    """Whether two loaded objects are equal, tensors bit for bit."""
    if isinstance(left, torch.Tensor):
        return type(left) is type(right) and left.dtype == right.dtype and bool(torch.equal(left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(type(left) is type(right) and left == right)
