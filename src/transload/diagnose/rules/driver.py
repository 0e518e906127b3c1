"""The CUDA driver at its start: what keeps it from answering, and what is left when no reason was found."""

from __future__ import annotations

from transload.diagnose import fixes
from transload.diagnose.rules import fabric
from transload.diagnose.rules.libraries import drop_library, library_line
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    CONTROL,
    UVM,
    absent,
    answer_line,
    card_nodes,
    code,
    fails,
    host_gpu,
    host_lines,
    mismatched,
    nodes_absent,
    nvml_line,
    nvml_ok,
    relief_line,
    relieved,
    taken,
    works,
)
from transload.diagnose.rules.withheld import withheld
from transload.diagnose.tables import cu_result, nvml_result
from transload.machine import Machine, Unknown

__all__ = ["TABLE"]

TABLE = Table("driver")
TABLE.rows.extend(fabric.TABLE.rows)

Lines = tuple[str, ...]

_OUT_OF_MEMORY = 2
_ENOUGH = 64 << 30  # seen on a card of 140 GB: with 16 GB of address space cuInit works and the first kernel does not


@TABLE.row(
    "U10",
    "several GPUs under WSL keep CUDA from starting",
    about="""Under WSL 2 with more than one GPU cudaGetDeviceCount was seen to fail with "Error 2: out of memory",
depending on the versions of WSL, of Windows and of the driver.

It is likely where cuInit answers 2 under WSL and no limit on the address space explains it.""",
    fix="Use one GPU (CUDA_VISIBLE_DEVICES=0), and update the Windows driver and WSL: wsl --update, wsl --shutdown.",
    likely=True,
    sources=("https://github.com/microsoft/WSL/issues/9092",),
)
def several_under_wsl(machine: Machine) -> Seen | None:
    """WSL 2, answer 2, no limit on the address space, and not a single GPU."""
    if machine.surroundings.wsl != 2 or not fails(machine) or code(machine) != _OUT_OF_MEMORY:
        return None
    if machine.platform.address_space is not None or machine.driver.nvml.count == 1:
        return None
    fix = (
        "Try it with one GPU:",
        *fixes.set_variable(machine, "CUDA_VISIBLE_DEVICES", "0"),
        "And update the driver in Windows, then in PowerShell:",
        "$ wsl --update",
        "$ wsl --shutdown",
    )
    return Seen((answer_line(machine), nvml_line(machine), *relief_line(machine)), fix)


@TABLE.row(
    "X04",
    "the address space of the process is limited",
    about="""CUDA reserves a large range of addresses, far more than it uses. A limit on the address space (ulimit
-v, RLIMIT_AS, set by schedulers, shells and services) makes cuInit answer 2, "out of memory", with the GPU idle; a
limit that is just large enough lets it start and fails at the first kernel.

It is told by the limit of this process: 8 GB are too few, 64 GB were enough.""",
    fix="ulimit -v unlimited before the program starts; in a systemd unit LimitAS=infinity.",
)
def address_space(machine: Machine) -> Seen | None:
    """A limit, and a driver or a first kernel that is out of memory."""
    limit = machine.platform.address_space
    if limit is None or machine.torch_run.cuda_works:
        return None
    starved = any("out of memory" in step.error for step in machine.torch_run.steps) and limit < _ENOUGH
    if not starved and (code(machine) != _OUT_OF_MEMORY or works(machine)):
        return None
    answer = "torch is out of memory at its first kernel" if works(machine) else answer_line(machine)
    hard = "If that is refused, the limit is the administrator's: limits.conf, the unit's LimitAS=, the scheduler."
    fix = ("$ ulimit -v unlimited", hard)
    evidence = (f"the address space of this process is limited to {limit >> 20} MB (ulimit -v)", answer)
    return Seen(evidence, fix, likely=limit >= _ENOUGH)


@TABLE.row(
    "X02",
    "the driver hangs",
    about="""cuInit or NVML does not come back. Usually a process hangs inside the kernel driver, in the state D
that no signal ends, and holds a lock that everybody needs: after a GPU fault, a failed reset, a card that is waking
up. torch.cuda.is_available() then hangs as well, and so does nvidia-smi. A driver that is merely slow (many GPUs,
no persistence mode) comes back after some seconds.

It is told by the deadline that passed, and by processes in that state.""",
    fix="""Find the processes in state D; they cannot be killed. A reset (sudo nvidia-smi -r) or a reboot helps.
Against a slow start: sudo systemctl enable --now nvidia-persistenced.""",
    sources=("https://github.com/rwth-i6/returnn/issues/1756", "https://github.com/torch/cutorch/issues/346"),
)
def hangs(machine: Machine) -> Seen | None:
    """The driver or NVML gave no answer in time: an error, or a warning where CUDA works and NVML hangs."""
    cuda, nvml = machine.driver.cuda.answer.state == "hung", machine.driver.nvml.answer.state == "hung"
    if not (cuda or nvml) or relieved(machine) or (cuda and machine.torch_run.cuda_works):
        return None
    stuck = tuple(f"{process} is stuck in the driver, in state D" for process in machine.kernel.stuck[:4])
    others = ("nvidia-smi and NVML hang too",) if cuda and nvml else ("NVML hangs, and nvidia-smi with it",) * nvml
    lib = taken(machine)
    if cuda and lib is not None and lib.via.startswith("LD_"):
        drop = (f"{lib.path} may be no driver's. Try without it:", *drop_library(machine, lib))
        return Seen((library_line(lib), answer_line(machine), *others, *stuck), drop)
    persist = "nvidia-persistenced" not in machine.kernel.daemons and not machine.surroundings.container
    enable = host_lines(machine, "systemctl enable --now nvidia-persistenced") if persist else ()
    fix = (
        "Look for processes in state D; no signal ends them:",
        "$ ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /^D/'",
        "If there are any, or it stays so, only a reboot helps.",
        fixes.reboot(machine),
        *(("If it is only slow, keep the driver awake:", *enable) if enable else ()),
    )
    evidence = (*((answer_line(machine),) if cuda else ()), *others, *stuck)
    return Seen(evidence, fix, severity="warning" if works(machine) else "error")


TABLE.page(
    "X03",
    "a second attempt to start CUDA hangs",
    about="""Where no device is visible (CUDA_VISIBLE_DEVICES is empty) and a program tries to start CUDA twice in
one process, the second attempt was seen to hang instead of failing like the first. It happens inside a program:
nothing on the machine shows it.""",
    fix="Do not try again in the same process: look once, in a child process if need be, and remember the answer.",
    sources=("https://github.com/pytorch/pytorch/issues/52145",),
)


@TABLE.row(
    "U12",
    "NVML does not work, and CUDA does",
    about="""CUDA and NVML are two libraries. Under WSL, on Jetson, with a part of the driver's packages or in a
sandbox NVML can fail while CUDA is well: nvidia-smi shows an error, and programs that ask NVML whether there is a
GPU say no, vLLM for one: "RuntimeError: Failed to infer device type". torch itself works.

It is told by both answers.""",
    fix="""Nothing is wrong with CUDA. Update the program, or tell it its device where it can be told
(CUDA_VISIBLE_DEVICES); or repair NVML if you need nvidia-smi.""",
    sources=("https://github.com/vllm-project/vllm/issues/49006",),
)
def nvml_only(machine: Machine) -> Seen | None:
    """CUDA works, NVML answers with an error or cannot be loaded: a note."""
    nvml = machine.driver.nvml
    answered = nvml.answer.answered and nvml.init > 0
    if not machine.driver.cuda.works or not (answered or nvml.answer.state in ("not-loadable", "no-symbol", "crashed")):
        return None
    meaning = nvml_result(nvml.init).text if answered else ""
    evidence = (
        nvml_line(machine),
        *filter(None, (meaning,)),
        f"CUDA works and has {machine.driver.cuda.count} devices",
    )
    fix = ("CUDA and torch need nothing. Update a program that asks NVML, or set CUDA_VISIBLE_DEVICES for it.",)
    return Seen(evidence, fix, severity="note")


def _expected(machine: Machine) -> bool:
    """Whether a GPU is surely there; where the bus could not be read, any answer but "no device" speaks for one."""
    if machine.driver.cuda.answer.state == machine.torch_run.answer.state == "crashed":
        return True  # whatever stands in for the driver, it is what ends torch as well
    if absent(machine):
        return False
    traces = machine.hardware.present or host_gpu(machine) or nvml_ok(machine)
    nodes = bool(machine.nodes.found) and not nodes_absent(machine)
    return bool(traces or nodes or code(machine) not in (-1, 0, 100))


@TABLE.row(
    "X08",
    "the CUDA driver does not start, and we could not find out why",
    about="""The driver answered with an error, or crashed, and none of the causes that this program knows fits what
it saw. What was looked at is listed with the finding; so is what could not be found out.""",
    fix="""Look into the kernel's log (sudo dmesg, as root) for lines of NVRM and Xid, and reboot: it clears most
states of the driver that nothing shows. If it stays, report it with the output of transload doctor --json.""",
    symptom=True,
)
def unexplained(machine: Machine) -> Seen | None:
    """CUDA fails where a GPU is; last of all, and told only where no other row explains it."""
    state = machine.driver.cuda.answer.state
    if not fails(machine) or state in ("hung", "unasked") or not _expected(machine) or withheld(machine):
        return None
    if state == "no-library" and machine.surroundings.wsl:
        return None
    told = cu_result(code(machine)).text
    meaning = (f"CUDA says of it: {told}",) if told else ()
    title = {
        "crashed": "the CUDA driver's library crashes, and we could not find out why",
        "no-library": "no libcuda.so.1 is found, and we could not find out why",
    }.get(state, "")
    lib = taken(machine)
    mapped = (library_line(lib),) if lib is not None and state == "crashed" else ()
    evidence = (
        *mapped,
        answer_line(machine),
        *meaning,
        *_ruled_out(machine),
        *_unknown(machine),
        *relief_line(machine),
    )
    if lib is not None and state == "crashed" and (lib.via.startswith("LD_") or absent(machine)):
        return Seen(evidence, ("Try without it:", *drop_library(machine, lib)), title)
    return Seen(evidence, _next(machine), title)


def _ruled_out(machine: Machine) -> Lines:
    """What was looked at and is in order."""
    kernel, lib = machine.kernel, taken(machine)
    nodes = (machine.nodes.at(CONTROL), machine.nodes.at(UVM), *card_nodes(machine))
    sound = machine.nodes.found and all(node.exists and not node.error for node in nodes) and card_nodes(machine)
    same = lib is not None and lib.version and lib.version == kernel.version and mismatched(machine) is None
    facts = (
        f"the kernel driver is loaded ({kernel.version or 'version unknown'})" if kernel.loaded else "",
        "the device nodes are there and open" if sound else "",
        "libcuda.so.1 is of the kernel driver's version" if same else "",
        nvml_line(machine) if machine.driver.nvml.answer.state != "unasked" else "",
    )
    return tuple(filter(None, facts))


def _unknown(machine: Machine) -> Lines:
    """What could not be looked at, and would have told more."""
    unread = machine.kernel.log.reason if isinstance(machine.kernel.log, Unknown) else ""
    log = (f"the kernel's log could not be read: {unread}",) if unread and unread != "not asked" else ()
    return (*log, *(f"not found out, {probe}: {why}" for probe, why in list(machine.problems.items())[:3]))


def _next(machine: Machine) -> Lines:
    if machine.surroundings.wsl:
        return ("Update the driver in Windows, then in PowerShell:", "$ wsl --update", "$ wsl --shutdown")
    return (
        "See what the driver wrote into the kernel's log:",
        *host_lines(machine, "dmesg | grep -iE 'NVRM|nvidia|Xid' | tail -n 40"),
        "A reboot clears most states of the driver that nothing shows:",
        fixes.reboot(machine),
        "If it stays, report it with the output of: transload doctor --json",
    )
