"""Environment variables that decide something, and the files that set them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from transload.diagnose.host import Host, reason
from transload.diagnose.probes.surroundings import service_of
from transload.machine import Variables

__all__ = ["DECIDING", "SHOWN", "variables"]

_DECIDING = """
CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH CUDA_CACHE_PATH CUDA_LAUNCH_BLOCKING
CUDA_FORCE_PTX_JIT CUDA_DISABLE_PTX_JIT CUDA_FORCE_JIT CUDA_DISABLE_JIT CUDA_MPS_PIPE_DIRECTORY
NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT
PYTORCH_NVML_BASED_CUDA_CHECK PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF
HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL HSA_OVERRIDE_GFX_VERSION ZE_AFFINITY_MASK
PYTHONPATH PYTHONHOME PYTHONNOUSERSITE PYTHONUSERBASE NCCL_NVLS_ENABLE
"""
DECIDING = frozenset(_DECIDING.split())
"""Those that can break CUDA or torch: of these it is also found out which file sets them."""

_SHOWN = """
CUDA_ROOT CUDA_VERSION CUDA_MODULE_LOADING CUDA_CACHE_DISABLE CUDA_CACHE_MAXSIZE CUDA_INJECTION64_PATH
CUDA_DEVICE_MAX_CONNECTIONS CUDA_MPS_LOG_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
CUDA_MPS_PINNED_DEVICE_MEM_LIMIT CUBLAS_WORKSPACE_CONFIG CUDNN_PATH
NVIDIA_REQUIRE_CUDA NVIDIA_DISABLE_REQUIRE NVIDIA_PRODUCT_NAME NVIDIA_PYTORCH_VERSION NVIDIA_IMEX_CHANNELS
NVIDIA_MIG_CONFIG_DEVICES NVIDIA_MIG_MONITOR_DEVICES NVIDIA_TF32_OVERRIDE
LIBRARY_PATH DYLD_LIBRARY_PATH GLIBC_TUNABLES NIX_LD_LIBRARY_PATH
PYTORCH_HIP_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_ROCM_ARCH PYTORCH_VERSION
TORCH_CUDA_ARCH_LIST TORCH_USE_CUDA_DSA TORCH_CUDNN_V8_API_DISABLED TORCH_DEVICE_BACKEND_AUTOLOAD
TORCH_BLAS_PREFER_CUBLASLT TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD TORCH_FORCE_WEIGHTS_ONLY_LOAD TORCH_COMPILE_DISABLE
TORCHDYNAMO_DISABLE TRITON_PTXAS_PATH TRITON_LIBCUDA_PATH TRITON_CACHE_DIR BNB_CUDA_VERSION VLLM_TARGET_DEVICE
ROCM_PATH ROCM_HOME HIP_PATH HIP_PLATFORM HSA_ENABLE_SDMA
ONEAPI_DEVICE_SELECTOR SYCL_DEVICE_FILTER ASCEND_RT_VISIBLE_DEVICES ASCEND_HOME_PATH HABANA_VISIBLE_DEVICES
PJRT_DEVICE TPU_VISIBLE_CHIPS
SLURM_JOB_ID SLURM_JOBID SLURM_STEP_ID SLURM_JOB_GPUS SLURM_STEP_GPUS SLURM_GPUS SLURM_GPUS_ON_NODE
SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_JOB_PARTITION SLURM_NTASKS SLURM_PROCID SLURM_LOCALID
LSB_JOBID KUBERNETES_SERVICE_HOST
container APPTAINER_CONTAINER APPTAINER_NV SINGULARITY_CONTAINER SINGULARITY_NV WSL_DISTRO_NAME
PYTHONSAFEPATH PYTHONWARNINGS VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV CONDA_OVERRIDE_CUDA CONDA_EXE
MAMBA_EXE MAMBA_ROOT_PREFIX UV_TORCH_BACKEND UV_PROJECT_ENVIRONMENT PIXI_PROJECT_ROOT PIXI_ENVIRONMENT_NAME
POETRY_ACTIVE PIP_TARGET PIP_USER
NCCL_DEBUG NCCL_P2P_DISABLE NCCL_IB_DISABLE NCCL_SHM_DISABLE NCCL_CUMEM_ENABLE NCCL_SOCKET_IFNAME
COLAB_GPU COLAB_RELEASE_TAG COLAB_TPU_ADDR KAGGLE_KERNEL_RUN_TYPE RUNPOD_GPU_COUNT RUNPOD_GPU_NAME
DRI_PRIME __NV_PRIME_RENDER_OFFLOAD KMP_DUPLICATE_LIB_OK OMP_NUM_THREADS
HOME SHELL LANG LC_ALL LC_CTYPE TMPDIR XDG_CACHE_HOME
"""
SHOWN = DECIDING.union(_SHOWN.split())
"""Names, not prefixes: SLURM_JWT, KAGGLE_KEY and NVIDIA_API_KEY are secrets, and a report is meant to be pasted."""

_LONGEST = 1 << 14
_FILE = 256 << 10
_MOST = 8  # files that set one variable

_SYSTEM = (
    "/etc/environment",
    "/etc/security/pam_env.conf",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/bashrc",
    "/etc/zsh/zshenv",
    "/etc/zsh/zshrc",
    "/etc/zshenv",
)
_SYSTEM_FOLDERS = (("/etc/profile.d", ".sh"), ("/etc/environment.d", ".conf"), ("/etc/fish/conf.d", ".fish"))
_HOME = (
    ".profile",
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_aliases",
    ".zshenv",
    ".zshrc",
    ".zprofile",
    ".cshrc",
    ".tcshrc",
    ".pam_environment",
    ".config/fish/config.fish",
)
_HOME_FOLDERS = ((".config/fish/conf.d", ".fish"), (".config/environment.d", ".conf"))
_PROJECT = (".env", ".envrc", "Dockerfile")
_UNITS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def variables(host: Host) -> Variables:
    """The values that may be shown, and for those that decide the places that set them: ``/etc/environment:3``."""
    values = {name: host.environ[name][:_LONGEST] for name in sorted(SHOWN & host.environ.keys())}
    return Variables(values, _origins(host, DECIDING & values.keys()), _cache_problem(host))


def _cache_problem(host: Host) -> str:
    """By the folder CUDA would write to, or the nearest above it that is there, in which it would have to be made."""
    if host.uname[0] != "Linux" or host.environ.get("CUDA_CACHE_DISABLE") == "1":
        return ""
    home = host.environ.get("HOME")
    cache = host.environ.get("CUDA_CACHE_PATH") or (f"{home}/.nv/ComputeCache" if home else "")
    if not cache:
        return "HOME is not set, and CUDA_CACHE_PATH neither"
    there = cache if cache.startswith("/") else f"{host.cwd}/{cache}"
    while len(there) > 1 and not host.exists(there):
        there = there.rpartition("/")[0] or "/"
    why = _not_writable(host, there)
    return f"{there}: {why}" if why else ""


def _not_writable(host: Host, folder: str) -> str:
    real = host.at(host.target(folder))
    try:
        if not os.path.isdir(real):
            return "no folder"
        if os.access(real, os.W_OK | os.X_OK):
            return ""
        return "read-only file system" if os.statvfs(real).f_flag & os.ST_RDONLY else "EACCES"
    except (OSError, ValueError) as error:
        return reason(folder, error).partition(": ")[2] or "not to be read"


def _origins(host: Host, names: frozenset[str]) -> dict[str, tuple[str, ...]]:
    if not names:
        return {}
    setting, places = _pattern(names), dict[str, list[str]]()
    for path in dict.fromkeys(_files(host)):
        text = host.text(path, _FILE) or ""
        for number, line in enumerate(text.split("\n") if any(name in text for name in names) else (), 1):
            for name in _set_in(line, setting):
                places.setdefault(name, []).append(f"{path}:{number}")
    return {name: tuple(found[:_MOST]) for name, found in sorted(places.items())}


def _pattern(names: frozenset[str]) -> re.Pattern[str]:
    """``NAME=`` of shells, systemd and Dockerfiles; ``setenv NAME`` and ``set -gx NAME``; ``NAME DEFAULT=`` of PAM."""
    name = f"(?:{'|'.join(sorted(names))})"
    words = r"(?:setenv|ENV|set(?:\s+-\S+)+)"
    return re.compile(
        rf"(?<![\w$./{{-])({name})=|^\s*{words}\s+({name})\s|^({name})\s+(?:DEFAULT|OVERRIDE)=|\"({name})\":"
    )


def _set_in(line: str, setting: re.Pattern[str]) -> Iterator[str]:
    """The variables a line sets. One that an alias or a message speaks of is not set.

    >>> list(_set_in("export A=1 CUDA_VISIBLE_DEVICES=0", _pattern(frozenset({"CUDA_VISIBLE_DEVICES"}))))
    ['CUDA_VISIBLE_DEVICES']
    """
    if re.match(r"\s*(?:#|;|//|alias\b|echo\b|unset\b)", line):
        return
    for found in setting.finditer(line):
        yield next(name for name in found.groups() if name)


def _files(host: Host) -> Iterator[str]:
    """Where a variable may come from, from the system down to the project."""
    yield from _SYSTEM
    for folder, end in _SYSTEM_FOLDERS:
        yield from host.paths(folder, end=end)
    home = host.environ.get("HOME", "").rstrip("/")
    if home.startswith("/"):
        yield from (f"{home}/{name}" for name in _HOME)
        for folder, end in _HOME_FOLDERS:
            yield from host.paths(f"{home}/{folder}", end=end)
    yield from _environments(host)
    if host.cwd.startswith("/"):
        yield from (f"{host.cwd.rstrip('/')}/{name}" for name in _PROJECT)
    yield from _unit_files(host)


def _environments(host: Host) -> Iterator[str]:
    """Of the activated conda environment its scripts and the variables it keeps; of a venv the script."""
    if conda := host.environ.get("CONDA_PREFIX", "").rstrip("/"):
        yield from host.paths(f"{conda}/etc/conda/activate.d")
        yield f"{conda}/conda-meta/state"
    if venv := host.environ.get("VIRTUAL_ENV", "").rstrip("/"):
        yield from (f"{venv}/bin/activate", f"{venv}/bin/activate.fish")


def _unit_files(host: Host) -> Iterator[str]:
    if unit := service_of(host):
        for folder in _UNITS:
            yield f"{folder}/{unit}"
            yield from host.paths(f"{folder}/{unit}.d", end=".conf")
