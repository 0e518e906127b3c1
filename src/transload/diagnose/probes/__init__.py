"""Examines a host in the order that takes the least time: starts child processes, and reads files while they work."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from math import inf
from typing import Any, Literal, TypeVar

from transload._version import __version__
from transload.diagnose.children import Child, Outcome, Question, source
from transload.diagnose.host import Host
from transload.frozen import replace
from transload.machine import (
    ChildAnswer,
    Cuda,
    CudaGpu,
    Driver,
    Experiment,
    Library,
    Machine,
    Nvml,
    NvmlGpu,
    Python,
    TorchRun,
    Unknown,
)

_DRIVER = 8.0
"""Seconds for the driver. It needs most of them with many cards and no persistence daemon, or when WSL is cold."""
_EXPERIMENTS = 9.0  # Seconds from the start of everything to the end of the last experiment.
_TORCH = 60.0
"""Seconds for torch, which may be on a cold network disk. If the driver hangs, torch gets no more time than it."""
IDLE = 15.0  # Seconds without work after which torch is killed, unless the user said how long it may take.

Fact = TypeVar("Fact")


def probe(
    python: str = "",
    *,
    torch: bool = True,
    timeout: float = 0.0,
    idle: float = 0.0,
    host: Host | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Machine:
    """Examine this host and the environment of ``python``; without one, that of an interpreter that has torch.

    torch is not run with ``torch=False``, nor if its files show that another file is imported instead. It may take
    ``timeout`` seconds, ``idle`` of them without work; 0 means the defaults. ``progress`` is called with a few words on
    the current step and, while torch is slow, on where it is. There is always an answer: a probe that fails is named in
    ``Machine.problems``, and a driver that hangs is killed within ten seconds, and torch with it; a busy
    machine takes longer.
    """
    begun = time.monotonic()
    here = host or Host()
    bare = Machine()
    problems: dict[str, str] = {}
    ours: set[int] = set()

    def attempt(name: str, default: Fact, ask: Callable[..., Fact], *arguments: object) -> Fact:
        """Return what a probe finds. If it raises on an unexpected host, name it in the problems, and continue."""
        try:
            return ask(*arguments)
        except Exception as error:  # noqa: BLE001  reported as a bug in transload
            problems[name] = f"{type(error).__name__}: {error}"
            return default

    def waiting(words: str) -> Callable[[str], object]:
        return lambda where: progress(f"{words}: {where}" if where else words)

    with ExitStack() as children:

        def start(question: Question, seconds: float) -> Child:
            child = children.enter_context(Child(question, seconds))
            ours.add(child.pid)
            return child

        progress("asking the driver")
        cuda_child = start(driver_question(here, "cuda"), _DRIVER)
        nvml_child = start(driver_question(here, "nvml"), _DRIVER)

        # The other probes are imported while the children start.
        from transload.diagnose.probes import python as interpreters

        why = ""
        if python:
            here = replace(here, python=python)
        elif here.python == Host().python:
            here, why = attempt("python", (here, ""), interpreters.choose, here)
        examined = attempt("python", Python(here.python), interpreters.python, here, why)
        installed = attempt("torch", bare.torch, interpreters.torch, here, examined)
        unasked = examined.problem or (f"import torch finds {installed.shadow}" if installed.shadow else "")
        runs = torch and not unasked  # never run a file that is not PyTorch's
        run = start(interpreters.question(here, examined.executable), timeout or _TORCH) if runs else None

        progress("reading files")
        from transload.diagnose.elf import Loader
        from transload.diagnose.probes import libraries, on_windows, system

        # The user may have named a folder or a script, but the loader needs the interpreter.
        loader = attempt("loader", None, Loader, replace(here, python=examined.executable))
        drivers = bare.driver.libraries
        cards = attempt("hardware", bare.hardware, system.hardware, here)
        if here.windows:
            drivers = attempt("driver libraries", drivers, on_windows.driver_libraries, here, examined)
        else:
            drivers = attempt("driver libraries", drivers, libraries.driver_libraries, loader)
        kernel = attempt("kernel", bare.kernel, system.kernel, here)
        suffixes = tuple(f"({pid})" for pid in ours)  # our own children may hang in the driver
        linked = bare.torch_libraries
        if first := installed.first:
            linked = attempt("torch libraries", linked, libraries.torch_libraries, loader, examined, first)
        machine = Machine(
            transload=__version__,
            taken=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            platform=attempt("platform", bare.platform, system.platform, here),
            surroundings=attempt("surroundings", bare.surroundings, system.surroundings, here),
            hardware=cards,
            kernel=replace(kernel, stuck=tuple(process for process in kernel.stuck if not process.endswith(suffixes))),
            nodes=attempt("nodes", bare.nodes, system.nodes, here),
            toolkit=attempt("toolkit", bare.toolkit, system.toolkit, here),
            variables=attempt("variables", bare.variables, system.variables, here),
            python=examined,
            torch=installed,
            torch_libraries=linked,
            extensions=attempt("extensions", (), libraries.extensions, loader, examined, installed.first),
            accelerators=attempt("accelerators", (), system.accelerators, here, cards),
        )
        # Imported while the children work: the rules take a third of the time of a run.
        import transload.diagnose.redact
        import transload.diagnose.report  # noqa: F401

        progress("waiting for the driver")
        asked = waiting("waiting for the driver")
        cuda = attempt("cuda", bare.driver.cuda, lambda: cuda_answer(cuda_child.outcome(inf, asked)))
        nvml = attempt("nvml", bare.driver.nvml, lambda: nvml_answer(here, nvml_child.outcome(inf, asked), ours))
        if here.windows:  # Windows says the same of a library that is absent and of one that lacks another library
            cuda, nvml = _unloaded(cuda, drivers.cuda), _unloaded(nvml, drivers.nvml)
        if run and "hung" in (cuda.answer.state, nvml.answer.state) and not cuda.works:
            run.end_by(begun + _DRIVER)
        left = max(1.0, begun + _EXPERIMENTS - time.monotonic())
        tried: tuple[Experiment, ...] = attempt("experiments", (), experiments, here, cuda, left)
        ran = TorchRun(ChildAnswer(detail=unasked))
        if run:
            progress("running torch")
            ended = run.outcome(idle or (inf if timeout else IDLE), waiting("running torch"))
            ran = attempt("torch run", bare.torch_run, interpreters.torch_run, ended)
    machine = replace(machine, driver=Driver(drivers, nvml, cuda, tried), torch_run=ran, problems=problems)
    return _native(machine) if here.windows else machine


_PATH = re.compile(r"(?:(?<![\w/\\])(?:[A-Za-z]:|HKLM|HKCU)|^/(?=/\w))/[^\n]*")
_AS_IS = ("values", "steps", "warnings", "taken")  # what comes from outside
_FILES = ("missing", "altered", "unlisted")  # paths in the folder of torch


def _native(value: Any, name: str = "") -> Any:
    """The facts with the paths of Windows as it writes them: probes use forward slashes."""
    if name in _AS_IS or isinstance(value, int | float | None):
        return value
    if isinstance(value, str):
        file = value.replace("/", "\\") if name in _FILES else value
        return _PATH.sub(lambda path: path[0].replace("/", "\\"), file)
    if isinstance(value, tuple):
        return tuple([_native(member, name) for member in value])
    if isinstance(value, dict):
        return {key: _native(member) for key, member in value.items()}
    return replace(value, **{key: _native(member, key) for key, member in vars(value).items()})


# -- the CUDA driver and NVML, each asked in a child process -----------------------------------------------------------

_NAMES = {"cuda": ("libcuda.so.1", "nvcuda.dll"), "nvml": ("libnvidia-ml.so.1", "nvml.dll")}
"""The libraries on Linux and on Windows."""
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE, for the memory of a process.


def driver_question(host: Host, which: Literal["cuda", "nvml"]) -> Question:
    """Ask the driver in the host's environment and current directory: both decide which library is loaded."""
    library = _NAMES[which][host.windows]
    if host.windows and which == "nvml":
        from transload.diagnose.probes import on_windows

        library = on_windows.nvml_library(host)
    library = host.real(library)
    flags = ("-I", "-S", "-B")  # without site: half the start-up time, and nothing of the environment can break it
    return Question(source("ask_driver"), sys.executable or host.python, host, flags, (which, library))


def cuda_answer(outcome: Outcome) -> Cuda:
    """What CUDA answered."""
    gpus = tuple(CudaGpu(**gpu) for gpu in outcome.values("gpu"))
    return Cuda(_answer(outcome, "cuda"), **outcome.fields_of(Cuda), gpus=gpus)


def nvml_answer(host: Host, outcome: Outcome, ours: Collection[int] = ()) -> Nvml:
    """What NVML answered, without our own processes, ``ours``."""
    gpus = []
    peers = dict(enumerate(outcome.facts.get("peers", ())))
    for gpu in outcome.values("gpu"):
        others = []
        for pid, used in gpu.get("processes", ()):
            if pid not in ours:  # one in another container has no name here
                name = f"{host.line(f'/proc/{pid}/comm') or 'process'} ({pid})"
                others.append(name if used == _NOT_AVAILABLE else f"{name}, {used / 1e9:.1f} GB")
        gpus.append(NvmlGpu(**{**gpu, "processes": tuple(others), "peers": peers.get(gpu["index"], -1)}))
    return Nvml(_answer(outcome, "nvml"), **outcome.fields_of(Nvml), gpus=tuple(gpus))


Answered = TypeVar("Answered", Cuda, Nvml)


def _unloaded(answered: Answered, libraries: tuple[Library, ...] | Unknown) -> Answered:
    """The answer of a library that Windows says it does not find, although it is there."""
    found = any(library.via != "disk" for library in libraries or ())
    if answered.answer.state != "no-library" or not found:
        return answered
    return replace(answered, answer=replace(answered.answer, state="not-loadable"))


def _answer(outcome: Outcome, which: str) -> ChildAnswer:
    facts, answer = outcome.facts, outcome.answer
    if "failed" in facts:
        words = facts["failed"]
        # The message is that of glibc, musl, or ctypes on Windows, and may name a library that the file itself needs.
        begins = r"(?:Error loading shared library |Could not find module '|dlopen\()?(?:\S*/)?"
        named = re.match(f"{begins}(?:{'|'.join(map(re.escape, _NAMES[which]))})", words)
        absent = named and re.search(r"No such file or directory|no such file|Could not find module", words)
        return ChildAnswer("no-library" if absent else "not-loadable", words, answer.seconds)
    if "missing" in facts:
        return replace(answer, state="no-symbol", detail=f"it has no {facts['missing']}")
    return answer


# -- fixes that are tried before they are suggested --------------------------------------------------------------------

_SUSPECTS = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_DEVICE_ORDER")
_HOPELESS = frozenset({"no-library", "hung", "unasked"})
"""States without experiments: removing a variable does not help the loader, and a driver that hangs will hang again."""


def experiments(host: Host, answered: Cuda, seconds: float) -> tuple[Experiment, ...]:
    """Ask CUDA again without each variable that may be to blame, and without all of them; not if CUDA works."""
    if answered.works or answered.answer.state in _HOPELESS:
        return ()
    mps = tuple(sorted(name for name in host.environ if name.startswith("CUDA_MPS_")))
    changes = [*((name,) for name in _SUSPECTS if name in host.environ), *((mps,) if mps else ())]
    if len(changes) > 1:
        changes.append(tuple(name for change in changes for name in change))
    with ExitStack() as children:
        asked = []
        for change in changes:
            rest = {name: value for name, value in host.environ.items() if name not in change}
            child = children.enter_context(Child(driver_question(replace(host, environ=rest), "cuda"), seconds))
            asked.append((change, child))
        return tuple(Experiment(change, cuda_answer(child.outcome())) for change, child in asked)
