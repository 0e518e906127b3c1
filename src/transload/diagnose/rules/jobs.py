"""A scheduler, a service or a sandbox that keeps the GPU from the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import (
    CONTROL,
    UVM,
    absent,
    answer_line,
    broken,
    card_nodes,
    code,
    fails,
    granted,
    nodes_absent,
    unmet,
)

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["TABLE", "sandboxed", "slurm", "without_nodes"]

TABLE = Table("surroundings")


def without_nodes(machine: Machine) -> bool:
    """Whether this process was given no node of any card. A forbidden /dev/nvidiactl alone was made by the library."""
    control = machine.nodes.at(CONTROL)
    made = control.error == "EPERM" and not (card_nodes(machine) or machine.nodes.at(UVM).exists)
    return broken(machine) and (nodes_absent(machine) or made)


def _forbidden(machine: Machine) -> str:
    """The node that a device cgroup forbids, if one does."""
    nodes = (machine.nodes.at(CONTROL), *card_nodes(machine))
    return next((node.path for node in nodes if node.exists and node.error == "EPERM"), "")


@TABLE.row(
    "C11",
    "the sandbox does not pass the GPU on",
    about="""gVisor, Kata and similar runtimes put a kernel of their own between the process and the machine.
Without support for the GPU switched on there (gVisor: nvproxy, for a list of driver versions), calls into the
driver fail: cuInit answers 304 "OS call failed or operation not supported on this OS", 100 or 999.

It is likely, not certain: what the sandbox supports cannot be seen from inside.""",
    fix="""gVisor: start runsc with --nvproxy and a driver version that "runsc nvproxy list-supported-drivers"
names. Kata: a runtime class with GPU passthrough. Or run without the sandbox.""",
    layer="driver",  # after the nodes: where one of them is at fault, the sandbox is not
    likely=True,
    sources=("https://github.com/google/gvisor/issues/9846", "https://github.com/google/gvisor/issues/10605"),
)
def sandboxed(machine: Machine) -> Seen | None:
    """A sandbox, a GPU in sight, and an answer that a sandbox gives; not one with a driver of its own inside."""
    sandbox = machine.surroundings.sandbox
    if (
        (machine.kernel.loaded and sandbox != "gvisor")
        or not sandbox
        or not broken(machine)
        or absent(machine)
        or code(machine) not in (100, 304, 999)
    ):
        return None
    steps = {
        "gvisor": (
            "Start it with GPU support, and a driver version from the list that this prints on the host:",
            "$ runsc nvproxy list-supported-drivers",
            "$ docker run --runtime=runsc --gpus all …   # runsc configured with --nvproxy",
        )
    }
    fix = steps.get(sandbox, ("Use a runtime class that passes the GPU on, or run without the sandbox.",))
    return Seen((f"the kernel is {sandbox}'s", answer_line(machine)), fix)


@TABLE.row(
    "C09",
    "Slurm gave this job no GPU",
    about="""On a Slurm cluster a job sees only the GPUs it asked for. Without a request the nodes are forbidden
(EPERM), or CUDA_VISIBLE_DEVICES is set to nothing or to NoDevFiles: torch says "No CUDA GPUs are available" on a
machine full of them. A step started by srun without --gres inside a job that has GPUs meets the same.

It is told by SLURM_JOB_ID, the lack of SLURM_JOB_GPUS, and EPERM on the nodes.""",
    fix="""Ask for one: srun --gres=gpu:1 …, or #SBATCH --gres=gpu:1 in the script; some clusters also want a
partition. Login nodes usually have none.""",
    avoid="Unsetting CUDA_VISIBLE_DEVICES: where it works, it takes a card that belongs to somebody else's job.",
    sources=("https://github.com/NVIDIA/pyxis/issues/47",),
)
def slurm(machine: Machine) -> Seen | None:
    """A job whose nodes are forbidden, or that was given no GPU and has an empty CUDA_VISIBLE_DEVICES or no nodes."""
    if not machine.surroundings.slurm or not fails(machine) or absent(machine):
        return None
    visible = machine.variables.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
    forbidden = _forbidden(machine)
    ungranted = not granted(machine)
    bare = without_nodes(machine) and not machine.surroundings.container
    if not ((forbidden and broken(machine)) or (ungranted and (hidden or bare))):
        return None
    job = f"this is Slurm job {machine.variables.get('SLURM_JOB_ID') or '?'}"
    facts = (
        "SLURM_JOB_GPUS and SLURM_GPUS_ON_NODE are not set" if ungranted else "",
        f"opening {forbidden} fails with EPERM: the job's device cgroup forbids it" if forbidden else "",
        f"CUDA_VISIBLE_DEVICES is {visible!r}" if hidden else "",
    )
    fix, severity = fixes.give_slurm(machine), unmet(machine)
    return Seen((job, *filter(None, facts), answer_line(machine)), fix, severity=severity, likely=not forbidden)


@TABLE.row(
    "D05",
    "the systemd service is not allowed to use the GPU",
    about="""CUDA works in a shell and not in the service: the unit has PrivateDevices=yes, which gives it a /dev
without hardware, or a DeviceAllow= list that lacks NVIDIA's nodes, so that opening them fails with EPERM.

It is told by the unit in /proc/self/cgroup and by what /dev holds.""",
    fix="""In the unit: PrivateDevices=no, and where DevicePolicy is closed or strict DeviceAllow= lines for
/dev/nvidiactl, /dev/nvidia0 and /dev/nvidia-uvm (under WSL /dev/dxg).""",
    sources=(
        "https://github.com/NixOS/nixpkgs/issues/331069",
        "https://github.com/NixOS/nixpkgs/issues/363357",
        "https://github.com/jupyterhub/systemdspawner/issues/67",
    ),
)
def service(machine: Machine) -> Seen | None:
    """A service with a private /dev without the nodes, or with nodes that its cgroup forbids."""
    around = machine.surroundings
    if not around.service or around.container or around.slurm or not broken(machine) or absent(machine):
        return None
    dxg = around.wsl == 2 and not machine.nodes.at("/dev/dxg").exists
    private = around.private_dev and (nodes_absent(machine) or dxg)
    forbidden = _forbidden(machine)
    if not (private or forbidden):
        return None
    why = "its /dev holds no devices of hardware (PrivateDevices=yes)" if private else f"opening {forbidden}: EPERM"
    names = ("dxg",) if around.wsl else ("nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-uvm-tools")
    fix = (
        fixes.sudo(machine, f"systemctl edit {around.service}"),
        "| [Service]",
        "| PrivateDevices=no",
        *(f"| DeviceAllow=/dev/{name} rw" for name in names),
        fixes.sudo(machine, f"systemctl restart {around.service}"),
    )
    return Seen((f"the process runs in the unit {around.service}", why, answer_line(machine)), fix)
