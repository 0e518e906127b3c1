"""Texts of imports: libraries that are missing, of another version, or of another build of torch."""

from __future__ import annotations

from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE"]

_NVIDIA = (
    r"lib(?:cuda|cudnn|cublas|cufft|curand|cusolver|cusparse|cupti|cufile|nvrtc|nvJitLink|nvToolsExt|nvidia|nvshmem|nccl)"
    r"[\w-]*\.so[\w.]*: cannot open shared object file"
)


def _missing(values: Values, _: str) -> dict[str, Any]:
    """The driver's own libraries come with the driver, the others with torch."""
    if values["library"] in ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"):
        return {
            "cause": "{library} is a library of the NVIDIA driver, and is not there: no driver is installed, or the "
            "container was given the GPU without its compute libraries.",
            "fix": (),
            "causes": ("C01", "C03", "K01", "U05", "U06", "H01"),
        }
    return {}


TABLE: tuple[Known, ...] = (
    Known(
        "library-missing",
        ("{library:w}: cannot open shared object file: No such file or directory",),
        "torch, or another package, needs the library {library}, and does not find it: a package of NVIDIA's that it "
        "was installed with is missing, incomplete, or of another CUDA.",
        needs=("machine",),
        causes=("L04", "T09"),
        context=_NVIDIA,
        work=_missing,
    ),
    Known(
        "nvjitlink",
        (
            "undefined symbol: __nvJitLink{symbol:w}",
            "undefined symbol: {symbol:w}, version libnvJitLink.so",
        ),
        "An older libnvJitLink than torch's own is loaded, most often from a CUDA toolkit on LD_LIBRARY_PATH.",
        ("Take the CUDA folders out of it; a wheel of torch needs none:", "$ unset LD_LIBRARY_PATH"),
        needs=("machine",),
        causes=("L01", "L07"),
    ),
    Known(
        "cudnn-version",
        (
            "cuDNN version incompatibility: PyTorch was compiled against {built} but found runtime version {found}.",
            "cuDNN version incompatibility",
        ),
        "Another cuDNN is loaded than torch brought with it: one on LD_LIBRARY_PATH, or of the system.",
        ("Take its folder out of the variable:", "$ unset LD_LIBRARY_PATH"),
        needs=("machine",),
        causes=("L02", "L06"),
    ),
    Known(
        "cudnn-parts",
        ("CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH", "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"),
        "Parts of two versions of cuDNN are mixed: the wheel's, and the system's.",
        needs=("machine",),
        causes=("L03",),
    ),
    Known(
        "libstdcxx",
        ("version `GLIBCXX_{version:w}' not found", "version `CXXABI_{version:w}' not found"),
        "An older C++ library (libstdc++.so.6) is loaded than torch, or the package, was built with.",
        needs=("machine",),
        causes=("L12",),
        context=r"torch|libc10",
    ),
    Known(
        "mkl-symbol",
        ("undefined symbol: iJIT_NotifyEvent",),
        "This conda build of torch needs an MKL before 2024.1.",
        needs=("machine",),
        causes=("L13",),
    ),
    Known(
        "extension-symbol",
        (
            "undefined symbol: _ZN3c10{symbol:w}",
            "undefined symbol: _ZN2at{symbol:w}",
            "undefined symbol: _ZN5torch{symbol:w}",
            "undefined symbol: _ZNK3c10{symbol:w}",
            "undefined symbol: _ZNK2at{symbol:w}",
            "undefined symbol: _ZNK5torch{symbol:w}",
        ),
        "A compiled package was built for another version of torch than the one here: it calls a function that this "
        "one does not have.",
        needs=("machine",),
        causes=("P06",),
    ),
    Known(
        "torchvision-other-torch",
        (
            "operator torchvision::nms does not exist",
            "Could not run 'torchvision::nms' with arguments from the 'CUDA' backend",
            "Couldn't load custom C++ ops",
        ),
        "torchvision is made for another torch: of another release, or one for the CPU beside the other for CUDA.",
        needs=("machine",),
        causes=("P05",),
    ),
    Known(
        "windows-dll",
        ('[WinError 126] {words} Error loading "{library}"', '[WinError 1114] {words} Error loading "{library}"'),
        "Windows could not load a library of torch. The file that is named is there as a rule: what is missing is "
        "another one that it needs, most often the runtime of Visual C++.",
        needs=("machine",),
        causes=("L10",),
        context=r"torch",
    ),
    Known(
        "torch-not-installed",
        (
            "ModuleNotFoundError: No module named 'torch'",
            "ImportError: No module named torch",
            "ImportError: No module named 'torch'",
        ),
        "The Python that runs the program has no torch; another one may have it.",
        (
            "Install it with that very Python:",
            "$ python -m pip install torch",
            "transload doctor tells which Python has one.",
        ),
        needs=("machine",),
        causes=("P01",),
    ),
    Known(
        "torch-shadowed",
        (
            "module 'torch' has no attribute 'cuda'",
            "No module named 'torch._C'",
            "partially initialized module 'torch' has no attribute",
        ),
        "What was imported as torch is another file: a torch.py or a folder torch of your own, or the source tree of "
        "torch; or the installation is incomplete.",
        ("See what it is, and rename it or go elsewhere:", "$ python -c 'import torch; print(torch.__file__)'"),
        needs=("machine",),
        causes=("P03", "P04", "T09"),
    ),
)
