"""What decides on torch's side when a file is loaded: its release, its devices, and the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transload.diagnose.tables import numbers_of
from transload.place.devices import split

if TYPE_CHECKING:
    from transload.diagnose.verdict import Diagnosis
    from transload.place import Devices

__all__ = ["Installed", "installed"]

_TRUE = ("1", "y", "yes", "true")


@dataclass(frozen=True, slots=True)
class Installed:
    """The torch of an environment, as far as it matters here."""

    version: str
    """``2.13.0+cu130``; empty where there is no torch, or none whose version could be read."""
    counts: dict[str, int] = field(default_factory=dict)
    """Devices of each kind that torch has: ``{"cuda": 1}``; a kind that does not work is left out."""
    sure: bool = True
    """Whether the counts are certain."""
    environ: Mapping[str, str] = field(default_factory=dict)
    absent: Collection[str] = ()
    """Packages a file asks for that are not installed."""

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers."""
        return numbers_of(self.version)

    @property
    def weights_only(self) -> bool:
        """What ``weights_only`` is where the caller of ``torch.load`` does not say.

        >>> Installed("2.5.1").weights_only, Installed("2.13.0+cpu").weights_only
        (False, True)
        """

        def forced(name: str) -> bool:
            return self.environ.get(name, "0").lower() in _TRUE

        if forced("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
            return True
        return self.release >= (2, 6) and not forced("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


def installed(
    diagnosis: Diagnosis, devices: Devices, environ: Mapping[str, str], absent: Collection[str] = ()
) -> Installed:
    """The torch that the doctor found, with the devices it would have."""
    first = diagnosis.machine.torch.first
    counts = Counter(split(device.name)[0] for device in devices.available if device.name != "cpu")
    version = first.version if first is not None and first.known else ""
    return Installed(version, dict(counts), _is_sure(diagnosis), environ, absent)


def _is_sure(diagnosis: Diagnosis) -> bool:
    """Whether it is known what ``torch.cuda.is_available()`` says: a card that computes nothing may still be there."""
    machine = diagnosis.machine
    first = machine.torch.first
    if machine.torch.shadow or machine.driver.cuda.answer.state in ("hung", "crashed"):
        return False
    return first is None or first.cpu_only or not machine.driver.cuda.works or diagnosis.status != "broken"
