"""Macs, on which torch uses the processor or Apple's GPU, the device "mps", and never CUDA."""

from __future__ import annotations

from transload.diagnose import fixes
from transload.diagnose.case import Case, Match, Matches, rules
from transload.diagnose.tables import numbers_of, releases
from transload.findings import Severity


def _needs(torch: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The macOS that the mps of a release of torch needs, and the release of its kernel."""
    if torch >= (2, 10):
        return "14.0", (23,)
    return ("13.0", (22,)) if torch >= (2, 5) else ("12.3", (21, 4))


@rules("python", "Y01")
def translated_python(m: Case) -> Matches:
    """Python is a program for Intel's processors, which has no mps; an error if it has no torch, either."""
    if m.platform.system == "Darwin" and m.platform.translator:
        which = f"{m.python.executable or 'Python'} runs under Rosetta, as a program for Intel processors"
        severity: Severity = "error" if m.torch.installs == () else "warning"
        yield "Y01", Match(("this Mac has Apple silicon", which), severity=severity)


@rules("build", "Y02", "T08")
def no_cuda(m: Case) -> Matches:
    """A note: there is no CUDA; and a warning if macOS is too old for this torch's mps."""
    if m.platform.system != "Darwin":
        return
    native = m.platform.machine == "arm64"
    works, release, kernel = "mps" in m.torch_run.backends, numbers_of(m.torch_version), numbers_of(m.platform.kernel)
    needs, least = _needs(release)
    old = native and bool(release and kernel) and kernel < least and not works
    if old:
        fitting = [name for name in releases() if _needs(numbers_of(name))[1] <= kernel]
        install = fixes.install(m, f"torch=={fitting[-1]}") if fitting else ()
        system = m.platform.distribution_name or f"macOS with the kernel {m.platform.kernel}"
        evidence = (f"this is {system}", f"the mps of torch {m.torch_version} needs macOS {needs} or newer")
        yield "Y02", Match(evidence, m.steps("Y02", needs=needs, install=install), severity="warning")
    usable = works or (native and not old)
    apple = native or m.platform.translator
    processor = "Apple silicon" if apple else "an Intel processor"
    fix = m.steps("T08 mps" if usable else "T08", intel=not apple)
    yield "T08", Match((f"this is a Mac with {processor}",), fix, severity="note")
