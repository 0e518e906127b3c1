"""One task in a process of its own: a contender's run, the limits of a place, or the files of a case.

    python -m bench.contest.worker

Each line of the input is one task as JSON, with the seconds it may take; for each, one line with its result is printed
after ``RESULT``. A task runs
in a child of this process, made after torch was imported and before anything was done with it: what a program has when
it begins to load, at none of the seconds that importing takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.contest.cache import cached, drop, warm
from bench.contest.cases import Case, check, write
from bench.contest.contenders import CONTENDERS, Job

MARK = "RESULT "


def main() -> int:
    """Every task of the input, one after the other."""
    import torch  # noqa: F401 - the children have it then

    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _child(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            _answer({"failed": f"its process ended with {status}"})
    return 0


def _child(task: dict[str, Any]) -> None:
    """A task and its answer; never returns."""
    signal.alarm(task.pop("limit"))  # ends the process if it hangs
    try:
        _answer(TASKS[task.pop("task")](task))
    except ImportError as error:
        _answer({"skipped": f"not installed ({error})"})
    except BaseException as error:  # noqa: BLE001 - whatever a contender does, the others still run
        traceback.print_exc()
        _answer({"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]})
    sys.stderr.flush()
    os._exit(0)  # some contenders take long to leave, and nothing of that is measured


def _answer(result: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


def _run(task: dict[str, Any]) -> dict[str, Any]:
    """First and later calls of one contender; the result checked after the first and after the last."""
    job = Job(**{**task, "case": Case(**task["case"])})
    if job.peers:
        sys.path.append(job.peers)
    start = CONTENDERS[job.contender].start
    _wake(job.device)
    there, calls = [], []
    for number in range(1 + job.later):
        call = start(job)
        there.append(_place(job))
        base = _forget_peak()
        loaded, seconds, cpu = _timed(call, job.device)
        calls.append({"seconds": seconds, "cpu": cpu, "peak": max(0, _peak() - base)})
        if job.check and number in (0, job.later):
            check(job.case, loaded, job.device)
        del loaded, call
    return {"calls": calls, "cached": there}


def _wake(device: str) -> None:
    """CUDA initialised, with one kernel and one copy behind it."""
    import torch

    if device == "cuda":
        torch.ones(16).to(device).add_(1).cpu()
        torch.cuda.synchronize()


def _place(job: Job) -> float | None:
    """The file put where it is to be read from; the part of it in the page cache then."""
    if job.where == "cold":
        drop(job.path)
    elif job.where == "cache":
        warm(job.path)
    return cached(job.path)


def _timed(call: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """What a call gives, its seconds and the processor's, until the device is done, too."""
    import torch

    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # or a later call might find memory that an earlier one has touched
    cpu, start = time.process_time(), time.perf_counter()
    loaded = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return loaded, time.perf_counter() - start, time.process_time() - cpu


def _forget_peak() -> int:
    """The resident size now, from which the next peak is counted where the system can do that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> int:
    """Largest resident size in bytes since it was last forgotten."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _limits(task: dict[str, Any]) -> dict[str, Any]:
    from bench.contest.limits import limits

    _wake(task["device"])
    return {"limits": limits(**task)}


def _make(task: dict[str, Any]) -> dict[str, Any]:
    write(Case(**task["case"]), Path(task["folder"]), task["suffixes"])
    return {}


def _versions(task: dict[str, Any]) -> dict[str, Any]:
    """What is installed, and the device."""
    import importlib.metadata

    import torch

    if task["peers"]:
        sys.path.append(task["peers"])
    found = {"torch": torch.__version__}
    for name in ("safetensors", "fastsafetensors", "instanttensor", "runai_model_streamer"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    from transload import __version__

    device = torch.cuda.get_device_name() if task["device"] == "cuda" else ""
    return {"versions": {"transload": __version__, **found}, "device": device}


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "run": _run,
    "limits": _limits,
    "make": _make,
    "versions": _versions,
}


if __name__ == "__main__":
    sys.exit(main())
