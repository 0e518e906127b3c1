"""What the CUDA driver and NVML answer in child processes, and what they answer in a changed environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from transload.diagnose.children import Child, Outcome, Question, source
from transload.diagnose.host import Host
from transload.machine import Answer, Cuda, CudaGpu, Experiment, Nvml, NvmlGpu, State

_FLAGS = ("-I", "-S", "-B")
"""Our own interpreter without site: half the start-up time, and nothing of the environment can break it."""
_NAMES = {"cuda": ("libcuda.so.1", "nvcuda.dll"), "nvml": ("libnvidia-ml.so.1", "nvml.dll")}
"""The libraries on Linux and on Windows."""
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, for the memory of a process.


def question(host: Host, which: Literal["cuda", "nvml"]) -> Question:
    """Ask the driver in the host's environment and current directory: both decide which library is loaded."""
    library = host.real(_NAMES[which][host.uname[0] == "Windows"])
    return Question(source("ask_driver"), sys.executable or host.python, host, _FLAGS, (which, library))


def cuda(outcome: Outcome) -> Cuda:
    """What CUDA answered."""
    gpus = tuple(CudaGpu(**gpu) for gpu in outcome.values("gpu"))
    return Cuda(_answer(outcome, "cuda"), **outcome.fields_of(Cuda), gpus=gpus)


def nvml(host: Host, outcome: Outcome, ours: Collection[int] = ()) -> Nvml:
    """What NVML answered, without our own processes, ``ours``."""

    def process(pid: int, used: int) -> str:
        """``python (4711), 3.2 GB``. A process in another container has no name here."""
        name = host.line(f"/proc/{pid}/comm") or "process"
        return f"{name} ({pid})" if used == _NOT_AVAILABLE else f"{name} ({pid}), {used / 1e9:.1f} GB"

    gpus = []
    peers = dict(enumerate(outcome.facts.get("peers", ())))
    for gpu in outcome.values("gpu"):
        others = tuple(process(*each) for each in gpu.get("processes", ()) if each[0] not in ours)
        gpus.append(NvmlGpu(**{**gpu, "processes": others, "peers": peers.get(gpu["index"], -1)}))
    return Nvml(_answer(outcome, "nvml"), **outcome.fields_of(Nvml), gpus=tuple(gpus))


def _answer(outcome: Outcome, which: str) -> Answer:
    facts, answer = outcome.facts, outcome.answer
    if "failed" in facts:
        state: State = "no-library" if _absent(facts["failed"], _NAMES[which]) else "not-loadable"
        return Answer(state, facts["failed"], answer.seconds)
    if "missing" in facts:
        return replace(answer, state="no-symbol", detail=f"it has no {facts['missing']}")
    return answer


def _absent(words: str, names: tuple[str, ...]) -> bool:
    """Whether an error says that there is no file of these names, rather than one that cannot be loaded.

    The error is glibc's, musl's, or that of ctypes on Windows. It may also name a library that the file itself needs.

    >>> _absent("libcuda.so.1: cannot open shared object file: No such file or directory", ("libcuda.so.1",))
    True
    >>> _absent("libnvidia-gpucomp.so: cannot open shared object file: No such file or directory", ("libcuda.so.1",))
    False
    >>> _absent("Error loading shared library libcuda.so.1: No such file or directory", ("libcuda.so.1",))
    True
    """
    begins = r"(?:Error loading shared library |Could not find module '|dlopen\()?(?:\S*/)?"
    missing = re.compile(r"No such file or directory|no such file|Could not find module")
    named = re.match(f"{begins}(?:{'|'.join(map(re.escape, names))})", words)
    return bool(named and missing.search(words))


# -- fixes that are tried before they are suggested --------------------------------------------------------------------

_SUSPECTS = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_DEVICE_ORDER")
_HOPELESS = frozenset({"no-library", "hung", "unasked"})
"""Nothing is tried then: without a variable the loader finds no more, and a driver that hangs will hang again."""


def experiments(host: Host, answered: Cuda, seconds: float) -> tuple[Experiment, ...]:
    """Ask CUDA again without each variable that may be to blame, and without all of them; not if CUDA works."""
    if answered.works or answered.answer.state in _HOPELESS:
        return ()
    mps = tuple(sorted(name for name in host.environ if name.startswith("CUDA_MPS_")))
    changes = [*((name,) for name in _SUSPECTS if name in host.environ), *((mps,) if mps else ())]
    if len(changes) > 1:
        changes.append(tuple(name for change in changes for name in change))
    with ExitStack() as children:
        asked = []
        for change in changes:
            rest = {name: value for name, value in host.environ.items() if name not in change}
            child = children.enter_context(Child(question(replace(host, environ=rest), "cuda"), seconds))
            asked.append((change, child))
        return tuple(Experiment(change, cuda(child.outcome())) for change, child in asked)
