"""The chain from the card to the kernel that runs on it: what was seen of each link, in a few words.

Nothing is judged here: a link is broken where the thing itself was seen to fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from transload.machine import Unknown
from transload.render.escape import printable
from transload.render.sizes import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transload.machine import Answer, Machine, PciDevice, TorchInstall

__all__ = ["ORDER", "Link", "State", "cards", "chain", "devices", "gib", "torch_words"]

State = Literal["ok", "broken", "idle", "unknown"]
Seen = tuple[State, str] | None

_SELDOM = frozenset({"CUDA_HOME", "CUDA_PATH", "PYTHONPATH"})  # set on many machines, and no matter to a wheel
_VALUE = 60
_ERROR = 200


class Link(NamedTuple):
    """One layer as it was seen. ``idle``: not reached, or there is nothing to do for it."""

    layer: str
    state: State
    text: str = ""


def chain(machine: Machine) -> list[Link]:
    """The links of a machine, hardware first, without those it does not have.

    >>> from transload.machine import Machine
    >>> [link.layer for link in chain(Machine())][:2]
    ['hardware', 'variables']
    """
    seen = ((layer, look(machine)) for layer, look in _LOOKS.items())
    return [Link(layer, found[0], found[1]) for layer, found in seen if found is not None]


def cards(machine: Machine) -> str:
    """The NVIDIA cards in words: as NVML names them, else the kernel, else CUDA, else by their number on the bus."""
    nvml, cuda = machine.driver.nvml.gpus, machine.driver.cuda.gpus
    named = [_card(gpu.name, gpu.capability, gpu.memory) for gpu in nvml if gpu.name]
    named = named or [printable(gpu.model) for gpu in machine.kernel.gpus if gpu.model]
    named = named or [_card(gpu.name, gpu.capability, gpu.memory) for gpu in cuda]
    named = named or [_by_number(gpu) for gpu in machine.hardware.gpus]
    if named:
        return ", ".join(f"{number} × {name}" if number > 1 else name for name, number in _counted(named).items())
    if machine.hardware.dxg:
        return "through Windows (/dev/dxg)"
    return printable(machine.hardware.tegra)


def _card(name: str, capability: tuple[int, ...], memory: int) -> str:
    level = f" ({'.'.join(map(str, capability))})" if capability else ""
    return f"{printable(name)}{level}{f', {gib(memory)}' if memory > 0 else ''}"


def _by_number(device: PciDevice) -> str:
    from transload.diagnose.tables import chip_of

    chip = chip_of(device.device)
    number = f"10de:{device.device:04x} at {printable(device.address)}"
    return f"{chip.code} ({chip.generation}), {number}" if chip else f"NVIDIA {number}"


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def gib(nbytes: int) -> str:
    """Memory as nvidia-smi and torch count it.

    >>> gib(150_754_820_096)
    '140 GiB'
    """
    value = nbytes / 2**30
    return f"{value:.0f} GiB" if value >= 9.95 else f"{value:.1f} GiB"


def devices(machine: Machine) -> str:
    """What torch computed on: ``NVIDIA H200`` of ``NVIDIA H200 (9, 0)``."""
    names = dict.fromkeys(printable(device.partition(" (")[0]) for device in machine.torch_run.devices)
    return ", ".join(names) or "the GPU"


def torch_words(install: TorchInstall) -> str:
    """A torch by its version, as people write it."""
    return f"torch {printable(install.version or install.dist_version or 'of unknown version')}"


def _there(machine: Machine) -> bool:
    """Whether there is a GPU, so that the layers above it matter."""
    return machine.hardware.present or machine.driver.cuda.works or machine.driver.nvml.count > 0


def _hardware(machine: Machine) -> Seen:
    if _there(machine):
        return "ok", cards(machine)
    others = ", ".join(printable(" ".join(filter(None, (each.name, each.detail)))) for each in machine.accelerators)
    if isinstance(machine.hardware.pci, Unknown):
        return "unknown", printable(machine.hardware.pci.reason)
    return "idle", f"no NVIDIA GPU; {others}" if others else "no NVIDIA GPU"


def _kernel(machine: Machine) -> Seen:
    kernel = machine.kernel
    if not _there(machine):
        return None
    if kernel.loaded:
        return "ok", printable(", ".join(filter(None, (kernel.version, kernel.flavour))) or "loaded")
    if machine.surroundings.wsl or machine.hardware.dxg:
        return "ok", "provided by Windows"
    if machine.driver.cuda.works:
        return "ok", "not visible from here, but works"
    if isinstance(kernel.loaded, Unknown):
        return "unknown", printable(kernel.loaded.reason)
    foreign = [name for name in kernel.modules if not name.startswith("nvidia")]
    return "broken", printable(f"not loaded{f'; {foreign[0]} is' if foreign else ''}")


def _surroundings(machine: Machine) -> Seen:
    around = machine.surroundings
    words = (
        f"{around.container} container" if around.container not in ("", "container") else around.container,
        "Kubernetes" if around.kubernetes else "",
        "Slurm job" if around.slurm else "",
        f"WSL {around.wsl}" if around.wsl else "",
        f"service {around.service}" if around.service else "",
        around.notebook,
        around.sandbox,
    )
    text = ", ".join(filter(None, words))
    return ("ok", printable(text)) if text else None


def _nodes(machine: Machine) -> Seen:
    if not _there(machine):
        return None
    start = "/dev/dxg" if machine.surroundings.wsl or machine.hardware.dxg else "/dev/nvidia"
    nodes = [n for n in machine.nodes.found if n.path.startswith(start) and "nvidia-caps" not in n.path]
    bad = [node for node in nodes if node.error]
    if bad and not machine.driver.cuda.works:
        return "broken", printable(", ".join(f"{node.path}: {node.error}" for node in bad))
    good = [node.path for node in nodes if not node.error]
    return ("ok", printable(", ".join(good))) if good else ("unknown", "not examined")


def _libraries(machine: Machine) -> Seen:
    if not _there(machine):
        return None
    libraries, mapped = machine.driver.libraries, machine.driver.cuda.library
    taken = libraries.libcuda
    if taken is None:
        if mapped:
            return "ok", printable(mapped)
        if isinstance(libraries.cuda, Unknown):
            return "unknown", printable(libraries.cuda.reason)
        return "broken", "libcuda.so.1 is not found"
    path = printable(mapped or taken.target or taken.path)
    if taken.problem:
        return "broken", f"{path}: {printable(taken.problem)}"
    kind = {"stub": ", a stub", "compat": ", from a compat directory", "wsl": "", "driver": "", "other": ""}[taken.kind]
    return "broken" if taken.kind == "stub" else "ok", f"{path}{kind}"


def _driver(machine: Machine) -> Seen:
    from transload.diagnose.tables import cu_result, cuda_text

    cuda = machine.driver.cuda
    if not _there(machine):
        return None
    if cuda.works:
        return "ok", f"CUDA {cuda_text(cuda.version)}, {plural(cuda.count, 'GPU')}"
    if not cuda.answer.answered:
        return _silence(cuda.answer), _answer(cuda.answer.state, cuda.answer.detail)
    if cuda.init:
        return "broken", f"cuInit returned {cuda.init} {cu_result(cuda.init).name}".rstrip()
    return "broken", "starts, but has no GPU for this process"


def _silence(answer: Answer) -> State:
    """What it means that there is no answer: nobody asked, or nobody could, or it went wrong."""
    if answer.state == "unasked":
        return "unknown" if answer.detail else "idle"
    return "idle" if answer.state == "no-library" else "broken"


def _answer(state: str, detail: str) -> str:
    words = {
        "unasked": "not asked",
        "no-library": "no library found",
        "not-loadable": "its library cannot be loaded",
        "no-symbol": "its library lacks a function",
        "hung": "no answer in time",
        "crashed": "it crashed",
    }[state]
    return f"{words}: {printable(detail, _ERROR)}" if detail and state != "no-library" else words


def _variables(machine: Machine) -> Seen:
    from transload.diagnose.probes.surroundings import DECIDING

    hiding = {"PYTHONPATH"} if machine.torch.shadow_via == "PYTHONPATH" else set()  # which hides torch
    told = DECIDING - (_SELDOM - hiding)
    values = {name: value for name, value in machine.variables.values.items() if name in told}
    shown = [printable(f"{name}={value}", _VALUE) for name, value in values.items()]
    return "broken" if hiding else "ok", ", ".join(shown) or "none that affects CUDA or torch"


def _python(machine: Machine) -> Seen:
    python = machine.python
    if python.problem:
        return "unknown", printable(python.problem)
    if not python.version:
        return "unknown", "not asked"
    where = f" in {python.prefix}" if python.prefix else ""
    return "ok", printable(f"{python.version}{where}{f', {python.environment}' if python.environment else ''}")


def _build(machine: Machine) -> Seen:
    torch = machine.torch
    if torch.shadow:
        return "broken", printable(f"{torch.shadow} is imported instead")
    if isinstance(torch.installs, Unknown):
        return "unknown", printable(torch.installs.reason)
    if torch.first is None:
        return "broken", "torch is not installed"
    return "ok", f"{torch_words(torch.first)}, {_built_for(torch.first)}"


def _built_for(install: TorchInstall) -> str:
    if not install.known:
        return printable(install.problem or "its version.py cannot be read")
    kinds = (("CUDA", install.cuda), ("ROCm", install.hip), ("XPU", install.xpu))
    return printable(" and ".join(f"for {kind} {version}" for kind, version in kinds if version)) or "for the CPU only"


def _torch_libraries(machine: Machine) -> Seen:
    first, libraries = machine.torch.first, machine.torch_libraries
    if first is None or not first.cuda:
        return None
    missing = [each.name for each in libraries.needed if not each.path]
    if missing:
        return "broken", printable(f"not found: {', '.join(missing)}")
    if libraries.unresolved:
        return "broken", printable(f"undefined: {libraries.unresolved[0]}")
    if libraries.needed:
        return "ok", f"all {len(libraries.needed)} NVIDIA libraries found"
    reason = libraries.architectures.reason if isinstance(libraries.architectures, Unknown) else ""
    return ("unknown", printable(reason)) if reason else ("ok", "bundled with torch")


def _fit(machine: Machine) -> Seen:
    from transload.diagnose.tables import cuda_text

    first, cuda = machine.torch.first, machine.driver.cuda
    if first is None or not first.cuda or not _there(machine):
        return None
    if not cuda.works:
        return "idle", "not checked"
    levels = {"sm_" + "".join(map(str, level)): None for level in machine.capabilities.values()}
    return "ok", printable(
        f"torch for CUDA {first.cuda}, driver for {cuda_text(cuda.version)}, {', '.join(levels)}".rstrip(", ")
    )


def _run(machine: Machine) -> Seen:
    run = machine.torch_run
    if run.answer.state == "unasked":
        why = f": {printable(run.answer.detail, _ERROR)}" if run.answer.detail else ""
        return _silence(run.answer), f"not run{why}"
    failed = next((step for step in run.steps if not step.ok), None)
    if failed is not None:
        return "broken", printable(f"{failed.name}: {failed.error}", _ERROR)
    if not run.answer.answered:
        return "broken", _answer(run.answer.state, run.answer.detail)
    if run.cuda_works:
        done = ", ".join(step.name for step in run.steps if step.name not in ("import", "available", "init"))
        return "ok", f"{printable(done)} on {devices(machine)}"
    if _there(machine):
        return "broken", "torch.cuda.is_available() is False"
    return "ok", printable(f"works with {', '.join(run.backends)}") if run.backends else "works on the CPU"


def _extensions(machine: Machine) -> Seen:
    names = [f"{each.package} {each.version}".strip() for each in machine.extensions]
    return ("ok", printable(", ".join(names), _ERROR)) if names else None


_LOOKS: dict[str, Callable[[Machine], Seen]] = {
    "hardware": _hardware,
    "kernel": _kernel,
    "surroundings": _surroundings,
    "nodes": _nodes,
    "libraries": _libraries,
    "driver": _driver,
    "variables": _variables,
    "python": _python,
    "build": _build,
    "torch-libraries": _torch_libraries,
    "fit": _fit,
    "run": _run,
    "extensions": _extensions,
}
ORDER: tuple[str, ...] = tuple(_LOOKS)
"""The layers as they are shown: from the card upwards, not in the order to fix them."""
