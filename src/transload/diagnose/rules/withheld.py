"""Whether a process was given no card, and its torch is built for none: a set-up that agrees with itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose.rules.jobs import slurm
from transload.diagnose.rules.kernel import vfio
from transload.diagnose.rules.signs import unmet
from transload.diagnose.rules.surroundings import apptainer, no_devices, pod, void

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["withheld"]


def withheld(machine: Machine) -> bool:
    """Whether a container, a pod, a job or a host of virtual machines has no card, and a torch without CUDA."""
    rows = (slurm, pod, void, apptainer, no_devices, vfio)
    return unmet(machine) == "note" and any(check(machine) for check in rows)
