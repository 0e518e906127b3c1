"""Environment variables that hide a GPU from a process, or change how CUDA works in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules import visibility
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import answer_line, works
from transload.diagnose.rules.torch_facts import cards, complaint, failed, has_nvidia, said, unrun
from transload.diagnose.rules.visibility import CVD, GUIDE
from transload.diagnose.tables import covers
from transload.diagnose.visible import visible_devices

if TYPE_CHECKING:
    from transload.findings import Severity
    from transload.machine import Machine

__all__ = ["TABLE"]

TABLE = Table("variables")
TABLE.rows.extend(visibility.TABLE.rows)

ORDER = "CUDA_DEVICE_ORDER"
_ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


@TABLE.row(
    "E12",
    "CUDA_DEVICE_ORDER has a value that CUDA refuses",
    about="""CUDA_DEVICE_ORDER may be FASTEST_FIRST or PCI_BUS_ID, in exactly that spelling. With anything else, an
empty value included, the driver does not start: cuInit answers 101, and torch says "Unexpected error from
cudaGetDeviceCount() … Error 101: invalid device ordinal", while device_count() still counts the cards.""",
    fix="Unset it, or set it to PCI_BUS_ID, which orders the cards as nvidia-smi does.",
    sources=(GUIDE,),
)
def bad_order(machine: Machine) -> Seen | None:
    """The value is neither of the two, and the driver did not start with it."""
    value = machine.variables.get(ORDER)
    if value is None or value in _ORDERS or works(machine) or not has_nvidia(machine):
        return None
    return Seen((f"{ORDER} is {value!r}", answer_line(machine)), fixes.set_variable(machine, ORDER, "PCI_BUS_ID"))


def _forced(machine: Machine, *names: str) -> str:
    """The first of some switches that is on."""
    return next((name for name in names if (machine.variables.get(name) or "0").strip() not in ("", "0")), "")


@TABLE.row(
    "A04",
    "a variable makes CUDA compile kernels, or forbids it",
    about="""CUDA_FORCE_PTX_JIT=1 makes the driver ignore compiled kernels and compile from PTX. torch's wheels have
no PTX, so is_available() is True and the first kernel fails: "CUDA error: no kernel image is available for
execution on the device". CUDA_DISABLE_PTX_JIT=1 is the reverse, and breaks what has only PTX for this card: "PTX
JIT compilation was disabled".""",
    fix="Unset both.",
    avoid="Installing another torch: with the variable set, none has a kernel.",
    sources=(GUIDE,),
)
def jit_switch(machine: Machine) -> Seen | None:
    """Set, and torch failed over it or must; a note where it did no harm."""
    name = _forced(machine, "CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")
    if not name or not has_nvidia(machine):
        return None
    told = complaint(machine, r"no kernel image is available|PTX JIT compil")
    severity: Severity = "error" if told or (unrun(machine) and _must_fail(machine, name)) else "note"
    evidence = (f"{name} is {machine.variables.get(name)!r}", *said(told))
    return Seen(evidence, fixes.unset(machine, name), severity=severity)


def _must_fail(machine: Machine, name: str) -> bool:
    """Whether torch's own kernels cannot run so on any of the cards."""
    codes = tuple(machine.torch_libraries.cubins or ())
    wanted = [code for code in codes if code.startswith("compute_") == ("FORCE" in name)]
    found = cards(machine)
    return bool(codes and found) and not any(covers(wanted, card.capability) for card in found)


@TABLE.row(
    "E09",
    "a variable hides the AMD GPUs",
    about="""A ROCm build of torch reads HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES. Empty,
-1 or with indices that do not exist they leave no GPU: "No HIP GPUs are available". HIP counts among the GPUs that
ROCR leaves.""",
    fix="Unset them, or name indices from 0 on; one of the variables is enough.",
)
def hides_amd(machine: Machine) -> Seen | None:
    """A ROCm build saw no GPU although there is one, and a variable that filters them is set."""
    first = machine.torch.first
    gpus = [other for other in machine.accelerators if other.kind == "rocm" and other.usable]
    if first is None or not first.hip or not gpus or machine.torch_run.available is not False:
        return None
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", CVD):
        value = machine.variables.get(name)
        if value is not None and visible_devices(value, ("",) * len(gpus)).error:
            return Seen((f"{name} is {value!r}", f"there are {len(gpus)} AMD GPUs"), fixes.unset(machine, name))
    return None


@TABLE.row(
    "E10",
    "is_available() asks NVML instead of CUDA",
    about="""With PYTORCH_NVML_BASED_CUDA_CHECK=1 torch.cuda.is_available() does not start CUDA and asks NVML for
the number of cards. It is True then although CUDA fails at the first use.""",
    fix="Unset it to find out whether CUDA works. It is meant for programs that fork after asking.",
)
def nvml_check(machine: Machine) -> Seen | None:
    """A note, where CUDA does not work and the variable makes it seem to."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    dead = not works(machine) or failed(machine, "init")
    if machine.variables.get(name) != "1" or not dead or not machine.torch_run.available:
        return None
    evidence = (f"{name} is '1'", "torch.cuda.is_available() is True, and CUDA does not work")
    return Seen(evidence, fixes.unset(machine, name), severity="note")


@TABLE.row(
    "E05",
    "CUDA counts the GPUs in another order than nvidia-smi",
    about="""Unless CUDA_DEVICE_ORDER says otherwise CUDA puts the fastest card first, nvidia-smi goes by the PCI
bus. Where the cards differ, cuda:0 and CUDA_VISIBLE_DEVICES=0 may be another card than nvidia-smi's 0.""",
    fix="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
    sources=(GUIDE,),
)
def other_order(machine: Machine) -> Seen | None:
    """A note, where the two orders were seen to differ."""
    cuda = [gpu for gpu in machine.driver.cuda.gpus if gpu.uuid]
    known = {gpu.uuid for gpu in cuda}
    nvml = [gpu for gpu in machine.driver.nvml.gpus if gpu.uuid in known]
    same = [gpu.uuid for gpu in cuda] == [gpu.uuid for gpu in nvml]
    if len(cuda) < 2 or len(nvml) != len(cuda) or same or machine.variables.get(CVD) or machine.variables.get(ORDER):
        return None
    evidence = (f"CUDA's device 0 is {cuda[0].name}, nvidia-smi's is {nvml[0].name}",)
    return Seen(evidence, fixes.set_variable(machine, ORDER, "PCI_BUS_ID"), severity="note")


@TABLE.row(
    "E11",
    "CUDA cannot keep what it compiles",
    about="""The driver keeps compiled kernels in ~/.nv/ComputeCache, or where CUDA_CACHE_PATH says. Where that
cannot be written, everything that comes as PTX is compiled again at each start. torch's own kernels are not
compiled; extensions for a newer card may be, for minutes.""",
    fix="Set CUDA_CACHE_PATH to a folder that can be written.",
    sources=("https://github.com/pytorch/pytorch/issues/1907",),
)
def no_cache(machine: Machine) -> Seen | None:
    """A note."""
    problem = machine.variables.cache_problem
    if not problem or not works(machine):
        return None
    return Seen((problem,), fixes.set_variable(machine, "CUDA_CACHE_PATH", "/tmp/cuda-cache"), severity="note")  # noqa: S108
