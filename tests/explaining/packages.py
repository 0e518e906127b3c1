"""The advice about transformers, accelerate, Lightning and safetensors works.

Each test provokes an error from the package, without a GPU, and then does what the answer advises instead.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.each import for_each
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import transload

transformers: Any = import_module("transformers")
accelerate: Any = import_module("accelerate")
lightning: Any = import_module("lightning.pytorch")
fabric: Any = import_module("lightning.fabric")
safetensors: Any = import_module("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")
Action = Callable[[], object]
NO_CUDA = "no-accelerator"
"""A torch built with CUDA reports by itself that there is no GPU, or no driver."""


class Advice(NamedTuple):
    """The code of an answer, what provokes its error, and what the answer advises instead, if it can be tested."""

    code: str
    wrong: Action
    right: Action | None


def check_advice(advice: Advice) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011  the answer identifies it
        advice.wrong()
    (answer,) = transload.explain(error.value, checks=False).answers
    assert answer.code in {advice.code, *(("no-gpus", "no-driver") if advice.code == NO_CUDA else ())}
    if advice.right:
        advice.right()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config(vocab_size=64).save_pretrained(folder)
    transformers.LlamaForCausalLM(config(vocab_size=64)).save_pretrained(folder)
    return folder


def config(**options: Any) -> Any:
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    return transformers.LlamaConfig(hidden_size=16, intermediate_size=32, **sizes, **options)


def variant(model: Path, name: str, file: str = "model.safetensors", content: bytes | None = None) -> Path:
    """A copy of the model in which one file has other content, or is missing."""
    folder = model.parent / f"{model.name}-{name}"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    return folder


def test_advice_about_transformers(model: Path) -> None:
    load = transformers.LlamaForCausalLM.from_pretrained
    auto = transformers.AutoModelForCausalLM.from_pretrained
    no_weights = variant(model, "none")
    bin_only = variant(model, "bin")
    torch.save(safetensors.load_file(model / "model.safetensors"), bin_only / "pytorch_model.bin")
    truncated = variant(model, "half", content=(model / "model.safetensors").read_bytes()[:5000])
    web_page = variant(model, "page", content=b"<!DOCTYPE html>" + b" " * 100)
    not_json = variant(model, "not-json", "config.json", b"<html>")
    no_config = variant(model, "no-config", "config.json")
    settings = json.loads((model / "config.json").read_text())
    unknown_type = variant(model, "unknown", "config.json", json.dumps({**settings, "model_type": "of-2030"}).encode())
    larger_vocabulary = variant(model, "wider", "config.json", json.dumps({**settings, "vocab_size": 65}).encode())
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "model-1-of-2.safetensors"}})
    shards = variant(model, "shards")
    (shards / "model.safetensors.index.json").write_text(index)

    def converted() -> object:
        transload.convert(bin_only / "pytorch_model.bin", bin_only / "model.safetensors")
        return load(bin_only, use_safetensors=True)

    advice = [
        Advice(NO_CUDA, lambda: load(model, device_map={"": 0}), lambda: load(model, device_map="cpu")),
        Advice("device-string", lambda: load(model, device_map="gpu"), lambda: load(model, device_map="auto")),
        Advice("transformers-no-weights", lambda: load(no_weights), None),
        Advice("transformers-no-weights", lambda: load(bin_only, use_safetensors=True), lambda: load(bin_only)),
        Advice("transformers-no-weights", lambda: load(no_weights, use_safetensors=True), converted),
        Advice("safetensors-incomplete", lambda: load(truncated), None),
        Advice("safetensors-header", lambda: load(web_page), None),
        Advice("config-not-json", lambda: load(not_json), None),
        Advice("transformers-no-model-type", lambda: auto(no_config), None),
        Advice("transformers-model-type", lambda: auto(unknown_type), None),
        Advice("transformers-no-repository", lambda: auto("./no/such/folder"), lambda: auto(model)),
        Advice("safetensors-no-file", lambda: load(shards), None),
        Advice(
            "weights-do-not-fit",
            lambda: load(larger_vocabulary),
            lambda: load(larger_vocabulary, ignore_mismatched_sizes=True),
        ),
        Advice("transformers-dtype", lambda: load(model, dtype="float17"), lambda: load(model, dtype="auto")),
        Advice("transformers-tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(model), None),
        Advice(
            "flash-attention-missing",
            lambda: load(model, attn_implementation="flash_attention_2"),
            lambda: load(model, attn_implementation="sdpa"),
        ),
        Advice(
            "attention-choice",
            lambda: load(model, attn_implementation="flash"),
            lambda: load(model, attn_implementation="eager"),
        ),
        Advice("argument-renamed", lambda: load(model, load_in_4bit=True), None),
        Advice(
            "quantization-options",
            lambda: transformers.BitsAndBytesConfig(load_in_4bit=True, load_in_8bit=True),
            lambda: transformers.BitsAndBytesConfig(load_in_4bit=True),
        ),
        Advice(
            "quantized-device",
            lambda: load(model, quantization_config=transformers.FineGrainedFP8Config()),
            lambda: load(model),
        ),
    ]
    for_each(advice, check_advice)


def test_advice_about_the_transformers_trainer(model: Path, tmp_path: Path) -> None:
    def arguments(**options: Any) -> Any:
        return transformers.TrainingArguments(str(tmp_path / "out"), report_to=[], max_steps=1, **options)

    def train(data: object = ({"input_ids": [1, 2], "labels": [1, 2]},), **options: Any) -> object:
        loaded = transformers.LlamaForCausalLM.from_pretrained(model)
        return transformers.Trainer(loaded, arguments(use_cpu=True), train_dataset=data).train(**options)

    advice = [
        Advice("app-no-gpu", lambda: arguments(bf16=True), lambda: arguments(bf16=True, use_cpu=True)),
        Advice("quantized-device", lambda: arguments(tf32=True), arguments),
        Advice(
            "trainer-arguments",
            lambda: arguments(load_best_model_at_end=True),
            lambda: arguments(
                load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", eval_steps=500
            ),
        ),
        Advice(
            "argument-renamed",
            lambda: arguments(evaluation_strategy="no"),
            lambda: arguments(eval_strategy="no"),
        ),
        Advice("argument-renamed", lambda: arguments(warmup_ratio=0.1), lambda: arguments(warmup_steps=0.1)),
        Advice("argument-renamed", lambda: arguments(overwrite_output_dir=True), arguments),
        Advice("argument-renamed", lambda: transformers.Trainer(tokenizer=1), None),
        Advice("trainer-data", lambda: train(None), train),
        Advice(
            "resume-from-nothing",
            lambda: transformers.Trainer(
                transformers.LlamaForCausalLM.from_pretrained(model),
                transformers.TrainingArguments(str(tmp_path / "none"), report_to=[], use_cpu=True),
                train_dataset=[{"input_ids": [1, 2], "labels": [1, 2]}],
            ).train(resume_from_checkpoint=True),
            train,
        ),
        Advice(
            "transformers-no-weights",
            lambda: train(resume_from_checkpoint=str(tmp_path / "checkpoint-9")),
            lambda: train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1")),
        ),
    ]
    for_each(advice, check_advice)


@pytest.fixture
def reset_accelerate() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("reset_accelerate")
def test_advice_about_accelerate(model: Path, tmp_path: Path) -> None:
    def empty() -> Any:
        with accelerate.init_empty_weights():
            return transformers.LlamaForCausalLM(config(vocab_size=64))

    def dispatch(devices: object, path: Path = model, **options: Any) -> Any:
        return accelerate.load_checkpoint_and_dispatch(empty(), str(path), device_map=devices, **options)

    def real() -> Any:
        return transformers.LlamaForCausalLM(config(vocab_size=64))

    devices_by_part = {"model": "disk", "lm_head": "cpu"}
    offload = str(tmp_path / "offload")
    load_in_model = accelerate.load_checkpoint_in_model
    advice = [
        Advice(NO_CUDA, lambda: dispatch({"": 0}), lambda: dispatch({"": "cpu"})),
        Advice("device-map-value", lambda: dispatch("everywhere"), lambda: dispatch("auto")),
        Advice(
            "device-map-value", lambda: dispatch({"model": "cpu"}), lambda: dispatch({"model": "cpu", "lm_head": "cpu"})
        ),
        Advice(
            "device-map-folder",
            lambda: dispatch(devices_by_part),
            lambda: dispatch(devices_by_part, offload_folder=offload),
        ),
        Advice(
            "device-map-folder",
            lambda: accelerate.dispatch_model(real(), devices_by_part),
            lambda: accelerate.dispatch_model(real(), devices_by_part, offload_dir=offload),
        ),
        Advice("offloaded-model-moved", lambda: dispatch(devices_by_part, offload_folder=offload).to("cpu"), None),
        Advice("model-files-missing", lambda: dispatch("auto", tmp_path), lambda: dispatch("auto")),
        Advice(
            "accelerate-empty-model",
            lambda: load_in_model(empty(), str(model)),
            lambda: load_in_model(empty(), str(model), device_map={"": "cpu"}),
        ),
        Advice("meta-tensor", lambda: empty().to("cpu"), lambda: empty().to_empty(device="cpu")),
        Advice("accelerate-precision", lambda: accelerate.Accelerator(mixed_precision="half"), None),
        Advice(
            "model-files-missing", lambda: accelerate.Accelerator(cpu=True).load_state(str(tmp_path / "none")), None
        ),
        Advice("accelerate-state", lambda: accelerate.Accelerator(mixed_precision="bf16"), accelerate.Accelerator),
    ]
    for_each(advice, check_advice)


class Module(lightning.LightningModule):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(2, size)

    def training_step(self, batch: Any, _: int) -> Any:
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_advice_about_lightning(tmp_path: Path) -> None:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

    def trainer(**options: Any) -> Any:
        return lightning.Trainer(**{"accelerator": "cpu", **quiet, "max_steps": 1, **options})

    def fit(module: Any = None, path: Path | None = None, **options: Any) -> Any:
        result = trainer(**options)
        result.fit(module or Module(), DataLoader(TensorDataset(torch.ones(4, 2))), ckpt_path=path and str(path))
        return result

    full, weights, plain = tmp_path / "whole.ckpt", tmp_path / "weights.ckpt", tmp_path / "bare.ckpt"
    fit().save_checkpoint(full)
    fit().save_checkpoint(weights, weights_only=True)
    torch.save(Module().state_dict(), plain)
    new_fabric = fabric.Fabric
    advice = [
        Advice("app-no-gpu", lambda: trainer(accelerator="gpu"), lambda: trainer(accelerator="auto", devices="auto")),
        Advice("app-no-gpu", lambda: trainer(accelerator="cuda", devices=2), None),
        Advice(
            "app-no-gpu", lambda: new_fabric(accelerator="cuda"), lambda: new_fabric(accelerator="auto", devices="auto")
        ),
        Advice("mps-not-available", lambda: trainer(accelerator="mps"), trainer),
        Advice("lightning-accelerator", lambda: trainer(accelerator="gpuu"), lambda: trainer(accelerator="auto")),
        Advice("lightning-accelerator", lambda: trainer(strategy="fsdp"), lambda: trainer(strategy="auto")),
        Advice("lightning-devices", lambda: trainer(devices=[0]), lambda: trainer(devices=1)),
        Advice("lightning-devices", lambda: trainer(devices=0), lambda: trainer(devices="auto")),
        Advice("lightning-flags", lambda: trainer(strategy="ddpp"), lambda: trainer(strategy="ddp")),
        Advice("argument-renamed", lambda: trainer(gpus=1), None),
        Advice("lightning-import-style", lambda: fit(nn.Linear(2, 2)), fit),
        Advice(
            "lightning-not-its-own",
            lambda: Module.load_from_checkpoint(plain),
            lambda: Module().load_state_dict(torch.load(plain)),
        ),
        Advice(
            "state-dict-keys",
            lambda: Module.load_from_checkpoint(full, size=3),
            lambda: Module.load_from_checkpoint(full),
        ),
        Advice(
            "lightning-checkpoint",
            lambda: Module().load_from_checkpoint(full),
            lambda: Module.load_from_checkpoint(full),
        ),
        Advice("resume-from-nothing", lambda: fit(path=tmp_path / "none.ckpt"), fit),
        Advice(
            "lightning-weights-only-file",
            lambda: fit(path=weights, max_steps=2),
            lambda: fit(Module.load_from_checkpoint(weights)),
        ),
        Advice("lightning-module-methods", lambda: fit(lightning.LightningModule()), fit),
        Advice("weights-do-not-fit", lambda: new_fabric(accelerator="cpu").load(str(full), {"model": Module()}), None),
    ]
    for_each(advice, check_advice)


def test_advice_about_safetensors(tmp_path: Path) -> None:
    path, ones = tmp_path / "a.safetensors", torch.ones(2, 3)
    safetensors.save_file({"a": ones}, path)

    def save(tensors: Any, **options: Any) -> object:
        return safetensors.save_file(tensors, tmp_path / "b.safetensors", **options)

    advice = [
        Advice(NO_CUDA, lambda: safetensors.load_file(path, "cuda"), lambda: safetensors.load_file(path, "cpu")),
        Advice(
            "safetensors-device", lambda: safetensors.load_file(path, "gpu"), lambda: safetensors.load_file(path, "cpu")
        ),
        Advice("safetensors-folder", lambda: safetensors.load_file(tmp_path), lambda: safetensors.load_file(path)),
        Advice(
            "safetensors-shared",
            lambda: save({"a": ones, "b": ones}),
            lambda: safetensors.save_model(nn.Linear(2, 2), path),
        ),
        Advice("safetensors-strided", lambda: save({"a": ones.t()}), lambda: save({"a": ones.t().contiguous()})),
        Advice("safetensors-only-tensors", lambda: save({"a": {"b": ones}}), lambda: save({"a": ones})),
        Advice(
            "safetensors-metadata",
            lambda: save({"a": ones}, metadata={"n": 1}),
            lambda: save({"a": ones}, metadata={"n": "1"}),
        ),
        Advice(
            "safetensors-sparse",
            lambda: save({"a": ones.to_sparse()}),
            lambda: save({"a": ones.to_sparse().to_dense()}),
        ),
    ]
    for_each(advice, check_advice)
