"""What surrounds the process: containers, schedulers, services, virtual machines, and the variables it is given."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from transload.diagnose.host import Host, reason
from transload.diagnose.probes.system import Mount, executable, mount_of, mounts
from transload.machine import Surroundings, Unknown, Variables

__all__ = ["DECIDING", "SHOWN", "service_of", "surroundings", "variables"]

# What managers of containers call themselves in the variable "container" → what we call them.
_NAMES = {"systemd-nspawn": "nspawn", "lxc-libvirt": "lxc", "oci": "container", "buildah": "podman"}
_NO_CONTAINERS = frozenset({"", "wsl", "flatpak", "snap", "host"})

# Paths of cgroups and of layers of the root file system, as the engines on the other side name them.
_CGROUPS = (
    r"(?P<docker>/docker[-/][0-9a-f]{12})|(?P<podman>/libpod(?:-conmon)?-[0-9a-f]{12})|(?P<lxc>/lxc/|/lxc\.payload)"
    r"|(?P<containerd>cri-containerd[-:]|/kubepods)|(?P<container>/crio-[0-9a-f]{12})|(?P<nspawn>/systemd-nspawn@)"
)
_LAYERS = (
    r"(?P<docker>/docker/overlay2?/|/docker/rootfs/)|(?P<containerd>io\.containerd\.snapshotter|/containerd/)"
    r"|(?P<podman>/containers/storage/)"
)

# Kaggle comes first: its images are made of Colab's.
_NOTEBOOKS = (
    ("KAGGLE_KERNEL_RUN_TYPE", "kaggle"),
    ("KAGGLE_URL_BASE", "kaggle"),
    ("COLAB_RELEASE_TAG", "colab"),
    ("COLAB_GPU", "colab"),
    ("RUNPOD_POD_ID", "runpod"),
    ("VAST_CONTAINERLABEL", "vast"),
    ("MODAL_TASK_ID", "modal"),
    ("LIGHTNING_CLOUD_PROJECT_ID", "lightning"),
    ("DATABRICKS_RUNTIME_VERSION", "databricks"),
    ("SAGEMAKER_INTERNAL_IMAGE_URI", "sagemaker"),
    ("SM_CURRENT_HOST", "sagemaker"),
    ("PAPERSPACE_FQDN", "paperspace"),
    ("CODESPACES", "codespaces"),
)

_BARE = """
null zero full random urandom tty console ptmx pts shm mqueue hugepages log fd stdin stdout stderr core
termination-log initctl char block .lxc .lxd-mounts vsock
"""
_HARMLESS = frozenset(_BARE.split())
"""What every private /dev holds: nothing behind these is a device that was built in."""

_GVISOR = "Sun Jan 10 15:06:54 PST 2016"  # its made-up kernel was built then, every release of it
_CDI = re.compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)")


def surroundings(host: Host) -> Surroundings:
    """What lies around the process, and what that was concluded from."""
    kubernetes, around = _kubernetes(host), mounts(host)
    container, wsl = _container(host, around, kubernetes=bool(kubernetes)), _wsl(host)
    service, sandbox = service_of(host), _sandbox(host)
    notebook = next(((kind, f"{name} is set") for name, kind in _NOTEBOOKS if name in host.environ), ("", ""))
    slurm = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if host.environ.get(name)), "")
    evidence = (container[1], kubernetes, slurm and f"{slurm} is set", wsl[1], notebook[1], sandbox[1])
    toolkit = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")
    programs = host.names("/usr/bin")
    return Surroundings(
        container=container[0],
        kubernetes=bool(kubernetes),
        slurm=bool(slurm),
        wsl=wsl[0],
        service=service,
        notebook=notebook[0],
        sandbox=sandbox[0],
        selinux={"1": "enforcing", "0": "permissive"}.get(host.line("/sys/fs/selinux/enforce"), ""),
        private_dev=_private_dev(host, around),
        cdi=_cdi(host),
        container_toolkit=programs
        if isinstance(programs, Unknown)
        else any(executable(host, name) for name in toolkit),
        docker=_docker(host),
        evidence=tuple(line for line in (*evidence, service and f"/proc/self/cgroup names {service}") if line),
    )


def service_of(host: Host) -> str:
    """The systemd unit this process belongs to, where it is a service of the system.

    What runs under ``user@1000.service`` is somebody's session: terminals of a desktop are services there.
    """
    for line in (host.text("/proc/self/cgroup", 1 << 14) or "").split("\n"):
        _, controllers, path = line.split(":", 2) if line.count(":") > 1 else ("", "-", "")
        steps = path.split("/")
        if controllers not in ("", "name=systemd") or any(step.startswith("user@") for step in steps):
            continue
        if unit := next((step for step in steps if step.endswith(".service")), ""):
            return unit
    return ""


def _container(host: Host, around: tuple[Mount, ...], *, kubernetes: bool) -> tuple[str, str]:
    """The kind of container and the evidence for it: the first, from the surest to the weakest."""
    for kind, why in _signs_of_containers(host, around):
        if kind == "podman" and kubernetes:
            return "container", why  # CRI-O keeps its images where Podman does
        return kind, why
    return ("container", "Kubernetes runs containers") if kubernetes else ("", "")


def _signs_of_containers(host: Host, around: tuple[Mount, ...]) -> Iterator[tuple[str, str]]:
    for name, kind in (("APPTAINER_CONTAINER", "apptainer"), ("SINGULARITY_CONTAINER", "singularity")):
        if host.environ.get(name):
            yield kind, f"{name} is set"
    for path, kind in (("/.singularity.d", "apptainer"), ("/run/.containerenv", "podman"), ("/.dockerenv", "docker")):
        if host.exists(path):
            yield kind, f"{path} is there"
    # What the manager itself has said, to us or to the first process of the container.
    first = re.search(r"(?:^|\0)container=([^\0]*)", host.text("/proc/1/environ", 1 << 16) or "")
    told = (
        (host.environ.get("container", ""), "the variable container is {}"),
        (host.line("/run/systemd/container"), "/run/systemd/container says {}"),
        (first[1] if first else "", "the variable container of process 1 is {}"),
    )
    for name, why in told:
        if name not in _NO_CONTAINERS:
            yield _NAMES.get(name, name), why.format(name)
    for path in ("/proc/self/cgroup", "/proc/1/cgroup"):
        if found := re.search(_CGROUPS, host.text(path, 1 << 14) or ""):
            yield found.lastgroup or "", f"{path} names one of {found.lastgroup}"
    root = mount_of(around, "/") or Mount("/", "")
    if root.kind in ("overlay", "fuse-overlayfs", "aufs") and (found := re.search(_LAYERS, root.detail)):
        yield found.lastgroup or "", f"/ is a layer of {found.lastgroup}"


def _kubernetes(host: Host) -> str:
    if host.environ.get("KUBERNETES_SERVICE_HOST"):
        return "KUBERNETES_SERVICE_HOST is set"
    secrets = "/var/run/secrets/kubernetes.io"
    return f"{secrets} is there" if host.folder(secrets) else ""


def _wsl(host: Host) -> tuple[int, str]:
    words = f"{host.uname[1]} {host.line('/proc/version')}"
    if re.search(r"microsoft-standard|wsl2", words, re.IGNORECASE):
        return 2, "the kernel is that of WSL 2"
    if re.search(r"-Microsoft\b", words):
        return 1, "the kernel is that of WSL 1"
    if host.environ.get("WSL_DISTRO_NAME") and host.exists("/dev/dxg"):
        return 2, "WSL_DISTRO_NAME is set and /dev/dxg is there"  # with a kernel of one's own
    return 0, ""


def _sandbox(host: Host) -> tuple[str, str]:
    version, line = host.line("/proc/version"), host.line("/proc/cmdline").split()
    if _GVISOR in version or "gvisor" in version.lower():
        return "gvisor", "/proc/version is gVisor's"
    if any("kata-containers" in word or word.startswith("agent.log=") for word in line):
        return "kata", "the kernel was started by Kata"
    if {"reboot=k", "panic=1"} <= set(line) and not host.folder("/sys/class/dmi/id"):
        return "firecracker", "the kernel was started as Firecracker does, on a board without a name"
    return "", ""


def _private_dev(host: Host, around: tuple[Mount, ...]) -> bool:
    mount = mount_of(around, "/dev/null")
    if mount is None or mount.point != "/dev" or mount.kind != "tmpfs":
        return False
    return not set(host.names("/dev") or ("unknown",)) - _HARMLESS


def _cdi(host: Host) -> tuple[str, ...]:
    versions: set[str] = set()
    for folder in ("/etc/cdi", "/var/run/cdi", "/run/cdi"):
        for path in (*host.paths(folder, end=".yaml"), *host.paths(folder, end=".json")):
            versions.update(_CDI.findall(host.text(path) or ""))
    return tuple(sorted(versions))


def _docker(host: Host) -> str:
    for path in ("/usr/bin/docker", "/usr/local/bin/docker"):
        begin = host.data(path, 256)
        if begin and b"podman" not in begin and not host.link(path).endswith("/snap"):  # podman-docker is a script
            return "installed"
    return "snap" if host.exists("/snap/bin/docker") else ""


# -- environment variables that matter, and the files that set them ----------------------------------------------------

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
    *("/etc/environment", "/etc/security/pam_env.conf", "/etc/profile", "/etc/bash.bashrc", "/etc/bashrc"),
    *("/etc/zsh/zshenv", "/etc/zsh/zshrc", "/etc/zshenv"),
)
_SYSTEM_FOLDERS = (("/etc/profile.d", ".sh"), ("/etc/environment.d", ".conf"), ("/etc/fish/conf.d", ".fish"))
_HOME = (
    *(".profile", ".bashrc", ".bash_profile", ".bash_login", ".bash_aliases", ".zshenv", ".zshrc"),
    *(".zprofile", ".cshrc", ".tcshrc", ".pam_environment", ".config/fish/config.fish"),
)
_HOME_FOLDERS = ((".config/fish/conf.d", ".fish"), (".config/environment.d", ".conf"))
_PROJECT = (".env", ".envrc", "Dockerfile")
_UNITS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def variables(host: Host) -> Variables:
    """The values that may be shown, and for those that decide the places that set them: ``/etc/environment:3``."""
    values = {name: host.environ[name][:_LONGEST] for name in sorted(SHOWN & host.environ.keys())}
    return Variables(values, _origins(host, DECIDING & values.keys()), _cache_problem(host))


def _cache_problem(host: Host) -> str:
    """By the folder CUDA would write to, or the nearest one above it, in which it would have to be made."""
    if host.uname[0] != "Linux" or host.environ.get("CUDA_CACHE_DISABLE") == "1":
        return ""
    home = host.environ.get("HOME")
    cache = host.environ.get("CUDA_CACHE_PATH") or (f"{home}/.nv/ComputeCache" if home else "")
    if not cache:
        return "neither HOME nor CUDA_CACHE_PATH is set"
    folder = cache if cache.startswith("/") else f"{host.cwd}/{cache}"
    while len(folder) > 1 and not host.exists(folder):
        folder = folder.rpartition("/")[0] or "/"
    real = host.real(folder)
    try:
        if not os.path.isdir(real):
            return f"{folder}: not a folder"
        if os.access(real, os.W_OK | os.X_OK):
            return ""
        return f"{folder}: {'read-only file system' if os.statvfs(real).f_flag & os.ST_RDONLY else 'EACCES'}"
    except (OSError, ValueError) as error:
        return f"{folder}: {reason(folder, error).partition(': ')[2] or 'cannot be read'}"


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
    if conda := host.environ.get("CONDA_PREFIX", "").rstrip("/"):  # its scripts, and the variables it keeps
        yield from host.paths(f"{conda}/etc/conda/activate.d")
        yield f"{conda}/conda-meta/state"
    if venv := host.environ.get("VIRTUAL_ENV", "").rstrip("/"):
        yield from (f"{venv}/bin/activate", f"{venv}/bin/activate.fish")
    if host.cwd.startswith("/"):
        yield from (f"{host.cwd.rstrip('/')}/{name}" for name in _PROJECT)
    if unit := service_of(host):
        for folder in _UNITS:
            yield f"{folder}/{unit}"
            yield from host.paths(f"{folder}/{unit}.d", end=".conf")
