"""The verdict on a machine, and its report: the cause and the fix first, then everything that led to them.

The verdict says which findings are causes, in which order to fix them, and which only follow from others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal

from transload.diagnose.case import LAYERS, Case, Rule
from transload.diagnose.fixes import folder_of, in_search_path, on_windows
from transload.diagnose.rules import BY_CODE
from transload.diagnose.tables import chip_of, cuda_text, parts, result, table, word_lists
from transload.diagnose.tables import page as page_of
from transload.findings import Finding
from transload.frozen import Plain, replace
from transload.machine import NOT_ASKED, ChildAnswer, Machine, TorchInstall, Unknown
from transload.render import Reported
from transload.render.lines import BLANK, GLUE, Block, Chain, Item, Line, Link, Prose, copied, heading, note
from transload.render.words import count, plural, printable
from transload.steps import steps_of

Status = Literal["ok", "broken", "degraded", "no-gpu"]
State = Literal["ok", "broken", "idle", "unknown"]

_WIDTH = max(map(len, LAYERS.values()))
_ON_WINDOWS = {"kernel": "display driver"}  # layers with another name there
_MARKS = {"ok": ("✓", "good"), "broken": ("✗", "bad"), "idle": ("–", "dim"), "unknown": ("?", "trust")}
_SIGNS = {"warning": ("!", "trust"), "note": ("·", "dim")}
_GAP = 2 * GLUE  # between a title and its code
_EVIDENCE = 8
_WORDS = 200  # characters shown of an error that a rule raised
# Within a chain of layers the first broken one is the cause of faults in later ones. Every other layer is independent.
_OF_TORCH = ("python", "build", "torch-libraries")
_OF_BOTH = ("fit", "run", "extensions")
_OF_MACHINE = ("hardware", "kernel", "surroundings", "nodes", "libraries", "driver")
_ROLE = {"ok": "good", "no-gpu": "good", "degraded": "trust", "broken": "bad"}


class Muted(Plain):
    """A finding that follows from another, which ``because`` names."""

    finding: Finding
    because: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**self.finding.to_dict(), "because": self.because}


class Diagnosis(Plain, Reported):
    """What is wrong with a machine, if anything, and what to do about it.

    ``cause`` is the first thing to fix. ``findings`` are independent of each other, in the order to fix them; ``muted``
    are those that fixing another will resolve. ``status`` is ``ok``, ``broken`` (CUDA or torch does not work),
    ``degraded`` (it works, but something is wrong) or ``no-gpu`` (there is no accelerator, and torch works without one:
    nothing to repair).
    """

    status: Status
    cause: Finding | None
    findings: tuple[Finding, ...]
    muted: tuple[Muted, ...]
    machine: Machine

    @property
    def ok(self) -> bool:
        """Whether there is nothing to repair."""
        return self.status in ("ok", "no-gpu")

    @property
    def cuda_usable(self) -> bool:
        """Whether CUDA works: torch used it, or torch was not run, the driver works and no error was found."""
        if self.machine.torch_run.answer.state != "unasked":
            return self.machine.torch_run.cuda_works
        return self.machine.driver.cuda.works and self.status != "broken"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema 1."""
        return {"schema": 1, "status": self.status, "cuda_usable": self.cuda_usable, **super().to_dict()}

    def __repr__(self) -> str:
        cause = f", cause={self.cause.code}" if self.cause else ""
        return f"<Diagnosis {self.status}{cause}, {len(self.findings)} findings>"

    def _blocks(self) -> Iterator[Block]:
        return report(self._redacted())

    def _page_blocks(self) -> Iterator[Block]:
        return drawn(self._redacted())

    def _redacted(self) -> Diagnosis:
        """Without names of this machine, except in the commands of fixes."""
        from transload.diagnose.redact import names_here, redacted

        return redacted(self, names_here(), runnable=True)


def judge_machine(machine: Machine, rules: Iterable[Rule] = BY_CODE.values()) -> Diagnosis:
    """Judge a machine by all rules. A rule that raises is named in the machine's problems; the others still count."""
    case, run = Case(machine), machine.torch_run
    failed = any(not step.ok for step in run.steps)  # then a working driver proves nothing
    matched: list[tuple[Rule, Finding]] = []
    raised: dict[str, str] = {}
    for rule in rules:
        try:
            finding = rule.finding(case)
        except Exception as error:  # noqa: BLE001  reported as a bug in transload
            raised[f"rule {rule.code}"] = f"{type(error).__name__}: {error}"[:_WORDS]
            continue
        if finding is None:
            continue
        # no rule overrides an observation: what works is not broken, however unusual it is
        driver_works = rule.layer in _OF_MACHINE and machine.driver.cuda.works
        computes = rule.layer != "extensions" and run.cuda_works
        if finding.severity == "error" and (driver_works or computes) and not failed:
            finding = replace(finding, severity="note")
        matched.append((rule, finding))
    matched.sort(key=lambda pair: [*LAYERS].index(pair[0].layer))  # stable: in a layer, the order of the rules
    faults = [(rule, finding) for rule, finding in matched if finding.severity == "error"]
    faults.sort(key=lambda pair: pair[0].symptom)  # stable: a symptom is a cause only if no layer has a fault
    causes: list[tuple[Rule, Finding]] = []
    muted: list[Muted] = []
    for rule, finding in faults:
        # causes in the same chain come first, then environment variables
        near = sorted(causes, key=lambda pair: (_chain(pair[0]) != _chain(rule), pair[0].layer != "variables"))
        if because := next((cause.code for cause, _ in near if _explains(cause, rule)), ""):
            muted.append(Muted(finding, because))
        else:
            causes.append((rule, finding))
    others = [finding for _, finding in matched if finding.severity != "error"]
    findings = (*(finding for _, finding in causes), *sorted(others, key=lambda finding: finding.severity != "warning"))
    severities = {finding.severity for finding in findings}
    withheld = not raised and case.withheld  # a check that has raised would do so again
    accelerated = machine.hardware.present and not withheld
    accelerated = accelerated or run.cuda_works or any(other.usable for other in machine.accelerators)
    status: Status = "ok" if accelerated else "no-gpu"
    if "error" in severities:
        status = "broken"
    elif "warning" in severities:
        status = "degraded"
    cause = findings[0] if status in ("broken", "degraded") else None
    judged = replace(machine, problems={**machine.problems, **raised}) if raised else machine
    return Diagnosis(status, cause, findings, tuple(muted), judged)


def _chain(rule: Rule) -> str:
    return "torch" if rule.layer in _OF_TORCH else "machine" if rule.layer in _OF_MACHINE else rule.layer


def _explains(cause: Rule, rule: Rule) -> bool:
    """Whether the fault of one rule explains that of another, in a later layer."""
    earlier, chain = _chain(cause), _chain(rule)
    # while one of these layers is broken, whether the driver and the build are compatible is unknown
    unjudgeable = chain == "fit" and cause.layer in (*_OF_TORCH, *_OF_MACHINE[:-1])
    follows = (rule.symptom or chain == "run") and earlier != "extensions"
    return earlier == chain != "extensions" or unjudgeable or follows


def report(diagnosis: Diagnosis) -> Iterator[Block]:
    """What ``transload doctor`` prints without options."""
    cause = diagnosis.cause
    yield _verdict(diagnosis)
    if cause:
        yield from _evidence(cause, "  ")
        yield from _fix(cause)
    yield from _others(diagnosis)
    yield from _links(diagnosis)
    if unknown := _unknown(diagnosis):
        yield BLANK
        yield Prose(((printable("; ".join(unknown), 600), ""),), lead=(("Unknown  ", "trust"),))
    more = f"transload doctor --explain {cause.code} explains more; " if cause else ""
    yield BLANK
    yield Prose(((f"{more}--verbose shows all facts; --json is for a bug report", "dim"),))


def drawn(diagnosis: Diagnosis) -> Iterator[Block]:
    """The same for a page or a notebook: after the verdict and the fix, the chain as a picture."""
    cause, others, unknown = diagnosis.cause, [*_others(diagnosis)], _unknown(diagnosis)
    yield _verdict(diagnosis)
    if cause:
        yield from _fix(cause)
    yield from _links(diagnosis)
    if cause and cause.evidence:
        yield from heading("Evidence", f"for {cause.code}")
        yield from _evidence(cause, "  ")
    if others:
        yield from heading("Other findings", count(len(diagnosis.findings) - bool(cause)))
        yield from others
    if unknown:
        yield from heading("Unknown", "what could not be determined and would have helped")
        yield from (Prose(printable(text, 600), lead="  ") for text in unknown)


def further(diagnosis: Diagnosis) -> Iterator[tuple[str, Iterator[Block]]]:
    """More for a page: what is known about the cause, and all facts."""
    if cause := diagnosis.cause:
        yield f"About {cause.code}", page(page_of(cause.code))
    yield "All facts", facts(diagnosis.machine)


def _verdict(diagnosis: Diagnosis) -> Block:
    cause, role = diagnosis.cause, _ROLE[diagnosis.status]
    if cause is None:
        return Prose(((_headline(diagnosis), role),))
    errors = sum(finding.severity == "error" for finding in diagnosis.findings)
    several = f", for {errors} reasons; the first" if errors > 1 else ""
    joint = ", " if cause.title.startswith("probably: ") else ": "
    return Prose(((f"{_subject(diagnosis)}{several}{joint}", role), *_titled(cause)))


def _evidence(finding: Finding, indent: str) -> Iterator[Block]:
    for text in finding.evidence[:_EVIDENCE]:
        yield Prose(printable(text, 400), lead=indent)
    if len(finding.evidence) > _EVIDENCE:
        yield Prose(((f"… and {len(finding.evidence) - _EVIDENCE:,} more, in --json", "dim"),), lead=indent)


def _fix(finding: Finding) -> Iterator[Block]:
    if finding.fix:
        yield BLANK
        yield Prose((("Fix", "strong"),))
        yield from steps(finding.fix)


def _others(diagnosis: Diagnosis) -> Iterator[Block]:
    """The findings that are not the cause."""
    for place, finding in enumerate(diagnosis.findings[bool(diagnosis.cause) :], 1 + bool(diagnosis.cause)):
        sign, colour = _SIGNS.get(finding.severity, (f"Then {place}:", "bad"))
        title = Prose(_titled(finding), lead=((f"{sign} ", colour),))
        inside = [*_evidence(finding, "    "), *steps(finding.fix, "    ")]
        if finding.severity == "error":
            inside = [*_evidence(finding, "  "), *_fix(finding)]
        yield BLANK
        yield Item(colour, [title, *inside])


def _unknown(diagnosis: Diagnosis) -> list[str]:
    """What could not be determined and would have helped."""
    machine, cause = diagnosis.machine, diagnosis.cause
    unknown = [f"{probe}: {why}" for probe, why in machine.problems.items()]
    log = machine.kernel.log
    unsure = cause is not None and (cause.title.startswith("probably: ") or BY_CODE[cause.code].symptom)
    unsure = unsure and machine.platform.system == "Linux"  # others have no such log
    if cause is not None and isinstance(log, Unknown) and unsure and log.reason not in " ".join(cause.evidence):
        unknown.append(f"the kernel log: {log.reason}")
    return unknown


def _subject(diagnosis: Diagnosis) -> str:
    """What does not work, by observations rather than conclusions."""
    machine, run = diagnosis.machine, diagnosis.machine.torch_run
    if run.cuda_works:
        return "CUDA works, but there is a problem"
    if diagnosis.status == "degraded":
        return "torch works, but there is a problem" if run.answer.answered else "There is a problem"
    if diagnosis.cause is not None and diagnosis.cause.code == "X13":  # nothing could be asked
        return "It is unknown whether CUDA works"
    torch, imported = machine.torch, run.step("import")
    if torch.installs == () or torch.shadow or (run.answer.state != "unasked" and not (imported and imported.ok)):
        return "torch does not work"
    if machine.driver.cuda.works or not machine.hardware.present:
        return "torch cannot use the GPU" if machine.hardware.present else "torch does not work as it should"
    return "CUDA does not work"


def _headline(diagnosis: Diagnosis) -> str:
    """The headline for a machine that needs no repair."""
    machine, run = diagnosis.machine, diagnosis.machine.torch_run
    first = machine.torch.first
    torch = f"torch {printable(run.version)}" if run.version else _torch_words(first) if first else "torch"
    if machine.platform.system == "Darwin":
        works = "works with mps" if "mps" in run.backends else "works on the CPU"
        return f"There is no CUDA on a Mac; {torch} {works if run.answer.answered else 'was not run'}"
    if run.cuda_works:
        return f"CUDA works: {torch} computed on {_devices(machine)}"
    if diagnosis.status == "no-gpu":
        unread = isinstance(machine.hardware.pci, Unknown)
        given = "was given to this process" if machine.hardware.present else ""
        where = given or ("was found" if unread else "in this machine")
        works = f"; {torch} works on the CPU" if run.answer.answered else f"; {torch} is installed" if first else ""
        return f"No GPU {where}{works}. Nothing to repair."
    if machine.driver.cuda.works:
        return f"The CUDA driver works, on {cards(machine)}; torch was not run"
    others = ", ".join(printable(other.name or other.kind) for other in machine.accelerators if other.usable)
    if run.backends:
        return f"{torch} works with {' and '.join(map(printable, run.backends))}{f', on {others}' if others else ''}"
    return f"No NVIDIA GPU, but {others}; no problem found with {torch}" if others else "No cause was found"


def _titled(finding: Finding) -> Line:
    return ((printable(finding.title, None), "strong"), (f"{_GAP}[{finding.code}]", "dim"))


def steps(fix: Sequence[str], indent: str = "  ") -> Iterator[Block]:
    """The lines of a fix."""
    for step in steps_of(fix):
        yield copied(step, indent) if step.copied else Prose(printable(step.text, None), lead=indent)


def _links(diagnosis: Diagnosis) -> Iterator[Block]:
    """The chain of layers, each with its state and with findings that follow from the cause."""
    muted = {consequence.finding.code: consequence.because for consequence in diagnosis.muted}
    every = (*diagnosis.findings, *(consequence.finding for consequence in diagnosis.muted))
    seen = chain(diagnosis.machine)
    names = {**LAYERS, **(_ON_WINDOWS if on_windows(diagnosis.machine) else {})}
    groups: dict[str, list[Link]] = {"The machine": [], "Python and torch": [], "Together": []}
    for layer in ORDER:
        of_layer = [finding for finding in every if BY_CODE[finding.code].layer == layer]
        if layer not in seen and all(finding.severity == "note" for finding in of_layer):
            continue
        state, text = seen.get(layer, ("idle", ""))
        causes = [finding for finding in of_layer if finding.code not in muted and finding.severity != "note"]
        unclear = state == "unknown" and all(BY_CODE[finding.code].symptom for finding in causes)
        severities = () if unclear else [finding.severity for finding in causes]
        mark, role = _MARKS[state]
        if "error" in severities:
            mark, role = _MARKS["broken"]
        elif "warning" in severities:
            mark, role = _SIGNS["warning"]
        elif state == "broken":  # because of the cause; or it is not needed
            mark, role = ("–" if diagnosis.ok else "✗"), "dim"
        codes = "".join(f"{_GAP}[{finding.code}]" for finding in causes)
        dim = "dim" if mark == "–" else ""
        below: list[Line] = []
        for finding in of_layer:
            if finding.code in muted:
                title = "" if BY_CODE[finding.code].symptom else f": {printable(finding.title, None)}"
                below.append(((f"because of {muted[finding.code]}{title}{_GAP}[{finding.code}]", "dim"),))
        kind = "Python and torch" if layer in _OF_TORCH else "Together" if layer in _OF_BOTH else "The machine"
        groups[kind].append(Link((mark, role), names[layer], ((text, dim), (codes, "dim")), below))
    yield from heading("From the card to torch")
    yield Chain([*groups.items()], _WIDTH)


def page(markdown: str) -> Iterator[Block]:
    """The page of a cause, from its Markdown: prose is wrapped, code is not."""
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
            for line in text.split("\n"):
                role = "dim" if before == "title" else ""  # the layer is below the title
                yield Prose(((line, role),), lead=(("  ", ""),) if kind == "code" else (), whole=kind != "prose")
        before = kind


# -- the state of each layer

ORDER = (*_OF_MACHINE, "variables", *_OF_TORCH, *_OF_BOTH)
"""The layers as they are shown: from the card upwards, not in the order to fix them."""

_SELDOM = frozenset({"CUDA_HOME", "CUDA_PATH", "PYTHONPATH"})  # set on many machines, and irrelevant to a wheel
_VALUE = 60
_ERROR = 200

Seen = tuple[State, str]  # The state of a layer, and a line about it. ``idle``: not reached, or not needed.


def chain(machine: Machine) -> dict[str, Seen]:
    """The layers of a machine with their states, in order, without those that it does not have."""
    python, torch, first, run = machine.python, machine.torch, machine.torch.first, machine.torch_run
    around, kernel, cuda = machine.surroundings, machine.kernel, machine.driver.cuda
    seen: dict[str, Seen] = {}

    # the layers between the card and torch matter only with a GPU
    gpu = machine.hardware.present or cuda.works or machine.driver.nvml.count > 0
    pci, in_wsl, libcuda = machine.hardware.pci, around.wsl or machine.hardware.dxg, machine.driver.libraries.libcuda
    windows, sure = on_windows(machine), cuda.works or machine.driver.nvml.count > 0
    removed = f"{cards(machine)}; it may have been removed: {printable(machine.hardware.unconfirmed)}"
    others = ", ".join(printable(" ".join(filter(None, (other.name, other.detail)))) for other in machine.accelerators)
    seen["hardware"] = _first(
        (gpu and machine.hardware.unconfirmed and not sure, "unknown", removed),
        (gpu, "ok", cards(machine)),
        (isinstance(pci, Unknown) and machine.platform.system != "Darwin", "unknown", _reason(pci)),
        (others, "idle", f"no NVIDIA GPU; {others}"),
        (True, "idle", "no NVIDIA GPU"),
    )
    if gpu:
        foreign = [name for name in kernel.modules if not name.startswith("nvidia")]
        models = dict.fromkeys(gpu.driver_model for gpu in machine.driver.nvml.gpus)  # of Windows
        known = printable(", ".join(filter(None, (kernel.version, kernel.flavour, *models))))
        code = next((card.problem for card in machine.hardware.gpus if card.problem), 0)
        seen["kernel"] = _first(
            (kernel.loaded, "ok", known or "loaded"),
            (in_wsl, "ok", "provided by Windows"),
            (cuda.works, "ok", known or "not visible from here, but works"),
            (kernel.version and code, "broken", f"{known}, but the device manager shows code {code}"),
            (kernel.version, "broken", f"{known}, but it is not running"),
            (kernel.provider, "broken", f"not NVIDIA's, but that of {printable(kernel.provider)}"),
            (windows and kernel.loaded is False, "broken", "not installed"),
            (isinstance(kernel.loaded, Unknown), "unknown", _reason(kernel.loaded)),
            (True, "broken", printable(f"not loaded{f'; {foreign[0]} is' if foreign else ''}")),
        )
    places = (
        f"{around.container} container" if around.container not in ("", "container") else around.container,
        "Kubernetes" if around.kubernetes else "",
        "Slurm job" if around.slurm else "",
        f"WSL {around.wsl}" if around.wsl else "",
        f"service {around.service}" if around.service else "",
        around.notebook,
        around.sandbox,
    )
    if any(places):
        seen["surroundings"] = "ok", printable(", ".join(filter(None, places)))
    if gpu:
        start = "/dev/dxg" if in_wsl else "/dev/nvidia"
        nodes = [n for n in machine.nodes.found if n.path.startswith(start) and "nvidia-caps" not in n.path]
        bad = [f"{node.path}: {node.error}" for node in nodes if node.error]
        good = [node.path for node in nodes if not node.error]
        if not windows:
            seen["nodes"] = _first(
                (bad and not cuda.works, "broken", printable(", ".join(bad))),
                (good, "ok", printable(", ".join(good))),
                (True, "unknown", "not examined"),
            )
        path = printable(cuda.library or (libcuda.target or libcuda.path if libcuda else ""))
        problem, kind = (printable(libcuda.problem), libcuda.kind) if libcuda else ("", "")
        unread = _reason(machine.driver.libraries.cuda)
        seen["libraries"] = _first(
            (problem, "broken", f"{path}: {problem}"),
            (kind == "stub", "broken", f"{path}, a stub"),
            (kind == "compat", "ok", f"{path}, from a compat directory"),
            (libcuda or path, "ok", path),
            (unread, "unknown", unread),
            (True, "broken", f"{'nvcuda.dll' if windows else 'libcuda.so.1'} is not found"),
        )
        seen["driver"] = _first(
            (cuda.works, "ok", f"CUDA {cuda_text(cuda.version)}, {plural(cuda.count, 'GPU')}"),
            (not cuda.answer.answered, *_no_answer(cuda.answer)),
            (cuda.init, "broken", f"cuInit returned {cuda.init} {result('cuda', cuda.init).name}".rstrip()),
            (True, "broken", "starts, but has no GPU for this process"),
        )

    through = first is not None and in_search_path(machine, "PYTHONPATH", folder_of(machine, first.location))
    hiding = torch.shadow_via == "PYTHONPATH"
    deciding = word_lists()["Variables that can break CUDA or torch"]
    seldom = _SELDOM - {"PYTHONPATH"} if hiding or through else _SELDOM
    values = ((name, value) for name, value in machine.variables.values.items() if name in deciding.keys() - seldom)
    shown = [printable(f"{name}={value}", _VALUE) for name, value in values]
    seen["variables"] = "broken" if hiding else "ok", ", ".join(shown) or "none that affects CUDA or torch"
    where = f" in {python.prefix}" if python.prefix else ""
    kind = "from the Microsoft Store" if python.environment == "store" else python.environment
    environment = f", {kind}" if kind else ""
    seen["python"] = _first(
        (python.problem or not python.version, "unknown", printable(python.problem or "not asked")),
        (True, "ok", printable(f"{python.version}{where}{environment}")),
    )
    built = ""
    if first is not None:
        apple = (machine.platform.system, machine.platform.machine) == ("Darwin", "arm64")
        only = "for the CPU and mps" if apple else "for the CPU only"
        kinds = (("CUDA", first.cuda), ("ROCm", first.hip), ("XPU", first.xpu))
        built = " and ".join(f"for {name} {version}" for name, version in kinds if version) or only
        built = built if first.known else first.problem or "its version.py cannot be read"
        built = f"{_torch_words(first)}, {printable(built)}"
    seen["build"] = _first(
        (torch.shadow, "broken", printable(f"{torch.shadow} is imported instead")),
        (isinstance(torch.installs, Unknown), "unknown", _reason(torch.installs)),
        (built, "ok", built),
        (True, "broken", "torch is not installed"),
    )
    if first is not None and first.cuda:
        libraries = machine.torch_libraries
        at_once = [library for library in libraries.needed if library.via != "delayed"]
        missing = [library.name for library in at_once if not library.path]
        spoilt = [f"{library.name}: {library.problem}" for library in at_once if library.problem]
        kind = "DLLs beside torch's own" if machine.platform.system == "Windows" else "NVIDIA libraries"
        unresolved = libraries.unresolved[0] if libraries.unresolved else ""
        unread = _reason(libraries.architectures)
        seen["torch-libraries"] = _first(
            (missing, "broken", printable(f"not found: {', '.join(missing)}")),
            (spoilt, "broken", printable(f"cannot be loaded: {', '.join(spoilt)}")),
            (libraries.unresolved, "broken", printable(f"undefined: {unresolved}")),
            (at_once, "ok", f"all {len(at_once)} {kind} found"),
            (unread, "unknown", unread),
            (True, "ok", "bundled with torch"),
        )
        if gpu and cuda.works:
            levels = {"sm_" + "".join(map(str, level)): None for level in machine.capabilities.values()}
            fit = f"torch for CUDA {first.cuda}, driver for {cuda_text(cuda.version)}, {', '.join(levels)}"
            seen["fit"] = "ok", printable(fit.rstrip(", "))
        elif gpu:
            seen["fit"] = "idle", "not checked"

    # without a GPU it is not a fault that CUDA does not start
    needed = gpu or machine.accelerators
    errors = (step for step in run.steps if not step.ok and (needed or step.name != "init"))
    failed = next((f"{step.name}: {step.error}" for step in errors), "")
    state, missing_answer = _no_answer(run.answer)
    done = ", ".join(step.name for step in run.steps if step.name not in ("import", "available", "init"))
    seen["run"] = _first(
        (run.answer.state == "unasked", state, missing_answer.replace("not asked", "not run", 1)),
        (failed, "broken", printable(failed, _ERROR)),
        (not run.answer.answered, "broken", missing_answer),
        (run.cuda_works, "ok", f"{printable(done)} on {_devices(machine)}"),
        (gpu, "broken", "torch.cuda.is_available() is False"),
        (run.backends, "ok", printable(f"works with {', '.join(run.backends)}")),
        (True, "ok", "works on the CPU"),
    )
    if names := [f"{extension.package} {extension.version}".strip() for extension in machine.extensions]:
        seen["extensions"] = "ok", printable(", ".join(names), _ERROR)
    return seen


def _first(*options: tuple[object, State, str]) -> Seen:
    """The state and the words of the first option whose condition is true."""
    return next((state, words) for condition, state, words in options if condition)


def _reason(fact: object) -> str:
    """Why a fact is not known; empty if it is."""
    return printable(fact.reason) if isinstance(fact, Unknown) else ""


_SILENT = {
    "unasked": "not asked",
    "not-loadable": "its library cannot be loaded",
    "no-symbol": "its library lacks a function",
    "hung": "no answer in time",
    "crashed": "it crashed",
}


def _no_answer(answer: ChildAnswer) -> Seen:
    """The state and the words for a missing answer: not asked, could not be asked, or failed."""
    if answer.state not in _SILENT:
        return "idle", "no library found"
    why = f"{_SILENT[answer.state]}: {printable(answer.detail, _ERROR)}" if answer.detail else _SILENT[answer.state]
    return "broken" if answer.state != "unasked" else "unknown" if answer.detail else "idle", why


def cards(machine: Machine) -> str:
    """The NVIDIA cards by the names of NVML, else of the kernel, else of CUDA, else by their PCI device ids."""
    named = [_card(gpu.name, gpu.capability, gpu.memory) for gpu in machine.driver.nvml.gpus if gpu.name]
    named = named or [printable(gpu.model) for gpu in machine.kernel.gpus if gpu.model]
    named = named or [_card(gpu.name, gpu.capability, gpu.memory) for gpu in machine.driver.cuda.gpus]
    for gpu in () if named else machine.hardware.gpus:
        chip = chip_of(gpu.device)
        number = f"10de:{gpu.device:04x} at {printable(gpu.address)}"
        unnamed = f"{chip.code} ({chip.generation}), {number}" if chip else f"NVIDIA {number}"
        named.append(printable(gpu.name) if "NVIDIA" in gpu.name else unnamed)  # Windows gives others generic names
    if named:
        return ", ".join(f"{number} × {name}" if number > 1 else name for name, number in Counter(named).items())
    return "through Windows (/dev/dxg)" if machine.hardware.dxg else printable(machine.hardware.tegra)


def _card(name: str, capability: tuple[int, ...], memory: int) -> str:
    level = f" ({'.'.join(map(str, capability))})" if capability else ""
    gib = memory / 2**30  # the unit of nvidia-smi and torch
    size = f", {gib:.0f} GiB" if gib >= 9.95 else f", {gib:.1f} GiB"
    return f"{printable(name)}{level}{size if memory > 0 else ''}"


def _devices(machine: Machine) -> str:
    """The GPUs torch computed on, without their capabilities: ``NVIDIA H200`` for ``NVIDIA H200 (9, 0)``."""
    names = dict.fromkeys(printable(device.partition(" (")[0]) for device in machine.torch_run.devices)
    return ", ".join(names) or "the GPU"


def _torch_words(install: TorchInstall) -> str:
    return f"torch {printable(install.version or install.dist_version or 'of unknown version')}"


# -- all facts

_NUMBERS = {"vendor": "0x{:04x}", "device": "0x{:04x}", "kind": "0x{:06x}", "mode": "{:#o}"}
_LABEL = 30
_LONGEST = 2000
_PLAIN = (str, int, float, bool, type(None))


def facts(machine: Machine) -> Iterator[Block]:
    """All facts, one section for each layer. Empty values, and -1 for unknown ones, are only in ``--json``."""
    windows = on_windows(machine)  # which lacks much of what is asked on Linux
    for section, value in vars(machine).items():
        shown = [fact for fact in _flat(section, value) if not (_empty(fact[1]) or (windows and fact[1] == NOT_ASKED))]
        absent = windows and value == getattr(Machine(), section)  # containers, nodes
        if isinstance(value, str) or not shown or absent:
            continue
        sources = _sources(section, windows=windows)
        yield from heading(sources["title"], sources.get("remark", ""))
        labels = {name: printable(name.removeprefix(section).lstrip(".") or section) for name, _ in shown}
        width = min(_LABEL, max(map(len, labels.values())))
        for source in dict.fromkeys(source_of(name, windows=windows) for name, _ in shown):
            if source and (machine.platform.system != "Darwin" or "/" not in source):  # paths of Linux
                yield note(f"from {source}")
            for name, fact in shown:
                if source_of(name, windows=windows) == source:
                    text = fact.reason if isinstance(fact, Unknown) else _words(fact)
                    doubt = (("? ", "trust"),) if isinstance(fact, Unknown) else ()
                    lead = (("    ", ""), (f"{labels[name]:<{width}}  ", "dim"))
                    yield Prose((*doubt, (printable(text, _LONGEST), "")), lead=lead)


def source_of(name: str, *, windows: bool = False) -> str:
    """Where the fact of that name comes from."""
    section, field, *_ = (*name.replace("[", ".").split("."), "")
    sources = _sources(section, windows=windows)
    return str(sources.get("fields", {}).get(field) or sources["source"])


def _sources(section: str, *, windows: bool) -> dict[str, Any]:
    """What a section is called, and where its facts come from."""
    facts = table("facts")
    there = facts["windows"].get(section) if windows else None
    return {**facts["sections"][section], **({"fields": {}, **there} if there else {})}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each fact with its full name. Elements of a list are numbered; one with only plain fields is a single fact."""
    if is_dataclass(value) and not isinstance(value, Unknown):
        value = vars(value)
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _flat(f"{name}.{key}", member)
    elif isinstance(value, tuple) and not all(isinstance(member, _PLAIN) for member in value):
        for place, member in enumerate(value):
            plain = all(isinstance(part, (*_PLAIN, tuple)) for part in vars(member).values())
            yield from [(f"{name}[{place}]", member)] if plain else _flat(f"{name}[{place}]", member)
    else:
        yield name, value


def _empty(value: Any) -> bool:
    return not isinstance(value, bool | Unknown) and value in ("", (), -1, None, {})


def _words(value: Any, field: str = "") -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(_words(member) for member in value)
    if is_dataclass(value):
        values = ((entry, getattr(value, entry.name)) for entry in fields(value))
        worth = ((entry.name, part) for entry, part in values if not _empty(part) and part != entry.default)
        return "; ".join(f"{name} {_words(part, name)}" for name, part in worth)
    return _NUMBERS[field].format(value) if field in _NUMBERS and isinstance(value, int) else str(value)
