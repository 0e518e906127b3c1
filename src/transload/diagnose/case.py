"""What a rule is, and what it judges: a ``Case``, a machine with conclusions from its facts.

Every check runs once, when its result is first needed. A rule can ask whether another one matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from transload.diagnose import fixes
from transload.diagnose.tables import chip_of, numbers_of, result, title
from transload.findings import Finding, Severity
from transload.machine import Accelerator, Library, Machine, PciDevice, Step
from transload.render.words import plural

Lines = tuple[str, ...]

CONTROL, UVM = "/dev/nvidiactl", "/dev/nvidia-uvm"
CVD = "CUDA_VISIBLE_DEVICES"
_SHOWN = 300
_RELEASE = re.compile(r"\d{3}\.\d+(?:\.\d+)*")
_LOG_NOISE = re.compile(r"\[\s*\d+\.\d+\]|\bNVRM:|\\x0a|\s+")


LAYERS = {
    "python": "Python environment",
    "build": "installed torch",
    "torch-libraries": "libraries torch loads",
    "hardware": "GPU",
    "kernel": "kernel driver",
    "surroundings": "container, scheduler, service",
    "nodes": "device nodes",
    "libraries": "driver libraries",
    "driver": "CUDA driver",
    "variables": "environment variables",
    "fit": "compatibility",
    "run": "running torch",
    "extensions": "packages using torch",
}
"""The layers between the card and the CUDA kernels that torch runs on it, in the order in which to fix them."""


class Match(NamedTuple):
    """What a rule saw on one machine. Empty lines are left out.

    The lines of ``fix`` are commands, which begin with ``$ ``, lines for a file, which begin with ``| ``, sentences, or
    a title that replaces the rule's, which begins with ``= ``. ``None`` means the section of ``steps.md`` with the
    rule's code. ``likely`` means that the evidence suggests the cause but does not prove it.
    """

    evidence: Lines
    fix: Lines | None = None
    severity: Severity = "error"
    likely: bool = False


Found = Iterator[tuple[str, Match]]
Check = Callable[["Case"], Found]  # Yields the codes of the causes that it finds, each with what it saw.


class Rule(NamedTuple):
    """A cause: its stable code and the layer it breaks. Its page, docs/doctor/CODE.md, has its title.

    A ``symptom`` says what happened, not why, and is reported only if no fault explains it. ``check`` is ``None`` for
    causes that facts cannot show, such as a fault of the program: they only have a page.
    """

    code: str
    layer: str
    check: Check | None = None
    symptom: bool = False
    likely: bool = False

    def finding(self, case: Case) -> Finding | None:
        """What the rule reports about a machine; ``None`` if it does not match."""
        match = case.found(self.check).get(self.code) if self.check else None
        if match is None:
            return None
        steps = case.steps(self.code) if match.fix is None else match.fix
        evidence, fix = (tuple(filter(None, lines)) for lines in (match.evidence, steps))
        own = next((line.removeprefix("= ") for line in fix if line.startswith("= ")), "") or title(self.code)
        likely = "probably: " if self.likely or match.likely else ""
        fix = tuple(line for line in fix if not line.startswith("= "))
        return Finding(self.code, match.severity, f"{likely}{own}", evidence, fix)


# Causes that the facts of a machine cannot show.
_PAGE_ONLY = {
    "surroundings": ("C06",),
    "variables": ("E06", "E08"),
    "fit": ("V04",),
    "driver": ("X03",),
    "run": ("N03", "S08", "S09", "X01"),
}
BY_CODE = {code: Rule(code, layer) for layer, codes in _PAGE_ONLY.items() for code in codes}
"""Every rule by its code, in the order in which they are checked. The modules of ``diagnose.rules`` add theirs."""


def rules(layer: str, *codes: str, likely: Lines = (), symptom: bool = False) -> Callable[[Check], Check]:
    """Make the decorated function the check of the rules with these codes.

    Within a layer, the first rule that matches is the cause. Rules in ``likely`` are never certain.
    """

    def add(check: Check) -> Check:
        for code in codes:
            BY_CODE[code] = Rule(code, layer, check, symptom, code in likely)
        return check

    return add


class Card(NamedTuple):
    """A GPU that torch could use; ``sure`` unless its capability is inferred from neighbouring PCI ids."""

    name: str
    capability: tuple[int, ...]
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.name} has compute capability {self.capability[0]}.{self.capability[1]}"


class Case(Machine):
    """A machine to be judged: its facts, and conclusions from them."""

    __setattr__ = object.__setattr__  # a machine is frozen, and ``__init__`` adds to it

    def __init__(self, machine: Machine) -> None:
        self.__dict__.update(machine.__dict__)
        self._found: dict[Check, dict[str, Match]] = {}
        self._log = ""
        cuda, nvml, kernel, hardware = self.driver.cuda, self.driver.nvml, self.kernel, self.hardware
        run, first = self.torch_run, self.torch.first

        # -- the nodes: those of cards that exist, /dev/nvidia0 and so on; and whether /dev has no NVIDIA node at all
        found, at = self.nodes.found, self.nodes.at
        self.card_nodes = tuple(node for node in found if node.exists and re.fullmatch(r"/dev/nvidia\d+", node.path))
        self.nodes_absent = bool(found) and not (self.card_nodes or at(CONTROL).exists or at(UVM).exists)

        # -- CUDA: whether the driver or torch used a GPU, which no rule may contradict
        self.works = cuda.works or run.cuda_works
        unasked = cuda.answer.state == "unasked"
        # Whether the driver should have been asked, but the child process could not be run.
        self.driver_unasked = unasked and bool(cuda.answer.detail or "cuda" in self.problems)
        self.no_libcuda = cuda.answer.state == "no-library"
        # Whether the driver was asked and has no GPU; or could not be asked, and files show that it must fail: no
        # process can use a GPU on the PCI bus without the kernel module or a device node.
        off_bus = self.surroundings.wsl or hardware.dxg or hardware.tegra
        must_fail = not off_bus and (kernel.loaded is False or self.nodes_absent)
        self.fails = not self.works and (not unasked or (self.driver_unasked and must_fail))
        # The variables without which the driver works, and a line about that experiment; empty if none succeeded.
        tried = next((tried for tried in self.driver.experiments if tried.cuda.works), None)
        self.works_without = tried.change if tried else ()
        starts = f"without {', '.join(self.works_without)} the driver starts and finds "
        self.works_without_line = f"{starts}{plural(tried.cuda.count, 'GPU')}" if tried else ""
        # Whether the driver fails for a reason other than a variable.
        self.broken = self.fails and not self.works_without
        # What the driver returned: the first result that is not 0, 100 for no device, -1 without an answer.
        counted = cuda.count_code if cuda.count_code > 0 else 100 if cuda.count == 0 else 0
        self.code = (cuda.init or counted) if cuda.answer.answered else -1
        # The CUDA version that the driver reports, 12080 for 12.8; 0 if unknown.
        self.driver_cuda = cuda.version or nvml.cuda
        # The libcuda.so.1 that a process loads: the file that was mapped, else the one that the loader should find.
        libraries = self.driver.libraries
        same = (lib for lib in libraries.cuda or () if cuda.library and cuda.library in (lib.path, lib.target))
        self.libcuda: Library | None = next(same, libraries.libcuda)
        # That library, if it is a driver's own and its version differs from the kernel driver's.
        lib = self.libcuda if self.libcuda and self.libcuda.kind == "driver" else None
        known = lib and kernel.version and _RELEASE.fullmatch(lib.version)
        self.mismatched = lib if lib and known and lib.version != kernel.version else None
        # Whether NVML, and so the kernel driver, works and sees a card.
        self.nvml_works = nvml.answer.answered and nvml.init == 0 and nvml.count > 0
        # Whether the driver fails and no card has a node. There may be a forbidden /dev/nvidiactl: libcuda creates it.
        only_control = at(CONTROL).error == "EPERM" and not (self.card_nodes or at(UVM).exists)
        self.without_nodes = self.broken and (self.nodes_absent or only_control)

        # -- the card: whether it was removed while its driver is still loaded, which keeps the nodes
        no_card = isinstance(hardware.pci, tuple) and not (hardware.present or kernel.gpus)
        removed = no_card and kernel.loaded is True and not self.surroundings.container
        # Whether the host, even outside of this container, certainly has an NVIDIA card.
        self.host_has_gpu = bool(hardware.gpus or kernel.loaded or kernel.gpus) and not removed
        # Whether no NVIDIA GPU was found anywhere: then the driver cannot be at fault.
        node = found and not self.nodes_absent and not removed
        trace = hardware.present or self.host_has_gpu or node or self.nvml_works or self.works or self.surroundings.wsl
        self.no_gpu = isinstance(hardware.pci, tuple) and not trace
        # Whether there certainly is an NVIDIA GPU: under WSL /dev/dxg may be another vendor's. ``None``: unknown.
        in_wsl = hardware.dxg and any(lib.kind == "wsl" for lib in libraries.cuda or ())
        self.has_nvidia = bool(hardware.gpus or hardware.tegra or in_wsl or cuda.works or self.nvml_works)
        self.nvidia = True if self.has_nvidia else False if self.no_gpu else None
        # A line about each card on the bus; and the cards of this process, or all listed ones if the driver fails.
        lines, on_bus = [], []
        for card in hardware.gpus:
            chip = chip_of(card.device)
            name = f" ({chip.code}, {chip.generation})" if chip else ""
            driver = f", bound to {card.driver}" if card.driver else ", not bound to a driver"
            asleep = f", in power state {card.power}" if card.power not in ("", "D0", "unknown") else ""
            lines.append(f"{card.address} is an NVIDIA card, 10de:{card.device:04x}{name}{driver}{asleep}")
            if chip and chip.capability and card.driver != "vfio-pci":
                on_bus.append(Card(f"the card at {card.address}{name}", chip.capability, not chip.inferred))
        gpus = cuda.gpus if cuda.works else nvml.gpus
        listed = [Card(gpu.name or "the GPU", gpu.capability) for gpu in gpus if len(gpu.capability) == 2]
        self.card_lines, self.cards = tuple(lines), tuple(listed or on_bus)
        # The cards on the bus that NVML does not list as usable. NVML writes PCI domains with eight digits, sysfs four.
        seen = {gpu.address[-12:].lower() for gpu in nvml.gpus if gpu.code == 0 and gpu.address}
        all_seen = not seen and self.nvml_works and nvml.count >= len(hardware.gpus)
        unseen = (card for card in hardware.gpus if card.address[-12:].lower() not in seen and not all_seen)
        self.unseen_cards: tuple[PciDevice, ...] = tuple(unseen)
        # How bad it is that a process has no GPU: only a note if its torch is built without CUDA.
        wants_gpu = first is None or not first.cpu_only or self.torch.shadow
        self.no_gpu_severity: Severity = "error" if wants_gpu else "note"
        # Whether a card on the bus needs NVIDIA's kernel driver; under WSL and on a Jetson none does.
        self.needs_driver = bool(hardware.gpus) and self.broken and not self.surroundings.wsl
        # Whether Slurm gave this job a GPU. ``0`` is a card in a list of indices, but means none in a count.
        counts = any((self.env(name) or "0") != "0" for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS"))
        lists = any(map(self.env, ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "GPU_DEVICE_ORDINAL")))
        self.slurm_granted = counts or lists

        # -- torch: whether it was not run, so that only its files are known; whether it was imported
        self.torch_not_run = run.answer.state == "unasked"
        step = run.step("import")
        self.imported = step is not None and step.ok
        # Why it could not be imported; empty if it could, or was not run.
        self.import_error = step.error if step and not step.ok else ""
        # Whether all its steps succeeded on the GPU: then nothing about it is broken.
        self.computes = run.cuda_works and self.failed() is None
        # The version of the torch that is imported, and the CUDA version that it was built with, also as two numbers.
        self.torch_version = run.version or (first.version if first else "")
        self.torch_cuda = run.cuda or (first.cuda if first else "")
        numbers = numbers_of(self.torch_cuda)
        self.built_with = numbers[:2] if len(numbers) > 1 else ()

        # -- one line each: what the CUDA driver returned, what NVML returned, and which kernel driver is loaded
        if self.no_libcuda:
            self.answer = "the loader finds no libcuda.so.1"
        elif cuda.answer.state in ("hung", "crashed"):
            ended = f"gave no answer within {cuda.answer.seconds:.0f} s" if cuda.answer.state == "hung" else "crashed"
            self.answer = f"the CUDA driver {ended}: {cuda.answer.detail}".rstrip(": ")
        elif not cuda.answer.answered:
            self.answer = f"libcuda.so.1 could not be used: {cuda.answer.detail or cuda.answer.state}"
        elif cuda.init == 0:
            self.answer = f"cuInit returned 0, and cuDeviceGetCount found {max(cuda.count, 0)} devices"
        else:
            self.answer = f"cuInit returned {cuda.init} {result('cuda', cuda.init).name}".rstrip()
        self.nvml_answer = f"NVML works and sees {plural(max(nvml.count, 0), 'GPU')}"
        if not nvml.answer.answered:
            self.nvml_answer = f"NVML: {nvml.answer.detail or nvml.answer.state}"
        elif nvml.init:
            self.nvml_answer = f"nvmlInit returned {nvml.init} {result('nvml', nvml.init).name}".rstrip()
        flavour = f", {kernel.flavour} flavour" if kernel.flavour else ""
        loaded = f"the loaded kernel driver is {kernel.version or 'of unknown version'}{flavour}"
        self.kernel_line = loaded if kernel.loaded else "the kernel module nvidia is not loaded"

    def env(self, name: str) -> str | None:
        """The value of an environment variable, or ``None`` if it is not set."""
        return self.variables.values.get(name)

    def usable(self, kind: str) -> list[Accelerator]:
        """The accelerators of a kind whose driver works."""
        return [other for other in self.accelerators if other.kind == kind and other.usable]

    def found(self, check: Check) -> dict[str, Match]:
        """What a check finds in this case. Every check runs only once."""
        if check not in self._found:
            self._found[check] = dict(check(self))
        return self._found[check]

    def matches(self, *codes: str) -> bool:
        """Whether any of these rules matches."""
        return any(code in self.found(check) for code in codes if (check := BY_CODE[code].check))

    @property
    def withheld(self) -> bool:
        """Whether a container, pod, job or VM host gives this process no GPU, and its torch is built without CUDA."""
        return self.no_gpu_severity == "note" and self.matches("C09", "C05", "C04", "C08", "C01", "K05")

    @property
    def driver_misfit(self) -> bool:
        """Whether the driver does not start because it does not support the card, or lacks its firmware."""
        return self.matches("K06", "K07", "K08", "K09", "K12")

    def logged(self, pattern: str) -> str:
        """A line that quotes the first match in the kernel log, even across lines; empty if there is none."""
        self._log = self._log or re.sub(r" +", " ", _LOG_NOISE.sub(" ", " ".join(self.kernel.log or ())))
        found = re.search(pattern, self._log) if self._log else None
        return f"the kernel log says: {found[0][:160].strip()}" if found else ""

    def complaint(self, pattern: str) -> str:
        """The first matching line of torch's errors and warnings; empty if there is none."""
        errors = (step.error for step in self.torch_run.steps if not step.ok)
        for text in (*errors, *self.torch_run.warnings):
            for line in text.splitlines():
                if re.search(pattern, line):
                    return line.strip()[:_SHOWN]
        return ""

    def failed(self, *names: str) -> Step | None:
        """The first failed step of the torch child, among those with these names or, without names, among all."""
        return next((step for step in self.torch_run.steps if not step.ok and (not names or step.name in names)), None)

    def steps(self, name: str, /, **values: object) -> Lines:
        """A section of ``steps.md`` for this machine."""
        return fixes.steps(self, name, **values)

    @property
    def reinstall(self) -> Lines:
        """Install torch again, with everything it needs."""
        return fixes.reinstall(self, gpu=self.nvidia)


def torch_says(text: str) -> str:
    """The first line of an error's text, as evidence; empty if there is none."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = "torch " if line.startswith("hung ") else "torch says: "
    return f"{said}{line[:_SHOWN]}" if line else ""
