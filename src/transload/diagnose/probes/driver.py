"""What the CUDA driver and NVML answer, each asked in a child process, and what changes with the environment."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transload.diagnose.children import Child, Outcome, Question
from transload.machine import Answer, Cuda, CudaGpu, Experiment, Nvml, NvmlGpu

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from transload.diagnose.host import Host

__all__ = ["cuda", "experiments", "nvml", "question"]

_FLAGS = ("-I", "-S", "-B")
"""Our own interpreter, without anybody's site: half the time, and nothing of the environment's that could break it."""

_COMPUTE_MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
_MIG = ("disabled", "enabled")
_FABRIC = ("not-supported", "not-started", "in-progress", "completed")
_VIRTUALIZATION = ("none", "passthrough", "vgpu", "host-vgpu", "host-vsga")
_UNTOLD = (1 << 64) - 1
"""What NVML gives for the memory of a process when the system does not tell."""


_LIBRARIES = {"ask_cuda": ("libcuda.so.1", "nvcuda.dll"), "ask_nvml": ("libnvidia-ml.so.1", "nvml.dll")}
"""What each script loads on Linux and on Windows."""


def question(host: Host, script: str) -> Question:
    """A question to the driver in the host's environment and current directory: both decide what is loaded."""
    library = host.dlopen(_LIBRARIES[script][host.uname[0] == "Windows"])
    return Question(
        script,
        sys.executable or host.python,
        host.outside(),
        host.at(host.cwd),
        _FLAGS,
        arguments=(library,),
        refusal="" if library else f"the driver of the system under {host.root} cannot be asked from here",
    )


def cuda(host: Host, outcome: Outcome) -> Cuda:
    """What ``ask_cuda`` told."""
    facts = outcome.facts
    return Cuda(
        answer=_answer(host, outcome, "ask_cuda"),
        library=host.named(facts.get("library", "")),
        init=facts.get("init", -1),
        version=facts.get("version", 0),
        count=facts.get("count", -1),
        count_code=facts.get("count_code", -1),
        gpus=tuple(_cuda_gpu(told) for told in outcome.all("gpu")),
    )


def _cuda_gpu(told: dict[str, Any]) -> CudaGpu:
    return CudaGpu(**{**told, "capability": tuple(told["capability"])})


def nvml(host: Host, outcome: Outcome, ours: Collection[int] = ()) -> Nvml:
    """What ``ask_nvml`` told; ``ours`` are processes of our own, which are no news."""
    facts = outcome.facts
    return Nvml(
        answer=_answer(host, outcome, "ask_nvml"),
        library=host.named(facts.get("library", "")),
        init=facts.get("init", -1),
        driver=facts.get("driver", ""),
        cuda=facts.get("cuda", 0),
        count=facts.get("count", -1),
        count_code=facts.get("count_code", -1),
        gpus=tuple(_nvml_gpu(host, told, ours) for told in outcome.all("gpu")),
        confidential=facts.get("confidential", ""),
    )


def _nvml_gpu(host: Host, told: dict[str, Any], ours: Collection[int]) -> NvmlGpu:
    if told["code"]:
        return NvmlGpu(told["index"], told["code"])
    memory, free, _ = told["memory"] or (-1, -1, -1)
    state, status = told["fabric"] or (-1, 0)
    pending, failure = told["remapped"][2:] or (0, 0)
    return NvmlGpu(
        told["index"],
        name=told["name"],
        uuid=told["uuid"],
        capability=tuple(told["capability"]),
        address=_address(told["address"]),
        memory=memory,
        free=free,
        compute_mode=_word(_COMPUTE_MODES, told["compute_mode"]),
        mig=_word(_MIG, told["mig"]),
        mig_devices=tuple(told["mig_devices"]),
        fabric=_word(_FABRIC, [state]),
        fabric_status=status,
        retired_pending=told["retired"] == [1],
        remap_pending=bool(pending),
        remap_failure=bool(failure),
        virtualization=_word(_VIRTUALIZATION, told["virtualization"]),
        licence=told["licence"],
        processes=tuple(_process(host, *each) for each in told["processes"] if each[0] not in ours),
    )


def _word(words: tuple[str, ...], numbers: list[int]) -> str:
    """The word for a number that was told; empty for one that has none.

    >>> _word(_MIG, [1]), _word(_MIG, []), _word(_MIG, [7])
    ('enabled', '', '')
    """
    return dict(enumerate(words)).get(numbers[0], "") if numbers else ""


def _address(text: str) -> str:
    """NVML's address of a card as the kernel writes it, where that is possible.

    >>> _address("00000000:0F:00.0")
    '0000:0f:00.0'
    """
    return (text[4:] if text.startswith("0000") and len(text) == 16 else text).lower()


def _process(host: Host, pid: int, used: int) -> str:
    """``python (4711), 3.2 GB``. A process of another container has a number, but no name here."""
    name = host.line(f"/proc/{pid}/comm") or "process"
    return f"{name} ({pid})" if used == _UNTOLD else f"{name} ({pid}), {used / 1e9:.1f} GB"


# -- what became of loading it -----------------------------------------------------------------------------------------


def _answer(host: Host, outcome: Outcome, script: str) -> Answer:
    facts, answer = outcome.facts, outcome.answer
    names = (*_LIBRARIES[script], host.dlopen(_LIBRARIES[script][0]))
    if "failed" in facts:
        return replace(
            answer, state="no-library" if _absent(facts["failed"], names) else "not-loadable", detail=facts["failed"]
        )
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


# -- a fix tried before it is told -------------------------------------------------------------------------------------

_SUSPECTS = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_DEVICE_ORDER")
_SETTLED = frozenset({"no-library", "hung", "unasked"})
"""With these nothing is tried: the loader finds no more for what is left out, and a driver that hangs will hang."""


def experiments(host: Host, cuda: Cuda, seconds: float) -> tuple[Experiment, ...]:
    """The same question without each variable that may be to blame, and without them all; none where CUDA works."""
    if cuda.works or cuda.answer.state in _SETTLED:
        return ()
    changes = tuple(_changes(host))
    with ExitStack() as children:
        asked = [children.enter_context(Child(_without(host, change), seconds)) for change in changes]
        return tuple(Experiment(change, _cuda(host, child)) for change, child in zip(changes, asked, strict=True))


def _changes(host: Host) -> Iterator[tuple[str, ...]]:
    mps = tuple(sorted(name for name in host.environ if name.startswith("CUDA_MPS_")))
    changes = [*((name,) for name in _SUSPECTS if name in host.environ), *((mps,) if mps else ())]
    yield from changes
    if len(changes) > 1:
        yield tuple(name for change in changes for name in change)


def _without(host: Host, names: tuple[str, ...]) -> Question:
    rest = {name: value for name, value in host.environ.items() if name not in names}
    return question(replace(host, environ=rest), "ask_cuda")


def _cuda(host: Host, child: Child) -> Cuda:
    return cuda(host, child.outcome())
