"""What a rule is, and what it judges: a machine with what follows from its facts.

Rules read a ``Case`` as they read a ``Machine``. Every property is computed once, when it is first used, and
so is every rule: ``fires`` tells one rule whether another one matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from transload.diagnose import fixes
from transload.diagnose.tables import chip_of, cu_result, numbers_of, nvml_result
from transload.findings import Finding, Severity
from transload.machine import Machine
from transload.render.words import plural

if TYPE_CHECKING:
    from transload.machine import Accelerator, Library, Node, PciDevice, Step

Lines = tuple[str, ...]

CONTROL, UVM = "/dev/nvidiactl", "/dev/nvidia-uvm"
CVD = "CUDA_VISIBLE_DEVICES"
_SHOWN = 300
_RELEASE = re.compile(r"\d{3}\.\d+(?:\.\d+)*")
_LOG_NOISE = re.compile(r"\[\s*\d+\.\d+\]|\bNVRM:|\\x0a|\s+")
_NVIDIA_LIBRARY = re.compile(r"lib(?:cu(?!rl|ps)|nv(?!di)|nccl|caffe2_nvrtc)\w*\.so[.\d]*")


class Layer(NamedTuple):
    """One link of the chain from the card to the kernel that runs on it.

    Faults of one chain follow from one another: the first broken layer is the cause of the others. Faults of
    different chains are independent.
    """

    name: str
    words: str
    chain: str


LAYERS: tuple[Layer, ...] = (
    Layer("python", "Python environment", "torch"),
    Layer("build", "installed torch", "torch"),
    Layer("torch-libraries", "libraries torch loads", "torch"),
    Layer("hardware", "GPU", "machine"),
    Layer("kernel", "kernel driver", "machine"),
    Layer("surroundings", "container, scheduler, service", "machine"),
    Layer("nodes", "device nodes", "machine"),
    Layer("libraries", "driver libraries", "machine"),
    Layer("driver", "CUDA driver", "machine"),
    Layer("variables", "environment variables", "variables"),
    Layer("fit", "compatibility", "fit"),
    Layer("run", "running torch", "run"),
    Layer("extensions", "packages using torch", "extensions"),
)
"""In the order in which to fix them."""


class Match(NamedTuple):
    """What a rule saw on one machine. Empty lines are left out.

    ``fix`` are lines in order: a command begins with ``$ ``, anything else is a sentence. ``title`` replaces the
    rule's if the check knows more. ``likely`` says that the evidence fits but does not prove it.
    """

    evidence: Lines
    fix: Lines = ()
    title: str = ""
    severity: Severity = "error"
    likely: bool = False


Found = Iterator[tuple[str, Match]]
Check = Callable[["Case"], Found]
"""A check yields the codes of the causes that it sees, each with what it saw."""


class Rule(NamedTuple):
    """A cause: its stable code and the layer it breaks. Its page is docs/doctor/CODE.md.

    A ``symptom`` is reported only if no fault explains it: it says what happened, not why. ``check`` is ``None`` for
    what a machine cannot show (a program's own fault, another system): the page is all there is.
    """

    code: str
    layer: str
    title: str
    check: Check | None = None
    symptom: bool = False
    likely: bool = False

    @property
    def fix(self) -> str:
        """What its page says to do."""
        from transload.diagnose.pages import section

        return section(self.code, "Fix")

    def finding(self, case: Case) -> Finding | None:
        """What it says about a machine."""
        match = case.found(self.check).get(self.code) if self.check else None
        if match is None:
            return None
        title = f"{'probably: ' if self.likely or match.likely else ''}{match.title or self.title}"
        evidence, fix = (tuple(filter(None, lines)) for lines in (match.evidence, match.fix))
        return Finding(self.code, match.severity, title, evidence, fix)


RULES: dict[str, Rule] = {}
"""Every rule by its code, in the order in which they are checked. The modules of ``diagnose.rules`` fill it."""


def rules(layer: str, *, likely: Lines = (), symptom: bool = False, **titles: str) -> Callable[[Check], Check]:
    """Make the decorated function the check of the rules with these codes and titles.

    In a layer the first rule that matches is the cause. ``likely`` are the codes of those that can never be certain.
    """

    def add(check: Check) -> Check:
        for code, title in titles.items():
            RULES[code] = Rule(code, layer, title, check, symptom, code in likely)
        return check

    return add


def page_only(code: str, layer: str, title: str) -> None:
    """Add a cause that the facts of a machine cannot show: only its page exists."""
    RULES[code] = Rule(code, layer, title)


class Card(NamedTuple):
    """A GPU for torch; ``sure`` unless its capability is inferred from neighbouring PCI ids."""

    name: str
    capability: tuple[int, int]
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.name} has compute capability {self.capability[0]}.{self.capability[1]}"


class Case(Machine):
    """A machine to be judged."""

    @classmethod
    def of(cls, machine: Machine) -> Case:
        """The case of a machine, with nothing computed yet."""
        case = cls.__new__(cls)
        case.__dict__.update((name, machine.__dict__[name]) for name in Machine.__dataclass_fields__)
        case.__dict__["_known"] = {}
        return case

    # -- rules

    def found(self, check: Check) -> dict[str, Match]:
        """What a check finds in this case; it runs once."""
        known: dict[Check, dict[str, Match]] = self.__dict__["_known"]
        if check not in known:
            known[check] = dict(check(self))
        return known[check]

    def fires(self, *codes: str) -> bool:
        """Whether any of these rules matches."""
        return any(code in self.found(check) for code in codes if (check := RULES[code].check))

    # -- the driver

    @cached_property
    def works(self) -> bool:
        """Whether the driver or torch was seen to use a GPU: no rule may say otherwise."""
        return self.driver.cuda.works or self.torch_run.cuda_works

    @cached_property
    def fails(self) -> bool:
        """Whether the CUDA driver was asked and has no GPU; or it could not be asked, and files show why it fails."""
        if self.works or self.driver.cuda.answer.state != "unasked":
            return not self.works
        # no process can use a GPU without the kernel module or a device node
        elsewhere = self.surroundings.wsl or self.hardware.dxg or self.hardware.tegra
        return self.driver_unasked and not elsewhere and (self.kernel.loaded is False or self.nodes_absent)

    @property
    def driver_unasked(self) -> bool:
        """Whether the CUDA driver should have been asked, but the child process could not be run."""
        answer = self.driver.cuda.answer
        return answer.state == "unasked" and bool(answer.detail or "cuda" in self.problems)

    @cached_property
    def works_without(self) -> Lines:
        """The variables without which the driver was seen to work; empty if no experiment succeeded."""
        return next((tried.change for tried in self.driver.experiments if tried.cuda.works), ())

    @property
    def relief(self) -> str:
        """What an experiment proved: the driver works without certain variables."""
        for tried in self.driver.experiments:
            if tried.cuda.works:
                return (
                    f"without {', '.join(tried.change)} the driver starts and finds {plural(tried.cuda.count, 'GPU')}"
                )
        return ""

    @cached_property
    def broken(self) -> bool:
        """Whether CUDA fails for a reason other than a variable."""
        return self.fails and not self.works_without

    @cached_property
    def code(self) -> int:
        """What the driver returned: the first result that is not 0, 100 for no device, -1 without an answer."""
        cuda = self.driver.cuda
        if not cuda.answer.answered:
            return -1
        if cuda.init:
            return cuda.init
        return cuda.count_code if cuda.count_code > 0 else 100 if cuda.count == 0 else 0

    @cached_property
    def nvml_works(self) -> bool:
        """Whether NVML, and so the kernel driver, works and sees a card."""
        nvml = self.driver.nvml
        return nvml.answer.answered and nvml.init == 0 and nvml.count > 0

    @cached_property
    def libcuda(self) -> Library | None:
        """The libcuda.so.1 that a process gets: the file that was mapped, or else the one the loader should find."""
        libraries, mapped = self.driver.libraries, self.driver.cuda.library
        same = (lib for lib in libraries.cuda or () if mapped and mapped in (lib.path, lib.target))
        return next(same, libraries.libcuda)

    @property
    def no_libcuda(self) -> bool:
        """Whether the loader finds no libcuda.so.1."""
        return self.driver.cuda.answer.state == "no-library"

    @cached_property
    def mismatched(self) -> Library | None:
        """The libcuda.so.1 in use, if its version is not the kernel driver's and it is not a compat library."""
        lib, kernel = self.libcuda, self.kernel.version
        if lib is None or lib.kind != "driver" or not kernel or not _RELEASE.fullmatch(lib.version):
            return None
        return lib if lib.version != kernel else None

    @property
    def answer(self) -> str:
        """What the CUDA driver returned, in one line."""
        cuda = self.driver.cuda
        state, detail = cuda.answer.state, cuda.answer.detail
        if self.no_libcuda:
            return "the loader finds no libcuda.so.1"
        if state in ("hung", "crashed"):
            went = "gave no answer" if state == "hung" else "crashed"
            return f"the CUDA driver {went} within {cuda.answer.seconds:.0f} s: {detail}".rstrip(": ")
        if not cuda.answer.answered:
            return f"libcuda.so.1 could not be used: {detail or state}"
        if cuda.init == 0:
            return f"cuInit returned 0, and cuDeviceGetCount found {max(cuda.count, 0)} devices"
        return f"cuInit returned {cuda.init} {cu_result(cuda.init).name}".rstrip()

    @property
    def nvml_answer(self) -> str:
        """What NVML returned, in one line."""
        nvml = self.driver.nvml
        if not nvml.answer.answered:
            return f"NVML: {nvml.answer.detail or nvml.answer.state}"
        if nvml.init:
            return f"nvmlInit returned {nvml.init} {nvml_result(nvml.init).name}".rstrip()
        return f"NVML works and sees {plural(max(nvml.count, 0), 'GPU')}"

    @property
    def driver_cuda(self) -> int:
        """The CUDA version that the driver reports, 12080 for 12.8; 0 if unknown."""
        return self.driver.cuda.version or self.driver.nvml.cuda

    # -- the card, its kernel driver and its nodes

    @cached_property
    def card_nodes(self) -> tuple[Node, ...]:
        """The nodes of single cards, /dev/nvidia0 and so on, that exist."""
        return tuple(node for node in self.nodes.found if node.exists and re.fullmatch(r"/dev/nvidia\d+", node.path))

    @cached_property
    def nodes_absent(self) -> bool:
        """Whether /dev was examined and contains none of NVIDIA's nodes."""
        at = self.nodes.at
        return bool(self.nodes.found) and not (self.card_nodes or at(CONTROL).exists or at(UVM).exists)

    @cached_property
    def without_nodes(self) -> bool:
        """Whether CUDA fails and no card has a node. A forbidden /dev/nvidiactl alone was created by the library."""
        at = self.nodes.at
        made = at(CONTROL).error == "EPERM" and not (self.card_nodes or at(UVM).exists)
        return self.broken and (self.nodes_absent or made)

    @property
    def _card_removed(self) -> bool:
        """Whether the card was removed while its driver is still loaded, which keeps the nodes."""
        bare = isinstance(self.hardware.pci, tuple) and not (self.hardware.present or self.kernel.gpus)
        return bare and self.kernel.loaded is True and not self.surroundings.container

    @cached_property
    def host_has_gpu(self) -> bool:
        """Whether the machine, also outside of a container, certainly has an NVIDIA card."""
        seen = self.hardware.gpus or self.kernel.loaded or self.kernel.gpus
        return bool(seen) and not self._card_removed

    @cached_property
    def no_gpu(self) -> bool:
        """Whether no NVIDIA GPU was found anywhere: then nothing about a driver can be wrong."""
        if not isinstance(self.hardware.pci, tuple):
            return False
        node = self.nodes.found and not self.nodes_absent and not self._card_removed
        here = self.hardware.present or self.host_has_gpu or node or self.nvml_works
        return not (here or self.works or self.surroundings.wsl)

    @cached_property
    def has_nvidia(self) -> bool:
        """Whether there certainly is an NVIDIA GPU; under WSL /dev/dxg alone may belong to any vendor's."""
        in_wsl = self.hardware.dxg and any(lib.kind == "wsl" for lib in self.driver.libraries.cuda or ())
        return bool(self.hardware.gpus or self.hardware.tegra or in_wsl or self.driver.cuda.works or self.nvml_works)

    @property
    def nvidia(self) -> bool | None:
        """Whether there is an NVIDIA GPU; ``None`` if that is unknown."""
        return True if self.has_nvidia else False if self.no_gpu else None

    @property
    def no_gpu_severity(self) -> Severity:
        """How bad it is that a process has no GPU: only a note if its torch is built without CUDA."""
        first = self.torch.first
        return "note" if first is not None and first.cpu_only and not self.torch.shadow else "error"

    @cached_property
    def withheld(self) -> bool:
        """Whether a container, pod, job or VM host has no GPU for this process, and its torch is built without CUDA."""
        return self.no_gpu_severity == "note" and self.fires("C09", "C05", "C04", "C08", "C01", "K05")

    @cached_property
    def driver_misfit(self) -> bool:
        """Whether the driver does not support the card, or lacks its firmware: that is why it does not start."""
        return self.fires("K06", "K07", "K08", "K09", "K12")

    @cached_property
    def slurm_granted(self) -> bool:
        """Whether Slurm gave this job a GPU. In a list of indices, ``0`` is a card."""
        counted = any((self.env(name) or "0") != "0" for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS"))
        return counted or any(map(self.env, ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "GPU_DEVICE_ORDINAL")))

    @cached_property
    def unseen_cards(self) -> tuple[PciDevice, ...]:
        """The cards on the bus that NVML does not list as usable."""
        nvml, cards = self.driver.nvml, self.hardware.gpus
        # NVML writes eight digits of the PCI domain, sysfs four
        seen = {gpu.address[-12:].lower() for gpu in nvml.gpus if gpu.code == 0 and gpu.address}
        if not seen and self.nvml_works and nvml.count >= len(cards):
            return ()
        return tuple(card for card in cards if card.address[-12:].lower() not in seen)

    @property
    def card_lines(self) -> Lines:
        """The cards on the bus, a line each."""
        lines = []
        for card in self.hardware.gpus:
            chip = chip_of(card.device)
            name = f" ({chip.code}, {chip.generation})" if chip else ""
            driver = f", bound to {card.driver}" if card.driver else ", not bound to a driver"
            lines.append(f"{card.address} is an NVIDIA card, 10de:{card.device:04x}{name}{driver}")
        return tuple(lines)

    @property
    def kernel_line(self) -> str:
        """Which kernel driver is loaded, in a line."""
        if not self.kernel.loaded:
            return "the kernel module nvidia is not loaded"
        flavour = f", {self.kernel.flavour} flavour" if self.kernel.flavour else ""
        return f"the loaded kernel driver is {self.kernel.version or 'of unknown version'}{flavour}"

    def logged(self, pattern: str) -> str:
        """What matches in the kernel log, whose messages may span several lines."""
        found = re.search(pattern, self._log) if self._log else None
        return f"the kernel log says: {found[0][:160].strip()}" if found else ""

    @cached_property
    def _log(self) -> str:
        return re.sub(r" +", " ", _LOG_NOISE.sub(" ", " ".join(self.kernel.log or ())))

    # -- torch

    @property
    def torch_not_run(self) -> bool:
        """Whether torch was not run, so that only its files are known."""
        return self.torch_run.answer.state == "unasked"

    @cached_property
    def imported(self) -> bool:
        """Whether torch was seen to be imported."""
        step = self.torch_run.step("import")
        return step is not None and step.ok

    @cached_property
    def import_error(self) -> str:
        """Why torch could not be imported; empty if it could, or was not tried."""
        step = self.torch_run.step("import")
        return step.error if step and not step.ok else ""

    def failed(self, *names: str) -> Step | None:
        """The first step of the torch child that failed, among these or all of them."""
        return next((step for step in self.torch_run.steps if not step.ok and (not names or step.name in names)), None)

    @cached_property
    def computes(self) -> bool:
        """Whether torch was seen to do all its work on the GPU: then nothing about it is broken."""
        return self.torch_run.cuda_works and self.failed() is None

    def complaint(self, pattern: str) -> str:
        """The first matching line of torch's errors and warnings; empty if there is none."""
        errors = (step.error for step in self.torch_run.steps if not step.ok)
        for text in (*errors, *self.torch_run.warnings):
            for line in text.splitlines():
                if re.search(pattern, line):
                    return line.strip()[:_SHOWN]
        return ""

    @property
    def torch_version(self) -> str:
        """The version of the torch that is imported."""
        first = self.torch.first
        return self.torch_run.version or (first.version if first else "")

    @property
    def torch_cuda(self) -> str:
        """The CUDA version that torch was built with; empty if none, or unknown."""
        first = self.torch.first
        return self.torch_run.cuda or (first.cuda if first else "")

    @property
    def built_with(self) -> tuple[int, int] | None:
        """The same as two numbers."""
        numbers = numbers_of(self.torch_cuda)
        return (numbers[0], numbers[1]) if len(numbers) > 1 else None

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """The cards of this process; if the driver does not work, all that NVML or the PCI bus lists."""
        driver = self.driver
        told = driver.cuda.gpus if driver.cuda.works else driver.nvml.gpus
        known = tuple(
            Card(gpu.name or "the GPU", (gpu.capability[0], gpu.capability[1]))
            for gpu in told
            if len(gpu.capability) == 2
        )
        chips = ((gpu, chip_of(gpu.device)) for gpu in self.hardware.gpus if gpu.driver != "vfio-pci")
        return known or tuple(
            Card(f"the card at {gpu.address} ({chip.code}, {chip.generation})", chip.capability, not chip.inferred)
            for gpu, chip in chips
            if chip and chip.capability
        )

    # -- shortcuts

    def usable(self, kind: str) -> list[Accelerator]:
        """The accelerators of a kind whose driver works."""
        return [other for other in self.accelerators if other.kind == kind and other.usable]

    def env(self, name: str) -> str | None:
        """The value of an environment variable, or ``None`` if it is not set."""
        return self.variables.get(name)

    @property
    def reinstall(self) -> Lines:
        """Install torch again, with everything it needs."""
        return fixes.reinstall(self, gpu=self.nvidia)


def quoted(text: str) -> str:
    """The first line of an error's text, as evidence; empty if there is none."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"torch says: {line[:_SHOWN]}" if line else ""


def is_nvidia_library(name: str) -> bool:
    """Whether a file is one of the CUDA libraries; libcuda and libnvidia-*, the driver's own, are not.

    >>> is_nvidia_library("libcudnn.so.9"), is_nvidia_library("libcuda.so.1"), is_nvidia_library("libcurl.so.4")
    (True, False, False)
    """
    return bool(_NVIDIA_LIBRARY.fullmatch(name)) and not name.startswith("libcuda.so")
