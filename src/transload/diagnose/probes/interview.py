"""An interpreter's own word on itself: our own in place, another's in a child process with a deadline."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transload.diagnose.host import Host

__all__ = ["Told", "asked", "own", "without_script"]

Told = dict[str, Any]
"""What it said: the fields of ``Python`` that an interpreter knows, and ``stdlib``, the folder of its library."""

_TEXTS = ("executable", "version", "implementation", "prefix", "base_prefix", "stdlib", "user_site")
_SWITCHES = ("free_threaded", "user_site_enabled")

_FACTS = """
def facts(path):
    import os, sys
    try:
        import site
    except Exception:
        site = None
    def text(value):
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    pypy = "__pypy__" in sys.builtin_module_names
    return {
        "executable": text(sys.executable or ""),
        "version": text(sys.version.split()[0]),
        "implementation": text(getattr(getattr(sys, "implementation", 0), "name", "pypy" if pypy else "cpython")),
        "bits": 64 if sys.maxsize > 2 ** 32 else 32,
        "free_threaded": "free-threading" in sys.version or "t" in getattr(sys, "abiflags", ""),
        "prefix": text(sys.prefix),
        "base_prefix": text(getattr(sys, "base_prefix", 0) or getattr(sys, "real_prefix", 0) or sys.prefix),
        "stdlib": text(os.path.dirname(getattr(os, "__file__", ""))),
        "user_site": text(getattr(site, "USER_SITE", 0) or ""),
        "user_site_enabled": bool(getattr(site, "ENABLE_USER_SITE", False)),
        "path": [text(each) for each in path if isinstance(each, (bytes, type(u"")))],
    }
"""  # one text for us and for others, from Python 2.7 on

# The empty entry is that of a -c, which looks into the current folder: it must go before anything is imported.
_SAY = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import json, os
try:
    import signal
    signal.alarm(int(sys.argv[1]))
except Exception:
    pass
told = facts(sys.path)
told["done"] = True
os.write(1, ("\\n\\x1e" + json.dumps(told) + "\\n").encode("ascii"))
"""


def own() -> Told:
    """What the interpreter we run in says."""
    space: dict[str, Any] = {}
    exec(_FACTS, space)  # noqa: S102  our own text, a few lines up
    told: Told = space["facts"](without_script(sys.path))
    return told


def without_script(path: Sequence[str]) -> list[str]:
    """``sys.path`` of this process less the entry that stands for our script, module or zipapp.

    Another program, started from elsewhere, would not have it.
    """
    first, rest = (path[0], list(path[1:])) if path else ("", [])
    main = sys.modules.get("__main__")
    file = os.path.realpath(getattr(main, "__file__", None) or os.sep)
    real = os.path.realpath(first)
    if first == "" or (os.path.isfile(real) and (file + os.sep).startswith(real + os.sep)):
        return rest
    starts = {os.path.dirname(file)}
    if getattr(main, "__spec__", None) is not None:  # -m puts the current folder there
        starts.add(os.path.realpath("."))
    inserted = not getattr(sys.flags, "safe_path", False) and real in starts
    return rest if inserted else list(path)


def asked(host: Host, executable: str, deadline: float) -> Told | str:
    """What another interpreter says of itself, or in words why it does not.

    It is asked in the environment and the folder that a program of the user's would have.
    """
    from transload.diagnose.children import Child, Question

    question = Question("", host.at(executable), host.outside(), host.at(host.cwd), ("-B",), _FACTS + _SAY)
    with Child(question, deadline) as child:
        outcome = child.outcome()
    if outcome.state == "answered":
        return outcome.facts if _whole(outcome.facts) else f"{executable} is no Python: its answer makes no sense"
    if outcome.state == "unasked":
        return f"{executable} {outcome.end}"
    if outcome.state == "hung":
        return f"{executable} did not answer within {deadline:g} s"
    return f"{executable} did not answer: {outcome.end}{_words(outcome.noise)}"


def _whole(told: Told) -> bool:
    kinds = (*((name, str) for name in _TEXTS), *((name, bool) for name in _SWITCHES), ("bits", int), ("path", list))
    return all(type(told.get(name)) is kind for name, kind in kinds) and all(type(e) is str for e in told["path"])


def _words(noise: str) -> str:
    """The line that says most: where Python gave up, the end of a traceback, else how the words began."""
    lines = [line.strip() for line in noise.splitlines() if line.strip()]
    fatal = (line for line in lines if line.startswith("Fatal Python error"))
    line = next(fatal, lines[-1 if any(line.startswith("Traceback") for line in lines) else 0] if lines else "")
    return f"; it printed: {line[:200]}" if line else ""
