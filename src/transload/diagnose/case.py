"""What a rule is, and what it judges: a ``Case``, a machine with conclusions from its facts.

Every check runs once, when its result is first needed. A rule can ask whether another one matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property

from transload.diagnose import fixes
from transload.diagnose.tables import Chip, chip_of, numbers_of, result, title
from transload.findings import Finding, Severity
from transload.frozen import NamedTuple
from transload.machine import Accelerator, Machine, PciDevice
from transload.machine import Step as TorchStep
from transload.render.words import plural
from transload.steps import Step, Steps

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

    ``fix`` is that of the finding, perhaps with a title that replaces the rule's; ``None`` means the section of
    ``steps.md`` with the rule's code. ``likely`` means that the evidence suggests the cause but does not prove it.
    """

    evidence: Lines
    fix: Steps | None = None
    severity: Severity = "error"
    likely: bool = False


Matches = Iterator[tuple[str, Match]]
Check = Callable[["Case"], Matches]  # Yields the codes of the causes that it finds, each with what it saw.


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
        match = case.matches_of(self.check).get(self.code) if self.check else None
        if match is None:
            return None
        steps = case.steps(self.code) if match.fix is None else match.fix
        titles = (step.text for step in steps if isinstance(step, Step) and step.kind == "title")
        likely = "probably: " if self.likely or match.likely else ""
        words = f"{likely}{next(titles, None) or title(self.code)}"
        return Finding(self.code, match.severity, words, tuple(filter(None, match.evidence)), fixes.lines_of(steps))


# Causes that do not exist on a system: they are about parts that it does not have.
_ELSEWHERE = {
    "Windows": re.compile(r"[CDJMRY]..|H0[456]|K0[1-578]|K1.|L0.|L1[23]|N0[12]|S0[1-4]|T03|U0[234589]|U1[01]|X0[14]"),
    "Darwin": re.compile(r"[A-EHJ-NRSUVW]..|P0[68]|T0[1-7]|X0."),
    "Linux": re.compile(r"[WY].."),
}


def exists_on(system: str, code: str) -> bool:
    """Whether a cause can exist on a system, as ``platform.system()`` names it."""
    return not _ELSEWHERE.get(system, _ELSEWHERE["Linux"]).fullmatch(code)


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


def _card_name(card: PciDevice, chip: Chip) -> str:
    """The name of a card that no driver names; Windows has one if its driver is installed."""
    return card.name if "NVIDIA" in card.name else f"the card at {card.address}{_chip_name(chip)}"


def _chip_name(chip: Chip | None) -> str:
    return f" ({chip.code}, {chip.generation})" if chip else ""


class Case(Machine):
    """A machine to be judged: its facts, and conclusions from them; those that take time are drawn when needed."""

    __setattr__ = object.__setattr__

    def __init__(self, machine: Machine) -> None:
        self.__dict__.update(machine.__dict__)
        self._log = re.sub(r" +", " ", _LOG_NOISE.sub(" ", " ".join(self.kernel.log or ())))  # without timestamps
        self._matches: dict[Check, dict[str, Match]] = {}
        hardware, kernel, nodes, around = self.hardware, self.kernel, self.nodes, self.surroundings
        cuda, nvml, run, first = self.driver.cuda, self.driver.nvml, self.torch_run, self.torch.first

        # Whether torch was not run, so that only its files are known; else whether it was imported, or why not.
        imported = run.step("import")
        self.torch_not_run = run.answer.state == "unasked"
        self.torch_imported = imported is not None and imported.ok
        self.import_error = imported.error if imported and not imported.ok else ""
        # Whether all its steps succeeded on the GPU: then nothing about it is broken.
        self.torch_computes = run.cuda_works and self.failed() is None
        # Its version, and the CUDA version that it was built with, also as two numbers; empty if unknown, or for none.
        self.torch_version = run.version or (first.version if first else "")
        self.torch_cuda = run.cuda or (first.cuda if first else "")
        numbers = numbers_of(self.torch_cuda)[:2]
        self.torch_cuda_numbers = numbers if len(numbers) == 2 else ()

        # The nodes of cards that exist, /dev/nvidia0 and so on; and whether /dev has no NVIDIA node at all.
        existing = (node for node in nodes.found if node.exists)
        self.card_nodes = tuple(node for node in existing if re.fullmatch(r"/dev/nvidia\d+", node.path))
        some_node = self.card_nodes or nodes.at(CONTROL).exists or nodes.at(UVM).exists
        self.nodes_absent = bool(nodes.found) and not some_node

        # Whether NVML, and so the kernel driver, works and sees a card.
        self.nvml_works = nvml.answer.answered and nvml.init == 0 and nvml.count > 0
        # Whether the driver or torch used a GPU, which no rule may contradict.
        self.cuda_works = cuda.works or run.cuda_works
        # Whether the loader finds no libcuda.so.1.
        self.no_libcuda = cuda.answer.state == "no-library"
        # What the driver returned: the first result that is not 0, 100 for no device, -1 without an answer.
        counted = cuda.count_code if cuda.count_code > 0 else 100 if cuda.count == 0 else 0
        self.driver_result = (cuda.init or counted) if cuda.answer.answered else -1
        # The variables without which the driver works, and a line about that experiment; empty if none succeeded.
        success = next((experiment for experiment in self.driver.experiments if experiment.cuda.works), None)
        self.works_without: Lines = success.change if success else ()
        finds = f"the driver starts and finds {plural(success.cuda.count, 'GPU')}" if success else ""
        self.works_without_line = f"without {', '.join(self.works_without)} {finds}" if success else ""
        # Whether the driver should have been asked, but the child process could not be run.
        unasked = cuda.answer.state == "unasked"
        self.driver_unasked = unasked and bool(cuda.answer.detail or "cuda" in self.problems)
        # Whether the driver has no GPU; or was not asked, and files show that it must fail: no process can use a GPU on
        # the PCI bus without the kernel module or a device node. It is broken if that is not because of a variable.
        off_bus = around.wsl or hardware.dxg or hardware.tegra
        must_fail = not off_bus and (kernel.loaded is False or self.nodes_absent)
        self.driver_fails = not self.cuda_works and (not unasked or (self.driver_unasked and must_fail))
        self.driver_broken = self.driver_fails and not self.works_without
        # Whether it fails and no card has a node. A forbidden /dev/nvidiactl may exist: libcuda makes it.
        only_control = nodes.at(CONTROL).error == "EPERM" and not (self.card_nodes or nodes.at(UVM).exists)
        self.fails_without_nodes = self.driver_broken and (self.nodes_absent or only_control)

        # Whether the host, even outside of this container, certainly has an NVIDIA card. If the card was removed while
        # its driver is loaded, that keeps the nodes.
        no_card = isinstance(hardware.pci, tuple) and not (hardware.present or kernel.gpus)
        removed = no_card and kernel.loaded is True and not around.container
        self.host_has_gpu = bool(hardware.gpus or kernel.loaded or kernel.gpus) and not removed
        # Whether there certainly is a GPU: under WSL /dev/dxg may be another vendor's.
        in_wsl = hardware.dxg and any(library.kind == "wsl" for library in self.driver.libraries.cuda or ())
        self.has_nvidia = bool(hardware.gpus or hardware.tegra or in_wsl or cuda.works or self.nvml_works)
        # Whether no NVIDIA GPU was found anywhere: then the driver cannot be at fault.
        node = nodes.found and not self.nodes_absent and not removed
        trace = hardware.present or self.host_has_gpu or node or self.nvml_works or self.cuda_works or around.wsl
        self.no_gpu = isinstance(hardware.pci, tuple) and not trace
        # Whether there is an NVIDIA GPU; ``None`` if that is unknown.
        self.has_nvidia_if_known = True if self.has_nvidia else False if self.no_gpu else None
        # Whether a card on the bus needs NVIDIA's kernel driver; under WSL and on a Jetson none does.
        self.needs_driver = bool(hardware.gpus) and self.driver_broken and not around.wsl
        # How bad it is that a process has no GPU: only a note if its torch is built without CUDA.
        without_cuda = first is not None and first.cpu_only and not self.torch.shadow
        self.no_gpu_severity: Severity = "note" if without_cuda else "error"
        # Whether Slurm gave this job a GPU. ``0`` is a card in a list of indices, but means none in a count.
        counts = any((self.env(name) or "0") != "0" for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS"))
        self.slurm_granted = counts or any(map(self.env, ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "GPU_DEVICE_ORDINAL")))

        # The names of the driver's libraries: CUDA's, and NVML's.
        names = ("nvcuda.dll", "nvml.dll") if fixes.on_windows(self) else ("libcuda.so.1", "libnvidia-ml.so.1")
        self.cuda_name, self.nvml_name = names
        # The CUDA library that a process loads: the file that was mapped, else the one that the loader should find.
        libraries, mapped = self.driver.libraries, cuda.library
        as_named = str.lower if self.platform.system == "Windows" else str  # which ignores case
        places = ((as_named(library.path), as_named(library.target), library) for library in libraries.cuda or ())
        same = (library for *paths, library in places if mapped and as_named(mapped) in paths)
        self.libcuda = next(same, libraries.libcuda)
        # That library, if it is a driver's own and its version differs from the kernel driver's.
        release = self.libcuda.version if self.libcuda and self.libcuda.kind == "driver" else ""
        differs = kernel.version and _RELEASE.fullmatch(release) and release != kernel.version
        self.mismatched_libcuda = self.libcuda if differs else None

    # -- lines of evidence

    @cached_property
    def driver_result_line(self) -> str:
        """What the CUDA driver returned, in words."""
        cuda = self.driver.cuda
        answer = cuda.answer
        if self.no_libcuda:
            return f"the loader finds no {self.cuda_name}"
        if answer.state in ("hung", "crashed"):
            end = f"gave no answer within {answer.seconds:.0f} s" if answer.state == "hung" else "crashed"
            return f"the CUDA driver {end}: {answer.detail}".rstrip(": ")
        if not answer.answered:
            return f"{self.cuda_name} could not be used: {answer.detail or answer.state}"
        if cuda.init == 0:
            return f"cuInit returned 0, and cuDeviceGetCount found {max(cuda.count, 0)} devices"
        return f"cuInit returned {cuda.init} {result('cuda', cuda.init).name}".rstrip()

    @cached_property
    def nvml_result_line(self) -> str:
        """What NVML returned, in words."""
        nvml = self.driver.nvml
        if not nvml.answer.answered:
            return f"NVML: {nvml.answer.detail or nvml.answer.state}"
        if nvml.init:
            return f"nvmlInit returned {nvml.init} {result('nvml', nvml.init).name}".rstrip()
        return f"NVML works and sees {plural(max(nvml.count, 0), 'GPU')}"

    @cached_property
    def kernel_line(self) -> str:
        """Which kernel driver is loaded."""
        if not self.kernel.loaded:
            return (
                "NVIDIA's driver is not loaded" if fixes.on_windows(self) else "the kernel module nvidia is not loaded"
            )
        flavour = f", {self.kernel.flavour} flavour" if self.kernel.flavour else ""
        return f"the loaded kernel driver is {self.kernel.version or 'of unknown version'}{flavour}"

    @cached_property
    def card_lines(self) -> Lines:
        """A line about each card on the bus."""
        lines = []
        for card in self.hardware.gpus:
            driver = f", bound to {card.driver}" if card.driver else ", not bound to a driver"
            asleep = f", in power state {card.power}" if card.power not in ("", "D0", "unknown") else ""
            chip = _chip_name(chip_of(card.device))
            lines.append(f"{card.address} is an NVIDIA card, 10de:{card.device:04x}{chip}{driver}{asleep}")
        return tuple(lines)

    # -- the cards

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The cards of this process, or all on the bus if the driver fails."""
        cuda, nvml = self.driver.cuda, self.driver.nvml
        gpus = cuda.gpus if cuda.works else nvml.gpus
        listed = [Card(gpu.name or "the GPU", gpu.capability) for gpu in gpus if len(gpu.capability) == 2]
        chips = ((card, chip_of(card.device)) for card in self.hardware.gpus if card.driver != "vfio-pci")
        on_bus = (
            Card(_card_name(card, chip), chip.capability, not chip.inferred)
            for card, chip in chips
            if chip and chip.capability
        )
        return tuple(listed or on_bus)

    @cached_property
    def unseen_cards(self) -> tuple[PciDevice, ...]:
        """The cards on the bus that NVML does not list as usable."""
        nvml, gpus = self.driver.nvml, self.hardware.gpus
        # NVML writes PCI domains with eight digits, sysfs with four.
        seen = {gpu.address[-12:].lower() for gpu in nvml.gpus if gpu.code == 0 and gpu.address}
        all_seen = not seen and self.nvml_works and nvml.count >= len(gpus)
        return tuple(card for card in gpus if card.address[-12:].lower() not in seen and not all_seen)

    # -- questions

    def env(self, name: str) -> str | None:
        """The value of an environment variable, or ``None`` if it is not set."""
        return self.variables.values.get(name)

    def usable(self, kind: str) -> list[Accelerator]:
        """The accelerators of a kind whose driver works."""
        return [other for other in self.accelerators if other.kind == kind and other.usable]

    def matches_of(self, check: Check) -> dict[str, Match]:
        """What a check finds in this case. Every check runs only once."""
        if check not in self._matches:
            found, system = check(self), self.platform.system
            self._matches[check] = {code: match for code, match in found if exists_on(system, code)}
        return self._matches[check]

    def matches(self, *codes: str) -> bool:
        """Whether any of these rules matches."""
        return any(code in self.matches_of(check) for code in codes if (check := BY_CODE[code].check))

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
        quote = re.search(pattern, self._log)
        return f"the kernel log says: {quote[0][:160].strip()}" if quote else ""

    def complaint(self, pattern: str) -> str:
        """The first matching line of torch's errors and warnings; empty if there is none."""
        errors = (step.error for step in self.torch_run.steps if not step.ok)
        for text in (*errors, *self.torch_run.warnings):
            for line in text.splitlines():
                if re.search(pattern, line):
                    return line.strip()[:_SHOWN]
        return ""

    def failed(self, *names: str) -> TorchStep | None:
        """The first failed step of the torch child, among those with these names or, without names, among all."""
        return next((step for step in self.torch_run.steps if not step.ok and (not names or step.name in names)), None)

    def steps(self, name: str, /, **values: object) -> Steps:
        """A section of ``steps.md`` for this machine."""
        return fixes.steps(self, name, **values)

    @property
    def reinstall(self) -> Steps:
        """Install torch again, with everything it needs."""
        return fixes.reinstall(self, gpu=self.has_nvidia_if_known)


def torch_says(text: str) -> str:
    """The first line of an error's text, as evidence; empty if there is none."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    speaker = "torch " if line.startswith("hung ") else "torch says: "
    return f"{speaker}{line[:_SHOWN]}" if line else ""
