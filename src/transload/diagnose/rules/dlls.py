"""The DLLs that torch loads on Windows, which names only the one that was asked for, never the one that is missing."""

from __future__ import annotations

import ntpath
import re

from transload.diagnose import fixes
from transload.diagnose.case import Case, Lines, Match, Matches, rules, torch_says
from transload.diagnose.pe import RUNTIME, SYSTEM, TORCH_LIB
from transload.diagnose.tables import numbers_of
from transload.machine import Machine, Resolved
from transload.render.words import size
from transload.steps import Steps

_NUMBER = re.compile(r"\[WinError (\d{1,5})\]")
_DLL = re.compile(r"\[WinError (?:126|127|182|193|1114)\].*?Error loading \"(?P<dll>[^\"]+)\"", re.DOTALL)
_FUNCTION_OF = re.compile(r"(?P<function>.+) of (?P<library>\S+), needed by (?P<user>\S+)")
_OPENMP = "libomp140.x86_64.dll"  # Visual Studio has it, the runtime does not
_PATH = "PATH: "
_FOREIGN = "for another machine"
_CHANGED = (14, 40)  # What this and later Visual C++ compile cannot use the mutexes of an older runtime.


def _found(lib: Resolved) -> str:
    version = f" ({lib.version})" if lib.version else ""
    return f"{lib.name} is taken from {lib.path}{version}, found through {lib.via}"


def _not_found(lib: Resolved) -> str:
    return f"{lib.name}, needed by {lib.needed_by}, is not found anywhere"


def _release(lib: Resolved) -> tuple[int, ...]:
    return numbers_of(lib.version)[:2]


def _broken(lib: Resolved) -> str:
    return f"{lib.path} cannot be loaded: {lib.problem}"


def _elsewhere(lib: Resolved) -> bool:
    """Whether a DLL comes from a place where other programs put theirs."""
    return lib.via.startswith(_PATH) or lib.via == "the current directory"


def _remove(m: Case, lib: Resolved) -> Steps:
    """Keep Windows from finding a DLL of another program."""
    if lib.via.startswith(_PATH):
        return fixes.drop_folder(m, "PATH", ntpath.dirname(lib.path))
    return m.steps("A DLL from elsewhere", path=lib.path)


def _runtime(m: Case) -> Steps:
    """Install the Visual C++ runtime, for the processor that this Python is built for."""
    if m.python.environment in fixes.CONDAS:
        return fixes.conda(m, "vc14_runtime", force=True)
    return m.steps("The Visual C++ runtime", machine="arm64" if m.python.machine == "ARM64" else "x64")


def commit_lines(machine: Machine) -> Lines:
    """How much of the commit limit is free, and how much of it a process takes; nothing if unknown."""
    limit, free, needs = machine.platform.commit_limit, machine.platform.commit_free, machine.torch_libraries.committed
    return (
        *((f"{size(free)} of the commit limit of {size(limit)} are free",) if limit >= 0 <= free else ()),
        *((f"every process that imports this torch takes {size(needs)} of it for DLLs",) if needs >= 0 else ()),
    )


@rules("torch-libraries", "W16")
def no_memory_for_dlls(m: Case) -> Matches:
    """The commit limit is reached; or torch was not run, and its DLLs alone would exceed it."""
    complaint = m.complaint(r"\[WinError 1455\]")
    short = m.torch_not_run and 0 <= m.platform.commit_free < m.torch_libraries.committed
    if complaint or (short and m.platform.system == "Windows"):
        yield "W16", Match((torch_says(complaint), *commit_lines(m)), likely=not complaint)


def _possible(m: Case, *numbers: str) -> bool:
    """Whether the import failed with one of these errors of Windows, or in words that have no number; or was not tried.

    The numbers are the same in every language. The import of ``_C`` fails without a number.
    """
    stated = _NUMBER.search(m.import_error)
    failed = stated[1] in numbers if stated else "DLL load failed while importing" in m.import_error
    return m.platform.system == "Windows" and (failed or m.torch_not_run)


@rules("torch-libraries", "W10", "W12")
def missing_dlls(m: Case) -> Matches:
    """A DLL of the Visual C++ runtime (W10) or of its OpenMP (W12) is not found."""
    missing = _missing(m)
    if runtime := [lib for lib in missing if RUNTIME.fullmatch(lib.name.lower())]:
        yield "W10", Match((torch_says(m.import_error), *map(_not_found, runtime[:4])), _runtime(m))
    if openmp := [lib for lib in missing if lib.name.lower() == _OPENMP]:
        yield "W12", Match((torch_says(m.import_error), *map(_not_found, openmp)))


def _missing(m: Case) -> list[Resolved]:
    absent = [lib for lib in m.torch_libraries.needed if not lib.path and lib.via != "delayed"]
    return absent if _possible(m, "126") else []


def _spoilt(m: Case) -> list[Resolved]:
    return [lib for lib in m.torch_libraries.needed if lib.path and lib.problem] if _possible(m, "126", "193") else []


@rules("torch-libraries", "W15")
def foreign_dlls(m: Case) -> Matches:
    """Windows finds a DLL for another processor, and no other."""
    if foreign := [lib for lib in _spoilt(m) if lib.problem.startswith(_FOREIGN)]:
        lib = foreign[0]
        python = f"Python is a program for {m.python.machine}" if m.python.machine else ""
        fix = m.reinstall if lib.via == TORCH_LIB else _remove(m, lib)
        yield "W15", Match((torch_says(m.import_error), _broken(lib), python), fix)


@rules("torch-libraries", "W11", "W13", "W14")
def unsuitable_dlls(m: Case) -> Matches:
    """A DLL is found that is too old, another program's, or of another release: it lacks a function, or fails."""
    libraries, says = m.torch_libraries, torch_says(m.import_error)
    taken = {lib.name.lower(): lib for lib in libraries.needed if lib.path and not lib.problem}
    unresolved = libraries.unresolved if _possible(m, "127", "182") else ()
    lacking = [match for match in map(_FUNCTION_OF.fullmatch, unresolved) if match]
    lines = [f"{match['library']} has no {match['function']}, which {match['user']} needs" for match in lacking[:3]]
    blamed = lacking[0]["library"].lower() if lacking else ""

    needs = numbers_of(libraries.toolset)[:2]
    older = [lib for name, lib in taken.items() if name.startswith("msvcp140") and () < _release(lib) < needs]
    fatal = [lib for lib in older if _release(lib) < _CHANGED <= needs]
    fails = "[WinError 1114]" in m.import_error
    crashed = m.torch_run.answer.state == "crashed" and m.platform.system == "Windows"
    old = [taken[blamed]] if blamed in taken and RUNTIME.fullmatch(blamed) else []
    old += (older if fails else []) or (fatal if crashed or (m.torch_not_run and _possible(m)) else [])
    if old:
        lib = old[0]
        built = f"torch is built with Visual C++ {libraries.toolset}, and needs a runtime as new as that"
        fix = _runtime(m)
        hides = lib.via != SYSTEM and not _elsewhere(lib)  # it is found before that of the system
        if hides and m.python.environment not in fixes.CONDAS:
            fix = m.steps("W11 copy", path=lib.path, runtime=fix)
        sure = lines or (fails and lib in fatal)
        yield "W11", Match((says, _found(lib), *lines, built), fix, likely=not sure)
        return

    strange = [lib for lib in taken.values() if _elsewhere(lib)] if fails else []
    strange = [taken[blamed]] if blamed in taken else strange
    if strange:
        of_runtime = RUNTIME.fullmatch(strange[0].name.lower())  # then System32, which comes first, has none
        fix = _runtime(m) if of_runtime else _remove(m, strange[0])
        yield "W13", Match((says, _found(strange[0]), *lines), fix, likely=not lines)
    elif lines:
        python, release = re.fullmatch(r"python\d+\.dll", blamed), ".".join(m.python.version.split(".")[:2])
        yield "W14", Match((says, *lines), m.steps("W14 python", version=release) if python else m.reinstall)


@rules("torch-libraries", "L10", "L11", likely=("L11",))
def windows_dlls(m: Case) -> Matches:
    """Another reason why Windows cannot load a DLL of torch (L10); or it loaded CUDA's DLLs from elsewhere (L11)."""
    first, asked = m.torch.first, _DLL.search(m.import_error)
    missing, broken = map(_not_found, _missing(m)), map(_broken, _spoilt(m))
    lines = (*missing, *broken)
    if (asked or lines) and not m.matches("T09", "W10", "W11", "W12", "W13", "W14", "W15"):
        fbgemm = first and first.version.startswith("2.4.0") and asked and "fbgemm" in asked["dll"]
        fix = m.reinstall if lines else m.steps("L10 fbgemm" if fbgemm else "L10")
        yield "L10", Match((torch_says(m.import_error), *lines[:4]), fix)
    if m.platform.system == "Windows" and first and m.failed() and not m.torch_computes:
        mapped = ((file, ntpath.basename(file).lower()) for file in m.torch_run.libraries)
        dlls = (file for file, name in mapped if name.startswith(("cudart64_", "cudnn", "cublas")))
        if outside := [file for file in dlls if not file.startswith(first.location)]:
            yield "L11", Match(tuple(f"loaded: {file}" for file in outside[:4]))
