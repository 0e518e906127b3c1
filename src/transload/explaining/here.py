"""What can be seen here: of the file that a text names, and of this machine. Nothing is loaded, torch is not run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from transload.errors import TransloadError
from transload.explaining import elsewhere
from transload.explaining.result import FileHere, MachineHere
from transload.explaining.splitting import flat

if TYPE_CHECKING:
    from transload.checking import Check
    from transload.diagnose.verdict import Diagnosis
    from transload.findings import Finding

__all__ = ["Here"]

_FINDINGS = 4
_CODE = ("import ", "from ", "torch.serialization.")
"""Lines of advice that are Python begin so."""
_SAME = 60
"""Letters that torch's words and the text must share to be the same error."""


class Here:
    """Looks at this machine once, however many answers need it."""

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What the doctor says without running torch."""
        from transload.diagnose import doctor

        return doctor(torch=False)

    def machine(self, causes: Sequence[str], text: str = "") -> MachineHere:
        """Whether one of some causes is at work here; of no causes, whether anything is.

        ``text`` is all that stands around the error: where its frames are in another torch than the one examined, what
        is wrong with this one is not the cause.
        """
        found = self.diagnosis
        other = elsewhere.other_torch(text, found.machine)
        faults = [finding for finding in found.findings if finding.severity == "error"]
        able = elsewhere.possible(faults, causes, other)
        if able:
            wanted = [finding for finding in able if finding.code in causes]
            return _shown(found, (wanted or able)[0], fits=bool(wanted) or not causes)
        if other or faults:
            return MachineHere(found.status, fits=False, title=elsewhere.words(found.machine, other))
        if found.ok or found.cause is None:
            return MachineHere(found.status, fits=False, title=_WELL[found.status])
        return _shown(found, found.cause, fits=False)

    def file(self, path: str, said: str) -> FileHere | None:
        """What would come of loading a file; nothing where it cannot be read."""
        try:
            made = self._check(path)
        except TransloadError:
            return None
        same = bool(made.torch.text) and flat(made.torch.text)[:_SAME] in said
        told = [finding for finding in made.findings if finding.severity != "note"][:_FINDINGS]
        return FileHere(path, made.ok, _verdict(made), same, tuple(each.title for each in told), _fix(told, said))

    def _check(self, path: str) -> Check:
        from transload.checking import checked
        from transload.judge import inspect
        from transload.loading.placement import AUTO

        return checked(inspect(path), self.diagnosis, AUTO, dict(os.environ), cwd=os.curdir)


_WELL = {
    "ok": "nothing is broken on this machine now, as far as can be seen without running torch",
    "no-gpu": "there is no GPU in this machine, and nothing is broken",
    "broken": "",
    "degraded": "",
}


def _shown(found: Diagnosis, cause: Finding, *, fits: bool) -> MachineHere:
    return MachineHere(found.status, fits, cause.code, cause.title, cause.evidence, cause.fix)


def _fix(told: Sequence[Finding], said: str) -> tuple[str, ...]:
    """What the first finding advises; on names to be allowed only where that is what was said."""
    finding = next((finding for finding in told if finding.fix), None)
    if finding is None:
        return ()
    from transload.judge.problems import command_lines

    if finding.code == "needs-trust" and not any(word in said.lower() for word in ("weights", "global")):
        return command_lines((finding,))
    return tuple(f"| {line}" if line.startswith(_CODE) else line for line in finding.fix)


def _verdict(made: Check) -> str:
    if not made.ok:
        return f"it does not load: {made.refusal}"
    lands = sorted({move.device for move in made.plan.moves})
    return f"transload.load loads it{', onto ' + ' and '.join(lands) if lands else ''}"
