"""Error messages in all wordings as they were printed, and the code of the answer to each.

``test_provoked.py`` also provokes those that a machine without a GPU can provoke; this collection covers other
releases, other machines and other programs. The messages are in ``wordings.txt``, each after a line ``=== code | who
printed it``, with ``␛`` for the escape character. The messages for CUDA's results are composed here: each is printed in
five ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["RESULTS", "WORDINGS", "Wording", "sections"]


class Wording(NamedTuple):
    """The code of the answer, who printed the text, and the text."""

    code: str
    where: str
    text: str


def sections(path: Path) -> Iterator[tuple[str, str]]:
    """The heading and the text of each section of a file."""
    for section in path.read_text(encoding="utf-8").split("=== ")[1:]:
        head, _, text = section.partition("\n")
        yield head, text.replace("␛", "\x1b").removesuffix("\n")


RESULTS: tuple[tuple[str, int, str], ...] = (
    ("no-kernel-image", 209, "no kernel image is available for execution on the device"),
    ("cuda-start", 3, "initialization error"),
    ("stub-library", 34, "CUDA driver is a stub library"),
    ("driver-insufficient", 35, "CUDA driver version is insufficient for CUDA runtime version"),
    ("driver-lacks-call", 36, "API call is not supported in the installed CUDA driver"),
    ("device-busy", 46, "CUDA-capable device(s) is/are busy or unavailable"),
    ("device-ordinal", 101, "invalid device ordinal"),
    ("no-grid-licence", 102, "device doesn't have valid Grid license"),
    ("integrity-check", 103, "integrity checks failed"),
    ("ecc-error", 214, "uncorrectable ECC error encountered"),
    ("jit-failed", 218, "a PTX JIT compilation failed"),
    ("jit-missing", 221, "PTX JIT compiler library not found"),
    ("ptx-too-new", 222, "the provided PTX was compiled with an unsupported toolchain."),
    ("jit-disabled", 223, "PTX JIT compilation was disabled"),
    ("nvlink-error", 226, "Invalid access of peer GPU memory over nvlink or a hardware error"),
    ("os-call-failed", 304, "OS call failed or operation not supported on this OS"),
    ("kernel-died", 700, "an illegal memory access was encountered"),
    ("kernel-died", 702, "the launch timed out and was terminated"),
    ("kernel-died", 710, "device-side assert triggered"),
    ("kernel-died", 719, "unspecified launch failure"),
    ("not-permitted", 800, "operation not permitted"),
    ("system-not-ready", 802, "system not yet initialized"),
    ("driver-mix", 803, "system has unsupported display driver / cuda driver combination"),
    ("forward-compatibility", 804, "forward compatibility was attempted on non supported HW"),
    ("mps-daemon", 805, "MPS client failed to connect to the MPS control daemon or the MPS server"),
    ("mps-daemon", 806, "the remote procedural call between the MPS server and the MPS client failed"),
    ("mps-daemon", 807, "MPS server is not ready to accept new MPS client requests"),
    ("mps-daemon", 808, "the hardware resources required to create MPS client have been exhausted"),
    ("mps-daemon", 809, "the hardware resources required to support device connections have been exhausted"),
    ("mps-daemon", 810, "the MPS client has been terminated by the server"),
    ("cuda-unknown-error", 999, "unknown error"),
)


_INIT = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error {number}: {words}"
)
_LAUNCH = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
SHAPES: dict[str, str] = {
    "use": "RuntimeError: CUDA error: {words}" + _LAUNCH,
    "accelerator": "torch.AcceleratorError: CUDA error: {words}\nSearch for `cudaErrorX' in the docs." + _LAUNCH,
    "start": f"RuntimeError: {_INIT}",
    "warning": (
        f"/env/lib/python3.11/site-packages/torch/cuda/__init__.py:180: UserWarning: CUDA initialization: {_INIT} "
        "(Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)\n"
        "  return torch._C._cuda_getDeviceCount() > 0"
    ),
    "1.x": "RuntimeError: cuda runtime error ({number}) : {words} at /pytorch/aten/src/THC/THCGeneral.cpp:50",
}


def _wordings() -> Iterator[Wording]:
    for head, text in sections(Path(__file__).with_name("wordings.txt")):
        code, _, where = head.partition(" | ")
        yield Wording(code, where, text)
    for code, number, words in RESULTS:
        for where, shape in SHAPES.items():
            yield Wording(code, f"{number}, {where}", shape.format(number=number, words=words))


WORDINGS: tuple[Wording, ...] = tuple(_wordings())
