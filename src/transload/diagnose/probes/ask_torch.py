"""Imports torch and uses it, step by step, as a program of the user's would. Part of the children; see ``ask``.

A torch that is broken, or is none, may lack any name and raise anything; each step says what became of it.
"""

from __future__ import annotations

import os
import time

from transload.diagnose.probes.ask import Report, begin, mapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ask_torch"]

LIBRARIES = (
    *("libcuda", "libcublas", "libcudnn", "libcufft", "libcufile", "libcupti", "libcurand", "libcusolver"),
    *("libcusparse", "libnccl", "libnvrtc", "libnvJitLink", "libnvToolsExt", "libnvshmem", "libnvidia-"),
    *("libamdhip64", "libhsa-runtime64", "libMIOpen", "librocblas"),
)
"""How the files of CUDA and ROCm begin."""
WORDS = 2000
"""Letters of an error or a warning that are kept."""
DEVICES = 64


def ask_torch() -> None:
    """Tell it all."""
    report = begin()
    watch(report)
    imported = step(report, "import", load)
    if imported:
        examine(report, imported[0])
    report.done()


def watch(report: Report) -> None:
    """Have warnings told, and Python's stack printed at a crash, or when the parent loses patience."""
    try:
        import warnings

        warnings.showwarning = lambda message, *_, **__: report.say(warning=clipped(message))
        import faulthandler

        faulthandler.enable(file=2, all_threads=False)
        from _signal import SIGUSR1  # type: ignore[import-not-found]

        faulthandler.register(SIGUSR1, file=2, all_threads=False)
        report.say(traced=True)
    except Exception:  # noqa: BLE001, S110  on Windows, or where a file of the user's is called warnings.py
        pass


def step(report: Report, name: str, action: Any, *arguments: Any) -> list[Any]:
    """Do it and say how it went: its result, in a list, which is empty where it failed."""
    report.doing(name)
    start, error, result = time.perf_counter(), "", []
    try:
        result = [action(*arguments)]
    except BaseException as caught:  # noqa: BLE001  importing a module may raise SystemExit
        error = told(caught)
    report.say(step=name, ok=not error, error=error, seconds=round(time.perf_counter() - start, 4))
    return result


def quietly(report: Report, name: str, action: Any, *arguments: Any) -> Any:
    """The result of something whose failure is no step of its own; ``None`` where it fails."""
    report.doing(name)
    try:
        return action(*arguments)
    except BaseException:  # noqa: BLE001  as above
        return None


def told(error: BaseException) -> str:
    """An exception in words, as Python shows it."""
    words = clipped(error).strip()
    return type(error).__name__ + (": " + words if words else "")


def clipped(words: object) -> str:
    """The beginning of a text, whose making may fail as well."""
    try:
        return str(words)[:WORDS]
    except BaseException as error:  # noqa: BLE001  as above
        return "(its text cannot be made: " + type(error).__name__ + ")"


def load() -> Any:
    """Torch, or what is found in its place."""
    import torch

    return torch


def examine(report: Report, torch: Any) -> None:
    """All that follows the import."""
    cuda, hip = attribute(torch, "version", "cuda"), attribute(torch, "version", "hip")
    report.say(version=attribute(torch, "__version__"), file=attribute(torch, "__file__"), cuda=cuda, hip=hip)
    report.say(libraries=libraries(), architectures=quietly(report, "architectures", architectures, torch) or [])
    if step(report, "available", available, report, torch):
        step(report, "count", count, report, torch)
    if not ((cuda or hip) and compute(report, torch, cudnn=bool(cuda))):
        step(report, "cpu", matmul, torch, "cpu")
    report.say(backends=[name for name in ("mps", "xpu") if quietly(report, name, backend, torch, name)])
    report.say(libraries=libraries())


def compute(report: Report, torch: Any, cudnn: bool) -> bool:
    """Whether a kernel ran on the GPU. MIOpen in place of cuDNN would compile, and keep a cache in the user's home."""
    if not step(report, "init", init, torch):
        return False
    report.say(devices=quietly(report, "devices", devices, torch) or [])
    if not step(report, "kernel", kernel, torch):
        return False
    step(report, "matmul", matmul, torch, "cuda")
    if cudnn:
        step(report, "convolution", convolution, report, torch)
    return True


def attribute(thing: Any, *names: str) -> str:
    """Text in an attribute of an attribute; empty where there is none."""
    try:
        for name in names:
            thing = getattr(thing, name)
        return "" if thing is None else str(thing)[:WORDS]
    except BaseException:  # noqa: BLE001  as above
        return ""


def init(torch: Any) -> None:
    torch.cuda.init()


def available(report: Report, torch: Any) -> None:
    report.say(available=bool(torch.cuda.is_available()))


def count(report: Report, torch: Any) -> None:
    report.say(count=int(torch.cuda.device_count()))


def architectures(torch: Any) -> list[str]:
    """What it was built for. The public function asks the driver first, and says nothing where there is no GPU."""
    return (torch._C._cuda_getArchFlags() or "").split()  # noqa: SLF001


def devices(torch: Any) -> list[str]:
    """Name and compute capability of each."""
    each = [torch.cuda.get_device_properties(index) for index in range(min(torch.cuda.device_count(), DEVICES))]
    return [f"{one.name} ({one.major}, {one.minor})" for one in each]


def kernel(torch: Any) -> None:
    expect((torch.zeros(1, device="cuda") + 1).item(), 1)


def matmul(torch: Any, device: str) -> None:
    ones = torch.ones(64, 64, device=device)
    expect(((ones + ones) @ ones).sum().item(), 2 * 64**3)


def convolution(report: Report, torch: Any) -> None:
    report.say(cudnn=int(torch.backends.cudnn.version() or 0))
    image, weights = torch.ones(1, 8, 16, 16, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda")
    expect(torch.nn.functional.conv2d(image, weights).sum().item(), 8 * 14 * 14 * 72)


def expect(result: float, wanted: float) -> None:
    """A GPU that computes nonsense is no better than one that computes nothing."""
    if not abs(result - wanted) <= wanted / 1000:
        raise ArithmeticError(f"the result is {result}, not {wanted}")


def backend(torch: Any, name: str) -> bool:
    """Whether another backend works here."""
    return bool(torch.backends.mps.is_available() if name == "mps" else torch.xpu.is_available())


def libraries() -> list[str]:
    """The files of CUDA and ROCm in memory."""
    return sorted({path for _, _, path in mapped() if os.path.basename(path).startswith(LIBRARIES)})


if __name__ == "__main__":
    ask_torch()
