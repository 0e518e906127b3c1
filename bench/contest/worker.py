"""Runs each task in its own process: a run of a contender, the limits of a place, or the files of a case.

    python -m bench.contest.worker [--once]

Each line of the input is one task as JSON, with its time limit in seconds; for each, one line with its result is
printed after ``RESULT``. A task runs in a fork of this process, which has imported torch but not used it: the state of
a program that starts to load, without the seconds that the import takes. But a fork copies each page that it touches;
with ``--once``, this process does a single task itself.
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
    """Run every task of the input, one after the other."""
    import torch  # noqa: F401 - its import is not measured

    for line in sys.stdin:
        if "--once" in sys.argv:
            _do_task(json.loads(line))
        pid = os.fork()
        if not pid:
            _do_task(json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            _print_result({"failed": f"its process ended with {status}"})
    return 0


def _do_task(task: dict[str, Any]) -> None:
    """Run a task and print its result; never returns."""
    signal.alarm(task.pop("limit"))  # ends the process if it hangs
    try:
        _print_result(TASKS[task.pop("task")](task))
    except ImportError as error:
        _print_result({"skipped": f"not installed ({error})"})
    except BaseException as error:  # noqa: BLE001 - the other contenders must still run
        traceback.print_exc()
        _print_result({"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]})
    sys.stderr.flush()
    os._exit(0)  # some contenders are slow to exit, which is not measured


def _print_result(result: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


def _run(task: dict[str, Any]) -> dict[str, Any]:
    """The first and later calls of one contender; the result is checked after the first and after the last."""
    job = Job(**{**task, "case": Case(**task["case"])})
    if job.peers:
        sys.path.append(job.peers)
    start = CONTENDERS[job.contender].start
    _initialise(job.device)
    cached_parts, calls = [], []
    for number in range(1 + job.later):
        call = start(job)
        cached_parts.append(_prepare_cache(job))
        base = _reset_peak()
        loaded, seconds, cpu = _timed(call, job.device)
        calls.append({"seconds": seconds, "cpu": cpu, "peak": max(0, _peak() - base)})
        if job.check and number in (0, job.later):
            check(job.case, loaded, job.device)
        del loaded, call
    return {"calls": calls, "cached": cached_parts}


def _initialise(device: str) -> None:
    """Initialise CUDA, and run one kernel and one copy."""
    import torch

    if device == "cuda":
        torch.ones(16).to(device).add_(1).cpu()
        torch.cuda.synchronize()


def _prepare_cache(job: Job) -> float | None:
    """Fill or drop the page cache for the file; return the fraction of it that is cached then."""
    if job.where == "cold":
        drop(job.path)
    elif job.where == "cache":
        warm(job.path)
    return cached(job.path)


def _timed(call: Callable[[], Any], device: str) -> tuple[Any, float, float]:
    """The result of a call, its wall time and its CPU time, until the device has finished, too."""
    import torch

    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # or a later call might reuse memory that an earlier one has touched
    cpu, start = time.process_time(), time.perf_counter()
    loaded = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return loaded, time.perf_counter() - start, time.process_time() - cpu


def _reset_peak() -> int:
    """The resident size now; the next peak is counted from here if the system supports that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> int:
    """The largest resident size in bytes since the last reset."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _limits(task: dict[str, Any]) -> dict[str, Any]:
    from bench.contest.limits import limits

    _initialise(task["device"])
    return {"limits": limits(**task)}


def _make(task: dict[str, Any]) -> dict[str, Any]:
    write(Case(**task["case"]), Path(task["folder"]), task["suffixes"])
    return {}


def _versions(task: dict[str, Any]) -> dict[str, Any]:
    """The installed versions, and the name of the device."""
    import importlib.metadata

    import torch

    if task["peers"]:
        sys.path.append(task["peers"])
    versions = {"torch": torch.__version__}
    for name in ("safetensors", "fastsafetensors", "instanttensor", "runai_model_streamer"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    from transload import __version__

    device = torch.cuda.get_device_name() if task["device"] == "cuda" else ""
    return {"versions": {"transload": __version__, **versions}, "device": device}


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "run": _run,
    "limits": _limits,
    "make": _make,
    "versions": _versions,
}


if __name__ == "__main__":
    sys.exit(main())
