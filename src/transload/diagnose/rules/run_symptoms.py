"""What torch does that no rule explains: told as it was seen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import answer_line, taken, unheard, works
from transload.diagnose.rules.torch_facts import (
    again,
    complaint,
    failed,
    import_error,
    imported,
    said,
    unrun,
    wheel_cuda,
)

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
    if machine.driver.cuda.answer.state == "crashed" and step and step.name != "import":
        return Seen((answer.detail or answer.state, *_crash(machine)), _other_driver(machine), title=title)
    more = (
        ("Give it more time, in case it is only slow:", "$ transload doctor --timeout 120") if hung else again(machine)
    )
    return Seen((answer.detail or answer.state,), more, title=title, likely=hung)


def _crash(machine: Machine) -> Lines:
    """That the driver's library crashes without torch as well, and which file that is."""
    lib = taken(machine)
    where = (f"libcuda.so.1 is {lib.path}{f', by {lib.via}' if lib.via else ''}",) if lib else ()
    return (f"without torch too: {answer_line(machine)}", *where)


def _other_driver(machine: Machine) -> Lines:
    """Torch is not to blame, and is not to be installed anew."""
    lib = taken(machine)
    if lib is None or not lib.via.startswith("LD_"):
        return ("The driver's library crashes, not torch: install the driver anew, or what stands in its place.",)
    said = f"{lib.path} crashes, not torch. Leave it out:"
    if lib.via == "LD_LIBRARY_PATH":
        return (said, *fixes.drop_folder(machine, lib.via, lib.path.rpartition("/")[0]))
    return (said, *fixes.unset(machine, lib.via))


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


@TABLE.row(
    "X13",
    "the machine could not be examined",
    symptom=True,
    about="""The driver and torch are asked in processes of their own, since either may hang or crash. Such a process
could not be started: the interpreter may not be executed by this user, no more processes are allowed (ulimit -u, the
pids.max of a container or a job), or no memory is left. What the files show is told all the same; whether CUDA works
is not known.""",
    fix="""Run transload doctor as a user who may execute the interpreter that is named. Where processes run out, end
some, or have the limit raised.""",
)
def unexamined(machine: Machine) -> Seen | None:
    """A child could not be started: an error where a GPU is and nothing tells whether it works; else a warning."""
    driver = unheard(machine) and machine.hardware.present and not works(machine)
    torch = unrun(machine) and bool(_why_not_run(machine)) and not machine.python.problem
    if not (driver or torch):
        return None
    evidence = (
        *((f"the CUDA driver was not asked: {_why_not_asked(machine)}",) if driver else ()),
        *((f"torch was not run: {_why_not_run(machine)}",) if torch else ()),
    )
    title = "" if driver else "torch could not be run, so it is not known whether it works"
    return Seen(evidence, _startable(" ".join(evidence)), title, severity="error" if driver else "warning")


def _why_not_asked(machine: Machine) -> str:
    return machine.driver.cuda.answer.detail or machine.problems.get("cuda", "")


def _why_not_run(machine: Machine) -> str:
    return machine.torch_run.answer.detail or machine.problems.get("torch run", "")


def _startable(why: str) -> Lines:
    lowered = why.lower()
    if "permission" in lowered or "not permitted" in lowered:
        return ("Run it as a user who may execute that interpreter.",)
    if any(word in lowered for word in ("temporarily unavailable", "memory", "thread")):
        return (
            "No more processes are to be had. See what the limits are, and end what is not needed:",
            "$ ulimit -u",
            "$ cat /sys/fs/cgroup/pids.max",
        )
    return ("Mend what is said above, and run it again.",)
