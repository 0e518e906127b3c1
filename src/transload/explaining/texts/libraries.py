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
        unless=r"dso_loader",
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
        (
            '[WinError 126] {words} Error loading "{library}"',
            '[WinError 127] {words} Error loading "{library}"',
            '[WinError 182] {words} Error loading "{library}"',
            '[WinError 193] {words} Error loading "{library}"',
            '[WinError 1114] {words} Error loading "{library}"',
            "DLL load failed while importing _C",
        ),
        "Windows could not load a library of torch. The file that is named is there as a rule: what is missing is "
        "another one that it needs, most often the runtime of Visual C++.",
        needs=("machine",),
        causes=("L10",),
        context=r"torch",
    ),
    Known(
        "windows-paging-file",
        ("[WinError 1455]",),
        "Windows had no memory left to load a library of torch: each process with CUDA, every worker of a DataLoader, "
        "sets some gigabytes aside in the paging file.",
        (
            "Fewer workers: num_workers=0 or 2.",
            "Or a larger paging file: System > Advanced > Performance > Virtual memory, on the drive of the program.",
        ),
        context=r"torch",
    ),
    Known(
        "older-cuda-library",
        (
            "undefined symbol: nccl{symbol:w}",
            "undefined symbol: cublas{symbol:w}",
            "undefined symbol: cudnn{symbol:w}",
            "undefined symbol: cusparse{symbol:w}",
            "undefined symbol: cuda{symbol:w}",
            "symbol {symbol:w} version libcublasLt.so.{version:w} not defined in file",
        ),
        "An older library of CUDA than torch's own is loaded, in which a function is missing: one on LD_LIBRARY_PATH, "
        "of the system, or of another package.",
        ("Take the CUDA folders out of the variable; a wheel of torch needs none:", "$ unset LD_LIBRARY_PATH"),
        needs=("machine",),
        causes=("L01", "L07", "L06", "T09"),
    ),
    Known(
        "cudnn-not-loaded",
        (
            "Unable to load any of {{libcudnn{names}}}",
            "Could not locate cudnn{file:w}. Please make sure it is in your library path!",
            "Cannot load symbol cudnn{symbol:w}",
        ),
        "A part of cuDNN was not found when it was first used. A program that is built for another major version of "
        "cuDNN than the one installed (onnxruntime, ctranslate2) says so, too.",
        (
            "Where torch itself says it, its cuDNN is incomplete, or another one stands before it: transload doctor.",
            "Else install the cuDNN that the program is built for: nvidia-cudnn-cu12 in version 8 or 9.",
        ),
        needs=("machine",),
        causes=("L03", "L04", "L02"),
    ),
    Known(
        "nvrtc-missing",
        (
            "nvrtc: error: failed to open {library:w}",
            "Error in dlopen for library {library:w}",
        ),
        "torch compiles some operations when they are first used, and did not find the compiler's library ({library}).",
        needs=("machine",),
        causes=("L04", "L01", "L05", "T09"),
    ),
    Known(
        "nvrtc-card",
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)",),
        "The compiler that came with this torch does not know the card, which is newer than it.",
        needs=("machine",),
        causes=("A01",),
    ),
    Known(
        "cuda-library-start",
        ("CUBLAS_STATUS_NOT_INITIALIZED", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_INITIALIZED"),
        "A library of CUDA could not start. Most often the memory of the GPU is full; else an earlier operation has "
        "failed (an index out of range, say), or the library is not torch's own.",
        (
            "See what holds the memory:",
            "$ nvidia-smi",
            "Run the same on the CPU, or with CUDA_LAUNCH_BLOCKING=1: the true error comes first then.",
        ),
        needs=("machine",),
        causes=("X06", "X05", "L01"),
    ),
    Known(
        "toolkit-of-another-version",
        (
            (
                "The detected CUDA version ({toolkit:w}) mismatches the version that was used to compile PyTorch "
                "({torch:w})."
            ),
        ),
        "A package is being compiled, with the CUDA toolkit {toolkit}, for a torch with CUDA {torch}: their major "
        "versions must be the same for that. To run torch no toolkit is needed.",
        (
            "Best: a ready-made wheel of the package for this torch, which needs no compiler.",
            "Else compile with a toolkit of CUDA {torch} (CUDA_HOME is its folder), or install a torch for {toolkit}.",
        ),
    ),
    Known(
        "toolkit-missing",
        ("CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",),
        "A package is being compiled and needs the CUDA toolkit (nvcc), which was not found. To run torch none is "
        "needed.",
        (
            "Best: a ready-made wheel of the package for this torch, which needs no compiler.",
            "Else install the toolkit in the version of torch.version.cuda, and set CUDA_HOME to its folder.",
        ),
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
