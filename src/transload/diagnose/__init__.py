"""Why PyTorch does not see the GPU: probes examine the host, and rules judge the facts and name one cause.

The package is not called ``doctor``, which is the name of the public function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.diagnose.report import Diagnosis

__all__ = ["doctor"]


def doctor(
    python: str = "", *, torch: bool = True, timeout: float = 0.0, progress: Callable[[str], object] | None = None
) -> Diagnosis:
    """Examine this machine and the environment of ``python``, by default this interpreter or one nearby that has torch.

    Nothing is changed and torch is not imported into this process; with ``torch=False`` it is not run at all.
    ``timeout`` is the most seconds that torch may take in its child process; by default it is killed after 60, or after
    15 without doing anything. ``progress`` is called with a few words on the current step.

    >>> transload.doctor().status  # doctest: +SKIP
    'ok'
    """
    from transload.diagnose.probes import probe

    machine = probe(python, torch=torch, timeout=timeout, progress=progress or (lambda _: None))
    from transload.diagnose.report import judge_machine  # the probes have imported it while they waited

    return judge_machine(machine)
