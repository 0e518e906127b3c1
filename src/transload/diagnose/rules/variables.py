"""Environment variables that hide a GPU from a process, or change how CUDA works in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import CVD, Case, quoted
from transload.diagnose.rules.rule import RULES, Lines, Match, Rule, page_only, rule
from transload.diagnose.tables import covers
from transload.diagnose.visible import Visible, visible_devices

if TYPE_CHECKING:
    from transload.findings import Severity

_ORDER = "CUDA_DEVICE_ORDER"
_WHY = {
    "empty-value": "an empty value hides every GPU",
    "empty": "an empty element ends the list",
    "negative": "a negative number ends the list",
    "not-a-number": "{token} is neither a number nor a UUID, and ends the list",
    "no-such-index": "{token} is not a valid index: they go from 0 to {last}",
    "twice": "{token} names a GPU that is already in the list; CUDA then rejects the whole list",
    "no-such-uuid": "no GPU's UUID begins with {token}",
    "ambiguous": "more than one UUID begins with {token}",
    "mixed": "{token} is of another kind than the first element: a list holds either numbers or UUIDs",
}


def _inventory(m: Case) -> tuple[Lines, Lines]:
    """UUIDs of the GPUs and MIG devices, including hidden ones; an empty UUID is unknown."""
    nvml = [gpu for gpu in m.driver.nvml.gpus if gpu.code == 0]
    freed = next((tried.cuda for tried in m.driver.experiments if CVD in tried.change and tried.cuda.works), None)
    if nvml:
        return tuple(gpu.uuid for gpu in nvml), tuple(uuid for gpu in nvml for uuid in gpu.mig_devices)
    if freed:
        return tuple(gpu.uuid for gpu in freed.gpus) or ("",) * freed.count, ()
    return ("",) * max(len(m.hardware.gpus), len(m.kernel.gpus)), ()


def _filtered(m: Case) -> Visible | None:
    """What CUDA_VISIBLE_DEVICES leaves visible, unless Slurm set it for a job without a GPU, or it cannot be judged."""
    value, (gpus, mig) = m.env(CVD), _inventory(m)
    if value is None or not gpus or not m.has_nvidia or (m.surroundings.slurm and not m.slurm_granted):
        return None
    seen = visible_devices(value, gpus, mig)
    return seen if seen.known and bool(seen.why) else None


def _hidden(m: Case, reasons: Lines) -> Match | None:
    """An error if the variable leaves no GPU visible; otherwise what it hides."""
    seen = _filtered(m)
    if seen is None or seen.why not in reasons or (seen.error and m.works):
        return None
    value, (gpus, mig) = m.env(CVD), _inventory(m)
    why = _WHY["empty-value" if value == "" else seen.why].format(token=repr(seen.token), last=len(gpus) - 1)
    answer = m.answer if seen.error and m.driver.cuda.answer.state != "unasked" else ""
    evidence = (f"{CVD} is {value!r}", why, answer, _experiment(m))
    if seen.error:
        return Match(evidence, _correct(m))
    if seen.why == "negative":
        return None  # -1 at the end of a list is a known way to end it
    # a warning if that hides a GPU
    rest = visible_devices(",".join(seen.dropped[1:]), gpus, mig) if len(seen.dropped) > 1 else Visible()
    severity: Severity = "warning" if rest.count > 0 else "note"
    left = f"{seen.count} of {len(gpus)} GPUs are visible"
    return Match((*evidence, left), _correct(m), f"{CVD} is cut off at {seen.token!r}", severity)


def _experiment(m: Case) -> str:
    for tried in m.driver.experiments:
        if tried.change == (CVD,):
            found = f"finds {tried.cuda.count} GPUs" if tried.cuda.works else "does not work either"
            return f"without {CVD} the driver {found}".replace(" 1 GPUs", " 1 GPU")
    return ""


def _correct(m: Case) -> Lines:
    if m.surroundings.slurm:
        return (
            "Do not set it in a Slurm job: Slurm sets it to the job's GPUs. Remove it from the batch script and the",
            "shell's startup files, and start the job again.",
        )
    return (*fixes.unset(m, CVD), "Or set it to indices starting at 0, as nvidia-smi -L lists them.")


def _hiding(code: str, title: str, *reasons: str) -> None:
    """Add a rule about CUDA_VISIBLE_DEVICES, for some reasons of ``visible_devices``."""
    RULES[code] = Rule(code, "variables", title, lambda m: _hidden(m, reasons))


_hiding("E03", f"{CVD} names a GPU twice", "twice")
_hiding("E01", f"{CVD} hides every GPU", "empty", "negative", "not-a-number")
_hiding("E02", f"{CVD} names a GPU that does not exist", "no-such-index")
_hiding("E04", f"{CVD} names a UUID that does not exist", "no-such-uuid", "ambiguous", "mixed")


@rule("E13", "variables", "torch counts no GPU although CUDA has one")
def miscounted(m: Case) -> Match | None:
    """torch computes on a GPU, and its own count of them is 0."""
    run, value = m.torch_run, m.env(CVD)
    if value is None or run.count != 0 or not run.cuda_works:
        return None
    evidence = (f"{CVD} is {value!r}", "torch.cuda.device_count() is 0, and a kernel ran on the GPU")
    return Match(evidence, _correct(m), severity="warning")


@rule("E07", "variables", "a file sets CUDA_VISIBLE_DEVICES", likely=True)
def from_file(m: Case) -> Match | None:
    """A note, where the value is wrong and a file was found that sets it."""
    places = m.variables.origins.get(CVD, ())
    if not places or m.works or _filtered(m) is None:
        return None
    return Match(tuple(f"{CVD} is set in {place}" for place in places), ("Remove it there.",), severity="note")


page_only("E06", "variables", "CUDA_VISIBLE_DEVICES is set too late")
page_only("E08", "variables", "a program asks for a GPU index that does not exist")


@rule("E12", "variables", "CUDA_DEVICE_ORDER has an invalid value")
def bad_order(m: Case) -> Match | None:
    """The value is neither of the two, and the driver did not start with it."""
    value = m.env(_ORDER)
    if value in (None, "FASTEST_FIRST", "PCI_BUS_ID") or m.works or not m.has_nvidia:
        return None
    return Match((f"{_ORDER} is {value!r}", m.answer), fixes.set_variable(m, _ORDER, "PCI_BUS_ID"))


@rule("A04", "variables", "a variable forces or forbids PTX compilation")
def jit_switch(m: Case) -> Match | None:
    """It is set, and torch failed because of it or must fail; a note if it did no harm."""
    names = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")
    name = next((name for name in names if (m.env(name) or "0").strip() not in ("", "0")), "")
    if not name or not m.has_nvidia:
        return None
    told = m.complaint(r"no kernel image is available|PTX JIT compil")
    # whether none of torch's own kernels can run on any of the cards
    codes = tuple(m.torch_libraries.cubins or ())
    usable = [code for code in codes if code.startswith("compute_") == ("FORCE" in name)]
    must_fail = bool(codes and m.cards) and not any(covers(usable, card.capability) for card in m.cards)
    severity: Severity = "error" if told or (m.torch_not_run and must_fail) else "note"
    return Match((f"{name} is {m.env(name)!r}", quoted(told)), fixes.unset(m, name), severity=severity)


@rule("E09", "variables", "a variable hides the AMD GPUs")
def hides_amd(m: Case) -> Match | None:
    """A ROCm build saw no GPU although there is one, and a variable that filters them is set."""
    first = m.torch.first
    gpus = [other for other in m.accelerators if other.kind == "rocm" and other.usable]
    if first is None or not first.hip or not gpus or m.torch_run.available is not False:
        return None
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", CVD):
        value = m.env(name)
        if value is not None and visible_devices(value, ("",) * len(gpus)).error:
            return Match((f"{name} is {value!r}", f"there are {len(gpus)} AMD GPUs"), fixes.unset(m, name))
    return None


@rule("E10", "variables", "is_available() asks NVML instead of CUDA")
def nvml_check(m: Case) -> Match | None:
    """A note, where CUDA does not work and the variable makes it seem to."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    dead = not m.works or m.failed("init")
    if m.env(name) != "1" or not dead or not m.torch_run.available:
        return None
    evidence = (f"{name} is '1'", "torch.cuda.is_available() is True, and CUDA does not work")
    return Match(evidence, fixes.unset(m, name), severity="note")


@rule("E05", "variables", "CUDA numbers the GPUs in a different order than nvidia-smi")
def other_order(m: Case) -> Match | None:
    """A note, where the two orders were seen to differ."""
    cuda = [gpu for gpu in m.driver.cuda.gpus if gpu.uuid]
    known = {gpu.uuid for gpu in cuda}
    nvml = [gpu for gpu in m.driver.nvml.gpus if gpu.uuid in known]
    same = [gpu.uuid for gpu in cuda] == [gpu.uuid for gpu in nvml]
    if len(cuda) < 2 or len(nvml) != len(cuda) or same or m.env(CVD) or m.env(_ORDER):
        return None
    evidence = (f"CUDA's device 0 is {cuda[0].name}, nvidia-smi's is {nvml[0].name}",)
    return Match(evidence, fixes.set_variable(m, _ORDER, "PCI_BUS_ID"), severity="note")


@rule("E11", "variables", "CUDA cannot write its cache of compiled kernels")
def no_cache(m: Case) -> Match | None:
    """A note."""
    problem = m.variables.cache_problem
    if not problem or not m.works:
        return None
    return Match((problem,), fixes.set_variable(m, "CUDA_CACHE_PATH", "/tmp/cuda-cache"), severity="note")  # noqa: S108
