"""CUDA_VISIBLE_DEVICES: which GPUs it leaves to a process, and which it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.signs import answer_line, granted, works
from transload.diagnose.rules.torch_facts import has_nvidia
from transload.diagnose.visible import Visible, visible_devices

if TYPE_CHECKING:
    from transload.findings import Severity
    from transload.machine import Machine

__all__ = ["CVD", "GUIDE", "TABLE"]

TABLE = Table("variables")

Lines = tuple[str, ...]

CVD = "CUDA_VISIBLE_DEVICES"
GUIDE = "https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html"
_UNREADABLE = ("empty", "negative", "not-a-number")
_UUIDS = ("no-such-uuid", "ambiguous", "mixed")

_WHY = {
    "empty-value": "an empty value hides every GPU",
    "empty": "an empty element ends the list",
    "negative": "a negative number ends the list",
    "not-a-number": "{token} is neither a number nor a UUID, and ends the list",
    "no-such-index": "{token} is no index here: they go from 0 to {last}",
    "twice": "{token} names a GPU that the list has already: then CUDA refuses the whole list",
    "no-such-uuid": "{token} is the beginning of no GPU's UUID",
    "ambiguous": "{token} is the beginning of more than one UUID",
    "mixed": "{token} is of another kind than the first element: a list is of numbers or of UUIDs",
}


def inventory(machine: Machine) -> tuple[Lines, Lines]:
    """UUIDs of the GPUs and of the MIG devices before any variable hides one; an empty UUID is one not known."""
    nvml = [gpu for gpu in machine.driver.nvml.gpus if gpu.code == 0]
    freed = next((tried.cuda for tried in machine.driver.experiments if CVD in tried.change and tried.cuda.works), None)
    if nvml:
        return tuple(gpu.uuid for gpu in nvml), tuple(uuid for gpu in nvml for uuid in gpu.mig_devices)
    if freed:
        return tuple(gpu.uuid for gpu in freed.gpus) or ("",) * freed.count, ()
    return ("",) * max(len(machine.hardware.gpus), len(machine.kernel.gpus)), ()


def filtered(machine: Machine) -> Visible | None:
    """What CUDA_VISIBLE_DEVICES leaves, where it is set, was not set by Slurm for want of a GPU, and can be judged."""
    value = machine.variables.get(CVD)
    gpus, mig = inventory(machine)
    if value is None or not gpus or not has_nvidia(machine):
        return None
    if machine.surroundings.slurm and not granted(machine):
        return None
    seen = visible_devices(value, gpus, mig)
    return seen if seen.known and bool(seen.why) else None


def hidden(machine: Machine, *reasons: str) -> Seen | None:
    """An error where the variable leaves no GPU and none was seen; otherwise what it leaves out."""
    seen = filtered(machine)
    if seen is None or seen.why not in reasons:
        return None
    if seen.error:
        return None if works(machine) else Seen(_evidence(machine, seen), _correct(machine))
    return _cut_off(machine, seen)


def _cut_off(machine: Machine, seen: Visible) -> Seen | None:
    """The value works and is cut off: a warning where that costs a GPU, a note where it does not."""
    if seen.why == "negative":
        return None  # -1 at the end of a list is a known way to end it
    gpus, mig = inventory(machine)
    rest = visible_devices(",".join(seen.dropped[1:]), gpus, mig) if len(seen.dropped) > 1 else Visible()
    lost = rest.count > 0
    title = f"{CVD} is cut off at {seen.token!r}"
    severity: Severity = "warning" if lost else "note"
    left = f"{seen.count} of {len(gpus)} GPUs are left"
    return Seen((*_evidence(machine, seen), left), _correct(machine), title=title, severity=severity)


def _evidence(machine: Machine, seen: Visible) -> Lines:
    value = machine.variables.get(CVD)
    last = len(inventory(machine)[0]) - 1
    words = (
        "an empty value hides every GPU" if value == "" else _WHY[seen.why].format(token=repr(seen.token), last=last)
    )
    answer = (answer_line(machine),) if seen.error and machine.driver.cuda.answer.state != "unasked" else ()
    return (f"{CVD} is {value!r}", words, *answer, *_experiment(machine))


def _experiment(machine: Machine) -> Lines:
    for tried in machine.driver.experiments:
        if tried.change == (CVD,):
            found = f"finds {tried.cuda.count} GPUs" if tried.cuda.works else "does not work either"
            return (f"without {CVD} the driver {found}".replace(" 1 GPUs", " 1 GPU"),)
    return ()


def _correct(machine: Machine) -> Lines:
    if machine.surroundings.slurm:
        return (
            "In a Slurm job do not set it: Slurm does, to the GPUs of the job. Remove it from the batch script and the",
            "shell's start files, and start the job again.",
        )
    return (*fixes.unset(machine, CVD), "Or set it to indices from 0 on, as nvidia-smi -L lists them.")


@TABLE.row(
    "E03",
    "CUDA_VISIBLE_DEVICES names a GPU twice",
    about="""With a list such as 0,0 the driver does not start: cuInit answers 101, and torch says "Unexpected error
from cudaGetDeviceCount() … Error 101: invalid device ordinal". Two spellings of one GPU count as well: 0,00 or a
UUID and a beginning of it.""",
    fix="Name each GPU once.",
    sources=(GUIDE,),
)
def twice(machine: Machine) -> Seen | None:
    """One GPU comes twice before the list ends, and CUDA does not work."""
    return hidden(machine, "twice")


@TABLE.row(
    "E01",
    "CUDA_VISIBLE_DEVICES hides every GPU",
    about="""The variable lists the GPUs that a process may use. Empty, -1, NoDevFiles, or beginning with anything
that is neither a number nor a UUID (quotes, "cuda:0", "gpu0", "all"), it leaves none. torch.cuda.is_available() is
False without any warning, the first use says "RuntimeError: No CUDA GPUs are available", and nvidia-smi shows all
cards as ever: the variable does not concern it.""",
    fix="Unset it, or set it to the indices of the GPUs to use: 0,1.",
    avoid="Setting it inside a running Python program: it is read once, when CUDA starts.",
    sources=(GUIDE, "https://github.com/chainer/chainer/issues/2245"),
)
def hides_all(machine: Machine) -> Seen | None:
    """The list ends before its first GPU, for a reason in its spelling; or it is cut off there later."""
    return hidden(machine, *_UNREADABLE)


@TABLE.row(
    "E02",
    "CUDA_VISIBLE_DEVICES names a GPU that is not there",
    about="""Indices count from 0. At the first one that does not exist the list ends: 0,2,1 on a machine with two
cards gives one card, and 1 on a machine with one card gives none, with "RuntimeError: No CUDA GPUs are available".
Inside a container or job the cards are counted anew, from 0.""",
    fix="Use indices from 0 to the number of cards less one, as nvidia-smi -L lists them here.",
    sources=(GUIDE,),
)
def no_such_index(machine: Machine) -> Seen | None:
    """An index is too large."""
    return hidden(machine, "no-such-index")


@TABLE.row(
    "E04",
    "CUDA_VISIBLE_DEVICES names a UUID that is not there",
    about="""A GPU may be named by its UUID, GPU-…, or by the beginning of it, if that is the beginning of no other.
A UUID of another machine, one without "GPU-", a space before it, or an index in a list of UUIDs ends the list; if
that is its first element, no GPU is left.""",
    fix="Copy the UUID from nvidia-smi -L on this machine, or use an index.",
    sources=(GUIDE,),
)
def no_such_uuid(machine: Machine) -> Seen | None:
    """A UUID fits no card, or several; or the list mixes indices and UUIDs."""
    return hidden(machine, *_UUIDS)


@TABLE.row(
    "E13",
    "torch counts no GPU although CUDA gives one",
    about="""torch.cuda.device_count() reads CUDA_VISIBLE_DEVICES by itself, and not quite as the driver does: a
UUID in upper case or without dashes, or an index that comes twice behind a wrong one (0,7,0), is nothing to it.
is_available() is True and tensors work on cuda:0, but programs that ask for the number of GPUs use none.""",
    fix="Write the value plainly: indices, each once, or UUIDs as nvidia-smi -L prints them.",
)
def miscounted(machine: Machine) -> Seen | None:
    """torch computes on a GPU, and its own count of them is 0."""
    run, value = machine.torch_run, machine.variables.get(CVD)
    if value is None or run.count != 0 or not run.cuda_works:
        return None
    evidence = (f"{CVD} is {value!r}", "torch.cuda.device_count() is 0, and a kernel ran on the GPU")
    return Seen(evidence, _correct(machine), severity="warning")


@TABLE.row(
    "E07",
    "a file sets CUDA_VISIBLE_DEVICES",
    likely=True,
    about="""A value that nobody remembers setting comes from a file: /etc/environment, a shell's start file, a
conda environment's activate.d, a .env that an IDE or a framework reads, an ENV line of the image, or a systemd
unit. Unsetting it in one shell helps that shell alone.""",
    fix="Remove the line there, and log in again, rebuild the image or restart the service.",
)
def from_file(machine: Machine) -> Seen | None:
    """A note, where the value is wrong and a file was found that sets it."""
    places = machine.variables.origins.get(CVD, ())
    if not places or works(machine) or filtered(machine) is None:
        return None
    return Seen(tuple(f"{CVD} is set in {place}" for place in places), ("Remove it there.",), severity="note")


TABLE.page(
    "E06",
    "CUDA_VISIBLE_DEVICES is set too late",
    about="""The driver reads the variable once, when CUDA starts in a process. os.environ["CUDA_VISIBLE_DEVICES"] =
"1" after the first CUDA call of the program, or of a library that it imports, has no effect, or gives "CUDA unknown
error". The value in /proc/<pid>/environ is that of the program's start, not what it has set since.""",
    fix="Set it before starting Python, or in the very first lines, before torch is imported.",
    sources=("https://github.com/THUDM/ChatGLM-6B/issues/649",),
)

TABLE.page(
    "E08",
    "a program asks for a GPU beyond those it has",
    about=""""CUDA error: invalid device ordinal" (101) from a program, while the driver works: it asks for cuda:1
or a higher one, and has fewer. Indices count among the visible GPUs: with CUDA_VISIBLE_DEVICES=3 the only one is
cuda:0. Checkpoints saved from cuda:1 ask for it too when they are loaded without map_location.""",
    fix='Use cuda:0, give the process more GPUs, or load with map_location="cpu".',
    sources=(
        "https://github.com/unslothai/unsloth/issues/670",
        "https://github.com/ultralytics/yolov5/issues/474",
    ),
)
