"""What torch does that no rule explains: told as it was seen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import again, complaint, failed, import_error, imported, said, wheel_cuda

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["TABLE"]

TABLE = Table("run")

Lines = tuple[str, ...]

_MODULE = re.compile(r"No module named '(?P<name>[\w.]+)'")
_STEPS = {
    "available": "torch.cuda.is_available() fails",
    "count": "torch.cuda.device_count() fails",
    "kernel": "the first kernel of torch fails",
    "matmul": "a matrix product fails on the GPU",
    "convolution": "a convolution fails on the GPU",
    "cpu": "torch cannot compute even on the CPU",
}


@TABLE.row(
    "X11",
    "torch hangs or crashes",
    symptom=True,
    about="""A process that only imports torch and adds two numbers did not come back in time, or was ended by a
signal, and no cause was found. A hang in the import is often a slow disk (a network folder, the first import after
a boot); in the first CUDA call it is the driver. A crash comes of mixed libraries, or of an instruction that this
processor lacks (SIGILL).""",
    fix="""Give it more time: transload doctor --timeout 120. To see where it stands: python -X faulthandler -c
"import torch", or py-spy dump --pid PID.""",
    sources=("https://github.com/rwth-i6/returnn/issues/1756",),
)
def no_return(machine: Machine) -> Seen | None:
    """The torch child did not end well."""
    answer = machine.torch_run.answer
    if answer.state not in ("hung", "crashed"):
        return None
    step = failed(machine)
    where = f" in {step.name}" if step else ""
    hung = answer.state == "hung"
    title = f"torch hangs{where}" if hung else f"torch crashes{where}"
    more = (
        ("Give it more time, in case it is only slow:", "$ transload doctor --timeout 120") if hung else again(machine)
    )
    return Seen((answer.detail or answer.state,), more, title=title, likely=hung)


@TABLE.row(
    "X10",
    "torch cannot be imported",
    symptom=True,
    about="""The import of torch ends with an error that no rule here explains. Its text is shown as it is. A
missing module is installed by its name; an undefined symbol between torch's own libraries means files of two
versions.""",
    fix="Install torch anew, in a fresh environment if need be, and report what remains.",
)
def no_import(machine: Machine) -> Seen | None:
    """The import raised."""
    error = import_error(machine)
    if not error or machine.torch_run.answer.state in ("hung", "crashed"):
        return None
    module = _MODULE.search(error)
    if module and module["name"].partition(".")[0] != "torch":
        return Seen(_lines(error), fixes.install(machine, module["name"].partition(".")[0].replace("_", "-")))
    return Seen(_lines(error), again(machine))


def _lines(error: str) -> Lines:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return tuple(lines[:4])


@TABLE.row(
    "X09",
    "torch sees no GPU although the driver gives one",
    symptom=True,
    about="""The driver starts and has a device for a process of its own, with the same environment; torch does not
get it, and no rule explains why. What torch said, and which libcuda.so.1 each of the two loaded, is shown: where
these differ, the search path of the loader is to blame.""",
    fix="Compare the two: LD_DEBUG=libs python -c 'import torch; torch.cuda.init()' 2>&1 | grep libcuda.",
)
def unseen(machine: Machine) -> Seen | None:
    """The driver works, torch has CUDA, and is_available() is False or its start failed."""
    run, cuda = machine.torch_run, machine.driver.cuda
    step = failed(machine, "init")
    if not imported(machine) or not (run.available is False or step):
        return _unseen_amd(machine)
    if not cuda.works or not wheel_cuda(machine):
        return _unseen_amd(machine)
    theirs = [path for path in run.libraries if "/libcuda.so" in path]
    other = [path for path in theirs if path != cuda.library] if cuda.library else []
    evidence = (
        f"the driver starts and gives {cuda.count} GPU{'' if cuda.count == 1 else 's'}",
        *(said(step.error) if step else said(complaint(machine, r"CUDA"))),
        *(f"torch loaded {path}, the driver is {cuda.library}" for path in other),
    )
    return Seen(evidence, _compare(machine))


def _compare(machine: Machine) -> Lines:
    names = [name for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if machine.variables.get(name)]
    first = ("Try without what changes the loader's search:", *fixes.unset(machine, *names)) if names else ()
    python = machine.python.executable or "python"
    return (*first, f"$ LD_DEBUG=libs {python} -c 'import torch; torch.cuda.init()' 2>&1 | grep libcuda")


def _unseen_amd(machine: Machine) -> Seen | None:
    run = machine.torch_run
    usable = any(other.kind == "rocm" and other.usable for other in machine.accelerators)
    if not (usable and run.hip and run.available is False):
        return None
    title = "torch sees no GPU although ROCm has one"
    step = failed(machine, "init")
    return Seen(("/dev/kfd has a GPU behind it", *said(step.error if step else "")), ("$ rocminfo",), title=title)


@TABLE.row(
    "X12",
    "torch fails on the GPU",
    symptom=True,
    about="""torch starts CUDA, and one of a few small operations fails: adding to a tensor, a matrix product
(cuBLAS), a convolution (cuDNN). No rule explains why; the error is shown as it is. A wrong result is a fault of the
card.""",
    fix="""Install torch anew with the libraries it asks for. If it stays, search the error's exact text with the
torch version.""",
)
def fails_at_work(machine: Machine) -> Seen | None:
    """A step after the import failed, on a machine whose driver works, or on the CPU."""
    step = failed(machine, *_STEPS)
    if step is None or machine.torch_run.answer.state in ("hung", "crashed"):
        return None
    if step.name in ("kernel", "matmul", "convolution") and "the result is" in step.error:
        fix = ("A card that computes wrong results is broken: test its memory, or replace it.",)
        return Seen(_lines(step.error), fix, title="the GPU computes wrong results")
    return Seen(_lines(step.error), again(machine), title=_STEPS[step.name])
