"""How to start a container or a job with a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["give_gpu", "give_slurm"]

Lines = tuple[str, ...]


def give_gpu(machine: Machine) -> Lines:
    """How to start this kind of container or job with a GPU."""
    around = machine.surroundings
    if around.kubernetes:
        return (
            "Ask for a GPU in the pod's container spec:",
            "| resources: {limits: {nvidia.com/gpu: 1}}",
            "Where the cluster's default runtime is not NVIDIA's, also set runtimeClassName: nvidia.",
        )
    if around.slurm and not around.container:
        return give_slurm(machine)
    return _GIVE.get(around.container, _give_docker)()


def give_slurm(machine: Machine) -> Lines:
    """How to ask Slurm for a GPU, and how to hand it on to the container that the job runs in."""
    around = machine.surroundings
    inner = _GIVE.get(around.container, _give_docker)() if around.container else ()
    return (
        "Ask Slurm for a GPU:",
        "$ srun --gres=gpu:1 --pty bash",
        "Or in the batch script:",
        "| #SBATCH --gres=gpu:1",
        *(("Then hand it on to the container:", *inner) if inner else ()),
    )


def _give_docker() -> Lines:
    return (
        "Start the container with its GPUs:",
        "$ docker run --gpus all …",
        "In a compose file, under the service:",
        "| deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}",
        "The host needs the nvidia-container-toolkit for that.",
    )


def _give_podman() -> Lines:
    return (
        "On the host, once, and again after each driver update (needs root):",
        "$ sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        "Then start the container with its GPUs:",
        "$ podman run --device nvidia.com/gpu=all …",
    )


def _give_apptainer() -> Lines:
    return ("Start it with the host's driver:", "$ apptainer exec --nv IMAGE COMMAND")


def _give_lxc() -> Lines:
    return (
        "On the host, give the container the device nodes (major 195, and that of nvidia-uvm in /proc/devices):",
        "$ lxc config device add CONTAINER gpu gpu",
        "Inside, install the driver's libraries in the host's version, without its kernel module.",
    )


_GIVE = {
    "podman": _give_podman,
    "apptainer": _give_apptainer,
    "singularity": _give_apptainer,
    "lxc": _give_lxc,
}
