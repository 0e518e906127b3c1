"""Texts of torch about the driver: what it prints when CUDA does not start."""

from __future__ import annotations

import re
from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE"]

_NO_DRIVER = ("H01", "K01", "K02", "K04", "C01", "C03", "C05", "C08", "U05", "U06", "U08", "U11", "N01", "H06", "W01")
_NO_GPU = ("E01", "E02", "E04", "C09", "C04", "D03", "H04", "K06", "K07", "K08", "K09", "M01", "M03")
_UNKNOWN = ("D01", "D02", "K11", "H02", "C11", "C10")
_WHEELS = "https://download.pytorch.org/whl"
# The newest index of wheels for a major version of CUDA; wheels of one major run on every driver of that major.
_INDEX = {"13": "cu130", "12": "cu126", "11": "cu118"}
_REMARKS = {"11": " (torch 2.7 is the last one)", "12": " (for a Blackwell card cu128 in place of cu126)"}
_INSTALL = f"$ pip install --force-reinstall torch --index-url {_WHEELS}/"
_OLDEST, _TURING, _BLACKWELL = 50, 75, 100


def _too_old(values: Values, _: str) -> dict[str, Any]:
    """12080 is CUDA 12.8: which torch goes with it."""
    found = int(values["version"])
    major, minor = str(found // 1000), found % 1000 // 10
    if found < 1000:
        return {"cause": "The NVIDIA driver is too old for this torch; it did not tell its version ({version})."}
    extra = {"cuda": f"{major}.{minor}"}
    index = _INDEX.get(major, "")
    install = (
        f"Install a torch that is built with CUDA {major}{_REMARKS.get(major, '')}:",
        _INSTALL + index,
        "Or update the driver; a container uses its host's.",
        "If torch.version.cuda is not newer than {cuda}, the text is false: a library stands in for the driver [V05].",
    )
    return {
        "values": extra,
        "fix": install if index else ("Update the driver, or install a torch as old as it.",),
    }


def _card(values: Values, _: str) -> dict[str, Any]:
    """Whether the card is too new for any old torch, or too old for the usual ones."""
    major, dot, minor = values["capability"].partition(".")
    digits = f"{major}{minor}" if dot else major
    if not digits.isdecimal() or len(digits) < 2:
        return {"values": {"dotted": values["capability"]}}
    number = int(digits)
    fix: tuple[str, ...]
    if number >= _BLACKWELL:
        fix = ("Install a newer torch, 2.7 at least, built with CUDA 12.8 or newer:", f"{_INSTALL}cu128")
    elif number >= _TURING:
        fix = ("Install the newest torch:", "$ pip install --upgrade torch")
    elif number >= _OLDEST:
        fix = ("The wheels for CUDA 12.6 still have code for it:", f"{_INSTALL}cu126")
    else:
        fix = ("For 3.7 (K80) torch 2.0 is the last that has code; for older cards only older releases may have.",)
    return {"values": {"dotted": f"{digits[:-1]}.{digits[-1]}"}, "fix": fix}


def _of_a_program(_: Values, text: str) -> dict[str, Any]:
    """Some ask for a certain GPU, and print what torch has; one advises not to ask."""
    counted = re.search(r"torch\.cuda\.device_count\(\): (\d{1,4})", text)
    if "torch.cuda.is_available(): True" in text and counted:
        return {
            "values": {"count": counted[1]},
            "cause": "The program asks for the CUDA device {device}, and torch sees {count} in all, counted from 0.",
            "fix": ("Ask for device=0, or see what hides the others:", '$ echo "$CUDA_VISIBLE_DEVICES"'),
            "causes": ("E08", "E02"),
        }
    if "--skip-torch-cuda-test" in text:
        return {
            "wrong": "To skip the test hides the question: the program then runs on the CPU, or fails later.",
        }
    return {}


TABLE: tuple[Known, ...] = (
    Known(
        "driver-too-old",
        ("The NVIDIA driver on your system is too old (found version {version:d}).",),
        "The NVIDIA driver is made for CUDA {cuda} (that is what {version} means), and this torch is built with a "
        "newer one. Updating the driver or installing another torch helps; the CUDA toolkit (nvcc) does not matter.",
        needs=("machine",),
        causes=("V01", "V05"),
        work=_too_old,
    ),
    Known(
        "no-driver",
        ("Found no NVIDIA driver on your system.",),
        "torch finds no driver library (libcuda.so.1): there is no NVIDIA GPU, its driver is not installed, or it is "
        "not passed on to this container.",
        (
            'If there is no NVIDIA GPU, nothing is broken: use the CPU, and map_location="cpu" for checkpoints.',
            "In a container: docker run --gpus all. Else install the driver; transload doctor says which case it is:",
            "$ transload doctor",
        ),
        needs=("machine",),
        causes=_NO_DRIVER,
    ),
    Known(
        "no-gpus",
        ("No CUDA GPUs are available", "no CUDA-capable device is detected", "cudaErrorNoDevice"),
        "The driver is there and has no GPU for this process: CUDA_VISIBLE_DEVICES hides them, the scheduler gave "
        "none, they may not be opened, or the card did not start.",
        (
            "Look at the variable first: empty, -1, or an index that does not exist hides every GPU.",
            '$ echo "$CUDA_VISIBLE_DEVICES"',
            "Else let the doctor find it:",
            "$ transload doctor",
        ),
        needs=("machine",),
        causes=_NO_GPU,
    ),
    Known(
        "driver-start",
        ("CUDA driver initialization failed, you might not have a CUDA gpu.", "request_free_mem_region() err -34"),
        "The driver does not start (3), although it is installed. Where nvidia-smi works, it is most often a feature "
        "of the open kernel module, heterogeneous memory management, that finds no address space.",
        needs=("machine",),
        causes=("K10", "X08"),
    ),
    Known(
        "cuda-unknown-error",
        (
            (
                "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
                "CUDA_VISIBLE_DEVICES after program start."
            ),
            "unknown error - this may be due to an incorrectly set up environment",
            "Error 999: unknown error",
            "CUDA error: unknown error",
            "cuda runtime error (30) : unknown error",
            "cuda runtime error (999) : unknown error",
        ),
        "The driver fails when it starts (999). Most often the device node /dev/nvidia-uvm is missing or wrong, the "
        "module nvidia_uvm did not survive a suspend, or a card has failed.",
        wrong="The text blames CUDA_VISIBLE_DEVICES: that is hardly ever it. Nor does installing torch or the driver "
        "again help: none of these is in their files.",
        needs=("machine",),
        causes=_UNKNOWN,
    ),
    Known(
        "no-cuda-build",
        (
            "Torch not compiled with CUDA enabled",
            "PyTorch was compiled without CUDA support",
            "Torch was not compiled with CUDA",
            "Cannot initialize CUDA without ATen_cuda library",
            "Cannot get CUDA generator without ATen_cuda library",
            "PyTorch is not linked with support for cuda devices",
            "module 'torch._C' has no attribute '_cuda_{name:w}'",
            "Could not run 'aten::empty{call:w}' with arguments from the 'CUDA' backend",
        ),
        "This torch is a build for the CPU only: it cannot use a GPU, whatever driver or CUDA toolkit is installed.",
        (
            (
                "To use the GPU, put a build with CUDA in its place. The doctor prints the command for this driver and "
                "card:"
            ),
            "$ transload doctor",
            'To do without: .to("cpu") in place of .cuda(), and map_location="cpu" for checkpoints.',
        ),
        needs=("machine",),
        causes=("T01", "T02", "T03", "T04", "T05", "T07", "T08", "N02", "J01", "P02"),
    ),
    Known(
        "card-without-code",
        (
            "with CUDA capability sm_{capability:d} is not compatible with the current PyTorch installation.",
            "Found GPU{index:d} {card} which is of cuda capability {capability:w}. PyTorch no longer supports this GPU",
            "Found GPU{index:d} {card} which is of compute capability (CC) {capability:w}.",
        ),
        "This torch has no code for the card, whose compute capability is {dotted}. torch.cuda.is_available() is True "
        "all the same, and the first operation fails. It is neither the driver nor the checkpoint.",
        needs=("machine",),
        causes=("A01", "A02", "A05", "J01"),
        work=_card,
    ),
    Known(
        "no-hip-gpus",
        (
            "No HIP GPUs are available",
            "HIP initialization: Unexpected error from hipGetDeviceCount()",
            "hipErrorInvalidDevice",
            "hipErrorNoDevice",
        ),
        "The torch for AMD cards finds none that it may use: most often the user may not open /dev/kfd, or the "
        "container was not given it.",
        needs=("machine",),
        causes=("R01", "E09", "T06", "R02"),
    ),
    Known(
        "hip-no-code",
        ("hipErrorNoBinaryForGpu", "HIP error: invalid device function"),
        "This torch has no code for the AMD card.",
        needs=("machine",),
        causes=("R02",),
    ),
    Known(
        "cuda-init",
        ("Unexpected error from cudaGetDeviceCount().",),
        "CUDA does not start; the number and the words at the end of the text say why.",
        ("$ transload doctor",),
        wrong="No CUDA function of the program's set that error before: it is what the driver answers.",
        needs=("machine",),
        role="frame",
    ),
    Known(
        "app-no-gpu",
        (
            "Torch is not able to use GPU; add --skip-torch-cuda-test to COMMANDLINE_ARGS",
            "Invalid CUDA 'device={device}' requested",
            "Invalid CUDA '--device {device}' requested",
            "CUDA unavailable, invalid device {device:w} requested",
            "Your setup doesn't support bf16/gpu.",
            "RuntimeError: CUDA is not available",
            "AssertionError: CUDA is not available",
            "is enabled, but CUDA is not available. Disabling.",
            "User provided device_type of 'cuda', but CUDA is not available.",
            "Failed to infer device type",
            "No supported gpu backend found!",
            "`CUDAAccelerator` can not run on your system since the accelerator is not available",
            "CUDAAccelerator can not run on your system since the accelerator is not available",
            "GPUAccelerator can not run on your system since the accelerator is not available",
            "fp16 mixed precision requires a GPU",
            "half precision evaluation (`--fp16_full_eval`) can only be used on CUDA devices",
            "AMP (`--fp16`) can only be used on CUDA devices",
        ),
        "A program says in its own words that torch sees no GPU: torch.cuda.is_available() was False. It does not say "
        "why; the doctor does.",
        (
            "Run it with the Python of that program:",
            "$ transload doctor --python /path/to/its/python",
        ),
        needs=("machine",),
        work=_of_a_program,
    ),
    Known(
        "app-fewer-gpus",
        (
            "You requested gpu: {asked} But your machine only has: {have:rest}",
            "You requested GPUs: {asked} But your machine only has: {have:rest}",
        ),
        "The program asks for the GPUs {asked}, and torch sees {have}: they are counted from 0, among those that are "
        "visible to this process.",
        (
            'Ask for one that is there: devices=1, or devices=[0], or accelerator="cpu".',
            "If the machine has more, a variable hides them:",
            '$ echo "$CUDA_VISIBLE_DEVICES"',
        ),
        needs=("machine",),
        causes=("E08", "E02", "E01", "C04", "C09"),
    ),
)
