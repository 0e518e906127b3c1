"""Running torch: what goes wrong although the driver and the build are right, and what no rule explains."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import Case, is_nvidia_library, quoted
from transload.diagnose.rules.rule import Lines, Match, page_only, rule

if TYPE_CHECKING:
    from transload.machine import NvmlGpu

_BUSY = r"busy or unavailable"
_STICKY = r"device-side assert|illegal memory access|unspecified launch failure|misaligned address"
_ENOUGH = 1 << 30  # free bytes that are enough for a small tensor: a context takes half of it
_MODULE = re.compile(r"No module named '(?P<name>[\w.]+)'")
_WORK = ("kernel", "matmul", "convolution")
_STEPS = {
    "available": "torch.cuda.is_available() fails",
    "count": "torch.cuda.device_count() fails",
    "kernel": "the first kernel of torch fails",
    "matmul": "a matrix product fails on the GPU",
    "convolution": "a convolution fails on the GPU",
    "cpu": "torch cannot compute even on the CPU",
}


def _gpus(m: Case) -> tuple[NvmlGpu, ...]:
    """The cards of this process, as NVML sees them; all of them if CUDA did not say which."""
    given = {gpu.uuid for gpu in m.driver.cuda.gpus if gpu.uuid}
    known = tuple(gpu for gpu in m.driver.nvml.gpus if gpu.uuid in given)
    return known or m.driver.nvml.gpus


@rule("S06", "run", "the virtual GPU has no licence")
def unlicensed(m: Case) -> Match | None:
    """An error if torch fails; a warning if it still works."""
    found = [gpu for gpu in _gpus(m) if gpu.licence == "unlicensed"]
    if not found:
        return None
    lines = (f"{gpu.name} is a virtual GPU without a licence" for gpu in found)
    enter = "Enter the licence server or token in /etc/nvidia/gridd.conf, then (needs root):"
    told = m.complaint(rf"{_BUSY}|Grid license")
    fix = (enter, fixes.sudo(m, "systemctl restart nvidia-gridd"))
    return Match((*lines, quoted(told)), fix, severity="error" if told else "warning")


@rule("S05", "run", "the card's compute mode excludes this process")
def reserved(m: Case) -> Match | None:
    """torch was refused and the mode explains it; or it was not run, and no card is usable."""
    gpus, told = _gpus(m), m.complaint(_BUSY)
    closed = [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]
    taken = [gpu for gpu in gpus if gpu.compute_mode.startswith("exclusive") and gpu.processes]
    by_cuda = [gpu.name for gpu in m.driver.cuda.gpus if gpu.compute_mode == 2]
    none_left = len(closed) + len(taken) == len(gpus) and bool(closed or taken)
    if not (closed or taken or by_cuda) or not (told or (m.torch_not_run and none_left)):
        return None
    mode = [f"{gpu.name} is in compute mode {gpu.compute_mode}" for gpu in (*closed, *taken)]
    mode = mode or [f"{name} is in compute mode prohibited" for name in by_cuda]
    users = (f"in use by {process}" for gpu in taken for process in gpu.processes)
    wait = "Wait for the other process, or end it. Or let several share the card (needs root):" if taken else ""
    fix = (wait, fixes.sudo(m, "nvidia-smi -c 0"))
    return Match((quoted(told), *mode, *users), fix, likely=not told and not closed)


@rule("X06", "run", "the GPU's memory is full")
def no_memory(m: Case) -> Match | None:
    """There was no memory for a small tensor; only likely if the card seems to have some."""
    step = m.failed("init", *_WORK)
    if step is None or "out of memory" not in step.error.lower():
        return None
    known = [gpu for gpu in _gpus(m) if gpu.free >= 0]
    limit = m.platform.address_space
    if limit and known and min(gpu.free for gpu in known) > _ENOUGH:
        why = "CUDA reserves more address space than there is memory. Lift the limit in the shell or the job:"
        evidence = (f"ulimit -v is {limit >> 30} GB", quoted(step.error))
        return Match(evidence, (why, "$ ulimit -v unlimited"), "a limit on the address space leaves CUDA no room")
    free = (f"{gpu.name} has {gpu.free >> 20} MB free of {gpu.memory >> 20}" for gpu in known)
    users = [f"{process} is using {gpu.name}" for gpu in _gpus(m) for process in gpu.processes]
    fix = ("End the processes that hold the card's memory, or use another card:", "$ nvidia-smi")
    full = any(gpu.free < _ENOUGH for gpu in known)
    return Match((quoted(step.error), *free, *users[:6]), fix, likely=not full)


@rule("X05", "run", "a kernel crashes on the GPU")
def dead_kernel(m: Case) -> Match | None:
    """Our own small operations failed in this way."""
    step = m.failed("init", *_WORK)
    if step is None or not re.search(_STICKY, step.error):
        return None
    fix = (
        "No program causes this. Look for Xid errors (needs root), then reboot or reset the card:",
        fixes.sudo(m, "dmesg | grep -i xid"),
        fixes.reboot(m),
    )
    return Match((f"in the step {step.name}", quoted(step.error)), fix, "a trivial kernel crashes on the GPU")


@rule("X07", "run", "two versions of a CUDA library are loaded in one process")
def two_versions(m: Case) -> Match | None:
    """torch alone loaded two versions of one library; an error only if it fails."""
    by_name: dict[str, list[str]] = {}
    for path in m.torch_run.libraries:
        name = path.rpartition("/")[2]
        if is_nvidia_library(name):
            by_name.setdefault(name.partition(".so")[0], []).append(path)
    double = [path for paths in by_name.values() if len(set(paths)) > 1 for path in paths]
    if not double or m.computes:
        return None
    step = m.failed(*_WORK)
    evidence = (*(f"loaded: {path}" for path in double[:6]), quoted(step.error if step else ""))
    fix = ("Remove CUDA directories from LD_LIBRARY_PATH, and uninstall packages that bring another CUDA version.",)
    return Match(evidence, fix, likely=True) if step else Match(evidence, fix, severity="note")


page_only("X01", "run", "CUDA is used in a forked process")
page_only("S08", "run", "the memory of a GH200 or GB200 seems wrong")
page_only("S09", "run", "several GPUs fail together, but each works alone")


# -- symptoms: reported as they were seen, and only if no rule explains them


def _lines(error: str) -> Lines:
    return tuple(line.strip() for line in error.splitlines() if line.strip())[:4]


@rule("X11", "run", "torch hangs or crashes", symptom=True)
def no_return(m: Case) -> Match | None:
    """The torch child hung or crashed."""
    answer, step = m.torch_run.answer, m.failed()
    hung = answer.state == "hung"
    if not hung and answer.state != "crashed":
        return None
    title = f"torch {'hangs' if hung else 'crashes'}{f' in {step.name}' if step else ''}"
    told = answer.detail or answer.state
    if m.driver.cuda.answer.state == "crashed" and step and step.name != "import":
        lib = m.libcuda
        where = f"libcuda.so.1 is {lib.path}{f', found through {lib.via}' if lib.via else ''}" if lib else ""
        return Match((told, f"also without torch: {m.answer}", where), _other_driver(m), title)
    slow = ("Give it more time, in case it is only slow:", "$ transload doctor --timeout 120")
    return Match((told,), slow if hung else m.reinstall, title, likely=hung)


def _other_driver(m: Case) -> Lines:
    """torch is not the reason, so reinstalling it does not help."""
    lib = m.libcuda
    if lib is None or not lib.via.startswith("LD_"):
        return (
            "The driver's library crashes, not torch: reinstall the driver, or remove the library that replaces it.",
        )
    folder = lib.path.rpartition("/")[0]
    drop = fixes.drop_folder(m, lib.via, folder) if lib.via == "LD_LIBRARY_PATH" else fixes.unset(m, lib.via)
    return (f"{lib.path} crashes, not torch. Remove it:", *drop)


@rule("X10", "run", "torch cannot be imported", symptom=True)
def no_import(m: Case) -> Match | None:
    """The import raised."""
    if not m.import_error or m.torch_run.answer.state in ("hung", "crashed"):
        return None
    module = _MODULE.search(m.import_error)
    name = module["name"].partition(".")[0] if module else "torch"
    fix = m.reinstall if name == "torch" else fixes.install(m, name.replace("_", "-"))
    return Match(_lines(m.import_error), fix)


@rule("X09", "run", "torch sees no GPU although the driver has one", symptom=True)
def unseen(m: Case) -> Match | None:
    """The driver works, torch has CUDA, and is_available() is False or its start failed."""
    run, cuda, step = m.torch_run, m.driver.cuda, m.failed("init")
    error = step.error if step else ""
    if not (m.imported and (run.available is False or step) and cuda.works and m.torch_cuda):
        usable = any(other.kind == "rocm" and other.usable for other in m.accelerators)
        if not (usable and run.hip and run.available is False):
            return None
        title = "torch sees no GPU although ROCm has one"
        return Match(("/dev/kfd has a GPU", quoted(error)), ("$ rocminfo",), title)
    other = [path for path in run.libraries if "/libcuda.so" in path and cuda.library not in ("", path)]
    names = [name for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if m.env(name)]
    without = "Try without the variables that change the loader's search path:"
    unset = (without, *fixes.unset(m, *names)) if names else ()
    python = m.python.executable or "python"
    evidence = (
        f"the driver starts and finds {cuda.count} GPU{'' if cuda.count == 1 else 's'}",
        quoted(error if step else m.complaint(r"CUDA")),
        *(f"torch loaded {path}, but the driver's library is {cuda.library}" for path in other),
    )
    compare = f"$ LD_DEBUG=libs {python} -c 'import torch; torch.cuda.init()' 2>&1 | grep libcuda"
    return Match(evidence, (*unset, compare))


@rule("X12", "run", "torch fails on the GPU", symptom=True)
def fails_at_work(m: Case) -> Match | None:
    """A step after the import failed, on a machine whose driver works, or on the CPU."""
    step = m.failed(*_STEPS)
    if step is None or m.torch_run.answer.state in ("hung", "crashed"):
        return None
    if step.name in _WORK and "the result is" in step.error:
        fix = ("A card that computes wrong results is broken: test its memory, or replace it.",)
        return Match(_lines(step.error), fix, "the GPU computes wrong results")
    return Match(_lines(step.error), m.reinstall, _STEPS[step.name])


@rule("X13", "run", "the machine could not be examined", symptom=True)
def unexamined(m: Case) -> Match | None:
    """A child could not be started: an error if there is a GPU and it is unknown whether it works; else a warning."""
    not_asked = m.driver.cuda.answer.detail or m.problems.get("cuda", "")
    not_run = m.torch_run.answer.detail or m.problems.get("torch run", "")
    driver = m.driver_unasked and m.hardware.present and not m.works
    torch = m.torch_not_run and bool(not_run) and not m.python.problem
    if not (driver or torch):
        return None
    evidence = (
        f"the CUDA driver was not asked: {not_asked}" if driver else "",
        f"torch was not run: {not_run}" if torch else "",
    )
    said = " ".join(evidence).lower()
    fix: Lines = ("Repair what is described above, and run it again.",)
    if "permission" in said or "not permitted" in said:
        fix = ("Run it as a user who may execute that interpreter.",)
    elif any(word in said for word in ("temporarily unavailable", "memory", "thread")):
        fix = (
            "No more processes can be started. Check the limits, and end processes that are not needed:",
            "$ ulimit -u",
            "$ cat /sys/fs/cgroup/pids.max",
        )
    title = "" if driver else "torch could not be run, so whether it works is unknown"
    return Match(evidence, fix, title, "error" if driver else "warning")


page_only("N03", "run", "a program says that torch cannot use the GPU")
