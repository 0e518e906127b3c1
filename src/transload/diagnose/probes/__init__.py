"""Examines a host in the order that takes the least time: starts child processes, and reads files while they work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import TypeVar

from transload._version import __version__
from transload.diagnose.children import Child, Question
from transload.diagnose.host import Host
from transload.machine import Answer, Driver, Experiment, Machine, Python, TorchRun

_DRIVER = 8.0
"""Seconds for the driver. It needs most of them with many cards and no persistence daemon, or when WSL is cold."""
_EXPERIMENTS = 9.0  # Seconds from the start of everything to the end of the last experiment.
_TORCH = 60.0
"""Seconds for torch, which may be on a cold network disk. If the driver hangs, torch gets no more than it."""
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
    ``timeout`` seconds, ``idle`` of them without work; 0 means the defaults. ``progress`` is called with a few words
    on the current step, and where torch is while it is slow. There is always an answer: a probe that fails is named in
    ``Machine.problems``, and a driver that hangs is killed within ten seconds, and torch with it.
    """
    begun = time.monotonic()
    here = host or Host()
    bare = Machine()
    problems: dict[str, str] = {}
    ours: set[int] = set()

    def attempt(name: str, default: Fact, ask: Callable[..., Fact], *arguments: object) -> Fact:
        """What a probe finds. If it raises on a host that we did not expect, the others still count."""
        try:
            return ask(*arguments)
        except Exception as error:  # noqa: BLE001  reported as a bug in transload
            problems[name] = f"{type(error).__name__}: {error}"
            return default

    def waiting(words: str) -> Callable[[str], object]:
        return lambda where: progress(f"{words}: {where}")

    with ExitStack() as children:

        def start(question: Question, seconds: float) -> Child:
            child = children.enter_context(Child(question, seconds))
            ours.add(child.pid)
            return child

        from transload.diagnose.probes import driver

        progress("asking the driver")
        cuda_child = start(driver.question(here, "cuda"), _DRIVER)
        nvml_child = start(driver.question(here, "nvml"), _DRIVER)

        # The other probes are imported while the children start.
        from transload.diagnose.probes import python as interpreters

        why = ""
        if python:
            here = replace(here, python=python)
        elif here.python == sys.executable:
            here, why = attempt("python", (here, ""), interpreters.choose, here)
        examined = attempt("python", Python(here.python), interpreters.python, here, why)
        found = attempt("torch", bare.torch, interpreters.torch, here, examined)
        unasked = examined.problem or (f"import torch finds {found.shadow}" if found.shadow else "")
        runs = torch and not unasked  # never run a file that is not PyTorch's
        run = start(interpreters.question(here, examined.executable), timeout or _TORCH) if runs else None

        progress("reading files")
        from transload.diagnose.loader import Loader
        from transload.diagnose.probes import libraries, system

        # The user may have named a folder or a script.
        loader = attempt("loader", None, Loader, replace(here, python=examined.executable))
        cards = attempt("hardware", bare.hardware, system.hardware, here)
        drivers = attempt("driver libraries", bare.driver.libraries, libraries.driver_libraries, loader)
        kernel = attempt("kernel", bare.kernel, system.kernel, here)
        own = tuple(f"({pid})" for pid in ours)  # our own children may hang in the driver
        linked = bare.torch_libraries
        if found.first:
            linked = attempt("torch libraries", linked, libraries.torch_libraries, loader, examined.path, found.first)
        machine = Machine(
            transload=__version__,
            taken=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            platform=attempt("platform", bare.platform, system.platform, here),
            surroundings=attempt("surroundings", bare.surroundings, system.surroundings, here),
            hardware=cards,
            kernel=replace(kernel, stuck=tuple(each for each in kernel.stuck if not each.endswith(own))),
            nodes=attempt("nodes", bare.nodes, system.nodes, here),
            toolkit=attempt("toolkit", bare.toolkit, system.toolkit, here),
            variables=attempt("variables", bare.variables, system.variables, here),
            python=examined,
            torch=found,
            torch_libraries=linked,
            extensions=attempt("extensions", (), libraries.extensions, loader, examined.path, found.first),
            accelerators=attempt("accelerators", (), system.accelerators, here, cards),
        )
        # Imported while the children work: the rules take a third of the time of a run.
        import transload.diagnose.redact
        import transload.diagnose.rules  # noqa: F401

        progress("waiting for the driver")
        asked = waiting("waiting for the driver")
        cuda = attempt("cuda", bare.driver.cuda, lambda: driver.cuda(cuda_child.outcome(inf, asked)))
        nvml = attempt("nvml", bare.driver.nvml, lambda: driver.nvml(here, nvml_child.outcome(inf, asked), ours))
        if run and "hung" in (cuda.answer.state, nvml.answer.state) and not cuda.works:
            run.end_by(begun + _DRIVER)
        left = max(1.0, begun + _EXPERIMENTS - time.monotonic())
        tried: tuple[Experiment, ...] = attempt("experiments", (), driver.experiments, here, cuda, left)
        ran = TorchRun(Answer(detail=unasked))
        if run:
            progress("running torch")
            ended = run.outcome(idle or (inf if timeout else IDLE), waiting("running torch"))
            ran = attempt("torch run", bare.torch_run, interpreters.torch_run, ended)
    return replace(machine, driver=Driver(drivers, nvml, cuda, tried), torch_run=ran, problems=problems)
