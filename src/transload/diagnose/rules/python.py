"""The Python environment: which torch an import takes, if any."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import (
    again,
    has_nvidia,
    import_error,
    imported,
    is_nvidia_library,
    said,
    unrun,
)
from transload.diagnose.tables import index_builds, numbers_of, releases

if TYPE_CHECKING:
    from transload.machine import Machine, TorchInstall

__all__ = ["TABLE"]

TABLE = Table("python")

Lines = tuple[str, ...]

_FIRST_MANYLINUX_2_28 = (2, 7)
_NO_GLIBC = r"version .GLIBC_[\d.]+. not found"


def absent(machine: Machine) -> bool:
    """Whether the examined Python surely has no torch at all."""
    torch = machine.torch
    return torch.installs == () and not (torch.shadow or torch.dangling or machine.python.problem)


def which(machine: Machine) -> str:
    python = machine.python
    return f"{python.executable or 'the examined Python'}{f' (Python {python.version})' if python.version else ''}"


@TABLE.row(
    "P09",
    "the Python to examine does not answer",
    about="""The interpreter that was named, or that would be used here, could not be started or asked where it
takes its packages from. What torch it has cannot be said.""",
    fix="""Name a working interpreter: transload doctor --python /path/to/python. A broken environment is best made
anew.""",
)
def unanswering(machine: Machine) -> Seen | None:
    """The interpreter could not be asked, and torch was not seen to work in it either."""
    python = machine.python
    if not python.problem or imported(machine):
        return None
    others = tuple(f"another Python has a torch: {other}" for other in python.others)
    return Seen((python.problem, *others), ("Name a working one:", "$ transload doctor --python /path/to/python"))


@TABLE.row(
    "P03",
    "a file of your own is imported as torch",
    about="""Python takes the first "torch" on its path, and the folder of the script, or the current one, comes
before the installed packages. A torch.py, or a folder torch with an __init__.py, hides the real one. It shows as
"AttributeError: module 'torch' has no attribute 'cuda'", as "No module named 'torch._C'" or as a circular import. A
folder torch without an __init__.py hides nothing.""",
    fix="""Rename the file or folder (and delete __pycache__ beside it), or leave the source tree of torch before
importing it.""",
    avoid="Reinstalling torch: the installed one is whole, and is not what is imported.",
    sources=("https://github.com/pytorch/pytorch/issues/574",),
)
def shadowed(machine: Machine) -> Seen | None:
    """Something that is no torch is found first, and nobody saw the real one being imported."""
    shadow, run = machine.torch.shadow, machine.torch_run
    if not shadow or (imported(machine) and run.version and run.file != shadow):
        return None
    via = f", by {machine.torch.shadow_via}" if machine.torch.shadow_via else ""
    evidence = (f"import torch takes {shadow}{via}", *said(import_error(machine)))
    if machine.torch.shadow_kind == "source":
        return Seen(evidence, ("Leave PyTorch's source tree, and start Python in another folder.",))
    return Seen(evidence, (f"Rename {shadow}, or start Python in another folder.",))


@TABLE.row(
    "P08",
    "no torch wheel runs on this system",
    about="""torch's wheels for Linux need glibc: from torch 2.7 on 2.28 or newer (tag manylinux_2_28), and never
run on musl, the C library of Alpine. A 32-bit Python has no wheels at all. pip then says "No matching distribution
found for torch", takes an old release, or the import fails with "version `GLIBC_2.28' not found".""",
    fix="""Use a 64-bit Python on a system with glibc 2.28 or newer: Debian 10, Ubuntu 20.04, RHEL 8, or any image
made of these (python:3.12-slim instead of python:3.12-alpine).""",
    avoid="Building torch from source on Alpine to save a few megabytes: CUDA itself needs glibc.",
)
def wrong_system(machine: Machine) -> Seen | None:
    """torch is absent and could not be installed, or its import was refused by the C library."""
    libc = machine.platform.libc
    lacking = [each for each in machine.torch_libraries.unresolved if each.startswith("GLIBC_")]
    if re.search(_NO_GLIBC, import_error(machine)) or (lacking and unrun(machine)):
        asked = said(import_error(machine)) or tuple(f"not defined: {each}" for each in lacking[:3])
        return Seen((*asked, f"this system has {libc or 'an older C library'}"), _OTHER_SYSTEM)
    if not absent(machine):
        return None
    if machine.python.bits == 32:
        return Seen((f"{which(machine)} is a 32-bit program",), ("Install a 64-bit Python, and torch into that.",))
    if libc.startswith("musl"):
        return Seen((f"the C library is {libc}, and torch has no wheels for it",), _OTHER_SYSTEM)
    return _old_glibc(machine)


_OTHER_SYSTEM = ("Use a system or image with glibc 2.28 or newer: python:3.12-slim instead of python:3.12-alpine.",)


def _old_glibc(machine: Machine) -> Seen | None:
    """glibc is too old for every release that has wheels for this Python."""
    name, _, version = machine.platform.libc.partition(" ")
    fitting = [each for each in releases() if _has_wheel(machine, each)]
    if name != "glibc" or not numbers_of(version) or numbers_of(version) >= (2, 28) or not fitting:
        return None
    if any(numbers_of(each)[:2] < _FIRST_MANYLINUX_2_28 for each in fitting):
        return None
    needs = f"torch {fitting[0]}, the first for Python {machine.python.version}, needs glibc 2.28"
    return Seen((f"the C library is glibc {version}", needs), _OTHER_SYSTEM)


@TABLE.row(
    "P07",
    "torch has no wheel for this Python",
    about="""Each torch release has wheels for a few versions of CPython. For a Python that is older or newer pip
says "Could not find a version that satisfies the requirement torch (from versions: none)", or takes an old release.
PyPy has no wheels; the free-threaded builds of CPython (3.13t, 3.14t) only those of some releases.""",
    fix="Make an environment with a Python that the wanted release has wheels for, for example: uv venv --python 3.12",
)
def wrong_python(machine: Machine) -> Seen | None:
    """torch is absent, and no release in the table has a wheel for this Python."""
    python = machine.python
    if not absent(machine) or not numbers_of(python.version) or machine.python.bits != 64:
        return None
    if any(_has_wheel(machine, release) for release in releases()):
        return None
    newest = index_builds(releases()[-1])[0]
    ahead = numbers_of(python.version)[:2] > newest.python[1] and python.implementation == "cpython"
    low, high = (".".join(map(str, version)) for version in newest.python)
    evidence = (f"{which(machine)} is {_kind(machine)}", f"torch {newest.torch} has wheels for CPython {low} to {high}")
    return Seen(evidence, (f"Make an environment with Python {low} to {high}, and install torch there.",), likely=ahead)


def _kind(machine: Machine) -> str:
    python = machine.python
    free = "free-threaded " if python.free_threaded else ""
    return f"{free}{'CPython' if python.implementation == 'cpython' else python.implementation}"


def _has_wheel(machine: Machine, release: str) -> bool:
    python = machine.python
    numbers = numbers_of(python.version)[:2]
    builds = index_builds(release)
    if python.implementation != "cpython" or not builds:
        return False
    if python.free_threaded:
        return f"{'.'.join(map(str, numbers))}t" in builds[0].free_threaded
    return builds[0].supports_python(numbers)


@TABLE.row(
    "P02",
    "a torch outside this environment comes first",
    about="""Python takes the first torch on its path. One in the user's own folder (~/.local, by "pip install
--user") or on PYTHONPATH comes before that of a system or of an environment that shares its packages. Often it is
an old or a CPU-only one: pip reports the good one as installed, and another is imported.

It is told by two installations of torch on sys.path, of which the first has no CUDA and a later one has.""",
    fix="""Keep the user's folder out with PYTHONNOUSERSITE=1, or uninstall the torch that comes first with the
Python and in the folder it belongs to.""",
    sources=("https://github.com/computational-cell-analytics/micro-sam/issues/953",),
)
def outranked(machine: Machine) -> Seen | None:
    """Error where a CPU-only torch hides one with CUDA from a GPU; else a note that there are two."""
    installs = machine.torch.installs or ()
    if len(installs) < 2 or machine.torch.shadow:
        return None
    first, rest = installs[0], installs[1:]
    evidence = (f"import torch takes {_named(first)}", *(f"behind it lies {_named(other)}" for other in rest))
    better = any(other.cuda for other in rest)
    if first.cpu_only and better and has_nvidia(machine):
        return Seen(evidence, _let_pass(machine, first))
    return Seen(evidence, _let_pass(machine, first), title="there are two torches on the path", severity="note")


def _named(install: TorchInstall) -> str:
    return f"{install.location}: torch {install.version or install.dist_version or 'of unknown version'}"


def _let_pass(machine: Machine, first: TorchInstall) -> Lines:
    remove = fixes.uninstall(machine, "torch")
    user_site = machine.python.user_site
    if user_site and first.location.startswith(user_site):
        return (*fixes.set_variable(machine, "PYTHONNOUSERSITE", "1"), "Or remove that torch for good:", *remove)
    return ("Remove the one that comes first (pip takes the same one as Python does):", *remove)


@TABLE.row(
    "P04",
    "two versions of torch lie over one another",
    about="""An installation that was interrupted, or two tools that install into one folder (conda and pip), leave
files of two releases in one folder torch. The import fails with undefined symbols, missing names or "cannot import
name", or works until some function is used. pip leaves folders that begin with a tilde (~orch) when it could not
delete an old version.

It is told by version.py and the package's metadata naming different releases, and by libraries in torch/lib that
RECORD does not list.""",
    fix="""Uninstall torch until pip says it is not installed, delete what is left of torch and ~orch*, and install
it again.""",
    sources=("https://github.com/pytorch/pytorch/issues/56126",),
)
def overlaid(machine: Machine) -> Seen | None:
    """Error where such a torch cannot be imported; a warning where it can; leftovers alone are a note."""
    first = machine.torch.first
    if first is None or machine.torch.shadow:
        return None
    mixed = _mixed(first)
    error = import_error(machine)
    strays = (*machine.torch.leftovers, *machine.torch.dangling)
    leftovers = tuple(f"left of another version: {name}" for name in strays)
    if error and (mixed or first.unlisted or first.altered) and not _other_library(error):
        unlisted = tuple(f"no file of this release: {name}" for name in (*first.unlisted, *first.altered)[:5])
        return Seen((*mixed, *unlisted, *leftovers, *said(error)), _again(machine), likely=not mixed)
    if mixed:
        return Seen((*mixed, *leftovers), _again(machine), severity="warning")
    if leftovers:
        title = "parts of another torch were left behind"
        return Seen(leftovers, ("Delete them: nothing uses them.",), title=title, severity="note")
    return None


def _mixed(first: TorchInstall) -> Lines:
    files, metadata = numbers_of(first.version), numbers_of(first.dist_version)
    length = min(len(files), len(metadata), 3)
    if length < 2 or files[:length] == metadata[:length]:
        return ()
    return (f"torch/version.py says {first.version}, its metadata {first.dist_version}",)


def _other_library(error: str) -> bool:
    """Whether a library of CUDA is missing: no fault of torch's own files."""
    found = re.search(r"(lib\S+?\.so[.\d]*): cannot open shared object file", error)
    return found is not None and is_nvidia_library(found[1])


def _again(machine: Machine) -> Lines:
    leftovers = ("Delete what is left of the other version, then:",) if machine.torch.leftovers else ()
    remove = fixes.uninstall(machine, "torch")
    return (*remove, "Repeat that until it finds nothing to uninstall.", *leftovers, *again(machine))


def _get(machine: Machine) -> Lines:
    return fixes.wheel(machine) if has_nvidia(machine) else fixes.install(machine, "torch")


@TABLE.row(
    "P01",
    "torch is not installed in this Python",
    about="""Several Pythons live on one machine, each with packages of its own: the system's, one an environment,
conda's base, that of a notebook kernel or an IDE. "ModuleNotFoundError: No module named 'torch'" in a program,
while it works in a shell, means that the program runs in another Python than the shell does.""",
    fix="""Run the program with the Python that has torch, or install torch with the very Python that runs it:
/path/to/that/python -m pip install torch. In a notebook: %pip install torch.""",
    avoid="A bare pip install: the pip that the shell finds may belong to yet another Python.",
    sources=("https://github.com/unslothai/unsloth/issues/1616",),
)
def missing(machine: Machine) -> Seen | None:
    """No torch on the path of the examined Python, nor anything that passes for one."""
    if not absent(machine) or imported(machine):
        return None
    python = machine.python
    why = (python.why,) if python.why else ()
    evidence = (f"{which(machine)} has no torch", *why, *(f"there is one in {other}" for other in python.others))
    install = _get(machine)
    if not python.others:
        return Seen(evidence, install)
    return Seen(evidence, ("Run your program with a Python that has torch, or install it in this one:", *install))
