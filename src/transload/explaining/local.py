"""Examine this machine, and the file that a text names.

Nothing is loaded, and torch is not run. A text may come from another Python than the one examined: if torch printed
it, some Python on some machine has a torch that works at least that far.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from transload.errors import TransloadError
from transload.explaining.logs import flat
from transload.explaining.result import FileCheck, MachineCheck

if TYPE_CHECKING:
    from transload.diagnose.report import Diagnosis
    from transload.machine import Machine

_MOST_FINDINGS = 4
_SAME = 60  # characters that torch's message and the text must share to be the same error
_WITHOUT_TORCH = frozenset({"P01", "P03", "P04", "P07", "P08", "P09", "T09", "W02", "L04", "L10", "L12", "L13", "X10"})
"""Faults that prevent torch from printing anything."""
_LAYERS_OF_A_PYTHON = frozenset({"python", "build", "torch-libraries", "fit", "run", "extensions"})
"""The doctor's layers that differ between the Pythons of a machine."""


class LocalChecks:
    """Examines this machine at most once, for all answers."""

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """The doctor's diagnosis, without running torch."""
        from transload.diagnose import doctor

        return doctor(torch=False)

    def machine(self, causes: Sequence[str], text: str = "") -> MachineCheck:
        """Whether this machine has one of the causes; without causes, whether it has any fault.

        ``text`` is everything around the error: if its frames are in another torch than the one examined, faults of
        the latter are not the cause.
        """
        from transload.diagnose.rules import BY_CODE

        found = self.diagnosis
        other = _other_torch(text, found.machine)
        faults = [finding for finding in found.findings if finding.severity == "error"]
        possible = [
            fault
            for fault in faults
            if (fault.code in causes or fault.code not in _WITHOUT_TORCH)
            and not (other and BY_CODE[fault.code].layer in _LAYERS_OF_A_PYTHON)
        ]
        cause, fits = found.cause, False
        if possible:
            wanted = [fault for fault in possible if fault.code in causes]
            cause, fits = (wanted or possible)[0], bool(wanted) or not causes
        elif other or faults:
            return MachineCheck(found.status, fits=False, title=_another_python(found.machine, other))
        if cause is None:
            title = "there is no GPU in this machine, and nothing is broken"
            if found.status == "ok":
                title = "nothing is broken on this machine now, as far as can be seen without running torch"
            return MachineCheck(found.status, fits=False, title=title)
        return MachineCheck(found.status, fits, cause.code, cause.title, cause.evidence, cause.fix)

    def file(self, files: Sequence[str], texts: Iterable[str], said: str) -> FileCheck | None:
        """What loading the first of some files, or of those that some texts name, would do; ``None`` if unknown."""
        from transload.checking import check_here
        from transload.judge.problems import command_lines
        from transload.loading.placement import AUTO

        path = next(iter((*files, *files_in(texts))), "")
        if not path:
            return None
        try:
            check = check_here(path, AUTO, self.diagnosis)
        except TransloadError:
            return None
        verdict = f"it cannot be loaded: {check.refusal}"
        if check.ok:
            devices = sorted({move.device for move in check.plan.moves})
            verdict = f"transload.load loads it{', onto ' + ' and '.join(devices) if devices else ''}"
        same = bool(check.torch.text) and flat(check.torch.text)[:_SAME] in said
        findings = [finding for finding in check.findings if finding.severity != "note"][:_MOST_FINDINGS]
        advised = next((finding for finding in findings if finding.fix), None)
        fix = advised.fix if advised else ()
        about_names = any(word in said.lower() for word in ("weights", "global"))
        if advised and advised.code == "needs-trust" and not about_names:
            fix = command_lines((advised,))
        python = ("import ", "from ", "torch.serialization.")
        fix = tuple(f"| {line}" if line.startswith(python) else line for line in fix)
        return FileCheck(path, check.ok, verdict, same, tuple(each.title for each in findings), fix)


# -- another Python

_TORCH = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch(?=[/\\])")
_LONGEST_PATH = 400
_MOST_PATHS = 50  # paths that are looked up: a log may be full of them


def _other_torch(text: str, machine: Machine) -> str:
    """The directory of the torch in the frames of a text, if it exists here and is not the one examined."""
    examined = {os.path.realpath(install.location) for install in machine.torch.installs or ()}
    for found in islice(_TORCH.finditer(text), _MOST_PATHS):
        before = text[max(0, found.start() - _LONGEST_PATH) : found.start()]
        for start in (before.rpartition('"')[2].strip(), *before.split()[-1:]):
            # Absolute, and never a path on another machine.
            if Path(start).is_absolute() and not start.startswith(("//", "\\\\")):
                folder = start + found[0]
                if Path(folder).is_dir() and os.path.realpath(folder) not in examined:
                    return folder
                break
    return ""


def _another_python(machine: Machine, other: str) -> str:
    """What to say if the text comes from another Python than the one examined."""
    gpu = machine.hardware.present or machine.accelerators
    if other:
        import shlex

        torch = Path(other)  # ENVIRONMENT/lib/python3.12/site-packages/torch; on Windows without the version
        above = 2 if torch.parent.parent.name.lower() == "lib" else 3
        environment = shlex.quote(str(torch.parents[min(above, len(torch.parents) - 1)]))
        without = "" if gpu else "there is no GPU in this machine; "
        return f"{without}the text comes from another Python: transload doctor --python {environment}"
    rest = "nothing else is broken on this machine" if gpu else "there is no GPU in this machine"
    examined = machine.python.executable or "the Python that was examined"
    return (
        f"{rest}; torch does not work in {examined}, so what torch says comes from another Python: "
        "transload doctor --python PYTHON"
    )


# -- files that a text names

_SUFFIXES = r"pt|pth|ckpt|bin|pt2|ptl|pkl|pickle|safetensors|tar|th|t7|model|distcp|npz|joblib|weights|mar"
_QUOTED = re.compile(r"""["'`]([^"'`\n]{1,1000})["'`]""")
_BARE = re.compile(rf"(?<![\w./\\~-])((?:[A-Za-z]:)?[\w./\\~+@%=-]{{1,1000}}\.(?:{_SUFFIXES}))(?![\w/])")
_CHECKPOINT_NAME = re.compile(rf"\.(?:{_SUFFIXES})$", re.IGNORECASE)
_OF_A_CHECKPOINT = (".distcp", ".index.json", "_optim_states.pt", "_model_states.pt", ".safetensors")
_MOST_NAMES = 200  # names that are looked up: a log may be full of them


def files_in(texts: Iterable[str]) -> Iterator[str]:
    """Checkpoints that some texts name and that exist here, each once, the likeliest first.

    A path on another machine (``//host/share``) is not touched: looking it up would contact that machine.
    """
    seen: dict[str, None] = {}
    for text in texts:
        for name in (*_BARE.findall(text), *_QUOTED.findall(text)):
            seen.setdefault(name)
            if len(seen) >= _MOST_NAMES:
                break
    for name in seen:
        if name.startswith(("//", "\\\\")):
            continue
        with suppress(OSError, ValueError, RuntimeError):  # a NUL, a name too long, or an unknown user
            path = Path(name).expanduser()
            if path.is_dir():
                with os.scandir(path) as entries:
                    names = [entry.name for entry in islice(entries, 1000)]
                is_checkpoint = any(each == ".metadata" or each.endswith(_OF_A_CHECKPOINT) for each in names)
            else:
                is_checkpoint = path.is_file() and _CHECKPOINT_NAME.search(name) is not None
            if is_checkpoint:
                yield str(path)
