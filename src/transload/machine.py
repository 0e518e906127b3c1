"""What a host is: plain, frozen facts, layer by layer, from the card on the bus to the kernel that torch launches.

Probes fill these and rules judge them; ``diagnose.saved`` reads back what ``to_dict`` wrote, so that a machine can be
judged elsewhere. Nothing here touches the host. What could not be found out is an ``Unknown`` with the reason,
which is false in a condition: ``if kernel.loaded`` asks whether it is known to be loaded.

Text is text as the host gave it: strangers' words, escaped by whoever shows them.
"""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass
from typing import Any, Literal

from transload.frozen import facts

__all__ = [
    "Accelerator",
    "Answer",
    "Cuda",
    "CudaGpu",
    "Driver",
    "DriverLibraries",
    "Experiment",
    "Extension",
    "Hardware",
    "Kernel",
    "Library",
    "Machine",
    "Node",
    "Nodes",
    "Nvml",
    "NvmlGpu",
    "PciDevice",
    "Platform",
    "ProcGpu",
    "Python",
    "Resolved",
    "Step",
    "Surroundings",
    "Toolkit",
    "Torch",
    "TorchInstall",
    "TorchLibraries",
    "TorchRun",
    "Unknown",
    "Variables",
    "to_dict",
]

NVIDIA, AMD, INTEL = 0x10DE, 0x1002, 0x8086


@facts(frozen=True)
class Unknown:
    """A fact that could not be found out, and why. False, so that only what is known counts.

    >>> bool(Unknown("/proc is not readable"))
    False
    """

    reason: str

    def __bool__(self) -> Literal[False]:
        return False


@facts(frozen=True)
class Platform:
    """The operating system and who asks."""

    system: str = "Linux"
    """As ``os.uname().sysname`` or ``platform.system()``: ``Linux``, ``Windows``, ``Darwin``."""
    machine: str = "x86_64"
    kernel: str = ""
    """The release of the running kernel, as ``uname -r``."""
    distribution: str = ""
    """``ID`` of os-release: ``ubuntu``, ``fedora``, ``arch``, ``alpine``, ``nixos`` …"""
    distribution_like: tuple[str, ...] = ()
    distribution_version: str = ""
    distribution_name: str = ""
    """``PRETTY_NAME`` of os-release."""
    libc: str = ""
    """``glibc 2.36``, ``musl 1.2``, or empty where it is not known."""
    package_manager: str = ""
    """``apt``, ``dnf``, ``pacman``, ``zypper``, ``apk``, ``nix``, or empty."""
    shell: str = ""
    """``bash``, ``zsh``, ``fish`` …, or empty."""
    root: bool = False
    groups: tuple[str, ...] = ()
    """Names of the groups of this process."""
    laptop: bool | Unknown = Unknown("not asked")
    address_space: int | None = None
    """``ulimit -v`` in bytes; ``None`` where there is no limit."""
    memory: int = -1
    """Bytes of memory this process may have: the machine's, or less where a container is given less. -1: not known."""
    memory_free: int = -1
    """How many of them are to be had without swapping."""
    suspends: int = 0
    """How often the machine was suspended since it booted."""
    prime: str = ""
    """Which card ``prime-select`` chose, from its file: ``nvidia``, ``intel``, ``on-demand``, or empty."""


@facts(frozen=True)
class Surroundings:
    """Containers, schedulers and services around the process; facts, not verdicts."""

    container: str = ""
    """``docker``, ``podman``, ``apptainer``, ``singularity``, ``lxc``, ``nspawn``, ``containerd``, or ``container``
    for one of unknown kind; empty outside."""
    kubernetes: bool = False
    slurm: bool = False
    wsl: int = 0
    """1 or 2 under the Windows Subsystem for Linux."""
    service: str = ""
    """The systemd unit the process runs in, where that is a service and no user session."""
    notebook: str = ""
    """``colab``, ``kaggle``, ``runpod`` …, or empty."""
    sandbox: str = ""
    """``gvisor``, ``kata``, ``firecracker`` …: a kernel that is not the host's."""
    selinux: str = ""
    """``enforcing``, ``permissive``, or empty where there is none."""
    private_dev: bool = False
    """/dev is a file system of this process's own with no devices of hardware in it."""
    cdi: tuple[str, ...] = ()
    """Driver versions named by the CDI files of this host or container (``/etc/cdi``, ``/var/run/cdi``)."""
    container_toolkit: bool | Unknown = Unknown("not asked")
    """Whether nvidia-ctk or nvidia-container-runtime is installed here."""
    docker: str = ""
    """``installed``, ``snap``, or empty: how Docker is installed on this host."""
    evidence: tuple[str, ...] = ()
    """What each of the above was concluded from, a line each."""


@facts(frozen=True)
class PciDevice:
    """One device on the PCI bus, from sysfs."""

    address: str
    vendor: int
    device: int
    kind: int
    """The class code, 24 bits: ``0x030000`` VGA, ``0x030200`` 3D controller, ``0x068000`` bridge."""
    driver: str = ""
    """Name of the kernel driver bound to it: ``nvidia``, ``nouveau``, ``nova_core``, ``vfio-pci``, or empty."""
    power: str = ""
    """``D0``, ``D3cold`` …"""
    bars: tuple[int, ...] = ()
    """Sizes of its memory regions in bytes, of those that have one, in order; 0 for one that was not assigned."""
    dead: bool = False
    """Its configuration space reads all ones: it has fallen off the bus."""

    @property
    def display(self) -> bool:
        """Whether it is a graphics or compute card."""
        return self.kind >> 16 == 0x03


@facts(frozen=True)
class Hardware:
    """What is built in."""

    pci: tuple[PciDevice, ...] | Unknown = Unknown("not asked")
    """Display devices and accelerators (class ``0x12``) of any vendor, and every device of NVIDIA."""
    dxg: bool = False
    """/dev/dxg, the road to the GPU under WSL 2."""
    tegra: str = ""
    """What a Jetson says of itself; empty elsewhere."""

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """The NVIDIA cards on the bus."""
        return tuple(d for d in self.pci or () if d.vendor == NVIDIA and d.display)

    @property
    def present(self) -> bool:
        """Whether there is an NVIDIA GPU, by any road we know."""
        return bool(self.gpus or self.dxg or self.tegra)


@facts(frozen=True)
class ProcGpu:
    """A card as the kernel driver lists it under /proc/driver/nvidia/gpus."""

    address: str
    model: str = ""
    minor: int | None = None
    firmware: str = ""
    excluded: bool = False


@facts(frozen=True)
class Kernel:
    """NVIDIA's kernel driver."""

    loaded: bool | Unknown = Unknown("not asked")
    version: str = ""
    flavour: str = ""
    """``open`` or ``proprietary``; empty where it is not known."""
    modules: tuple[str, ...] = ()
    """Loaded modules of concern: ``nvidia``, ``nvidia_uvm``, ``nvidia_modeset``, ``nouveau``, ``nova_core`` …"""
    built_for: tuple[str, ...] | Unknown = Unknown("not asked")
    """Kernel releases under /lib/modules that have an nvidia.ko."""
    secure_boot: bool | Unknown = Unknown("not asked")
    uvm_disable_hmm: str = ""
    """The parameter of nvidia_uvm: ``Y``, ``N``, or empty where it is not there."""
    kaslr: bool | Unknown = Unknown("not asked")
    parameters: dict[str, str] = field(default_factory=dict)
    """/proc/driver/nvidia/params."""
    gpus: tuple[ProcGpu, ...] = ()
    firmware: bool | Unknown = Unknown("not asked")
    """Whether /lib/firmware/nvidia holds the folder of the loaded version."""
    log: tuple[str, ...] | Unknown = Unknown("not asked")
    """Lines of the kernel's log that speak of NVRM, nvidia, nouveau or Xid; the last of them."""
    daemons: tuple[str, ...] = ()
    """Of ``nv-fabricmanager``, ``nvidia-persistenced``, ``nvidia-cuda-mps-control``, ``nvidia-cuda-mps-server``,
    ``nvidia-gridd``: those that run."""
    stuck: tuple[str, ...] = ()
    """Processes in uninterruptible sleep that have an NVIDIA device open, or wait in its driver: ``name (pid)``."""
    fabric_manager: str = ""
    """Version of the installed fabric manager; empty where there is none."""
    mps_directory: str = ""
    """The directory of the MPS control pipe, where it exists: ``CUDA_MPS_PIPE_DIRECTORY`` or ``/tmp/nvidia-mps``."""


@facts(frozen=True)
class Node:
    """A file under /dev and what became of opening it for reading and writing."""

    path: str
    exists: bool = True
    kind: str = "char"
    """``char``, ``file``, ``directory``, ``link``, or empty where it does not exist."""
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    group: str = ""
    major: int = 0
    minor: int = 0
    error: str = ""
    """Name of the errno of opening it: ``EACCES``, ``EPERM``, ``ENXIO`` …; empty where it opened."""
    nodev: bool = False
    """It lies on a file system mounted with ``nodev``."""


@facts(frozen=True)
class Nodes:
    """The device nodes of NVIDIA, and of AMD's and Intel's compute drivers."""

    found: tuple[Node, ...] = ()
    """/dev/nvidiactl, /dev/nvidia0 …, /dev/nvidia-uvm, /dev/nvidia-caps/*, /dev/dxg, /dev/nvhost-*, /dev/nvmap,
    /dev/kfd, /dev/dri/render*, /dev/accel/*. The first three of NVIDIA are always listed, existing or not."""
    majors: dict[str, int] = field(default_factory=dict)
    """From /proc/devices: ``nvidia``, ``nvidiactl``, ``nvidia-uvm``, ``nvidia-caps``, ``nvidia-nvswitch``, ``kfd``."""
    cgroup: tuple[str, ...] = ()
    """The rules of the devices cgroup (version 1) that allow something; empty where it cannot be read."""

    def at(self, path: str) -> Node:
        """The node at ``path``; one that does not exist, where nobody looked."""
        return next((n for n in self.found if n.path == path), Node(path, exists=False, kind="", error="ENOENT"))


Kind = Literal["driver", "stub", "compat", "wsl", "other"]


@facts(frozen=True)
class Library:
    """A shared library the loader could take."""

    name: str
    """The name it is asked for by: ``libcuda.so.1``."""
    path: str
    target: str = ""
    """What the path leads to in the end: ``/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06``."""
    via: str = ""
    """How the loader gets to it: ``LD_PRELOAD``, ``LD_LIBRARY_PATH``, ``ld.so.cache``, ``default folder``; or
    ``disk`` for one the loader does not see."""
    version: str = ""
    kind: Kind = "driver"
    problem: str = ""
    """Why it cannot be loaded: ``not an ELF file``, ``for another machine (aarch64)``, ``empty`` …"""


@facts(frozen=True)
class DriverLibraries:
    """The user's half of the driver. In each list the first whose ``via`` is not ``disk`` is what a process gets."""

    cuda: tuple[Library, ...] | Unknown = Unknown("not asked")
    nvml: tuple[Library, ...] | Unknown = Unknown("not asked")
    ptx_compiler: tuple[Library, ...] | Unknown = Unknown("not asked")
    smi: str = ""
    """Where nvidia-smi is. It is never run: it may hang, and says less than the libraries."""
    preload: tuple[str, ...] = ()
    """What /etc/ld.so.preload lists."""
    cwd_searched: tuple[str, ...] = ()
    """Why the loader also looks into the current directory: ``LD_LIBRARY_PATH has an empty element`` …"""

    @property
    def libcuda(self) -> Library | None:
        """The libcuda.so.1 that the loader takes, by simulation; see also ``Cuda.library``."""
        return next((lib for lib in self.cuda or () if lib.via != "disk"), None)

    @property
    def libnvml(self) -> Library | None:
        """The libnvidia-ml.so.1 that the loader takes."""
        return next((lib for lib in self.nvml or () if lib.via != "disk"), None)


State = Literal["answered", "no-library", "not-loadable", "no-symbol", "hung", "crashed", "unasked"]


@facts(frozen=True)
class Answer:
    """What became of a question asked in a child process."""

    state: State = "unasked"
    """``no-library``: the loader did not find it. ``not-loadable``: it found something it could not load.
    ``no-symbol``: the library lacks a function every release has. ``hung``: no answer within the deadline.
    ``crashed``: a signal, or an exit without an answer."""
    detail: str = ""
    """The loader's or the system's own words; for ``hung`` and ``crashed`` also how far it got."""
    seconds: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether there is an answer at all; its codes may still say no."""
        return self.state == "answered"


@facts(frozen=True)
class NvmlGpu:
    """A card as NVML sees it. CUDA_VISIBLE_DEVICES does not apply here. -1 and empty: not told."""

    index: int
    code: int = 0
    """The result of getting its handle: 0, or 15 for a lost card, 4 for one we may not use …"""
    name: str = ""
    uuid: str = ""
    capability: tuple[int, ...] = ()
    """``(9, 0)``"""
    address: str = ""
    memory: int = -1
    free: int = -1
    compute_mode: str = ""
    """``default``, ``exclusive-thread``, ``prohibited``, ``exclusive-process``."""
    mig: str = ""
    """``enabled``, ``disabled``, or empty where the card has none."""
    mig_devices: tuple[str, ...] = ()
    """UUIDs of its MIG devices."""
    fabric: str = ""
    """``not-supported``, ``not-started``, ``in-progress``, ``completed``, or empty where it was not told."""
    fabric_status: int = 0
    retired_pending: bool = False
    remap_pending: bool = False
    remap_failure: bool = False
    virtualization: str = ""
    """``none``, ``passthrough``, ``vgpu``, ``host-vgpu``, ``host-vsga``."""
    licence: str = ""
    """``licensed``, ``unlicensed``, or empty where none is needed."""
    processes: tuple[str, ...] = ()
    """Processes that compute on it, other than our own: ``name (pid), 3.2 GB``."""


@facts(frozen=True)
class Nvml:
    """What libnvidia-ml says."""

    answer: Answer = Answer()
    library: str = ""
    """The file that was mapped."""
    init: int = -1
    """Result of ``nvmlInit_v2``."""
    driver: str = ""
    cuda: int = 0
    """``13000`` for CUDA 13.0"""
    count: int = -1
    count_code: int = -1
    gpus: tuple[NvmlGpu, ...] = ()
    confidential: str = ""
    """``ready``, ``not-ready`` where confidential computing is on; empty elsewhere."""


@facts(frozen=True)
class CudaGpu:
    """A card as the CUDA driver gives it to this process."""

    ordinal: int
    name: str = ""
    capability: tuple[int, ...] = ()
    uuid: str = ""
    memory: int = -1
    compute_mode: int = -1
    """Attribute 20: 0 default, 2 prohibited, 3 exclusive process."""
    integrated: bool = False


@facts(frozen=True)
class Cuda:
    """What libcuda says: ``cuInit``, ``cuDriverGetVersion``, ``cuDeviceGetCount`` and the devices."""

    answer: Answer = Answer()
    library: str = ""
    """The file that was mapped."""
    init: int = -1
    version: int = 0
    """``13000`` for CUDA 13.0"""
    count: int = -1
    count_code: int = -1
    gpus: tuple[CudaGpu, ...] = ()

    @property
    def works(self) -> bool:
        """Whether the driver started and has a device for this process."""
        return self.answer.answered and self.init == 0 and self.count > 0


@facts(frozen=True)
class Experiment:
    """The same question to the CUDA driver with something changed: a fix tried before it is told."""

    change: tuple[str, ...]
    """Names of the variables that were left out, such as ``CUDA_VISIBLE_DEVICES``."""
    cuda: Cuda


@facts(frozen=True)
class Toolkit:
    """A CUDA toolkit on the disk. A torch wheel brings its own libraries and needs none."""

    nvcc: str = ""
    version: str = ""
    home: str = ""
    """``CUDA_HOME`` or ``CUDA_PATH``."""
    folders: tuple[str, ...] = ()
    """/usr/local/cuda*"""


@facts(frozen=True)
class Python:
    """The interpreter examined, which need not be the one we run in."""

    executable: str = ""
    version: str = ""
    """``3.11.7``"""
    implementation: str = "cpython"
    bits: int = 64
    free_threaded: bool = False
    prefix: str = ""
    base_prefix: str = ""
    path: tuple[str, ...] = ()
    """``sys.path``, without the entry of the script."""
    user_site: str = ""
    user_site_enabled: bool = False
    environment: str = ""
    """``venv``, ``conda``, ``pixi``, ``system``, ``pyenv`` … what kind of environment it is."""
    tool: str = "pip"
    """What installs packages here: ``pip``, ``uv``, ``conda``, ``poetry``, ``pixi``, ``pdm``."""
    project: bool = False
    """Whether it is the environment of a project whose packages that tool keeps in a lock file."""
    pip: bool = True
    """Whether pip is installed in it."""
    externally_managed: bool = False
    why: str = ""
    """Why this interpreter is examined, where that needs to be said."""
    others: tuple[str, ...] = ()
    """Other interpreters of this host that have a torch: ``/usr/bin/python3: torch 2.8.0+cu128``."""
    problem: str = ""
    """Why it could not be asked; the rest is then empty."""
    packages: dict[str, str] = field(default_factory=dict)
    """Name → version of what matters here: torch*, nvidia-*, cuda-*, triton, flash-attn, xformers, tensorflow …"""


@facts(frozen=True)
class TorchInstall:
    """One torch on the path."""

    location: str
    """The folder ``torch``."""
    version: str = ""
    """From torch/version.py: ``2.15.0+cu132``."""
    cuda: str = ""
    """``13.2``; empty where it is not built with CUDA, see ``known``."""
    hip: str = ""
    xpu: str = ""
    known: bool = True
    """Whether version.py could be read; where not, ``problem`` says why."""
    problem: str = ""
    dist_info: str = ""
    dist_version: str = ""
    installer: str = ""
    """``pip``, ``uv``, ``conda`` …"""
    conda_build: str = ""
    """``cuda126_mkl_py311…``, ``cpu_generic_py312…``"""
    tags: tuple[str, ...] = ()
    """Of the WHEEL file: ``cp311-cp311-manylinux_2_28_x86_64``."""
    missing: tuple[str, ...] = ()
    """Files that RECORD lists and that are absent or cut off: ``lib/libtorch_cuda.so: absent`` …"""
    unlisted: tuple[str, ...] = ()
    """Libraries in torch/lib that RECORD does not list."""
    installed: float = 0.0
    """Time stamp of the dist-info."""
    replaced_by: tuple[str, ...] = ()
    """Packages installed within a minute of it, the likely reason for its being there: ``ultralytics 8.3``."""
    altered: tuple[str, ...] = ()
    """Libraries that are whole and yet of another size than RECORD says: stripped or patched, which is no fault, or of
    another release: ``lib/libc10.so: 18 bytes instead of 20``."""
    origin: str = ""
    """Where it was installed from, if not from an index: the URL in direct_url.json, without credentials."""

    @property
    def cpu_only(self) -> bool:
        """Whether it was certainly built for no accelerator."""
        return self.known and not (self.cuda or self.hip or self.xpu)


@facts(frozen=True)
class Torch:
    """Every torch that the examined interpreter could import. The first is the one it would."""

    installs: tuple[TorchInstall, ...] | Unknown = Unknown("not asked")
    shadow: str = ""
    """A file or folder that is imported as torch and is none: ``/home/user/project/torch.py``."""
    leftovers: tuple[str, ...] = ()
    """Paths of ``~orch-2.8.0.dist-info`` and the like, left by an interrupted pip."""
    dangling: tuple[str, ...] = ()
    """Paths of dist-infos of a torch whose files are gone, or were overwritten by another's."""
    shadow_kind: str = ""
    """``file``; ``package``, a folder that is not PyTorch; or ``source``, PyTorch's own source tree, not built."""
    shadow_via: str = ""
    """How it comes first on the path: ``the current directory``, ``PYTHONPATH``, ``sys.path``."""

    @property
    def first(self) -> TorchInstall | None:
        """The one that an import takes, unless something shadows it."""
        return self.installs[0] if self.installs else None


@facts(frozen=True)
class Resolved:
    """A library that torch needs, and what the loader would take for it."""

    name: str
    """``libcudnn.so.9``"""
    path: str = ""
    """Empty where it is not found."""
    via: str = ""
    """``RUNPATH``, ``RPATH``, ``LD_LIBRARY_PATH``, ``LD_PRELOAD``, ``ld.so.cache``, ``default folder``, ``loaded``
    (an earlier one has brought it in under that name)."""
    needed_by: str = ""
    """``libtorch_cuda.so``"""
    version: str = ""
    """From its file's name or the package that owns it."""
    expected: str = ""
    """The path in site-packages that the wheel means; empty where it means none."""
    package: str = ""
    """The distribution that should hold it: ``nvidia-cudnn-cu13``."""
    problem: str = ""
    """Why the file at ``path`` cannot be loaded: ``empty``, ``not an ELF file`` …"""

    @property
    def shadowed(self) -> bool:
        """Whether another file takes the place of the wheel's own."""
        return bool(self.expected and self.path and self.path != self.expected)


@facts(frozen=True)
class TorchLibraries:
    """What torch's own binaries say."""

    architectures: tuple[str, ...] | Unknown = Unknown("not asked")
    """The list baked into libtorch_python: what ``torch.cuda.get_arch_list()`` returns."""
    cubins: dict[str, int] | Unknown = Unknown("not asked")
    """Architecture → how many kernels of it libtorch_cuda holds: ``{"sm_90": 4711, "compute_90": 12}``."""
    needed: tuple[Resolved, ...] = ()
    """NVIDIA's libraries, directly or indirectly needed; and any other that is not found or cannot be loaded."""
    unresolved: tuple[str, ...] = ()
    """Versioned symbols that the library to be taken does not define:
    ``__nvJitLinkAddData_12_1 of libnvJitLink.so.12, needed by libcusparse.so.12``; and whole versions:
    ``GLIBCXX_3.4.32 of libstdc++.so.6, needed by libtorch_cpu.so``."""
    overlaps: tuple[str, ...] = ()
    """Files that two installed distributions both own: ``nvidia/cudnn/lib/libcudnn.so.9: nvidia-cudnn-cu12, …``."""
    split_cudnn: tuple[str, ...] = ()
    """Parts of cuDNN that would be taken from elsewhere, and of another release, because the wheel lacks them or the
    loader looks there first: ``libcudnn_ops.so.9: /usr/lib/x86_64-linux-gnu/libcudnn_ops.so.9, by LD_LIBRARY_PATH``."""
    cwd_searched: tuple[str, ...] = ()
    """Libraries for which the loader also looks into the current directory:
    ``libcusparseLt.so.0: RUNPATH has an empty element``."""


@facts(frozen=True)
class Extension:
    """A package with compiled code of its own that runs on the GPU beside torch."""

    package: str
    version: str = ""
    library: str = ""
    """The file examined; the worst one where there are several."""
    architectures: tuple[str, ...] = ()
    """What its fatbins hold; empty where it has no code for a GPU."""
    undefined: tuple[str, ...] = ()
    """Symbols it needs from torch that torch does not define."""
    missing: tuple[str, ...] = ()
    """Libraries it needs that are found nowhere."""
    wants_torch: str = ""
    """The torch its metadata pins: ``==2.8.0``."""
    local: str = ""
    """The local part of its version: ``cu128``, ``cpu``, ``pt28cu128`` …"""


@facts(frozen=True)
class Variables:
    """Environment variables that decide something."""

    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Name → files that set it, as far as found: ``/etc/environment:3``."""
    cache_problem: str = ""
    """Why CUDA cannot keep what it compiles: ``/home/user/.nv/ComputeCache: EACCES``; empty where it can, or was not
    looked."""

    def get(self, name: str) -> str | None:
        """The value, or ``None`` where it is not set."""
        return self.values.get(name)


@facts(frozen=True)
class Accelerator:
    """An accelerator that is no NVIDIA card."""

    kind: str
    """``rocm``, ``xpu``, ``mps``, ``npu`` …: the torch build it needs."""
    name: str = ""
    detail: str = ""
    """``gfx1100``, ``Apple M2`` …"""
    usable: bool = False
    """Whether its compute driver is there: /dev/kfd with a GPU behind it, and so on."""
    integrated: bool = False
    """It is part of the processor: in most machines there, and seldom what torch is meant to run on."""


@facts(frozen=True)
class Step:
    """One thing the torch child did."""

    name: str
    """``import``, ``available``, ``init``, ``kernel``, ``matmul``, ``convolution``"""
    ok: bool
    error: str = ""
    """``RuntimeError: CUDA error: no kernel image is available …``"""
    seconds: float = 0.0


@facts(frozen=True)
class TorchRun:
    """What happened when torch was imported and used in a child process."""

    answer: Answer = Answer()
    version: str = ""
    file: str = ""
    """``torch.__file__``"""
    cuda: str = ""
    hip: str = ""
    available: bool | Unknown = Unknown("not asked")
    """``torch.cuda.is_available()``"""
    count: int = -1
    """``torch.cuda.device_count()``"""
    architectures: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """``NVIDIA H200 (9, 0)``"""
    cudnn: str = ""
    warnings: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    libraries: tuple[str, ...] = ()
    """CUDA libraries really mapped into the process."""
    backends: tuple[str, ...] = ()
    """Other backends of torch that work here: ``mps``, ``xpu``."""

    def step(self, name: str) -> Step | None:
        """The step of that name, where it came to it."""
        return next((step for step in self.steps if step.name == name), None)

    @property
    def cuda_works(self) -> bool:
        """Whether a kernel ran on a GPU."""
        step = self.step("kernel")
        return step is not None and step.ok


@facts(frozen=True)
class Driver:
    """The user's side of the driver: its files and what they answered."""

    libraries: DriverLibraries = DriverLibraries()
    nvml: Nvml = Nvml()
    cuda: Cuda = Cuda()
    experiments: tuple[Experiment, ...] = ()


@facts(frozen=True)
class Machine:
    """A host, layer by layer."""

    transload: str = ""
    taken: str = ""
    """When it was looked at, UTC: ``2026-11-15T04:57:54Z``."""
    platform: Platform = Platform()
    surroundings: Surroundings = Surroundings()
    hardware: Hardware = Hardware()
    kernel: Kernel = field(default_factory=Kernel)
    nodes: Nodes = field(default_factory=Nodes)
    driver: Driver = Driver()
    toolkit: Toolkit = Toolkit()
    variables: Variables = field(default_factory=Variables)
    python: Python = field(default_factory=Python)
    torch: Torch = Torch()
    torch_libraries: TorchLibraries = TorchLibraries()
    extensions: tuple[Extension, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    torch_run: TorchRun = TorchRun()
    problems: dict[str, str] = field(default_factory=dict)
    """Probe → what stopped it. Its facts keep their defaults."""

    @property
    def capabilities(self) -> dict[str, tuple[int, int]]:
        """Compute capability of each card, by name: as CUDA says, else NVML; empty where neither answered."""
        cards: tuple[CudaGpu | NvmlGpu, ...] = (*self.driver.cuda.gpus, *self.driver.nvml.gpus)
        return {gpu.name: (gpu.capability[0], gpu.capability[1]) for gpu in reversed(cards) if len(gpu.capability) == 2}


def to_dict(value: Any) -> Any:
    """Plain data for JSON: an ``Unknown`` becomes ``{"unknown": reason}``.

    >>> to_dict(Hardware())["pci"]
    {'unknown': 'not asked'}
    """
    if isinstance(value, Unknown):
        return {"unknown": value.reason}
    if is_dataclass(value):
        return {each.name: to_dict(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [to_dict(each) for each in value]
    if isinstance(value, dict):
        return {name: to_dict(each) for name, each in value.items()}
    return value
