"""What is to be said of a file on one machine: each thing that stands in its way, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transload.errors import LoadError
from transload.findings import Finding, Severity, quoted
from transload.judge.problems import WITHOUT_CODE
from transload.loading.refusal import PROGRAMS, Allowed, loaded_pickles, refuse_program, registrar

if TYPE_CHECKING:
    from transload.checking.compatibility import Compatibility
    from transload.checking.packages import Package
    from transload.checkpoint import Checkpoint
    from transload.diagnose.verdict import Diagnosis
    from transload.loading.placement import Devices, Plan
    from transload.machine import Machine
    from transload.nodes import Global

__all__ = [
    "of_compiled",
    "of_dtypes",
    "of_file",
    "of_origin",
    "of_packages",
    "of_plan",
    "of_program",
    "of_quantized",
    "of_tags",
    "of_torch",
]

_DEVICES_INSIDE = frozenset({"device-objects", "script-device", "export-device"})
_SAID_OTHERWISE = frozenset({"rare-opcodes", "aoti-architecture"})
_DEVICE = re.compile(r"\b(?:cuda|mps|xpu|hpu|npu|mtia|xla)(?::\d{1,4})?\b")
_NAMES = 6


def of_program(checkpoint: Checkpoint) -> Iterator[Finding]:
    """That it is a program, or a directory of ranks, and what loads such a thing."""
    try:
        refuse_program(checkpoint, trusted=False)
    except LoadError as error:
        yield Finding("is-a-program", "error", error.what, (), tuple(error.fix.split("\n")))


def of_torch(diagnosis: Diagnosis) -> Iterator[Finding]:
    """That there is no torch to load anything with; the doctor knows what to do about it."""
    torch, cause = diagnosis.machine.torch, diagnosis.cause
    if torch.first is not None and not torch.shadow:
        return
    if isinstance(torch.installs, tuple) and cause is not None:
        title = "torch cannot be imported here" if torch.shadow else "torch is not installed here"
        yield Finding("no-torch", "error", title, (f"{cause.title} [{cause.code}]",), cause.fix)


def of_dtypes(checkpoint: Checkpoint, machine: Machine) -> Iterator[Finding]:
    """Kinds of numbers that the installed torch is too old to know."""
    first = machine.torch.first
    release = _release(first.version if first else "")
    unknown = [name for name, *_ in checkpoint.dtypes if release and release <= _WITHOUT.get(name, (0, 0))]
    if unknown and first:
        title = f"it holds {', '.join(unknown)}, which torch {first.version} does not have"
        yield Finding("torch-too-old", "error", title, (), ("Install a newer torch.",))


def of_origin(checkpoint: Checkpoint, machine: Machine, devices: Devices) -> Iterator[Finding]:
    """What the file records of where it was saved, where that is not what is here. Nothing of it stops a load."""
    recorded = dict(checkpoint.written_by.recorded)
    first = machine.torch.first
    here = ", ".join(device.label for device in devices.accelerators if device.label) or "no GPU"
    evidence = []
    if "torch" in recorded and first and first.version and first.version != recorded["torch"]:
        evidence.append(f"torch {recorded['torch']} there, {first.version} here")
    if "gpus" in recorded and recorded["gpus"].partition(" (")[0] not in here:
        evidence.append(f"{recorded['gpus']} there, {here} here")
    if evidence:
        yield Finding("saved-elsewhere", "note", "it was saved with other versions or hardware", tuple(evidence))


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", version, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


# The newest release that was seen to lack a dtype; the next one need not have it yet.
_WITHOUT: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "uint16", "uint32", "uint64"), (2, 1)),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), (2, 1)),
    **dict.fromkeys(("float4_e2m1fn_x2", "float8_e8m0fnu"), (2, 6)),
    "bcomplex32": (2, 13),
}


def of_plan(plan: Plan) -> Iterator[Finding]:
    """What the plan cannot do."""
    from transload.render.landing import shortage_words

    if plan.refused:
        yield Finding("no-such-device", "error", plan.refused, (), plan.fix)
    for short in plan.shortages:
        fix = tuple(f"Instead: {words}." for words in short.instead)
        yield Finding("too-little-memory", "error", shortage_words(short), (), fix)


def of_tags(checkpoint: Checkpoint, plan: Plan) -> Iterator[Finding]:
    """Tags of devices that are not here, which plain ``torch.load`` insists on; and how to be rid of them."""
    tags = [move.tag for move in plan.moves if move.device and move.reason in ("absent", "lost")]
    if tags and checkpoint.format in ("torch-zip", "torch-legacy") and checkpoint.safety != "dangerous":
        title = f"plain torch.load wants {', '.join(tags)}, which is not here"
        fix = "transload.load lands it as above. To let plain torch.load do so, here and anywhere:"
        yield Finding(
            "tags-elsewhere", "note", title, (), (fix, f"$ transload retag {quoted(checkpoint.path)} --to cpu")
        )


def of_file(checkpoint: Checkpoint, devices: Devices) -> Iterator[Finding]:
    """What was found in the file itself, weighed for this machine."""
    refused = _refused(checkpoint)
    for finding in checkpoint.findings:
        if finding.code in _DEVICES_INSIDE:
            here = all(devices.get(name) for text in finding.evidence for name in _DEVICE.findall(text))
            yield finding if here else replace(finding, severity="warning")
        elif finding.code == "needs-trust" and refused:
            yield replace(finding, severity="error", fix=_trusting(finding))
        elif finding.severity != "note" and finding.code not in _SAID_OTHERWISE | {"needs-trust"}:
            yield finding


def _trusting(finding: Finding) -> tuple[str, ...]:
    """With the way of those who trust all of it; before the one that needs no trust."""
    if not finding.fix:
        return ()
    at = finding.fix.index(WITHOUT_CODE) if WITHOUT_CODE in finding.fix else len(finding.fix)
    return (*finding.fix[:at], "Or, if you trust its author, pass weights_only=False.", *finding.fix[at:])


class _Listed(Allowed):
    """torch's own list, without torch: names that a part of torch allows when it is imported are on it."""

    def user(self, node: Global) -> Any:
        return registrar(node.full_name) or None


def _refused(checkpoint: Checkpoint) -> bool:
    """Whether ``load`` refuses names in it, as far as no program has allowed any."""
    return checkpoint.format not in PROGRAMS and bool(_Listed().refused(loaded_pickles(checkpoint)))


def of_packages(needed: Sequence[Package], machine: Machine, devices: Devices) -> Iterator[Finding]:
    """Packages that are not there, and those that need a GPU that is not there."""
    from transload.diagnose.fixes import install

    cuda = bool(devices.of_kind("cuda"))
    for package in needed:
        names = _shown(package.names)
        if package.missing and package.name == "safetensors":
            continue  # only torch.load needs it
        if package.missing:
            title = f"it needs {package.missing}, which is not installed"
            if package.missing != package.name:
                title = f"it needs {package.missing}, which this release of {package.name} does not have"
            fix = install(machine, package.on_pypi) if package.on_pypi else _PROJECT
            yield Finding("missing-package", "error", title, (names,), fix)
        elif package.problem:
            yield Finding("missing-package", "error", f"{package.name} does not load: {package.problem}", (names,))
        if package.cuda_only and not cuda:
            title = f"{package.name} runs on NVIDIA GPUs only, and there is none here"
            yield Finding("cuda-only-package", "warning", title, (names,), _WEIGHTS)


def of_quantized(checkpoint: Checkpoint, devices: Devices) -> Iterator[Finding]:
    """Weights that load as plain tensors, and that only a package for NVIDIA GPUs can compute with."""
    for package, mark in _QUANTIZED.items():
        marked = [tensor.name for tensor in checkpoint.tensors if mark in tensor.name]
        if marked:
            severity: Severity = "note" if devices.of_kind("cuda") else "warning"
            title = f"its weights are quantized for {package}, which runs on NVIDIA GPUs"
            yield Finding("cuda-only-package", severity, title, (_shown(marked),), _WHOLE)


_QUANTIZED = {
    "bitsandbytes": ".quant_state.bitsandbytes__",
    "LLM.int8() of bitsandbytes": ".SCB",
    "GPTQ or AWQ": ".qzeros",
}
"""Package → what the names of its tensors hold."""
_WHOLE = ("They load anywhere; to compute with them elsewhere, get the weights before they were quantized.",)
_PROJECT = (
    "It is code of the project that saved the file: run from there, or put its folder on PYTHONPATH.",
    "A package of the same name on PyPI need not be it.",
)
_WEIGHTS = ("Ask its author for a state dict: weights alone need no package.",)


def of_compiled(checkpoint: Checkpoint, cuda: Compatibility) -> Iterator[Finding]:
    """Code inside that this machine does not run."""
    if checkpoint.format == "aotinductor" and not cuda:
        fix = ("Compile it again on the GPU it shall run on.",)
        yield Finding("other-architecture", "error", cuda.reason, cuda.evidence, fix)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"for {', '.join(names[:_NAMES])}{more}"
