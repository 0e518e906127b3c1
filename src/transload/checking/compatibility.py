"""Whether a file depends on CUDA at all, and if so, whether the CUDA of this machine will do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transload.diagnose.tables import cuda_text, parse_version, runs_on
from transload.errors import TransloadError

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint, Part
    from transload.machine import Machine

__all__ = ["Compatibility", "compatibility", "is_cuda_compatible", "raw_bytes"]

_TENSORS = "tensors carry no CUDA version: they load under any, and without CUDA"
_PTX_HEAD = 4096
_PTX_VERSION = re.compile(rb"^\.version\s+(\d{1,2})\.(\d{1,2})", re.MULTILINE)
# PTX ISA → the first CUDA whose driver compiles it: the release history in NVIDIA's PTX ISA manual. From 7.0 on the
# number has followed that of CUDA, except for these.
_PTX_CUDA = {(8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)}
_PTX_MAJOR = {7: 11, 8: 12, 9: 13}
_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Compatibility:
    """An answer with its reason; true where the file can be used here as far as CUDA is concerned.

    ``origin`` are the versions that the file records of where it was made; hardly any file records one.
    """

    compatible: bool
    reason: str
    evidence: tuple[str, ...] = ()
    origin: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self.compatible

    def __str__(self) -> str:
        """The reason, then what shows it."""
        return "\n  ".join((f"{'yes' if self.compatible else 'no'}: {self.reason}", *self.evidence))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "compatible": self.compatible,
            "reason": self.reason,
            "evidence": list(self.evidence),
            "origin": dict(self.origin),
        }


def is_cuda_compatible(path: str | os.PathLike[str], *, machine: Machine | None = None) -> Compatibility:
    """Whether a checkpoint is compatible with the CUDA of this machine, or of another one that was examined.

    Tensors carry no CUDA version. Only compiled parts depend on one: kernels of an AOTInductor package run on GPUs of
    their architecture alone, and PTX needs a driver that can compile it.

    >>> transload.is_cuda_compatible("model.pt").reason  # doctest: +SKIP
    'tensors carry no CUDA version: they load under any, and without CUDA'
    """
    from transload.judge import inspect

    if machine is None:
        from transload.diagnose.probes import probe

        machine = probe(torch=False)
    return compatibility(inspect(path), machine)


def compatibility(checkpoint: Checkpoint, machine: Machine) -> Compatibility:
    """The same for a file and a machine that were examined already."""
    recorded = checkpoint.written_by.recorded
    origin = dict(recorded)
    compared = tuple(_compared(origin, machine))
    kernels = [kernel for part in checkpoint.parts for kernel in _kernels(checkpoint, part)]
    if not kernels:
        reason = _TENSORS if checkpoint.tensors else "there is no code for a GPU in it"
        return Compatibility(True, reason, compared, recorded)
    driver = machine.driver.cuda
    failing = {
        name: [kernel for kernel in kernels if not kernel.runs(card, driver.version)]
        for name, card in machine.capabilities.items()
    }
    evidence = [*_listed(kernels)]
    for name, lost in failing.items():
        card = ".".join(map(str, machine.capabilities[name]))
        evidence.append(f"{name}, compute capability {card}: {f'does not run {lost[0].name}' if lost else 'runs'}")
    evidence += compared
    targets = ", ".join(sorted({code for kernel in kernels for code in kernel.codes})[:8])
    against = _other_processor(checkpoint, machine) or _older_driver(origin, machine)
    if against or not failing or not driver.works:
        why = against or "there is no NVIDIA GPU here that works"
        return Compatibility(False, f"it holds compiled code for {targets}, and {why}", tuple(evidence), recorded)
    able = [name for name, lost in failing.items() if not lost]
    reason = f"it holds compiled code for {targets}, which {'runs on' if able else 'does not run on'}"
    return Compatibility(bool(able), f"{reason} {' or '.join(able or failing)}", tuple(evidence), recorded)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel, or all that a library holds: it runs on a card if one of its codes does."""

    name: str
    codes: tuple[str, ...]
    cuda: int = 0
    """The CUDA version that its PTX needs of the driver, numbered as drivers do: ``12080``."""

    def runs(self, card: tuple[int, int], driver: int) -> bool:
        able = not driver or self.cuda <= driver
        return able and any(runs_on(code, card) for code in self.codes)


def _kernels(checkpoint: Checkpoint, part: Part) -> Iterator[_Kernel]:
    facts = dict(part.facts)
    if part.kind == "PTX":
        target = facts.get("target", "").replace("sm_", "compute_")
        yield _Kernel(part.name, (target,), _ptx_cuda(checkpoint, part.name))
    elif part.kind in ("cubin", "AMD GPU code", "Intel GPU code", "GPU code for several architectures"):
        yield _Kernel(part.name, (facts.get("target", part.kind),))
    elif "GPU code inside" in facts:
        yield _Kernel(part.name, tuple(facts["GPU code inside"].split(", ")))


def _ptx_cuda(checkpoint: Checkpoint, name: str) -> int:
    """The CUDA version that PTX was written for; 0 where it does not say."""
    record = next((record for record in checkpoint.records if record.name == name), None)
    if record is None or record.offset is None or record.method:
        return 0
    found = _PTX_VERSION.search(raw_bytes(checkpoint.path, record.offset, min(record.stored, _PTX_HEAD)))
    if found is None:
        return 0
    written = int(found[1]), int(found[2])
    major, minor = _PTX_CUDA.get(written, (_PTX_MAJOR.get(written[0], 0), written[1]))
    return major * 1000 + minor * 10


def raw_bytes(path: str, start: int, count: int) -> bytes:
    """Up to ``count`` bytes of a file from ``start`` on; none if it cannot be read."""
    from transload.io.sources import open_source

    try:
        with closing(open_source(path)) as source:
            return source.read(start, count)
    except TransloadError:
        return b""


def _listed(kernels: list[_Kernel]) -> Iterator[str]:
    for codes in dict.fromkeys(kernel.codes for kernel in kernels):
        same = [kernel for kernel in kernels if kernel.codes == codes]
        yield f"{', '.join(codes)}: {same[0].name}{f' and {len(same) - 1} more' if len(same) > 1 else ''}"


def _other_processor(checkpoint: Checkpoint, machine: Machine) -> str:
    """Why the library of a package does not run here."""
    here = _PROCESSORS.get(machine.platform.machine.lower(), machine.platform.machine)
    built = {dict(part.facts).get("machine", here) for part in checkpoint.parts if part.kind == "library"}
    other = sorted(built - {here})
    return f"its library is for {other[0]} processors, not {here}" if other else ""


def _older_driver(origin: dict[str, str], machine: Machine) -> str:
    """Why the driver does not run what the recorded torch has compiled: its CUDA is of an earlier generation."""
    build = re.search(r"\+cu(\d{2})(\d)", origin.get("torch", ""))
    recorded = re.match(r"\d{1,2}\.\d", origin.get("cuda", ""))
    cuda = recorded[0] if recorded else f"{build[1]}.{build[2]}" if build else ""
    here = machine.driver.cuda.version
    if not cuda or not here or parse_version(cuda)[0] <= here // 1000:
        return ""
    return f"it was made with CUDA {cuda}, while this driver stops at {cuda_text(here)}"


def _compared(origin: dict[str, str], machine: Machine) -> Iterator[str]:
    """What the file records of its origin, beside what is here."""
    torch = machine.torch.first
    here = {
        "torch": torch.version if torch else "",
        "cuda": torch.cuda if torch else "",
        "driver": machine.driver.nvml.driver or machine.kernel.version,
        "gpu": ", ".join(dict.fromkeys(gpu.name for gpu in machine.driver.cuda.gpus)),
    }
    for name, value in origin.items():
        yield f"made with {name} {value}{f'; here {here[name]}' if here.get(name) else ''}"
    if not origin:
        yield "no origin is recorded in the file"
