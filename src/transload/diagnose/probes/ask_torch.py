"""Imports torch and uses it, step by step, as a user's program would. Runs in a child; see ``ask``.

A broken torch, or another module of that name, may lack any name and raise anything; each step reports how it went.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from transload.diagnose.probes.ask import Report, mapped

LIBRARIES = (
    *("libcuda", "libcublas", "libcudnn", "libcufft", "libcufile", "libcupti", "libcurand", "libcusolver"),
    *("libcusparse", "libnccl", "libnvrtc", "libnvJitLink", "libnvToolsExt", "libnvshmem", "libnvidia-"),
    *("libamdhip64", "libhsa-runtime64", "libMIOpen", "librocblas"),
    *("nvcuda", "cudart64", "cublas", "cudnn", "cufft64", "curand64", "cusolver64", "cusparse64", "nvrtc", "nvJitLink"),
)
"""Prefixes of CUDA's and ROCm's files."""
WORDS = 2000  # Characters of an error or a warning that are kept.
DEVICES = 64
EVERY = 1.0  # Seconds between two dumps of the stack.


def ask_torch() -> None:
    """Report everything."""
    report = Report()
    try:  # report warnings, and print Python's stack at a crash and each second
        import warnings

        warnings.showwarning = lambda message, *_, **__: report.say(warning=clipped(message))
        import faulthandler

        faulthandler.enable(file=2, all_threads=False)
        from _thread import start_new_thread

        # The parent sees from the stack where this process is. A Python thread prints it while it can get the GIL.
        # Compiled code that keeps the GIL stops this thread; but then the stack cannot change, and faulthandler's own
        # thread, which needs no GIL, can read it safely.
        def dump() -> None:
            time.sleep(EVERY / 2)
            while True:
                faulthandler.dump_traceback_later(2 * EVERY, repeat=True, file=report.out)
                faulthandler.dump_traceback(file=report.out)
                time.sleep(EVERY)

        if getattr(sys, "_is_gil_enabled", lambda: True)():  # without a GIL, reading the stack is never safe
            faulthandler.dump_traceback_later(2 * EVERY, repeat=True, file=report.out)
            start_new_thread(dump, ())
    except Exception:  # noqa: BLE001, S110  the user may have a file named warnings.py
        pass
    imported = step(report, "import", lambda: __import__("torch"))  # whatever module has that name
    if imported:
        examine(report, imported[0])
    report.done()


def step(report: Report, name: str, action: Any) -> list[Any]:
    """Run an action and report how it went. The result is in a list, which is empty if it failed."""
    report.say(doing=name)
    start, error, result = time.perf_counter(), "", []
    try:
        result = [action()]
    except BaseException as caught:  # noqa: BLE001  importing a module may raise SystemExit
        words = clipped(caught).strip()
        error = type(caught).__name__ + (": " + words if words else "")
    report.say(step=name, ok=not error, error=error, seconds=round(time.perf_counter() - start, 4))
    return result


def quietly(report: Report, name: str, action: Any) -> Any:
    """The result of an action that is not reported as a step; ``None`` if it fails."""
    report.say(doing=name)
    try:
        return action()
    except BaseException:  # noqa: BLE001  as above
        return None


def clipped(words: object) -> str:
    """The first ``WORDS`` characters of an object's text, which may fail as well."""
    try:
        return str(words)[:WORDS]
    except BaseException as error:  # noqa: BLE001  as above
        return "(str() raised " + type(error).__name__ + ")"


def examine(report: Report, torch: Any) -> None:
    """Report all but the import. ``torch.cuda.get_arch_list`` asks the driver; ``_cuda_getArchFlags`` does not."""

    def text(find: Any) -> str:
        return quietly(report, "import", lambda: clipped(find() or "")) or ""

    cuda, hip = text(lambda: torch.version.cuda), text(lambda: torch.version.hip)
    report.say(version=text(lambda: torch.__version__), file=text(lambda: torch.__file__), cuda=cuda, hip=hip)
    flags = quietly(report, "architectures", lambda: torch._C._cuda_getArchFlags() or "")  # noqa: SLF001
    report.say(libraries=libraries(), architectures=tuple((flags or "").split()))
    report.say(nccl=quietly(report, "nccl", lambda: ".".join(map(str, torch.cuda.nccl.version()[:3]))) or "")
    if step(report, "available", lambda: report.say(available=bool(torch.cuda.is_available()))):
        step(report, "count", lambda: report.say(count=int(torch.cuda.device_count())))
    if not ((cuda or hip) and compute(report, torch, cudnn=bool(cuda))):
        step(report, "cpu", lambda: matmul(torch, "cpu"))
    others = {"mps": lambda: bool(torch.backends.mps.is_available()), "xpu": lambda: bool(torch.xpu.is_available())}
    report.say(backends=tuple(name for name, works in others.items() if quietly(report, name, works)))
    report.say(libraries=libraries())


def compute(report: Report, torch: Any, cudnn: bool) -> bool:
    """Whether a kernel ran on the GPU. MIOpen gets no convolution: it would compile code and cache it in the home."""

    def devices() -> tuple[str, ...]:
        every = [torch.cuda.get_device_properties(index) for index in range(min(torch.cuda.device_count(), DEVICES))]
        return tuple(f"{device.name} ({device.major}, {device.minor})" for device in every)

    def convolution() -> None:
        report.say(cudnn=int(torch.backends.cudnn.version() or 0))
        image, weights = torch.ones(1, 8, 16, 16, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda")
        expect(torch.nn.functional.conv2d(image, weights).sum().item(), 8 * 14 * 14 * 72)

    if not step(report, "init", lambda: torch.cuda.init()):  # noqa: PLW0108  it may lack any of these names
        return False
    report.say(devices=quietly(report, "devices", devices) or ())
    if not step(report, "kernel", lambda: expect((torch.zeros(1, device="cuda") + 1).item(), 1)):
        return False
    step(report, "matmul", lambda: matmul(torch, "cuda"))
    if cudnn:
        step(report, "convolution", convolution)
    return True


def matmul(torch: Any, device: str) -> None:
    """Multiply matrices on a device and check the result."""
    ones = torch.ones(64, 64, device=device)
    expect(((ones + ones) @ ones).sum().item(), 2 * 64**3)


def expect(result: float, wanted: float) -> None:
    """Raise if a result is wrong: a GPU that computes nonsense is no better than one that computes nothing."""
    if not abs(result - wanted) <= wanted / 1000:
        raise ArithmeticError(f"the result is {result}, not {wanted}")


def libraries() -> tuple[str, ...]:
    """The mapped files of CUDA and ROCm."""
    return tuple(sorted({path for _, _, path in mapped() if os.path.basename(path).startswith(LIBRARIES)}))


if __name__ == "__main__":
    ask_torch()
