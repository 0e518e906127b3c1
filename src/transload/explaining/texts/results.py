"""Texts of CUDA's own results, by number: the same words come from torch, from the runtime, and from NCCL."""

from __future__ import annotations

from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE"]

_TO_CPU = '| obj = torch.load(path, map_location="cpu")'


def _result(number: int, words: str, *, plain: bool = True, old: int = 0) -> tuple[str, ...]:
    """The ways in which a result is printed; its words alone where nobody else uses them."""
    numbers = (number, old) if old else (number,)
    told = tuple(f"cuda runtime error ({each}) : {words}" for each in numbers)
    return (
        f"CUDA error: {words}",
        f"Error {number}: {words}",
        f"Cuda failure {number} '{words}'",
        *told,
        *((words,) if plain else ()),
    )


def _wanted(values: Values, _: str) -> dict[str, Any]:
    """How much more was asked for."""
    size, unit = values.get("size", ""), values.get("unit", "").rstrip(".")
    return {"values": {"wanted": f"{size} {unit}" if size and unit else "what was asked for"}}


TABLE: tuple[Known, ...] = (
    Known(
        "no-kernel-image",
        (
            *_result(209, "no kernel image is available for execution on the device", old=48),
            "cudaErrorNoKernelImageForDevice",
        ),
        "The program has no code for this card: neither the checkpoint nor the driver is at fault, even where it is "
        "raised in load_state_dict or torch.load. Either the torch here is not built for the card, or, where the last "
        "frames are in another package (flash_attn, bitsandbytes, xformers), that package is not.",
        (
            (
                "A card newer than the torch: install the newest. One below sm_75: take the wheels for CUDA 12.6, "
                "https://download.pytorch.org/whl/cu126."
            ),
            "The doctor compares card, torch and packages, and prints the command:",
            "$ transload doctor",
        ),
        needs=("machine",),
        causes=("A01", "A02", "A03", "A04", "A05"),
    ),
    Known(
        "stub-library",
        _result(34, "CUDA driver is a stub library"),
        "The libcuda.so.1 that is loaded is the stub of the CUDA toolkit, which is only for linking: a folder 'stubs' "
        "is on LD_LIBRARY_PATH.",
        ("Take every folder that ends in stubs out of it:", "$ echo \"$LD_LIBRARY_PATH\" | tr : '\\n' | grep stubs"),
        needs=("machine",),
        causes=("U04",),
    ),
    Known(
        "driver-insufficient",
        _result(35, "CUDA driver version is insufficient for CUDA runtime version"),
        "The NVIDIA driver is older than the CUDA that torch is built with.",
        needs=("machine",),
        causes=("V01", "V05", "U01"),
    ),
    Known(
        "driver-lacks-call",
        _result(36, "API call is not supported in the installed CUDA driver"),
        "The driver is too old for something this program uses, although it starts.",
        needs=("machine",),
        causes=("V03",),
    ),
    Known(
        "device-busy",
        _result(46, "CUDA-capable device(s) is/are busy or unavailable")
        + _result(46, "all CUDA-capable devices are busy or unavailable"),
        "The card is there and does not take this process: it is in an exclusive compute mode and another process has "
        "it, or it is a virtual GPU without a licence.",
        needs=("machine",),
        causes=("S05", "S06"),
    ),
    Known(
        "no-grid-licence",
        _result(102, "device doesn't have valid Grid license"),
        "The virtual GPU has no licence.",
        needs=("machine",),
        causes=("S06",),
    ),
    Known(
        "integrity-check",
        _result(103, "integrity checks failed", plain=False),
        "The driver's own self-test failed when it started.",
        needs=("machine",),
        causes=("X08",),
    ),
    Known(
        "ecc-error",
        _result(214, "uncorrectable ECC error encountered"),
        "The card's memory has an error that it could not correct. It is the hardware, not the program.",
        needs=("machine",),
        causes=("H03",),
    ),
    Known(
        "jit-failed",
        _result(218, "a PTX JIT compilation failed"),
        "Code for the card was to be compiled when the program started, and could not be.",
        needs=("machine",),
        causes=("A04", "V02", "E11"),
    ),
    Known(
        "jit-missing",
        _result(221, "PTX JIT compiler library not found"),
        "Code for the card is to be compiled when the program starts, and the driver's library for that "
        "(libnvidia-ptxjitcompiler.so.1) is not there.",
        needs=("machine",),
        causes=("U07", "C03"),
    ),
    Known(
        "ptx-too-new",
        _result(222, "the provided PTX was compiled with an unsupported toolchain."),
        "A package holds only PTX for this card, made by a newer CUDA than the driver knows.",
        needs=("machine",),
        causes=("V02",),
    ),
    Known(
        "jit-disabled",
        _result(223, "PTX JIT compilation was disabled"),
        "CUDA_DISABLE_PTX_JIT is set, and this card needs code to be compiled.",
        ("$ unset CUDA_DISABLE_PTX_JIT CUDA_FORCE_PTX_JIT",),
        needs=("machine",),
        causes=("A04",),
    ),
    Known(
        "nvlink-error",
        _result(226, "Invalid access of peer GPU memory over nvlink or a hardware error")
        + _result(220, "uncorrectable NVLink error detected during the execution"),
        "The connection between two cards failed.",
        needs=("machine",),
        causes=("S01", "S02", "S09"),
    ),
    Known(
        "os-call-failed",
        _result(304, "OS call failed or operation not supported on this OS"),
        "The operating system refuses what the driver asks: typical of sandboxes (gVisor and the like) that do not "
        "pass the GPU on.",
        needs=("machine",),
        causes=("C11",),
    ),
    Known(
        "kernel-died",
        _result(700, "an illegal memory access was encountered")
        + _result(710, "device-side assert triggered", old=59)
        + _result(719, "unspecified launch failure", plain=False)
        + _result(702, "the launch timed out and was terminated"),
        "A kernel of the program died on the GPU, before the line that is shown: CUDA reports it late. Very often it "
        "is an index out of range (a label beyond the number of classes, a token beyond the vocabulary). From then on "
        "every call in this process fails, also torch.load and is_available().",
        (
            "Run it again so that the line is the true one, or on the CPU, where the message is plain:",
            "$ CUDA_LAUNCH_BLOCKING=1 python program.py",
            "The process must be started again in any case.",
        ),
        causes=("X05",),
    ),
    Known(
        "not-permitted",
        _result(800, "operation not permitted", plain=False),
        "The driver does not allow this process to use the device: its nodes may not be opened, or the container is "
        "not allowed to.",
        needs=("machine",),
        causes=("D03", "D04", "D05", "D06"),
    ),
    Known(
        "system-not-ready",
        _result(802, "system not yet initialized"),
        "On machines with NVSwitch (HGX, DGX) the fabric manager is not running, or not of the driver's version; on a "
        "machine for confidential computing the GPU was not released yet. torch and the driver's files are fine.",
        needs=("machine",),
        causes=("S01", "S02", "S03"),
    ),
    Known(
        "driver-mix",
        _result(803, "system has unsupported display driver / cuda driver combination"),
        "The driver's library in use (libcuda.so.1) is not of the version of its kernel module: after an update "
        "without a reboot, or by a 'compat' folder of a CUDA image.",
        needs=("machine",),
        causes=("U01", "U02", "C07", "C10"),
    ),
    Known(
        "forward-compatibility",
        _result(804, "forward compatibility was attempted on non supported HW"),
        "A 'compat' library of CUDA (of an image, or on LD_LIBRARY_PATH) is used in place of the driver's own, and the "
        "card does not allow it: only those for data centres do. An update without a reboot shows the same.",
        needs=("machine",),
        causes=("U03", "U02", "U01"),
    ),
    Known(
        "mps-daemon",
        _result(805, "MPS client failed to connect to the MPS control daemon or the MPS server")
        + _result(806, "the remote procedural call between the MPS server and the MPS client failed")
        + _result(807, "MPS server is not ready to accept new MPS client requests")
        + _result(808, "the hardware resources required to create MPS client have been exhausted")
        + _result(809, "the hardware resources required to support device connections have been exhausted")
        + _result(809, "the hardware resources required to device connections have been exhausted")
        + _result(810, "the MPS client has been terminated by the server"),
        "The process goes through CUDA's Multi-Process Service, whose daemon does not serve it: it is dead, full, or "
        "another user's. (It is not Apple's MPS.)",
        needs=("machine",),
        causes=("S04",),
    ),
    Known(
        "cuda-start",
        _result(3, "initialization error", plain=False),
        "CUDA does not start in this process: it was forked from one that had used CUDA already, or the driver does "
        "not start at all.",
        (
            "With multiprocessing or a DataLoader: start its processes by spawn, before or without CUDA in the parent.",
            '| torch.multiprocessing.set_start_method("spawn")',
            "If it comes in a plain script, too: transload doctor.",
        ),
        needs=("machine",),
        causes=("X01", "K10", "X08"),
    ),
    Known(
        "wsl-several-gpus",
        (
            (
                "cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have "
                "already set an error? Error 2: out of memory"
            ),
            "Error 2: out of memory",
        ),
        "CUDA has no memory to start with. Under WSL with several GPUs that is a known fault; else the address space "
        "of the process is limited (ulimit -v), or the card is full.",
        needs=("machine",),
        causes=("U10", "X04", "X06"),
    ),
    Known(
        "no-memory-to-start",
        ("CUDA error: out of memory", "cuda runtime error (2) : out of memory"),
        "The card had no memory left for what the driver itself needs, or for the first tensor: other processes hold "
        "it. (Where torch's own allocator runs out, the text is another: 'CUDA out of memory. Tried to allocate ...'.)",
        ("Look who holds it, and end it or use another card:", "$ nvidia-smi"),
        needs=("machine",),
        causes=("X06", "X04"),
    ),
    Known(
        "gpu-memory-full",
        (
            "CUDA out of memory. Tried to allocate {size:w} {unit:w}",
            "HIP out of memory. Tried to allocate {size:w} {unit:w}",
            "Allocation on device {index:d} would exceed allowed memory. (out of memory)",
        ),
        "The memory of the GPU is full: {wanted} did not fit into it any more. It is neither the file nor the driver: "
        "the model, its gradients, the batch and whatever else runs on that GPU are too much together.",
        (
            "See which processes hold it, and end what is not needed (with AMD: rocm-smi):",
            "$ nvidia-smi",
            "If it is raised in torch.load, the file is put on the GPU beside the model. Load it onto the CPU:",
            _TO_CPU,
            "Or straight into the model's own parameters, without a second copy:",
            "| transload.load_into(model, path)",
            "If it is raised in training: a smaller batch, a smaller dtype, or less of the model on that GPU.",
        ),
        torch="1.0 and later",
        work=_wanted,
    ),
)
