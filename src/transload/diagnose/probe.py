"""All probes, in the order that takes the least time: children first, files while they are at work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from transload._version import __version__
from transload.diagnose.children import Child, Question
from transload.diagnose.host import Host
from transload.diagnose.probes import driver
from transload.machine import (
    Answer,
    Cuda,
    Driver,
    DriverLibraries,
    Hardware,
    Kernel,
    Machine,
    Nodes,
    Nvml,
    Platform,
    Python,
    Surroundings,
    Toolkit,
    Torch,
    TorchLibraries,
    TorchRun,
    Variables,
)

__all__ = ["probe"]

_DRIVER = 8.0
"""Seconds for the driver. With many cards and no persistence daemon it needs most of them; so does a cold WSL."""
_EXPERIMENTS = 9.0
"""Seconds from the start of everything to the end of the last experiment."""
_TORCH = 60.0
"""Seconds for torch, which may lie on a cold network disk. Where the driver hangs, torch gets no more than it."""

Fact = TypeVar("Fact")


def probe(
    python: str = "",
    *,
    torch: bool = True,
    timeout: float = 0.0,
    host: Host | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Machine:
    """What this host is, with the environment of ``python``; without one, of an interpreter that has a torch.

    With ``torch=False`` torch is not run; ``timeout`` is the most seconds it may take, 0 for the usual. ``progress`` is
    called with a few words on what is being done. There is always an answer: a probe that fails is named in
    ``Machine.problems``, and a driver that hangs is given up within ten seconds, and torch with it.
    """
    return _Survey(host or Host(), progress).machine(python, timeout or _TORCH, torch=torch)


class _Survey:
    def __init__(self, host: Host, say: Callable[[str], None]) -> None:
        self.host = host
        self.say = say
        self.begun = time.monotonic()
        self.children = ExitStack()
        self.ours: set[int] = set()
        self.problems: dict[str, str] = {}

    def machine(self, python: str, timeout: float, *, torch: bool) -> Machine:
        with self.children:
            self.say("asking the driver")
            cuda = self.child(driver.question(self.host, "cuda"), _DRIVER)
            nvml = self.child(driver.question(self.host, "nvml"), _DRIVER)
            examined = self.python(python)
            from transload.diagnose.probes.torch import question, torch_run

            runs = torch and not examined.problem
            run = self.child(question(self.host, examined.executable), timeout) if runs else None
            machine = self.files(examined)
            # Imported while the children are at work: the rules are a third of the time of a run.
            import transload.diagnose.redact
            import transload.diagnose.rules.catalogue
            import transload.diagnose.verdict  # noqa: F401

            self.say("waiting for the driver")
            answers = self.driver(cuda, nvml, run, machine.driver.libraries)
            ran = TorchRun(Answer(detail=examined.problem))
            if run:
                self.say("running torch")
                ran = self.attempt("torch run", TorchRun(), lambda: torch_run(self.host, run.outcome()))
        return replace(machine, driver=answers, torch_run=ran, problems=self.problems)

    def child(self, question: Question, seconds: float) -> Child:
        child = self.children.enter_context(Child(question, seconds))
        self.ours.add(child.pid)
        return child

    def attempt(self, name: str, default: Fact, probe: Callable[..., Fact], *arguments: object) -> Fact:
        """What a probe finds. One that raises has met a host we did not think of: the others still count."""
        try:
            return probe(*arguments)
        except Exception as error:  # noqa: BLE001  named in the report, as a bug of ours
            self.problems[name] = f"{type(error).__name__}: {error}"
            return default

    def python(self, named: str) -> Python:
        """The interpreter to examine, which becomes the host's."""
        from transload.diagnose.probes import python

        why = ""
        if named:
            self.host = replace(self.host, python=named)
        elif self.host.python == sys.executable:
            self.host, why = self.attempt("python", (self.host, ""), python.choose, self.host)
        return self.attempt("python", Python(self.host.python), python.python, self.host, why)

    def files(self, examined: Python) -> Machine:
        """All that is read and not asked. The modules are imported here, while the children start."""
        from transload.diagnose.loader import Loader
        from transload.diagnose.probes import hardware, libraries, system, torch

        self.say("reading files")
        host, attempt, loader = self.host, self.attempt, Loader(self.host)
        cards = attempt("hardware", Hardware(), hardware.hardware, host)
        found = attempt("torch", Torch(), torch.torch, host, examined)
        drivers = attempt("driver libraries", DriverLibraries(), libraries.driver_libraries, loader)
        kernel_facts = attempt("kernel", Kernel(), hardware.kernel, host)
        own = tuple(f"({pid})" for pid in self.ours)  # our children may hang in the driver by now
        others = tuple(each for each in kernel_facts.stuck if not each.endswith(own))
        parts = (loader, examined, found.first)
        linked = TorchLibraries()
        if found.first:
            linked = attempt("torch libraries", linked, libraries.torch_libraries, *parts)
        return Machine(
            transload=__version__,
            taken=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            platform=attempt("platform", Platform(), system.platform, host),
            surroundings=attempt("surroundings", Surroundings(), system.surroundings, host),
            hardware=cards,
            kernel=replace(kernel_facts, stuck=others),
            nodes=attempt("nodes", Nodes(), hardware.nodes, host),
            driver=Driver(drivers),
            toolkit=attempt("toolkit", Toolkit(), system.toolkit, host),
            variables=attempt("variables", Variables(), system.variables, host),
            python=examined,
            torch=found,
            torch_libraries=linked,
            extensions=attempt("extensions", (), libraries.extensions, *parts),
            accelerators=attempt("accelerators", (), hardware.accelerators, host, cards),
        )

    def driver(self, cuda: Child, nvml: Child, run: Child | None, libraries: DriverLibraries) -> Driver:
        host = self.host
        one = self.attempt("cuda", Cuda(), lambda: driver.cuda(host, cuda.outcome()))
        other = self.attempt("nvml", Nvml(), lambda: driver.nvml(host, nvml.outcome(), self.ours))
        if run and "hung" in (one.answer.state, other.answer.state) and not one.works:
            run.hurry(self.begun + _DRIVER)
        left = max(1.0, self.begun + _EXPERIMENTS - time.monotonic())
        return Driver(libraries, other, one, self.attempt("experiments", (), driver.experiments, host, one, left))
