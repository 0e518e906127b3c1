"""``transload.check``: whether a file can be loaded here, on which devices, and what prevents it. Nothing is loaded.

``check`` reads the file and examines the machine; ``checked`` compares the two: where ``load`` would put everything
(the plan), which packages it imports names from, which CUDA its compiled code needs, and what plain ``torch.load``
would say (``torch_says``). ``_findings`` lists what matters about it here, ``report`` shows it.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from transload.checking.torch_says import InstalledTorch, Prediction, read_bytes, torch_says
from transload.checkpoint import Checkpoint
from transload.devices import Device, Devices, local_rank, split
from transload.diagnose import doctor
from transload.diagnose.fixes import install, lines_of
from transload.diagnose.report import Diagnosis
from transload.diagnose.tables import cuda_text, driver_runs, numbers_of, runs_on, table
from transload.errors import LoadError
from transload.findings import SEVERITIES, Finding, Problem, Severity, join_names, quoted
from transload.formats.arrays import are_plain
from transload.frozen import Frozen, Plain, replace
from transload.io.sources import is_url
from transload.judge import judge
from transload.judge.names import PLAIN_VALUES
from transload.judge.problems import WITHOUT_CODE, refuse_broken, rules, sentence_of
from transload.judge.safety import judge_pickles, loaded_pickles, safe_globals_lines
from transload.judge.torch_releases import NESTED, NESTED_REFUSED, needs_nested_of_2_15
from transload.loading.placement import AUTO, Plan, is_device_list, place, plan_blocks
from transload.loading.refusal import Allowed, plain_part, refuse_program, registrar
from transload.machine import Machine, Python
from transload.nodes import Global
from transload.opening import OpenCheckpoint, inspect
from transload.render import Reported
from transload.render.checkpoint import findings, format_words
from transload.render.lines import BLANK, Block, Prose, Table, Words, heading, note, row, tally
from transload.render.words import path_text, plural, printable, size
from transload.steps import tables

if TYPE_CHECKING:
    from transload.loading.into.fitting import Fit

__all__ = ["Check", "Compatibility", "check", "check_here", "is_cuda_compatible", "report", "several"]


class Check(Frozen, Reported):
    """What ``transload.load(path, map_location=device)`` would do on a machine.

    ``ok`` is whether it would load and fit; if not, ``refusal`` says why in a sentence. ``plan`` is where everything
    goes. ``torch`` is what plain ``torch.load(path)`` would do instead, with its message word for word if
    ``torch.exact``. ``packages`` are those that the file imports names from; ``cuda`` is whether its CUDA fits.
    ``findings`` are what matters about it here, errors first. ``fit`` is how it fits the model, if there is one.
    """

    checkpoint: Checkpoint
    diagnosis: Diagnosis
    devices: Devices
    map_location: Any
    plan: Plan
    torch: Prediction
    packages: tuple[Package, ...]
    cuda: Compatibility
    refusal: str
    findings: tuple[Finding, ...]
    fit: Fit | None = None

    @property
    def ok(self) -> bool:
        """Whether it would load as asked; with a model, whether ``load_into`` would fill that."""
        return not self.refusal if self.fit is None else self.fit.ok and self.plan.ok

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, schema 1."""
        device = ",".join(map(str, self.map_location)) if is_device_list(self.map_location) else str(self.map_location)
        return {
            "schema": 1,
            "path": self.checkpoint.path,
            "ok": self.ok,
            "refusal": self.refusal,
            **{name: getattr(self.checkpoint, name) for name in ("format", "safety", "integrity")},
            "map_location": None if self.map_location is None else device,
            "devices": [device.to_dict() for device in self.devices.available],
            **{name: getattr(self.devices, name) for name in ("current", "rank", "absent")},
            "plan": self.plan.to_dict(),
            "torch": self.torch.to_dict(),
            "python": self.diagnosis.machine.python.executable,
            "packages": [package.to_dict() for package in self.packages],
            "cuda": self.cuda.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            **({} if self.fit is None else {"model": self.fit.to_dict()}),
        }

    def _blocks(self) -> Iterator[Block]:
        return report(self)


def check(
    path: str | os.PathLike[str], device: Any = AUTO, *, machine: Machine | None = None, model: Any = None
) -> Check:
    """Whether a checkpoint can be loaded, and on which devices, here or on another machine that was examined.

    ``device`` is what ``load`` takes as ``map_location``. torch is not imported and need not be installed: the devices
    are those that the doctor's probes find.

    ``model`` asks whether the checkpoint fits it, as ``load_into`` compares the two: a ``torch.nn.Module``, or a
    function or class that returns one, which is called on the meta device; or the name of such a function,
    ``"package.module:function"``, or ``"transformers:NAME_OR_DIR"``. This needs torch.

    >>> transload.check("model.pt").plan.device_of("cuda:0")  # doctest: +SKIP
    'cpu'
    """
    if model is not None:
        from transload.loading.into.fitting import built

        model = built(model)
    if machine is None:
        return check_here(path, device, doctor(torch=False), model)
    from transload.diagnose.report import judge_machine

    with OpenCheckpoint(path, neighbours=True, lazy=True) as opened:
        checkpoint = _inspected(opened)
    return _compared(checked(checkpoint, judge_machine(machine), device, machine.variables.values), path, model)


def check_here(path: str | os.PathLike[str], device: Any, diagnosis: Diagnosis, model: Any = None) -> Check:
    """As ``check``, for this machine, which was already examined, and a model that was already built."""
    from transload.opening.engine import forecast

    with OpenCheckpoint(path, neighbours=True, lazy=True) as opened:
        result = checked(_inspected(opened), diagnosis, device, dict(os.environ), cwd=os.curdir)
        # How load would move the bytes, except for what only a working driver knows.
        cuda = sum(move.nbytes for move in result.plan.moves if move.device.startswith("cuda"))
        host = sum(move.nbytes for move in result.plan.moves) - cuda
        how = forecast(os.fspath(path), host, cuda, opened.sources()).why if result.plan.ok and host + cuda else ""
    return _compared(replace(result, plan=replace(result.plan, how=how)), path, model)


def _compared(result: Check, path: str | os.PathLike[str], model: Any) -> Check:
    """The same with how the file fits a model, if there is one."""
    if model is None:
        return result
    from transload.loading.into.fitting import fit

    return replace(result, fit=fit(path, model))


def _inspected(opened: OpenCheckpoint) -> Checkpoint:
    checkpoint = opened.checkpoint
    if any(kind.startswith("sparse") for kind in {tensor.kind for tensor in checkpoint.tensors}):
        # load checks the indices of sparse tensors, and no other bytes of tensors.
        from transload.opening.damage import misplaced

        problems = tuple(Problem("sparse-outside", name, why) for name, why in misplaced(opened.elements).items())
        if problems:
            return judge(replace(checkpoint, problems=(*checkpoint.problems, *problems)))
    return checkpoint


def checked(
    checkpoint: Checkpoint, diagnosis: Diagnosis, device: Any, environ: dict[str, str], *, cwd: str = ""
) -> Check:
    """As ``check``, for a file and a machine that were already examined. ``cwd`` is where programs run from."""
    machine, devices = diagnosis.machine, devices_of(diagnosis, environ)
    plan = place(plain_part(checkpoint), devices, device)
    needed = packages(checkpoint, machine, cwd=cwd)
    first, cuda = machine.torch.first, machine.driver.cuda
    # Whether the result of torch.cuda.is_available() is known: a GPU that cannot compute may still be counted.
    sure = not machine.torch.shadow and cuda.answer.state not in ("hung", "crashed")
    sure = sure and (first is None or first.cpu_only or not cuda.works or diagnosis.status != "broken")
    installed = InstalledTorch(
        first.version if first and first.known else "",
        Counter(split(device.name)[0] for device in devices.available if device.name != "cpu"),
        sure,
        environ,
        {package.missing for package in needed if package.missing},
    )
    prediction, fits = torch_says(checkpoint, installed), compatibility(checkpoint, machine)
    result = Check(checkpoint, diagnosis, devices, device, plan, prediction, needed, fits, "", ())
    findings = list(_findings(result))
    # Why ``load`` would raise, in the order of its checks: the file, the names it imports, the machine.
    refusals: list[str] = []
    try:
        refuse_broken(checkpoint)
    except LoadError as error:
        refusals.append(error.what.partition("\n")[0])
    titles = {finding.code: finding.title for finding in findings}
    if "needs-trust" in titles:
        titles["needs-trust"] = "it asks for names that are not allowed"
    refusals += [titles[code] for code in ("is-a-program", "not-loaded", "no-torch") if code in titles]
    errors = [f for f in findings if f.severity == "error" and f.code in rules()]
    refusals += [f.title for f in errors if rules()[f.code].safety == "dangerous"]  # these cannot be allowed
    last = ("needs-trust", "no-such-device", "too-little-memory", "torch-too-old")
    refusals += [titles[code] for code in last if code in titles]
    refusal = refusals[0] if refusals else ""
    tags = [move.tag for move in plan.moves if move.device and move.reason in ("absent", "lost")]
    in_file = checkpoint.traits.container in ("zip", "stream")
    if not refusal and tags and in_file and checkpoint.safety != "dangerous":
        title = f"plain torch.load needs {', '.join(tags)}, which is not available here"
        fix: tuple[str, ...] = (
            "transload.load loads it as shown above. To make plain torch.load work, here and anywhere:",
            f"$ transload retag {quoted(checkpoint.path)} --to cpu",
        )
        if is_url(checkpoint.path):
            fix = ("transload.load loads it as shown above. In a copy on this machine, transload retag changes that.",)
        findings.append(Finding("tags-elsewhere", "note", title, (), fix))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return replace(result, refusal=refusal, findings=tuple(findings))


def devices_of(diagnosis: Diagnosis, environ: Mapping[str, str]) -> Devices:
    """The devices that work according to the doctor; torch itself is not asked.

    If torch is not installed, the devices that it would find.
    """
    machine = diagnosis.machine
    torch = machine.torch.first
    without_torch = isinstance(machine.torch.installs, tuple) and torch is None
    accelerators: list[Device] = []
    if diagnosis.cuda_usable or (without_torch and machine.driver.cuda.works):
        # The GPUs that the driver lists; only NVML knows how much memory is free.
        free = {gpu.uuid: gpu.free for gpu in machine.driver.nvml.gpus if gpu.uuid}
        gpus = machine.driver.cuda.gpus
        accelerators += [Device(f"cuda:{gpu.ordinal}", free.get(gpu.uuid, -1), gpu.memory, gpu.name) for gpu in gpus]
    else:
        # Accelerators other than NVIDIA GPUs that the installed torch was built for.
        built = {"mps": "mps"}
        if torch is not None:
            built |= {"rocm": "cuda" if torch.hip else "", "xpu": "xpu" if torch.xpu else ""}
        seen: Counter[str] = Counter()
        for accelerator in machine.accelerators:
            kind = built.get(accelerator.kind, "")
            name = kind if kind == "mps" else f"{kind}:{seen[kind]}"
            if accelerator.usable and kind and name not in seen:
                accelerators.append(Device(name, label=accelerator.name))
                seen.update((kind, name))
    why, cause = "no GPU works here", diagnosis.cause
    if cause is not None and diagnosis.status == "broken" and machine.hardware.present:
        why = f"{cause.title} [{cause.code}]"
    host = Device("cpu", machine.platform.memory_free, machine.platform.memory)
    current, absent = (accelerators[0].name, "") if accelerators else ("", why)
    return Devices((host, *accelerators), current, local_rank(environ), absent)


# -- packages

_MAIN_MODULES = frozenset({"__main__", "__mp_main__"})
_NO_PACKAGE = frozenset({"__torch__", "__builtin__", "copy_reg", "torch"})
_LONGEST_FINDER = 1 << 20


class Package(Plain):
    """A package that a loader would import for a file, and the names it would look up there."""

    name: str  # as it is imported: ``flash_attn``
    names: tuple[str, ...]
    found: bool
    missing: str = ""  # the module that is not found: the package itself, or one that only another release of it has
    on_pypi: str = ""  # what to install, if that is known
    cuda_only: bool = False
    problem: str = ""  # why it would not work although it is installed


def packages(checkpoint: Checkpoint, machine: Machine, *, cwd: str = "") -> tuple[Package, ...]:
    """What loading without ``weights_only`` would import, besides torch and the standard library; nothing is imported.

    ``cwd`` is the directory that scripts run from: Python finds modules there, too.
    """
    modules: dict[str, list[tuple[str, str]]] = {}
    streams = {pickle.name: pickle.globals.keys() for pickle in loaded_pickles(checkpoint)}
    composed = checkpoint.traits.composed  # not every name in its files is needed
    for use in checkpoint.globals:
        needed = use.stream in streams and (not composed or (use.module, use.name) in streams[use.stream])
        package = use.module.partition(".")[0] if needed else "torch"
        if use.verdict != "data" and package not in _NO_PACKAGE and package not in sys.stdlib_module_names:
            # For a name that transload.load builds itself, any release of the package will do.
            module = package if use.full_name in PLAIN_VALUES else use.module
            modules.setdefault(package, []).append((module, use.full_name.removeprefix(f"{module}.")))
    if checkpoint.path.endswith(".safetensors"):
        modules.setdefault("safetensors", []).append(("safetensors.torch", "load_file"))
    listed = table("packages")
    extensions = {broken.package.replace("-", "_"): broken for broken in reversed(machine.extensions)}
    result = []
    for name, uses in modules.items():
        parts = [] if name in _MAIN_MODULES else [_missing(module, machine.python, cwd) for module, _ in uses]
        missing = next(filter(None, parts), "")
        extension = extensions.get(name)
        lacks = extension.missing or extension.undefined if extension and not missing else ()
        problem = f"it needs {lacks[0]}, which is missing" if lacks else ""
        names, installed = tuple(map(".".join, uses)), not missing and name not in _MAIN_MODULES
        on_pypi, cuda_only = listed["imported_from_pypi"].get(name, ""), name in listed["cuda_only"].split()
        result.append(Package(name, names, installed, missing, on_pypi, cuda_only, problem))
    return tuple(result)


def _missing(module: str, python: Python, cwd: str) -> str:
    """The first part of a dotted name that an interpreter would not find; empty if it finds all, or that is unclear."""
    path = inside = [*([cwd] if cwd else []), *python.path]
    parts = module.split(".") if path else []
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            spec = PathFinder.find_spec(name, inside)
        except (ImportError, ValueError, OSError):  # a broken path entry or parent
            spec = None
        if spec is None:
            return name if count > 1 or not _found_otherwise(name, python, path) else ""
        if spec.submodule_search_locations is None or spec.origin is None:
            return ""  # a module, which may create submodules at run time; or a namespace package, with any content
        inside = list(spec.submodule_search_locations)
    return ""


def _found_otherwise(name: str, python: Python, path: list[str]) -> bool:
    """Whether a module is found without ``sys.path``: by an import hook of this process, or an editable install."""
    for finder in sys.meta_path if python.executable == sys.executable else ():
        try:
            if finder is not PathFinder and finder.find_spec(name, None) is not None:
                return True
        except Exception:  # noqa: BLE001, PERF203, S112  somebody's hook may raise anything, and must not stop us
            continue
    from pathlib import Path  # slow to import and seldom needed

    for file in (file for folder in path for file in Path(folder).glob("__editable___*_finder.py")):
        try:
            with file.open(encoding="utf-8", errors="replace") as stream:
                if f"'{name}'" in stream.read(_LONGEST_FINDER):
                    return True
        except OSError:  # noqa: PERF203 - one that cannot be read does not stop the others
            continue
    return False


# -- CUDA

_TENSORS = "tensors carry no CUDA version: they load under any, and without CUDA"
_PTX_HEAD = 4096
_PTX_VERSION = re.compile(rb"^\.version\s+(\d{1,2})\.(\d{1,2})", re.MULTILINE)
# PTX ISA version → the first CUDA whose driver compiles it, from the release history in NVIDIA's PTX ISA manual. Since
# 7.0 the minor versions are those of CUDA, with these exceptions.
_PTX_CUDA = {(8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)}
_PTX_MAJOR = {7: 11, 8: 12, 9: 13}
_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


class Compatibility(Plain, Reported):
    """An answer with its reason; true if CUDA does not prevent using the file here.

    ``origin`` are the versions of the machine that wrote the file; hardly any file records them.
    """

    compatible: bool
    reason: str
    evidence: tuple[str, ...] = ()
    origin: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self.compatible

    def _blocks(self) -> Iterator[Block]:
        answer = ("yes", "good") if self.compatible else ("no", "bad")
        yield Prose((answer, (f": {printable(self.reason, None)}", "")))
        yield from (Prose(printable(text, None), lead="  ") for text in self.evidence)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**super().to_dict(), "origin": dict(self.origin)}


def is_cuda_compatible(path: str | os.PathLike[str], *, machine: Machine | None = None) -> Compatibility:
    """Whether a checkpoint is compatible with the CUDA of this machine, or of another one that was examined.

    Tensors carry no CUDA version. Only compiled parts depend on one: kernels of an AOTInductor package run only on GPUs
    of their architecture, and PTX needs a driver that can compile it.

    >>> transload.is_cuda_compatible("model.pt").reason  # doctest: +SKIP
    'tensors carry no CUDA version: they load under any, and without CUDA'
    """
    if machine is None:
        from transload.diagnose.probes import probe

        machine = probe(torch=False)
    return compatibility(inspect(path), machine)


def compatibility(checkpoint: Checkpoint, machine: Machine) -> Compatibility:
    """As ``is_cuda_compatible``, for a file and a machine that were already examined."""
    recorded, torch, driver = checkpoint.written_by.recorded, machine.torch.first, machine.driver.cuda
    here = {
        "torch": torch.version if torch else "",
        "cuda": torch.cuda if torch else "",
        "driver": machine.driver.nvml.driver or machine.kernel.version,
        "gpu": ", ".join(dict.fromkeys(gpu.name for gpu in driver.gpus)),
    }
    compared = tuple(
        f"made with {name} {value}{f'; here {here[name]}' if here.get(name) else ''}" for name, value in recorded
    ) or ("no origin is recorded in the file",)
    # Each kernel, or library of kernels: its name, the architectures of which a GPU must run at least one, and the CUDA
    # version that its PTX needs in the driver, as drivers number it (``12080``); 0 if unknown.
    kernels: list[tuple[str, tuple[str, ...], int]] = []
    for part in checkpoint.parts:
        facts = dict(part.facts)
        if part.kind == "PTX":
            needed = 0
            record = next((record for record in checkpoint.records if record.name == part.name), None)
            if record is not None and record.offset is not None and not record.method:
                head = read_bytes(checkpoint.path, record.offset, min(record.stored, _PTX_HEAD))
                if match := _PTX_VERSION.search(head):
                    written = int(match[1]), int(match[2])
                    major, minor = _PTX_CUDA.get(written, (_PTX_MAJOR.get(written[0], 0), written[1]))
                    needed = major * 1000 + minor * 10
            kernels.append((part.name, (facts.get("target", "").replace("sm_", "compute_"),), needed))
        elif part.kind in ("cubin", "AMD GPU code", "Intel GPU code", "GPU code for several architectures"):
            kernels.append((part.name, (facts.get("target", part.kind),), 0))
        elif "GPU code inside" in facts:
            kernels.append((part.name, tuple(facts["GPU code inside"].split(", ")), 0))
    if checkpoint.integrity == "not-a-checkpoint":
        return Compatibility(False, "it is not a checkpoint", compared, recorded)
    if not kernels:
        reason = _TENSORS if checkpoint.tensors else "it contains no GPU code"
        return Compatibility(True, reason, compared, recorded)
    by_codes: dict[tuple[str, ...], list[str]] = {}
    for name, codes, _ in kernels:
        by_codes.setdefault(codes, []).append(name)
    evidence = [f"{', '.join(codes)}: {join_names(names, 1)}" for codes, names in by_codes.items()]
    capable = []
    for gpu, card in machine.capabilities.items():
        fits = ((name, any(runs_on(code, card) for code in codes), needed) for name, codes, needed in kernels)
        failing = next((name for name, runs, needed in fits if not runs or 0 < driver.version < needed), "")
        outcome = f"does not run {failing}" if failing else "runs"
        evidence.append(f"{gpu}, compute capability {'.'.join(map(str, card))}: {outcome}")
        capable += [] if failing else [gpu]
    evidence += compared
    targets = ", ".join(sorted({code for codes in by_codes for code in codes})[:8])
    processor = _PROCESSORS.get(machine.platform.machine.lower(), machine.platform.machine)
    libraries = (dict(part.facts) for part in checkpoint.parts if part.kind == "library")
    other = sorted({library.get("machine", processor) for library in libraries} - {processor})
    build = re.search(r"\+cu(\d{2})(\d)", dict(recorded).get("torch", ""))
    named = re.match(r"\d{1,2}\.\d", dict(recorded).get("cuda", ""))
    cuda = named[0] if named else f"{build[1]}.{build[2]}" if build else ""
    obstacle = ""
    if other:
        obstacle = f"its library is for {other[0]} processors, not {processor}"
    elif cuda and driver.version > 0 and not driver_runs(driver.version, numbers_of(cuda)):
        obstacle = f"it was made with CUDA {cuda}, while this driver supports up to {cuda_text(driver.version)}"
    elif not (machine.capabilities and driver.works):
        obstacle = "no NVIDIA GPU works here"
    if obstacle:
        return Compatibility(False, f"it holds compiled code for {targets}, and {obstacle}", tuple(evidence), recorded)
    reason = f"it holds compiled code for {targets}, which {'runs on' if capable else 'does not run on'}"
    cards = " or ".join(capable or machine.capabilities)
    return Compatibility(bool(capable), f"{reason} {cards}", tuple(evidence), recorded)


# -- findings

_DEVICE = re.compile(r"\b(?:cuda|mps|xpu|hpu|npu|mtia|xla)(?::\d{1,4})?\b")
_SHOWN = 6
_PROJECT = (
    "It is code of the project that saved the file: run from there, or put its folder on PYTHONPATH.",
    "A package of the same name on PyPI may be a different one.",
)


class _TorchDefault(Allowed):
    """The names that a torch allows, without importing it; includes those its submodules allow when imported."""

    def __init__(self, release: tuple[int, ...]) -> None:
        self.without_nested = release >= NESTED_REFUSED

    def user(self, node: Global) -> Any:
        refused = self.without_nested and node.full_name in NESTED
        return None if refused else registrar(node.full_name) or None


def _findings(result: Check) -> Iterator[Finding]:
    """The findings, in report order within a severity: what is wrong with the file comes first."""
    checkpoint, machine, devices = result.checkpoint, result.diagnosis.machine, result.devices
    torch, cause = machine.torch, result.diagnosis.cause
    first = torch.first
    release = numbers_of(first.version)[:2] if first else ()
    broken = checkpoint.integrity not in ("whole", "unchecked")
    if broken:
        yield from _of_file(checkpoint, devices, release)
    try:
        refuse_program(checkpoint, trusted=False)
    except LoadError as error:
        code = "is-a-program" if checkpoint.traits.program else "not-loaded"
        if not any(error.what == sentence_of(one) for one in checkpoint.findings if one.severity == "error"):
            yield Finding(code, "error", error.what, (), tuple(error.fix.split("\n")))
    if (first is None or torch.shadow) and isinstance(torch.installs, tuple) and cause is not None:
        title = "torch cannot be imported here" if torch.shadow else "torch is not installed here"
        yield Finding("no-torch", "error", title, (f"{cause.title} [{cause.code}]",), cause.fix)
    dtypes = {storage.dtype for storage in checkpoint.storages} | {tensor.dtype for tensor in checkpoint.tensors}
    last_without = tables("transload.judge", "releases")["without a dtype"]
    unknown = [name for name, last in last_without.items() if () < release <= numbers_of(last) and name in dtypes]
    if first and (unknown or (release < NESTED_REFUSED and needs_nested_of_2_15(checkpoint))):
        title = f"it holds {', '.join(unknown)}, which torch {first.version} does not have"
        title = title if unknown else f"torch {first.version} cannot rebuild a jagged tensor that torch 2.15 saved"
        yield Finding("torch-too-old", "error", title, (), ("Install a newer torch.",))
    if result.plan.refused:
        yield Finding("no-such-device", "error", result.plan.refused, (), result.plan.fix)
    for short in result.plan.shortages:
        fix = tuple(f"Instead: {words}." for words in short.instead)
        yield Finding("too-little-memory", "error", str(short), (), fix)
    if not broken:
        yield from _of_file(checkpoint, devices, release)
    for package in result.packages if checkpoint.safety != "dangerous" else ():  # nobody should install its packages
        names = f"for {join_names(package.names, _SHOWN)}"
        if package.missing and package.name == "safetensors":
            continue  # only torch.load needs it
        if package.missing:
            title = f"it needs {package.missing}, which is not installed"
            if package.missing != package.name:
                title = f"it needs {package.missing}, which this release of {package.name} does not have"
            how = lines_of(install(machine, package.on_pypi)) if package.on_pypi else _PROJECT
            yield Finding("missing-package", "error", title, (names,), how)
        elif package.problem:
            yield Finding("missing-package", "error", f"{package.name} does not load: {package.problem}", (names,))
        if package.cuda_only and not devices.of_kind("cuda"):
            title = f"{package.name} runs on NVIDIA GPUs only, and there is none here"
            advice = "Ask its author for a state dict: weights alone need no package."
            yield Finding("cuda-only-package", "warning", title, (names,), (advice,))
    for quantizer, mark in table("packages")["quantized"].items():  # they load as plain tensors
        if marked := [tensor.name for tensor in checkpoint.tensors if mark in tensor.name]:
            severity: Severity = "note" if devices.of_kind("cuda") else "warning"
            title = f"its weights are quantized for {quantizer}, which runs on NVIDIA GPUs"
            advice = "They load anywhere; to compute with them without such a GPU, get the unquantized weights."
            yield Finding("cuda-only-package", severity, title, (f"for {join_names(marked, _SHOWN)}",), (advice,))
    if checkpoint.traits.compiled and not result.cuda:
        advice = "Compile it again on the GPU that it must run on."
        yield Finding("other-architecture", "error", result.cuda.reason, result.cuda.evidence, (advice,))
    # Versions and hardware that the file records and that differ from those here. They do not prevent loading.
    recorded = dict(checkpoint.written_by.recorded)
    here = ", ".join(device.label for device in devices.accelerators if device.label) or "no GPU"
    evidence = []
    if "torch" in recorded and first and first.version and first.version != recorded["torch"]:
        evidence.append(f"torch {recorded['torch']} there, {first.version} here")
    if "gpus" in recorded and recorded["gpus"].partition(" (")[0] not in here:
        evidence.append(f"{recorded['gpus']} there, {here} here")
    if evidence:
        yield Finding("saved-elsewhere", "note", "it was saved with other versions or hardware", tuple(evidence))


def _of_file(checkpoint: Checkpoint, devices: Devices, release: tuple[int, ...]) -> Iterator[Finding]:
    """The findings about the file itself, with severities for this machine."""
    # Whether load refuses names in it that no program has allowed, or arrays of anything but numbers and strings.
    pickles = () if checkpoint.traits.program else loaded_pickles(checkpoint)
    refused = bool(_TorchDefault(release).refused(pickles)) or not are_plain(pickles)
    if refused and not any(finding.code == "needs-trust" for finding in checkpoint.findings):
        nested = [use for use in checkpoint.globals if use.full_name in NESTED]
        title = "torch refuses nested tensors from 2.15 on unless you allow them"
        names = tuple(f"{use.full_name}: {use.purpose}" for use in nested)
        yield Finding("needs-trust", "error", title, names, safe_globals_lines(nested, load="transload.load"))
    # Only other files of a directory or other records of an archive may be dangerous, which load does not read.
    apart = checkpoint.safety == "dangerous" and not checkpoint.traits.program
    apart = apart and judge_pickles(pickles).safety != "dangerous"
    for finding in checkpoint.findings:
        if apart and finding.code in ("dangerous-globals", "dangerous-use"):
            attacks = [pickle.name for pickle in checkpoint.pickles if judge_pickles([pickle]).safety == "dangerous"]
            title = f"dangerous, but not read by transload.load: {join_names(attacks, _SHOWN)}"
            yield replace(finding, severity="warning", title=title)
        elif finding.code in ("device-objects", "script-device", "export-device"):
            here = all(devices.get(name) for text in finding.evidence for name in _DEVICE.findall(text))
            yield finding if here else replace(finding, severity="warning")
        elif finding.code == "needs-trust" and refused:
            fix = list(finding.fix)
            if fix:  # insert before the advice that needs no trust
                at = fix.index(WITHOUT_CODE) if WITHOUT_CODE in fix else len(fix)
                fix.insert(at, "Or, if you trust its author, pass weights_only=False.")
                if absent := [use.device for use in checkpoint.devices if not devices.get(use.device)]:
                    words = f"Also pass map_location='cpu' to torch.load, since there is no {' or '.join(absent)} here."
                    fix.insert(at + 1, words)
            yield replace(finding, severity="error", fix=tuple(fix))
        elif finding.severity != "note" and finding.code not in ("needs-trust", "rare-opcodes", "aoti-architecture"):
            yield finding


# -- the report


def _left_out(checkpoint: Checkpoint) -> int:
    """How many tensors load leaves out, with a warning."""
    return len(checkpoint.tensors) - len(plain_part(checkpoint).tensors)


def several(results: Sequence[Check], total: int) -> Iterator[Block]:
    """A table of several files, and why some cannot be loaded; ``total`` includes those that could not be read."""
    rows: list[tuple[Words, ...]] = []
    for check in results:
        devices = ", ".join(dict.fromkeys(move.device for move in check.plan.moves if move.device)) if check.ok else ""
        loads = ("loads in part", "trust") if _left_out(check.checkpoint) else ("loads", "good")
        loads = ("fits", "good") if check.fit is not None else loads
        misfits = check.fit is not None and not check.fit.ok
        verdict = (loads if check.ok else ("does not fit" if misfits else "cannot be loaded", "bad"),)
        columns = format_words(check.checkpoint), size(check.checkpoint.nbytes)
        rows.append((path_text(check.checkpoint.path), *columns, verdict, devices))
    if results:
        titles = ("file", "format", "size", "here", "lands on")
        yield Table(rows, right=(2,), dim=(1,), titles=titles, drops=(1, 2), indent=0)
    bad = [check for check in results if not check.ok]
    for check in bad:
        yield from heading(path_text(check.checkpoint.path, None))
        why = check.fit.why.partition("\n")[0] if check.fit is not None else ""
        yield Prose(printable(why or check.refusal, None), lead=(("✗ ", "bad"),))
    hint = "transload check FILE says more about one" if bad else ""
    misfit = "does not fit" if len(bad) == 1 else "do not fit"
    fault = misfit if any(check.fit for check in results) else "cannot be loaded"
    yield from tally(total, len(results), len(bad), fault, hint)


def _fit_words(fit: Fit) -> str:
    """Whether a model fits, in a phrase."""
    if not fit.ok:
        return f"it does not fit {fit.model}, see below"
    place = f", found in {fit.found}" if fit.found else ""
    return f"it fits {fit.model}: {plural(fit.matched, 'key')}{place}"


def report(check: Check) -> Iterator[Block]:
    """Everything ``transload check`` says: the verdict, where everything goes, and what prevents it."""
    checkpoint, plan, outcome = check.checkpoint, check.plan, check.torch
    left = _left_out(checkpoint)
    loads = f"it loads without {left:,} of its {len(checkpoint.tensors):,} tensors, see below"
    loads = loads if left else "it loads"
    verdict = f"it cannot be loaded: {check.refusal}" if check.refusal else loads
    content = f"{format_words(checkpoint)}, {plural(len(checkpoint.tensors), 'tensor')}"
    prediction = checkpoint.prediction.removeprefix("torch.load ") or "cannot be predicted"
    torch_load = {"loads": "loads it", "raises": "fails, as shown below", "unknown": prediction}[outcome.outcome]
    summary = [
        ("here", verdict, "bad" if check.refusal else "trust" if left else "good"),
        ("file", f"{content} of {size(checkpoint.tensor_nbytes)}", ""),
        ("torch.load", torch_load, ""),
    ]
    python = check.diagnosis.machine.python
    if python.why:  # not the one that runs transload
        summary.append(("Python", f"{python.executable}, {python.why}", ""))
    if checkpoint.tensors or not check.cuda:
        summary.append(("CUDA", check.cuda.reason, "" if check.cuda else "bad"))
    yield Prose(((path_text(checkpoint.path, None), "strong"),))
    if check.fit is not None:
        despite = "; load_into loads them, although load refuses the file" if check.refusal and check.ok else ""
        summary.append(("model", _fit_words(check.fit) + despite, "good" if check.fit.ok else "bad"))
    for label, words, role in summary:
        yield row(label, printable(words, None), role)
    if check.fit is not None:
        for text in check.fit.notes:
            yield row("", printable(text, None), "dim")
        if not check.fit.ok:
            yield from heading(f"load_into({check.fit.model}, FILE) says")
            for line in (*check.fit.why.split("\n"), *filter(None, check.fit.fix.split("\n"))):
                yield Prose(printable(line, None), lead="  ")
    if plan.moves:
        yield from heading("where it lands", f"map_location={printable(repr(check.map_location), 60)}")
        yield from plan_blocks(plan)
    for finding in check.findings:
        if finding.code in ("no-such-device", "too-little-memory"):  # the plan shows them
            continue
        yield BLANK
        yield from findings([finding])
    if outcome.outcome == "raises" and (outcome.text or outcome.exact):
        how = "word for word" if outcome.exact else "approximately"
        of_what = "(FILE)" if not is_url(check.checkpoint.path) else ", of a copy on this machine,"
        yield from heading(f"torch.load{of_what} says", f"torch {printable(outcome.torch, 40)}, {how}")
        message = f"{outcome.error}: {outcome.text}" if outcome.text else outcome.error
        for bold in ("\033[1m", "\033[0m"):
            message = message.replace(bold, "")
        for line in message.replace("\t", "    ").split("\n"):  # never folded: people search for these words
            yield Prose(printable(line, None), lead="  ", whole=True)
    elsewhere = bool(plan.refused) or any(move.reason in ("absent", "lost") for move in plan.moves)
    if check.diagnosis.status == "broken" and check.devices.absent and elsewhere:
        yield BLANK
        yield note("transload doctor shows how to get the GPU to work")
