"""What the CUDA driver and NVML answer, each asked in a child process, and what changes with the environment."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from transload.diagnose.children import Child, Outcome, Question, source
from transload.machine import Answer, Cuda, CudaGpu, Experiment, Nvml, NvmlGpu

if TYPE_CHECKING:
    from collections.abc import Collection

    from transload.diagnose.host import Host
    from transload.machine import State

_FLAGS = ("-I", "-S", "-B")
"""Our own interpreter without any site: half the time, and nothing from the environment that could break it."""
_NAMES = {"cuda": ("libcuda.so.1", "nvcuda.dll"), "nvml": ("libnvidia-ml.so.1", "nvml.dll")}
"""What is loaded on Linux and on Windows."""
_NOT_STATED = (1 << 64) - 1  # What NVML gives for the memory of a process where the system does not tell.


def question(host: Host, which: Literal["cuda", "nvml"]) -> Question:
    """A question to the driver in the host's environment and current directory: both decide what is loaded."""
    library = host.dlopen(_NAMES[which][host.uname[0] == "Windows"])
    return Question(
        source("ask_driver"),
        sys.executable or host.python,
        host.child_environ(),
        host.at(host.cwd),
        _FLAGS,
        arguments=(which, library),
        refusal="" if library else f"the driver of the system under {host.root} cannot be asked from here",
    )


def cuda(host: Host, outcome: Outcome) -> Cuda:
    """What CUDA answered."""
    found = Cuda(_answer(host, outcome, "cuda"), **outcome.fields_of(Cuda))
    return replace(
        found, library=host.host_path(found.library), gpus=tuple(CudaGpu(**gpu) for gpu in outcome.values("gpu"))
    )


def nvml(host: Host, outcome: Outcome, ours: Collection[int] = ()) -> Nvml:
    """What NVML answered; ``ours`` are processes of our own, which are left out."""

    def process(pid: int, used: int) -> str:
        """``python (4711), 3.2 GB``. A process of another container has a number, but no name here."""
        name = host.line(f"/proc/{pid}/comm") or "process"
        return f"{name} ({pid})" if used == _NOT_STATED else f"{name} ({pid}), {used / 1e9:.1f} GB"

    gpus = []
    peers = dict(enumerate(outcome.facts.get("peers", ())))
    for gpu in outcome.values("gpu"):
        others = tuple(process(*each) for each in gpu.get("processes", ()) if each[0] not in ours)
        gpus.append(NvmlGpu(**{**gpu, "processes": others, "peers": peers.get(gpu["index"], -1)}))
    found = Nvml(_answer(host, outcome, "nvml"), **outcome.fields_of(Nvml))
    return replace(found, library=host.host_path(found.library), gpus=tuple(gpus))


def _answer(host: Host, outcome: Outcome, which: str) -> Answer:
    facts, answer = outcome.facts, outcome.answer
    if "failed" in facts:
        names = (*_NAMES[which], host.dlopen(_NAMES[which][0]))
        state: State = "no-library" if _absent(facts["failed"], names) else "not-loadable"
        return Answer(state, facts["failed"], answer.seconds)
    if "missing" in facts:
        return replace(answer, state="no-symbol", detail=f"it has no {facts['missing']}")
    return answer


def _absent(words: str, names: tuple[str, ...]) -> bool:
    """Whether the loader says that it found no file of these names, rather than one that it could not load.

    glibc, musl, and ctypes on Windows; a library that the file itself needs is named in the same way.

    >>> _absent("libcuda.so.1: cannot open shared object file: No such file or directory", ("libcuda.so.1",))
    True
    >>> _absent("libnvidia-gpucomp.so: cannot open shared object file: No such file or directory", ("libcuda.so.1",))
    False
    >>> _absent("Error loading shared library libcuda.so.1: No such file or directory", ("libcuda.so.1",))
    True
    """
    begins = tuple(
        start + name
        for name in filter(None, names)
        for start in ("", "Error loading shared library ", "Could not find module '", "dlopen(")
    )
    missing = ("No such file or directory", "no such file", "Could not find module")
    return words.startswith(begins) and any(each in words for each in missing)


# -- a fix tried before it is suggested --------------------------------------------------------------------------------

_SUSPECTS = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_DEVICE_ORDER")
_SETTLED = frozenset({"no-library", "hung", "unasked"})
"""Then nothing is tried: without a variable the loader finds no more, and a driver that hangs will hang again."""


def experiments(host: Host, answered: Cuda, seconds: float) -> tuple[Experiment, ...]:
    """The same question without each variable that may be to blame, and without them all; none where CUDA works."""
    if answered.works or answered.answer.state in _SETTLED:
        return ()
    mps = tuple(sorted(name for name in host.environ if name.startswith("CUDA_MPS_")))
    changes = [*((name,) for name in _SUSPECTS if name in host.environ), *((mps,) if mps else ())]
    if len(changes) > 1:
        changes.append(tuple(name for change in changes for name in change))
    with ExitStack() as children:
        asked = []
        for change in changes:
            rest = {name: value for name, value in host.environ.items() if name not in change}
            asked.append(children.enter_context(Child(question(replace(host, environ=rest), "cuda"), seconds)))
        return tuple(
            Experiment(change, cuda(host, child.outcome())) for change, child in zip(changes, asked, strict=True)
        )
