"""The report of ``transload doctor``: the verdict and the fix first, then everything that led to them."""

from __future__ import annotations

from dataclasses import Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from transload.diagnose.rules.rule import LAYERS
from transload.machine import Machine, Unknown
from transload.render.lines import BLANK, GLUE, Block, Line, Prose, heading, layout, note, plain
from transload.render.words import plural, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from transload.diagnose.verdict import Diagnosis
    from transload.findings import Finding
    from transload.machine import Answer, PciDevice, TorchInstall

__all__ = [
    "ORDER",
    "SOURCES",
    "Link",
    "State",
    "as_text",
    "cards",
    "chain",
    "devices",
    "facts",
    "gib",
    "headline",
    "page",
    "report",
    "source_of",
    "steps",
    "torch_words",
]


_WORDS = {layer.name: layer.words for layer in LAYERS}
_WIDTH = max(map(len, _WORDS.values()))
_MARKS = {"ok": ("✓", "good"), "broken": ("✗", "bad"), "idle": ("–", "dim"), "unknown": ("?", "trust")}
_SIGNS = {"warning": ("!", "trust"), "note": ("·", "dim")}
_EVIDENCE = 8
_ROLE = {"ok": "good", "no-gpu": "good", "degraded": "trust", "broken": "bad"}


def as_text(diagnosis: Diagnosis) -> str:
    """The report as a pipe gets it: redacted but for what a fix says to type, without colour."""
    from transload.diagnose.redact import names_here, redacted
    from transload.render.lines import Style

    blocks = report(redacted(diagnosis, names_here(), runnable=True))
    return "\n".join(plain(line) for line in layout(blocks, Style()))


def report(diagnosis: Diagnosis) -> Iterator[Block]:
    """Everything ``transload doctor`` says when nothing special is asked for."""
    yield Prose(headline(diagnosis))
    causes = [finding for finding in diagnosis.findings if finding.severity == "error"]
    rest = [finding for finding in diagnosis.findings if finding.severity != "error"]
    if diagnosis.cause is not None:
        first, *more = (*causes, *rest)
        yield from _explained(first)
        causes, rest = [f for f in more if f in causes], [f for f in more if f not in causes]
    for place, finding in enumerate(causes, 2):
        yield BLANK
        yield Prose((*_titled(finding), _code(finding)), lead=((f"Then {place}: ", "bad"),))
        yield from _explained(finding)
    for finding in rest:
        yield BLANK
        yield from _remark(finding)
    yield from _links(diagnosis)
    yield from _unknown(diagnosis)
    yield from _hints(diagnosis)


def headline(diagnosis: Diagnosis) -> Line:
    """The verdict in one sentence."""
    role = _ROLE[diagnosis.status]
    if diagnosis.cause is None:
        return ((_well(diagnosis), role),)
    errors = sum(finding.severity == "error" for finding in diagnosis.findings)
    subject = f"{_subject(diagnosis)}{f', for {errors} reasons; the first' if errors > 1 else ''}"
    joint = ", " if diagnosis.cause.title.startswith("probably: ") else ": "
    return ((subject, role), (joint, role), *_titled(diagnosis.cause), _code(diagnosis.cause))


def _subject(diagnosis: Diagnosis) -> str:
    """What does not work, by what was seen and not by what was concluded."""
    machine, run = diagnosis.machine, diagnosis.machine.torch_run
    if run.cuda_works:
        return "CUDA works, but there is a problem"
    if diagnosis.status == "degraded":
        return "torch works, but there is a problem" if run.answer.answered else "There is a problem"
    if _is_unexamined(diagnosis):
        return "It is unknown whether CUDA works"
    imported = run.step("import")
    absent = machine.torch.first is None and not isinstance(machine.torch.installs, Unknown)
    if absent or machine.torch.shadow or (run.answer.state != "unasked" and not (imported and imported.ok)):
        return "torch does not work"
    if machine.driver.cuda.works or not machine.hardware.present:
        return "torch cannot use the GPU" if machine.hardware.present else "torch does not work as it should"
    return "CUDA does not work"


def _is_unexamined(diagnosis: Diagnosis) -> bool:
    """Whether the cause is that nothing could be asked."""
    return diagnosis.cause is not None and diagnosis.cause.code == "X13"


def _well(diagnosis: Diagnosis) -> str:
    """What to say of a machine that has nothing to repair."""
    machine, run = diagnosis.machine, diagnosis.machine.torch_run
    first = machine.torch.first
    torch = f"torch {printable(run.version)}" if run.version else torch_words(first) if first else "torch"
    if run.cuda_works:
        return f"CUDA works: {torch} computed on {devices(machine)}"
    if diagnosis.status == "no-gpu":
        unread = isinstance(machine.hardware.pci, Unknown)
        given = "was given to this process" if machine.hardware.present else ""
        where = given or ("was found" if unread else "in this machine")
        works = f"; {torch} works on the CPU" if run.answer.answered else f"; {torch} is installed" if first else ""
        return f"No GPU {where}{works}. Nothing to repair."
    if machine.driver.cuda.works:
        return f"The CUDA driver works, on {cards(machine)}; torch was not run"
    return _elsewhere(diagnosis, torch)


def _elsewhere(diagnosis: Diagnosis, torch: str) -> str:
    """What to say where there is an accelerator, and CUDA is not what works on it."""
    run = diagnosis.machine.torch_run
    others = ", ".join(printable(each.name or each.kind) for each in diagnosis.machine.accelerators if each.usable)
    if run.backends:
        return f"{torch} works with {' and '.join(map(printable, run.backends))}{f', on {others}' if others else ''}"
    if others:
        return f"No NVIDIA GPU, but {others}; no problem found with {torch}"
    return "No cause was found"


def _titled(finding: Finding) -> Line:
    return ((printable(finding.title, None), "strong"),)


def _code(finding: Finding) -> tuple[str, str]:
    return (f"{GLUE}{GLUE}[{finding.code}]", "dim")


def _explained(finding: Finding) -> Iterator[Block]:
    """The evidence for a cause, and how to repair it."""
    yield from _evidence(finding, "  ")
    if finding.fix:
        yield BLANK
        yield Prose((("Fix", "strong"),))
        yield from steps(finding.fix)


def _evidence(finding: Finding, indent: str) -> Iterator[Block]:
    for text in finding.evidence[:_EVIDENCE]:
        yield Prose(((printable(text, 400), ""),), lead=((indent, ""),))
    if len(finding.evidence) > _EVIDENCE:
        yield Prose(((f"… and {len(finding.evidence) - _EVIDENCE:,} more, in --json", "dim"),), lead=((indent, ""),))


def steps(fix: Sequence[str], indent: str = "  ") -> Iterator[Block]:
    """What to do, line by line. Commands and what belongs into a file are never folded: they are there to be copied."""
    for line in fix:
        copied = line.startswith(("$ ", "| "))
        mark = line[:2] if copied else ""
        text = printable(line.removeprefix(mark), None)
        yield Prose(((text, "strong" if mark == "$ " else ""),), lead=((indent, ""), (mark, "dim")), whole=copied)


def _remark(finding: Finding) -> Iterator[Block]:
    """A warning or a note, smaller than a cause."""
    sign, role = _SIGNS[finding.severity]
    yield Prose((*_titled(finding), _code(finding)), lead=((f"{sign} ", role),))
    yield from _evidence(finding, "    ")
    yield from steps(finding.fix, "    ")


def _links(diagnosis: Diagnosis) -> Iterator[Block]:
    """The chain of layers, each with what was seen of it and what follows from the cause."""
    layers = _layers(diagnosis)
    yield from heading("From the card to torch")
    for link in _complete(chain(diagnosis.machine), layers):
        yield from _link(link, layers.get(link.layer, ()), diagnosis)


def _layers(diagnosis: Diagnosis) -> Mapping[str, Sequence[Finding]]:
    """The findings of each layer."""
    from transload.diagnose.rules.catalogue import BY_CODE

    out: dict[str, list[Finding]] = {}
    for finding in (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted)):
        if finding.code in BY_CODE:
            out.setdefault(BY_CODE[finding.code].layer, []).append(finding)
    return out


def _complete(links: Sequence[Link], layers: Mapping[str, Sequence[Finding]]) -> list[Link]:
    """The links, and those that only a finding mentions."""
    by_layer = {link.layer: link for link in links}
    told = {layer for layer, found in layers.items() if any(finding.severity != "note" for finding in found)}
    return [by_layer.get(layer, Link(layer, "idle")) for layer in ORDER if layer in by_layer or layer in told]


def _link(link: Link, found: Sequence[Finding], diagnosis: Diagnosis) -> Iterator[Block]:
    muted = {each.finding.code: each.because for each in diagnosis.muted}
    own = [finding for finding in found if finding.code not in muted and finding.severity != "note"]
    mark, role = _mark(link, own, diagnosis)
    codes = "".join(_code(finding)[0] for finding in own)
    words = f"{_WORDS[link.layer]:<{_WIDTH}}  "
    dim = "dim" if mark == "–" else ""
    yield Prose(((link.text, dim), (codes, "dim")), lead=(("  ", ""), (f"{mark} ", role), (words, dim)))
    for finding in found:
        if finding.code in muted:
            words = "" if _is_symptom(finding) else f": {printable(finding.title, None)}"
            text = f"because of {muted[finding.code]}{words}"
            yield Prose(((text, "dim"), _code(finding)), lead=((" " * (_WIDTH + 6), ""),))


def _mark(link: Link, own: Sequence[Finding], diagnosis: Diagnosis) -> tuple[str, str]:
    severities = {finding.severity for finding in own}
    if own and link.state == "unknown" and all(map(_is_symptom, own)):
        return _MARKS["unknown"]
    if "error" in severities:
        return _MARKS["broken"]
    if "warning" in severities:
        return _SIGNS["warning"]
    if link.state == "broken":  # by the cause; or where nobody needs it
        return ("–" if diagnosis.ok else "✗"), "dim"
    return _MARKS[link.state]


def _unknown(diagnosis: Diagnosis) -> Iterator[Block]:
    """What could not be found out and would have helped."""
    told = [f"{probe}: {why}" for probe, why in diagnosis.machine.problems.items()]
    log, cause = diagnosis.machine.kernel.log, diagnosis.cause
    if cause is not None and isinstance(log, Unknown) and _unsure(cause) and log.reason not in " ".join(cause.evidence):
        told.append(f"the kernel log: {log.reason}")
    if told:
        yield BLANK
        yield Prose(((printable("; ".join(told), 600), ""),), lead=(("Unknown  ", "trust"),))


def _unsure(cause: Finding) -> bool:
    return cause.title.startswith("probably: ") or _is_symptom(cause)


def _is_symptom(finding: Finding) -> bool:
    """Whether it says what happened and not why."""
    from transload.diagnose.rules.catalogue import BY_CODE

    return finding.code in BY_CODE and BY_CODE[finding.code].symptom


def _hints(diagnosis: Diagnosis) -> Iterator[Block]:
    more = f"transload doctor --explain {diagnosis.cause.code} explains more; " if diagnosis.cause else ""
    yield BLANK
    yield Prose(((f"{more}--verbose shows all facts; --json is for a bug report", "dim"),))


def page(markdown: str) -> Iterator[Block]:
    """The page of a cause, from its Markdown: prose folds, what is there to be copied does not."""
    from transload.diagnose.pages import parts

    before = ""
    for kind, text in parts(markdown):
        if kind == "heading":
            yield from heading(text)
        elif kind == "title":
            code, _, title = text.partition(": ")
            yield Prose(((code, "dim"), (f"  {title}", "strong")))
        else:
            if before not in ("title", "heading", "item"):
                yield BLANK
            copied = kind == "code"
            for line in text.split("\n"):
                role = "dim" if before == "title" else ""  # the layer
                yield Prose(((line, role),), lead=(("  ", ""),) if copied else (), whole=kind != "prose")
        before = kind


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


# Field → where a fact of it comes from. The longest beginning of a fact's name counts.
SOURCES: dict[str, str] = {
    "transload": "",
    "taken": "",
    "platform": "uname, /etc/os-release",
    "platform.libc": "the loader's file",
    "platform.package_manager": "the programs there are",
    "platform.shell": "SHELL",
    "platform.root": "the user's number",
    "platform.groups": "/etc/group",
    "platform.laptop": "/sys/class/dmi/id/chassis_type",
    "platform.address_space": "/proc/self/limits",
    "platform.suspends": "/sys/power/suspend_stats",
    "platform.prime": "/etc/prime-discrete, /etc/prime/current_type",
    "surroundings": "/proc, the environment, and the evidence named",
    "hardware": "/sys/bus/pci/devices",
    "hardware.dxg": "/dev/dxg",
    "hardware.tegra": "/proc/device-tree/model, /etc/nv_tegra_release",
    "kernel": "/sys/module/nvidia, /proc/driver/nvidia/version",
    "kernel.modules": "/proc/modules",
    "kernel.built_for": "/lib/modules",
    "kernel.secure_boot": "/sys/firmware/efi/efivars",
    "kernel.uvm_disable_hmm": "/sys/module/nvidia_uvm/parameters",
    "kernel.kaslr": "/proc/cmdline",
    "kernel.parameters": "/proc/driver/nvidia/params",
    "kernel.gpus": "/proc/driver/nvidia/gpus",
    "kernel.firmware": "/lib/firmware/nvidia",
    "kernel.log": "/dev/kmsg, /var/log",
    "kernel.daemons": "/proc/*/comm",
    "kernel.stuck": "/proc/*/stat",
    "kernel.fabric_manager": "its package or program",
    "kernel.mps_directory": "CUDA_MPS_PIPE_DIRECTORY, /tmp/nvidia-mps",
    "nodes": "opening each under /dev",
    "nodes.majors": "/proc/devices",
    "nodes.cgroup": "/sys/fs/cgroup/devices",
    "driver.libraries": "LD_LIBRARY_PATH, /etc/ld.so.cache, the default folders",
    "driver.nvml": "libnvidia-ml, in a child process",
    "driver.cuda": "libcuda, in a child process",
    "driver.experiments": "libcuda, in a child process with a changed environment",
    "toolkit": "PATH, CUDA_HOME, /usr/local",
    "variables": "the environment",
    "variables.origins": "the files named",
    "python": "the interpreter itself",
    "python.packages": "the dist-info folders on its path",
    "python.others": "PATH, environments nearby",
    "torch": "version.py, dist-info and RECORD on the path",
    "torch_libraries": "the binaries of torch and the loader's search",
    "extensions": "their binaries and metadata",
    "accelerators": "/sys, /dev",
    "torch_run": "torch itself, in a child process",
    "problems": "",
}

_TITLES = {
    "": "report",
    "platform": "system",
    "surroundings": "container, scheduler, service",
    "hardware": "hardware",
    "kernel": "kernel driver",
    "nodes": "device nodes",
    "driver": "the driver's libraries and their answers",
    "toolkit": "CUDA toolkit",
    "variables": "environment variables",
    "python": "Python",
    "torch": "torch, by its files",
    "torch_libraries": "torch's binaries",
    "extensions": "packages beside torch",
    "accelerators": "other accelerators",
    "torch_run": "torch, run",
    "problems": "what stopped a probe",
}
_REMARKS = {"toolkit": "a torch wheel brings its own libraries and uses none of it"}
_NUMBERS = {"vendor": "0x{:04x}", "device": "0x{:04x}", "kind": "0x{:06x}", "mode": "{:#o}"}
_LABEL = 30
_VALUE_INDENT = 2000
_PLAIN = (str, int, float, bool, type(None))

Fact = tuple[str, Any]


def facts(machine: Machine) -> Iterator[Block]:
    """All facts, a section a layer. What is empty or was not told is left to ``--json``."""
    for section in fields(Machine):
        value = getattr(machine, section.name)
        told = [fact for fact in _flat(section.name, value) if not _empty(fact[1])]
        if isinstance(value, str) or not told:
            continue
        yield from heading(_TITLES.get(section.name, section.name), _REMARKS.get(section.name, ""))
        yield from _section(section.name, told)


def _section(section: str, told: list[Fact]) -> Iterator[Block]:
    """Facts under the places they came from."""
    labels = {name: printable(name.removeprefix(section).lstrip(".") or section) for name, _ in told}
    width = min(_LABEL, max(map(len, labels.values())))
    for source in dict.fromkeys(source_of(name) for name, _ in told):
        if source:
            yield note(f"from {source}")
        for name, value in told:
            if source_of(name) == source:
                yield Prose(_shown(value), lead=(("    ", ""), (f"{labels[name]:<{width}}  ", "dim")))


def source_of(name: str) -> str:
    """Where the fact of that name comes from.

    >>> source_of("kernel.gpus[0].model"), source_of("kernel.version")
    ('/proc/driver/nvidia/gpus', '/sys/module/nvidia, /proc/driver/nvidia/version')
    """
    path = name.replace("[", ".[").split(".")
    places = (".".join(path[:length]) for length in range(len(path), 0, -1))
    return next((SOURCES[place] for place in places if place in SOURCES), "")


def _flat(name: str, value: Any) -> Iterator[Fact]:
    """Each fact by its full name; things of the same kind are numbered, and those that hold no others told at once."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}", each)
    elif isinstance(value, tuple) and not all(isinstance(each, _PLAIN) for each in value):
        for place, each in enumerate(value):
            yield from ([(f"{name}[{place}]", each)] if _is_record(each) else _flat(f"{name}[{place}]", each))
    elif is_dataclass(value) and not isinstance(value, Unknown):
        for each in fields(value):
            yield from _flat(f"{name}.{each.name}", getattr(value, each.name))
    else:
        yield name, value


def _is_record(value: Any) -> bool:
    values = [getattr(value, each.name) for each in fields(value)]
    return all(isinstance(each, (*_PLAIN, tuple)) for each in values)


def _empty(value: Any) -> bool:
    """Whether there is nothing to tell: text or numbers that stand for "not told"."""
    return not isinstance(value, bool | Unknown) and value in ("", (), -1, None, {})


def _shown(value: Any) -> Line:
    if isinstance(value, Unknown):
        return (("? ", "trust"), (printable(value.reason, _VALUE_INDENT), ""))
    return ((printable(_words(value), _VALUE_INDENT), ""),)


def _words(value: Any, field: str = "") -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(_words(each) for each in value)
    if is_dataclass(value):
        told = ((each, getattr(value, each.name)) for each in fields(value))
        return "; ".join(f"{each.name} {_words(part, each.name)}" for each, part in told if _worth_telling(each, part))
    return _NUMBERS[field].format(value) if field in _NUMBERS and isinstance(value, int) else str(value)


def _worth_telling(field: Field[Any], value: Any) -> bool:
    return not _empty(value) and value != field.default
