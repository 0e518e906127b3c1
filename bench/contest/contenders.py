"""The loaders that are measured, each used as its documentation says is fastest.

A contender is a function that takes a job and returns the call to time. Imports, and the model that ``load_into`` and
``load_state_dict`` need, come before that call. All return tensors that own their memory or share it among themselves,
valid after the call; a contender that only maps the file has that in its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.contest.cases import Case, layout

TORCH, INTO = "torch.load", "torch.load + load_state_dict"
CPU, CUDA, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
PT, SAFETENSORS = ".pt", ".safetensors"


@dataclass(frozen=True)
class Job:
    """One run of one contender, in its own process."""

    contender: str
    case: Case
    path: str
    device: str
    where: str
    later: int
    check: bool
    peers: str = ""


Start = Callable[[Job], Callable[[], Any]]


@dataclass(frozen=True)
class Contender:
    """A loader: the file it reads, the devices it loads to, and the contender that its time is compared with."""

    name: str
    start: Start
    suffix: str = PT
    devices: tuple[str, ...] = BOTH
    base: str = TORCH
    cases: tuple[str, ...] = ()
    """The only cases it is for; empty for every case."""
    where: tuple[str, ...] = ()
    """The only places it is for; empty for every place."""
    lazy: bool = False
    """Whether it leaves the bytes in the file until they are used."""

    def takes(self, case: Case, where: str, device: str) -> bool:
        """Whether it is for this case, place and device; safetensors cannot store nested containers."""
        fits = (not self.cases or case.name in self.cases) and (not self.where or where in self.where)
        return fits and device in self.devices and not (case.training and self.suffix == SAFETENSORS)


def _transload(**options: Any) -> Start:
    def start(job: Job) -> Callable[[], Any]:
        from transload import load

        return lambda: load(job.path, map_location=job.device, **options)

    return start


def _torch(finish: Callable[[Any], Any] = lambda loaded: loaded, **options: Any) -> Start:
    def start(job: Job) -> Callable[[], Any]:
        import torch

        return lambda: finish(torch.load(job.path, map_location=job.device, weights_only=True, **options))

    return start


def _torch_then_to(job: Job) -> Callable[[], Any]:
    import torch

    return lambda: _map_tensors(torch.load(job.path, map_location="cpu", weights_only=True), lambda t: t.to(job.device))


def _safetensors(finish: Callable[[Any], Any] = lambda loaded: loaded, **options: Any) -> Start:
    def start(job: Job) -> Callable[[], Any]:
        from safetensors.torch import load_file

        return lambda: finish(load_file(job.path, device=job.device, **options))

    return start


def _map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, with ``change`` applied to every tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    return {key: _map_tensors(item, change) for key, item in value.items()} if isinstance(value, dict) else value


def _cloned(loaded: Any) -> Any:
    return _map_tensors(loaded, lambda tensor: tensor.clone())


def _touched(loaded: Any) -> Any:
    """The same tensors, after one byte of every page was read."""
    import torch

    return _map_tensors(loaded, lambda tensor: (tensor.reshape(-1).view(torch.uint8)[::4096].sum(), tensor)[1])


def _model(job: Job) -> Any:
    """A model with the parameters of the file, whose memory has already been written to."""
    import torch

    model = torch.nn.Module()
    for spec in layout(job.case):
        *parents, leaf = spec.name.split(".")
        module = model
        for name in parents:
            if not hasattr(module, name):
                module.add_module(name, torch.nn.Module())
            module = getattr(module, name)
        values = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=job.device).fill_(1)
        module.register_parameter(leaf, torch.nn.Parameter(values, requires_grad=False))
    return model


def _load_into(job: Job) -> Callable[[], Any]:
    from transload import load_into

    model = _model(job)

    def call() -> Any:
        load_into(model, job.path)
        return model.state_dict()

    return call


def _load_state_dict(**options: Any) -> Start:
    def start(job: Job) -> Callable[[], Any]:
        import torch

        model = _model(job)

        def call() -> Any:
            model.load_state_dict(torch.load(job.path, map_location=job.device, weights_only=True, **options))
            return model.state_dict()

        return call

    return start


def _fastsafetensors(*, direct: bool) -> Start:
    """Its copier through pinned slices; the tensors keep their common buffer alive."""

    def start(job: Job) -> Callable[[], Any]:
        if not direct:
            os.environ["FASTSAFETENSORS_ODIRECT"] = "0"
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        def call() -> Any:
            loader = SafeTensorsFileLoader(SingleGroup(), device=_with_index(job.device), nogds=True, max_threads=16)
            loader.add_filenames({0: [job.path]})
            buffers = loader.copy_files_to_device()
            loaded = {name: buffers.get_tensor(name) for name in loader.get_keys()}
            buffers.close()
            loader.close()
            return loaded

        return call

    return start


def _instanttensor(backend: str = "") -> Start:
    """Tensors that own their memory, which is its default."""

    def start(job: Job) -> Callable[[], Any]:
        import instanttensor

        policies = {"buffered": instanttensor.BackendPolicy.BUFFERED, "mmap": instanttensor.Backend.MMAP}

        def call() -> Any:
            opened = instanttensor.safe_open(
                job.path, framework="pt", device=_with_index(job.device), backend=policies.get(backend)
            )
            with opened as file:
                return dict(file.tensors())

        return call

    return start


def _runai(job: Job) -> Callable[[], Any]:
    os.environ.update(RUNAI_STREAMER_CONCURRENCY="16", RUNAI_STREAMER_MEMORY_LIMIT="-1")
    from runai_model_streamer import SafetensorsStreamer

    def call() -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(job.path)
            return {name: tensor.to(job.device) for name, tensor in streamer.get_tensors()}

    return call


def _with_index(device: str) -> str:
    return f"{device}:0" if device == "cuda" else device


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("transload.load", _transload()),
        Contender("transload.load, .safetensors", _transload(), SAFETENSORS),
        Contender(TORCH, _torch()),
        Contender("torch.load(mmap=True), only mapped", _torch(mmap=True), devices=CPU, lazy=True),
        Contender("torch.load(mmap=True), touched", _torch(_touched, mmap=True), devices=CPU, lazy=True),
        Contender("torch.load(mmap=True), cloned", _torch(_cloned, mmap=True), devices=CPU),
        Contender("torch.load(mmap=True)", _torch(mmap=True), devices=CUDA),
        Contender("torch.load, then .to", _torch_then_to, devices=CUDA),
        Contender("safetensors, only mapped", _safetensors(), SAFETENSORS, CPU, lazy=True),
        Contender("safetensors, touched", _safetensors(_touched), SAFETENSORS, CPU, lazy=True),
        Contender("safetensors, cloned", _safetensors(_cloned), SAFETENSORS, CPU),
        Contender("safetensors(backend='pread')", _safetensors(backend="pread"), SAFETENSORS),
        Contender("safetensors", _safetensors(), SAFETENSORS, CUDA),
        Contender("fastsafetensors", _fastsafetensors(direct=True), SAFETENSORS, CUDA),
        Contender("fastsafetensors, buffered", _fastsafetensors(direct=False), SAFETENSORS, CUDA, where=("cache",)),
        Contender("InstantTensor", _instanttensor(), SAFETENSORS, CUDA),
        Contender("InstantTensor, buffered", _instanttensor("buffered"), SAFETENSORS, CUDA, where=("cache",)),
        Contender("InstantTensor, mmap", _instanttensor("mmap"), SAFETENSORS, CUDA, where=("cache",)),
        Contender("run:ai streamer, then .to", _runai, SAFETENSORS, CUDA),
        Contender("transload.load_into", _load_into, base=INTO, cases=("large",)),
        Contender(INTO, _load_state_dict(), base=INTO, cases=("large",)),
        Contender("torch.load(mmap=True) + load_state_dict", _load_state_dict(mmap=True), base=INTO, cases=("large",)),
    )
}
