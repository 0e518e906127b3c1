"""Torch at work: what goes wrong although the driver and the build are right, and what nothing explains."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules import run_symptoms
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import complaint, computes, failed, is_nvidia_library, said, unrun

if TYPE_CHECKING:
    from transload.machine import Machine, NvmlGpu

__all__ = ["TABLE"]

TABLE = Table("run")

Lines = tuple[str, ...]

_BUSY = r"busy or unavailable"
_STICKY = r"device-side assert|illegal memory access|unspecified launch failure|misaligned address"
_ENOUGH = 1 << 30
"""Bytes free on a card with which a small tensor must find room: a context takes half of it."""


def gpus(machine: Machine) -> tuple[NvmlGpu, ...]:
    """The cards that this process gets, as NVML sees them; all of them where CUDA did not say which."""
    given = {gpu.uuid for gpu in machine.driver.cuda.gpus if gpu.uuid}
    known = tuple(gpu for gpu in machine.driver.nvml.gpus if gpu.uuid in given)
    return known or machine.driver.nvml.gpus


@TABLE.row(
    "S06",
    "the virtual GPU has no licence",
    about="""A virtual GPU (vGPU, GRID) works for some twenty minutes without a licence, then becomes many times
slower, and new programs get "CUDA-capable device(s) is/are busy or unavailable" (46) or "device doesn't have valid
Grid license" (102). nvidia-smi -q shows "License Status : Unlicensed".""",
    fix="Set the licence server in /etc/nvidia/gridd.conf (or the client token), and restart nvidia-gridd.",
    sources=("https://github.com/Azure/AKS/issues/4868", "https://github.com/NVIDIA/gpu-operator/issues/220"),
)
def unlicensed(machine: Machine) -> Seen | None:
    """Error where torch fails; a warning where it still works."""
    found = [gpu for gpu in gpus(machine) if gpu.licence == "unlicensed"]
    if not found:
        return None
    evidence = tuple(f"{gpu.name} is a virtual GPU without a licence" for gpu in found)
    fix = (
        "Enter the licence server or token in /etc/nvidia/gridd.conf, then (needs root):",
        fixes.sudo(machine, "systemctl restart nvidia-gridd"),
    )
    told = complaint(machine, rf"{_BUSY}|Grid license")
    return Seen((*evidence, *said(told)), fix, severity="error" if told else "warning")


@TABLE.row(
    "S05",
    "the card is reserved for one process, or for none",
    about="""A card's compute mode says how many processes may use it: in EXCLUSIVE_PROCESS one, in PROHIBITED none.
is_available() is True, and the first tensor fails: "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
(46).""",
    fix="Wait for, or end, the process that holds the card; or set the mode back: sudo nvidia-smi -c 0.",
    sources=("https://github.com/pytorch/pytorch/issues/3871", "https://github.com/pytorch/pytorch/issues/100691"),
)
def reserved(machine: Machine) -> Seen | None:
    """torch was refused and the mode explains it; or was not run, and every card is closed or taken."""
    closed = [gpu for gpu in gpus(machine) if gpu.compute_mode == "prohibited"]
    taken = [gpu for gpu in gpus(machine) if gpu.compute_mode.startswith("exclusive") and gpu.processes]
    by_cuda = [gpu.name for gpu in machine.driver.cuda.gpus if gpu.compute_mode == 2]
    told = complaint(machine, _BUSY)
    none_left = len(closed) + len(taken) == len(gpus(machine)) and bool(closed or taken)
    if not (closed or taken or by_cuda) or not (told or (unrun(machine) and none_left)):
        return None
    lines = tuple(f"{gpu.name} is in compute mode {gpu.compute_mode}" for gpu in (*closed, *taken))
    users = tuple(f"in use by {process}" for gpu in taken for process in gpu.processes)
    mode = lines or tuple(f"{name} is in compute mode prohibited" for name in by_cuda)
    wait = ("Wait for the other process, or end it. Or let several share the card (needs root):",) if taken else ()
    fix = (*wait, fixes.sudo(machine, "nvidia-smi -c 0"))
    return Seen((*said(told), *mode, *users), fix, likely=not told and not closed)


@TABLE.row(
    "X06",
    "the GPU's memory is used up",
    about="""A program needs some hundred megabytes on the card before its first tensor. Where other processes hold
the rest, even that fails: is_available() is True, and the first use says "CUDA error: out of memory".""",
    fix="""End the processes that hold the memory (nvidia-smi lists them; a notebook's kernel is a common one), or
use another card.""",
    avoid="Reinstalling anything, or setting PYTORCH_ALLOC_CONF: the allocator has not started yet.",
)
def no_memory(machine: Machine) -> Seen | None:
    """A small tensor found no room; likely only, where the card seems to have some."""
    step = failed(machine, "init", "kernel", "matmul", "convolution")
    if step is None or "out of memory" not in step.error.lower():
        return None
    known = [gpu for gpu in gpus(machine) if gpu.free >= 0]
    limit = machine.platform.address_space
    if limit and known and min(gpu.free for gpu in known) > _ENOUGH:
        return _no_room(limit, step.error)
    free = tuple(f"{gpu.name} has {gpu.free >> 20} MB free of {gpu.memory >> 20}" for gpu in known)
    users = tuple(f"{process} computes on {gpu.name}" for gpu in gpus(machine) for process in gpu.processes)
    fix = ("End the processes that hold the card's memory, or use another card:", "$ nvidia-smi")
    full = any(gpu.free < _ENOUGH for gpu in known)
    return Seen((*said(step.error), *free, *users[:6]), fix, likely=not full)


def _no_room(limit: int, error: str) -> Seen:
    title = "a limit on address space leaves CUDA no room"
    why = "CUDA reserves more address space than there is memory. Lift the limit in the shell or the job:"
    fix = (why, "$ ulimit -v unlimited")
    return Seen((f"ulimit -v is {limit >> 30} GB", *said(error)), fix, title=title)


@TABLE.row(
    "X05",
    "a kernel dies on the GPU",
    about="""After "device-side assert triggered" (710), "an illegal memory access was encountered" (700) or
"unspecified launch failure" (719) CUDA is dead in that process: every later call reports the same error, wherever
it is, and is_available() may turn False. The fault is in the kernel that ran before, very often an index out of
range in the program.

Where a process that does nothing but add one to a tensor dies so, it is the card or the driver.""",
    fix="""Restart the process. Run the program with CUDA_LAUNCH_BLOCKING=1 to see which call it is, or on the CPU,
where the message is plain.""",
)
def dead_kernel(machine: Machine) -> Seen | None:
    """Our own few operations died that way."""
    step = failed(machine, "init", "kernel", "matmul", "convolution")
    if step is None or not re.search(_STICKY, step.error):
        return None
    fix = (
        "This is no program's fault. Look for Xid errors (needs root), then reboot or reset the card:",
        fixes.sudo(machine, "dmesg | grep -i xid"),
        fixes.reboot(machine),
    )
    title = "a kernel of three lines dies on the GPU"
    return Seen((f"in the step {step.name}", *said(step.error)), fix, title=title)


@TABLE.row(
    "X07",
    "two versions of a CUDA library are in one process",
    about="""Another package (faiss, tensorflow, cupy, onnxruntime) brings its own CUDA libraries, and the first one
loaded under a name serves both. It shows as a cuDNN version error, an undefined symbol, or a crash that depends on
the order of imports.""",
    fix="Import torch first; install packages that are built for the same CUDA major version.",
    sources=("https://github.com/facebookresearch/faiss/issues/908",),
)
def two_versions(machine: Machine) -> Seen | None:
    """torch alone has loaded two of one library; an error only where it fails."""
    by_name: dict[str, list[str]] = {}
    for path in machine.torch_run.libraries:
        name = path.rpartition("/")[2]
        if is_nvidia_library(name):
            by_name.setdefault(name.partition(".so")[0], []).append(path)
    double = {name: paths for name, paths in by_name.items() if len(set(paths)) > 1}
    if not double or computes(machine):
        return None
    step = failed(machine, "kernel", "matmul", "convolution")
    evidence = tuple(f"loaded: {path}" for paths in double.values() for path in paths)[:6]
    fix = ("Take CUDA folders out of LD_LIBRARY_PATH, and remove packages that bring another CUDA.",)
    if step is None:
        return Seen(evidence, fix, severity="note")
    return Seen((*evidence, *said(step.error)), fix, likely=True)


TABLE.page(
    "X01",
    "CUDA is used in a forked process",
    about=""""RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you
must use the 'spawn' start method". A process that has started CUDA cannot hand it on by fork, and fork is the
default start method of multiprocessing on Linux before Python 3.14. torch.cuda.is_available() alone starts CUDA
too.""",
    fix="""Call torch.multiprocessing.set_start_method("spawn") first, keep CUDA out of the parent and of datasets
used by DataLoader workers; or set PYTORCH_NVML_BASED_CUDA_CHECK=1 where the parent only asks whether there is a
GPU.""",
    sources=("https://pytorch.org/docs/stable/notes/multiprocessing.html",),
)

TABLE.page(
    "S08",
    "memory of a GH200 or GB200 seems wrong",
    likely=True,
    about="""On Grace machines the GPU's memory may be part of the system's, as a NUMA node of its own: the kernel
hands it out to programs, and free shows more memory than there are modules. It does not concern is_available().""",
    fix="""A driver from 580.65.06 on can keep the GPU's memory apart (CDMM): module option
NVreg_CoherentGPUMemoryMode=driver; or bind programs with numactl.""",
)

TABLE.page(
    "S09",
    "several GPUs fail together, one alone works",
    likely=True,
    about="""NCCL uses NVLink and NVSwitch between cards. "Cuda failure 802 'system not yet initialized'" or errors
that name NVLS, in programs with several GPUs only, point to the fabric manager or to its state.""",
    fix="See S01. NCCL_NVLS_ENABLE=0 or NCCL_P2P_DISABLE=1 prove it; they are no cure.",
    sources=("https://github.com/hiyouga/LlamaFactory/issues/8968",),
)

TABLE.rows.extend(run_symptoms.TABLE.rows)  # last: they are told only where nothing else is
