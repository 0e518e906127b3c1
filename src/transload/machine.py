"""A host as plain, frozen facts, layer by layer, from the card on the bus to the kernel that torch launches.

Probes fill these in and rules judge them; ``diagnose.saved`` reads what ``to_dict`` wrote, so that a machine can be
judged elsewhere. Nothing here touches the host. What could not be determined is an ``Unknown`` with the reason, which
is false in a condition: ``if kernel.loaded`` is true only if it is known to be loaded. The comment next to a field or
above it is its description in docs/doctor.schema.json.

Text comes from the host: it is untrusted, and whatever displays it must escape it.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from transload.frozen import Plain

NVIDIA, AMD = 0x10DE, 0x1002


class Unknown(Plain):
    """A fact that could not be determined, and why. It is false, so that only known facts count.

    >>> bool(Unknown("/proc is not readable"))
    False
    """

    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    def to_dict(self) -> dict[str, Any]:
        """``{"unknown": reason}``, for JSON."""
        return {"unknown": self.reason}


NOT_ASKED = Unknown("not asked")


class Platform(Plain):
    """The operating system and the user."""

    system: str = "Linux"  # As ``os.uname().sysname`` or ``platform.system()``: ``Linux``, ``Windows``, ``Darwin``.
    machine: str = "x86_64"
    kernel: str = ""  # The release of the running kernel, as ``uname -r``.
    distribution: str = ""  # ``ID`` of os-release: ``ubuntu``, ``fedora``, ``arch``, ``alpine``, ``nixos`` …
    distribution_like: tuple[str, ...] = ()
    distribution_version: str = ""
    distribution_name: str = ""  # ``PRETTY_NAME`` of os-release.
    libc: str = ""  # ``glibc 2.36``, ``musl 1.2``, or empty if unknown.
    package_manager: str = ""  # ``apt``, ``dnf``, ``pacman``, ``zypper``, ``apk``, ``nix``, or empty.
    shell: str = ""  # ``bash``, ``zsh``, ``fish`` …, or empty.
    root: bool = False
    groups: tuple[str, ...] = ()  # Names of the groups of this process.
    laptop: bool | Unknown = NOT_ASKED
    address_space: int | None = None  # ``ulimit -v`` in bytes; ``None`` if there is no limit.
    memory: int = -1  # Bytes of memory this process may use: the machine's, or the container's limit. -1: unknown.
    memory_free: int = -1  # How many of them are available without swapping.
    suspends: int = 0  # How often the machine was suspended since it booted.
    prime: str = ""  # The card that ``prime-select`` chose: ``nvidia``, ``intel``, ``on-demand``, or empty.
    # On Windows: bytes of memory and page file together, and how many of them can still be reserved. -1: unknown.
    commit_limit: int = -1
    commit_free: int = -1
    translator: str = ""  # ``Rosetta`` if macOS translates this process, a program for Intel processors.
    long_paths: bool | Unknown | None = None  # On Windows: whether programs may use paths of more than 260 characters.


class Surroundings(Plain):
    """Containers, schedulers and services around the process."""

    container: str = ""  # ``docker``, ``podman``, ``lxc`` …; ``container`` for one of unknown kind; empty outside.
    kubernetes: bool = False
    slurm: bool = False
    wsl: int = 0  # 1 or 2 under the Windows Subsystem for Linux.
    service: str = ""  # The systemd unit the process runs in, if it is a service and not a user session.
    notebook: str = ""  # ``colab``, ``kaggle``, ``runpod`` …, or empty.
    sandbox: str = ""  # ``gvisor``, ``kata``, ``firecracker`` …: a kernel that is not the host's.
    selinux: str = ""  # ``enforcing``, ``permissive``, or empty if there is none.
    private_dev: bool = False  # /dev is private to this process and contains no hardware devices.
    cdi: tuple[str, ...] = ()  # Driver versions named by CDI files here (``/etc/cdi``, ``/var/run/cdi``).
    container_toolkit: bool | Unknown = NOT_ASKED  # Whether nvidia-ctk or nvidia-container-runtime is installed here.
    docker: str = ""  # ``installed``, ``snap``, or empty: how Docker is installed on this host.
    evidence: tuple[str, ...] = ()  # How each of the above was detected, one line each.


class PciDevice(Plain):
    """One device on the PCI bus: from sysfs, or from the registry and the configuration manager of Windows."""

    address: str
    vendor: int
    device: int
    kind: int  # The class code, 24 bits: ``0x030000`` VGA, ``0x030200`` 3D controller, ``0x068000`` bridge.
    # The kernel driver bound to it: ``nvidia``, ``nouveau``, ``vfio-pci`` …; on Windows its service, ``nvlddmkm`` or
    # ``BasicDisplay``; or empty.
    driver: str = ""
    power: str = ""  # ``D0``, ``D3cold`` …
    bars: tuple[int, ...] = ()  # Bytes of each of its memory regions; 0 for one that was not assigned.
    dead: bool = False  # Its configuration space reads all ones: it has fallen off the bus.
    problem: int = 0  # Its code in the device manager of Windows: 22 disabled, 28 no driver, 43 stopped …
    name: str = ""  # Its name in the device manager of Windows: ``NVIDIA GeForce RTX 4090``.

    @property
    def display(self) -> bool:
        """Whether it is a graphics or compute card."""
        return self.kind >> 16 == 0x03


class Hardware(Plain):
    """The devices in the machine."""

    pci: tuple[PciDevice, ...] | Unknown = NOT_ASKED  # Display devices, accelerators, and all devices of NVIDIA.
    dxg: bool = False  # Whether /dev/dxg exists, the way to the GPU under WSL 2.
    tegra: str = ""  # The model of a Jetson; empty elsewhere.
    # Why it is not known which devices are still present: the registry of Windows also lists those that were removed.
    unconfirmed: str = ""
    absent: tuple[str, ...] = ()  # NVIDIA cards that the registry of Windows lists and that are not present.

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """The NVIDIA cards on the bus."""
        return tuple(d for d in self.pci or () if d.vendor == NVIDIA and d.display)

    @property
    def present(self) -> bool:
        """Whether there is an NVIDIA GPU of any kind."""
        return bool(self.gpus or self.dxg or self.tegra)


class ProcGpu(Plain):
    """A card as the kernel driver lists it under /proc/driver/nvidia/gpus."""

    address: str
    model: str = ""
    minor: int | None = None
    firmware: str = ""
    excluded: bool = False


class Kernel(Plain):
    """NVIDIA's kernel driver."""

    loaded: bool | Unknown = NOT_ASKED  # On Windows: whether a card uses it without a problem.
    version: str = ""  # In NVIDIA's numbering: ``581.80``, which Windows calls ``32.0.15.8180``.
    flavour: str = ""  # ``open`` or ``proprietary``; empty if unknown.
    # Loaded modules that matter here: ``nvidia``, ``nvidia_uvm``, ``nvidia_modeset``, ``nouveau``, ``nova_core`` …
    modules: tuple[str, ...] = ()
    built_for: tuple[str, ...] | Unknown = NOT_ASKED  # Kernel releases under /lib/modules that have an nvidia.ko.
    secure_boot: bool | Unknown = NOT_ASKED
    uvm_disable_hmm: str = ""  # The parameter of nvidia_uvm: ``Y``, ``N``, or empty if there is none.
    kaslr: bool | Unknown = NOT_ASKED
    parameters: dict[str, str] = field(default_factory=dict)  # /proc/driver/nvidia/params.
    gpus: tuple[ProcGpu, ...] = ()
    firmware: bool | Unknown = NOT_ASKED  # Whether /lib/firmware/nvidia contains a directory for the loaded version.
    log: tuple[str, ...] | Unknown = NOT_ASKED  # The kernel log's last lines about NVRM, nvidia, nouveau or Xid.
    # Which of ``nv-fabricmanager``, ``nvidia-persistenced``, ``nvidia-cuda-mps-control``, ``nvidia-cuda-mps-server``
    # and ``nvidia-gridd`` are running.
    daemons: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()  # Processes that hang in NVIDIA's driver or with its device open: ``name (pid)``.
    fabric_manager: str = ""  # Version of the installed fabric manager; empty if there is none.
    mps_directory: str = ""  # ``CUDA_MPS_PIPE_DIRECTORY`` or ``/tmp/nvidia-mps``, if it exists.
    provider: str = ""  # On Windows: whose driver the card has: ``NVIDIA``, or ``Microsoft`` for the basic one.


class Node(Plain):
    """A file under /dev, and the result of opening it for reading and writing."""

    path: str
    exists: bool = True
    kind: str = "char"  # ``char``, ``file``, ``directory``, ``link``, or empty if it does not exist.
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    group: str = ""
    major: int = 0
    minor: int = 0
    error: str = ""  # Name of the errno of opening it: ``EACCES``, ``EPERM``, ``ENXIO`` …; empty if it could be opened.
    nodev: bool = False  # It is on a file system mounted with ``nodev``.


class Nodes(Plain):
    """The device nodes of NVIDIA, and of AMD's and Intel's compute drivers."""

    # /dev/nvidiactl, /dev/nvidia0 …, /dev/nvidia-uvm, /dev/nvidia-caps/*, /dev/dxg, /dev/nvhost-*, /dev/nvmap,
    # /dev/kfd, /dev/dri/render*, /dev/accel/*. The first three of NVIDIA are always listed, existing or not.
    found: tuple[Node, ...] = ()
    majors: dict[str, int] = field(default_factory=dict)  # From /proc/devices: ``nvidia-uvm``, ``kfd`` …
    cgroup: tuple[str, ...] = ()  # What the devices cgroup (version 1) allows; empty if it cannot be read.

    def at(self, path: str) -> Node:
        """The node at ``path``; a missing one if it was not examined."""
        return next((n for n in self.found if n.path == path), Node(path, exists=False, kind="", error="ENOENT"))


Kind = Literal["driver", "stub", "compat", "wsl", "other"]


class Library(Plain):
    """A shared library that the loader could use."""

    name: str  # The name under which programs request it: ``libcuda.so.1``.
    path: str
    target: str = ""  # The file after following all links: ``/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06``.
    # How the loader finds it: ``LD_PRELOAD``, ``LD_LIBRARY_PATH``, ``ld.so.cache``, ``default folder``; on Windows the
    # folder: ``System32``, ``PATH`` …; or ``disk`` for one that the loader does not find.
    via: str = ""
    version: str = ""
    kind: Kind = "driver"
    problem: str = ""  # Why it cannot be loaded: ``not an ELF file``, ``for another machine (aarch64)``, ``empty`` …


class DriverLibraries(Plain):
    """The driver's libraries. In each list a process gets the first one whose ``via`` is not ``disk``."""

    cuda: tuple[Library, ...] | Unknown = NOT_ASKED
    nvml: tuple[Library, ...] | Unknown = NOT_ASKED
    ptx_compiler: tuple[Library, ...] | Unknown = NOT_ASKED
    smi: str = ""  # Path of nvidia-smi. It is never run: it may hang, and reports less than the libraries.
    preload: tuple[str, ...] = ()  # What /etc/ld.so.preload lists.
    # Why the loader also searches the current directory: ``LD_LIBRARY_PATH has an empty element`` …
    cwd_searched: tuple[str, ...] = ()

    @property
    def libcuda(self) -> Library | None:
        """The libcuda.so.1 that the loader should find; see also ``Cuda.library``."""
        return next((lib for lib in self.cuda or () if lib.via != "disk"), None)


State = Literal["answered", "no-library", "not-loadable", "no-symbol", "hung", "crashed", "unasked"]


class ChildAnswer(Plain):
    """The outcome of asking something in a child process."""

    # ``no-library``: the loader did not find it. ``not-loadable``: it found something it could not load. ``no-symbol``:
    # the library lacks a function every release has. ``hung``: no answer within the deadline. ``crashed``: a signal, or
    # an exit without an answer.
    state: State = "unasked"
    detail: str = ""  # The message of the loader or the system; for ``hung`` and ``crashed`` also how far it got.
    seconds: float = 0.0

    @property
    def answered(self) -> bool:
        """Whether there is an answer; its codes may still be errors."""
        return self.state == "answered"


class NvmlGpu(Plain):
    """A card as NVML sees it. CUDA_VISIBLE_DEVICES does not apply here. -1 and empty: unknown."""

    index: int
    code: int = 0  # The result of getting its handle: 0, or 15 for a lost card, 4 for one without permission …
    name: str = ""
    uuid: str = ""
    capability: tuple[int, ...] = ()  # ``(9, 0)``
    address: str = ""
    memory: int = -1
    free: int = -1
    compute_mode: str = ""  # ``default``, ``exclusive-thread``, ``prohibited``, ``exclusive-process``.
    mig: str = ""  # ``enabled``, ``disabled``, or empty if the card does not support it.
    mig_devices: tuple[str, ...] = ()  # UUIDs of its MIG devices.
    fabric: str = ""  # ``not-supported``, ``not-started``, ``in-progress``, ``completed``, or empty if unknown.
    fabric_status: int = 0
    retired_pending: bool = False
    remap_pending: bool = False
    remap_failure: bool = False
    virtualization: str = ""  # ``none``, ``passthrough``, ``vgpu``, ``host-vgpu``, ``host-vsga``.
    licence: str = ""  # ``licensed``, ``unlicensed``, or empty if none is needed.
    processes: tuple[str, ...] = ()  # Other processes that compute on it: ``name (pid), 3.2 GB``.
    ecc: str = ""  # ``enabled``, ``disabled``, or empty if the card does not support it.
    nvlinks: int = -1  # How many of its NVLinks are up.
    peers: int = -1  # How many other cards of the machine it can read directly (P2P).
    driver_model: str = ""  # On Windows: ``WDDM``, ``TCC``, ``MCDM``, or empty if unknown. CUDA works with each.


class Nvml(Plain):
    """What libnvidia-ml reports."""

    answer: ChildAnswer = ChildAnswer()
    library: str = ""  # The file that was mapped.
    init: int = -1  # Result of ``nvmlInit_v2``.
    driver: str = ""
    cuda: int = 0  # ``13000`` for CUDA 13.0
    count: int = -1
    count_code: int = -1
    gpus: tuple[NvmlGpu, ...] = ()
    confidential: str = ""  # ``ready``, ``not-ready`` if confidential computing is enabled; else empty.


class CudaGpu(Plain):
    """A card as the CUDA driver shows it to this process."""

    ordinal: int
    name: str = ""
    capability: tuple[int, ...] = ()
    uuid: str = ""
    memory: int = -1
    compute_mode: int = -1  # Attribute 20: 0 default, 2 prohibited, 3 exclusive process.
    integrated: bool = False


class Cuda(Plain):
    """What libcuda reports: ``cuInit``, ``cuDriverGetVersion``, ``cuDeviceGetCount`` and the devices."""

    answer: ChildAnswer = ChildAnswer()
    library: str = ""  # The file that was mapped.
    init: int = -1
    version: int = 0  # ``13000`` for CUDA 13.0
    count: int = -1
    count_code: int = -1
    gpus: tuple[CudaGpu, ...] = ()

    @property
    def works(self) -> bool:
        """Whether the driver started and has a device for this process."""
        return self.answer.answered and self.init == 0 and self.count > 0


class Experiment(Plain):
    """The CUDA driver asked again in a changed environment, to try a fix before recommending it."""

    change: tuple[str, ...]  # Names of the variables that were removed, such as ``CUDA_VISIBLE_DEVICES``.
    cuda: Cuda


class Toolkit(Plain):
    """A CUDA toolkit on the disk. A torch wheel includes its own libraries and needs none."""

    nvcc: str = ""
    version: str = ""
    home: str = ""  # ``CUDA_HOME`` or ``CUDA_PATH``.
    folders: tuple[str, ...] = ()  # /usr/local/cuda*


class Python(Plain):
    """The examined interpreter, which need not be the one that runs transload."""

    executable: str = ""
    version: str = ""  # ``3.11.7``
    implementation: str = "cpython"
    bits: int = 64
    machine: str = ""  # On Windows: the processor it was built for: ``AMD64``, ``ARM64``, ``x86``. It may be emulated.
    free_threaded: bool = False
    prefix: str = ""
    base_prefix: str = ""
    path: tuple[str, ...] = ()  # ``sys.path``, without the script's entry.
    user_site: str = ""
    user_site_enabled: bool = False
    environment: str = ""  # ``venv``, ``conda``, ``pixi``, ``system``, ``pyenv``, ``store`` … the kind of environment.
    tool: str = "pip"  # What installs packages here: ``pip``, ``uv``, ``conda``, ``poetry``, ``pixi``, ``pdm``.
    project: bool = False  # Whether it belongs to a project with a lock file of that tool.
    pip: bool = True  # Whether pip is installed in it.
    externally_managed: bool = False
    why: str = ""  # Why this interpreter is examined, if that is not obvious.
    others: tuple[str, ...] = ()  # Other interpreters here with torch: ``/usr/bin/python3: torch 2.8.0+cu128``.
    problem: str = ""  # Why it did not respond; the rest is then empty.
    packages: dict[str, str] = field(default_factory=dict)  # Name → version of torch*, nvidia-*, triton …


class TorchInstall(Plain):
    """One torch on the path."""

    location: str  # The directory ``torch``.
    version: str = ""  # From torch/version.py: ``2.15.0+cu132``.
    cuda: str = ""  # ``13.2``; empty if it is built without CUDA, see ``known``.
    hip: str = ""
    xpu: str = ""
    known: bool = True  # Whether version.py could be read; if not, ``problem`` says why.
    problem: str = ""
    dist_info: str = ""
    dist_version: str = ""
    installer: str = ""  # ``pip``, ``uv``, ``conda`` …
    conda_build: str = ""  # ``cuda126_mkl_py311…``, ``cpu_generic_py312…``
    tags: tuple[str, ...] = ()  # From the WHEEL file: ``cp311-cp311-manylinux_2_28_x86_64``.
    missing: tuple[str, ...] = ()  # Files of RECORD that are absent or truncated: ``lib/libc10.so: absent`` …
    unlisted: tuple[str, ...] = ()  # Libraries in torch/lib that RECORD does not list.
    installed: float = 0.0  # Time stamp of the dist-info.
    replaced_by: tuple[str, ...] = ()  # Packages that need torch, installed within a minute of it: ``ultralytics 8.3``.
    # Complete libraries with a different size than RECORD says: stripped or patched, which is harmless, or from another
    # release: ``lib/libc10.so: 18 bytes instead of 20``.
    altered: tuple[str, ...] = ()
    origin: str = ""  # Where it was installed from, if not from an index: the URL, without credentials.

    @property
    def cpu_only(self) -> bool:
        """Whether it was certainly built without support for any accelerator."""
        return self.known and not (self.cuda or self.hip or self.xpu)


class Torch(Plain):
    """Every torch that the examined interpreter could import; it imports the first."""

    installs: tuple[TorchInstall, ...] | Unknown = NOT_ASKED
    shadow: str = ""  # What is imported as torch but is not PyTorch: ``/home/user/project/torch.py``.
    leftovers: tuple[str, ...] = ()  # Paths such as ``~orch-2.8.0.dist-info``, left by an interrupted pip.
    dangling: tuple[str, ...] = ()  # Paths of dist-infos of a torch whose files are missing or overwritten.
    shadow_kind: str = ""  # ``file``; ``package``, a directory; or ``source``, PyTorch's source tree, not built.
    shadow_via: str = ""  # Why it is found first: ``the current directory``, ``PYTHONPATH``, ``sys.path``.

    @property
    def first(self) -> TorchInstall | None:
        """The one that is imported, unless something shadows it."""
        return self.installs[0] if self.installs else None


class Resolved(Plain):
    """A library that torch needs, and what the loader finds for it."""

    name: str  # ``libcudnn.so.9``
    path: str = ""  # Empty if it is not found.
    # ``RUNPATH``, ``RPATH``, ``LD_LIBRARY_PATH``, ``LD_PRELOAD``, ``ld.so.cache``, ``default folder``, ``loaded``
    # (another library already loaded it under that name). On Windows: ``torch\lib``, ``System32``, ``Library\bin``,
    # ``PATH: C:\tools`` …; or ``delayed`` if it is not found, and needed only when it is first used.
    via: str = ""
    needed_by: str = ""  # ``libtorch_cuda.so``
    version: str = ""  # From the file's name or the package that owns it.
    expected: str = ""  # The path in site-packages that the wheel expects; empty if it expects none.
    package: str = ""  # The distribution that should contain it: ``nvidia-cudnn-cu13``.
    problem: str = ""  # Why the file at ``path`` cannot be loaded: ``empty``, ``not an ELF file`` …

    @property
    def shadowed(self) -> bool:
        """Whether another file is loaded instead of the wheel's own."""
        return bool(self.expected and self.path and self.path != self.expected)


class TorchLibraries(Plain):
    """What torch's own binaries contain and need."""

    architectures: tuple[str, ...] | Unknown = NOT_ASKED  # As ``torch.cuda.get_arch_list()`` returns them.
    cubins: dict[str, int] | Unknown = NOT_ASKED  # Architecture → kernels for it in libtorch_cuda: ``{"sm_90": 4711}``.
    # NVIDIA's libraries that it needs, directly or indirectly; and any other that is not found or cannot be loaded. On
    # Windows: what it needs beside its own libraries and those of Windows, and what is not found or cannot be loaded.
    needed: tuple[Resolved, ...] = ()
    # Versioned symbols that the library to be loaded does not define: ``__nvJitLinkAddData_12_1 of libnvJitLink.so.12,
    # needed by libcusparse.so.12``; and whole versions: ``GLIBCXX_3.4.32 of libstdc++.so.6, needed by
    # libtorch_cpu.so``.
    unresolved: tuple[str, ...] = ()
    overlaps: tuple[str, ...] = ()  # Files that two distributions own: ``nvidia/cudnn/lib/libcudnn.so.9: …, …``.
    # Parts of cuDNN that would be loaded from elsewhere, in another release, because the wheel lacks them or the loader
    # searches there first: ``libcudnn_ops.so.9: /usr/lib/x86_64-linux-gnu/libcudnn_ops.so.9, by LD_LIBRARY_PATH``.
    split_cudnn: tuple[str, ...] = ()
    # Libraries for which the loader also searches the current directory: ``libcusparseLt.so.0: RUNPATH has an empty
    # element``.
    cwd_searched: tuple[str, ...] = ()
    toolset: str = ""  # On Windows: the version of Visual C++ that linked torch's own libraries: ``14.42``.
    # On Windows: bytes that every process with torch takes of the commit limit for its libraries. -1: unknown.
    committed: int = -1


class ExtensionPackage(Plain):
    """A package with its own compiled code for the GPU."""

    package: str
    version: str = ""
    library: str = ""  # The examined file; the worst one if there are several.
    architectures: tuple[str, ...] = ()  # What its fatbins contain; empty if it has no code for a GPU.
    undefined: tuple[str, ...] = ()  # Symbols it needs from torch that torch does not define.
    missing: tuple[str, ...] = ()  # Libraries it needs that are not found.
    wants_torch: str = ""  # The torch its metadata pins: ``==2.8.0``.
    local: str = ""  # The local part of its version: ``cu128``, ``cpu``, ``pt28cu128`` …


class Variables(Plain):
    """Environment variables that affect CUDA or torch."""

    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)  # What sets it: ``/etc/environment:3``.
    cache_problem: str = ""  # Why CUDA cannot write its cache: ``/home/user/.nv/ComputeCache: EACCES``; or empty.


class Accelerator(Plain):
    """An accelerator other than an NVIDIA card."""

    kind: str  # ``rocm``, ``xpu``, ``mps``, ``npu`` …: the torch build it needs.
    name: str = ""
    detail: str = ""  # ``gfx1100``, ``Apple M2`` …
    usable: bool = False  # Whether its compute driver works: /dev/kfd with a GPU, and so on.
    integrated: bool = False  # It is part of the processor: common, and seldom what torch should run on.


class Step(Plain):
    """A step of the child process that runs torch."""

    name: str  # ``import``, ``available``, ``init``, ``kernel``, ``matmul``, ``convolution``
    ok: bool
    error: str = ""  # ``RuntimeError: CUDA error: no kernel image is available …``
    seconds: float = 0.0


class TorchRun(Plain):
    """What happened when torch was imported and used in a child process."""

    answer: ChildAnswer = ChildAnswer()
    version: str = ""
    file: str = ""  # ``torch.__file__``
    cuda: str = ""
    hip: str = ""
    available: bool | Unknown = NOT_ASKED  # ``torch.cuda.is_available()``
    count: int = -1  # ``torch.cuda.device_count()``
    architectures: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # ``NVIDIA H200 (9, 0)``
    cudnn: str = ""
    nccl: str = ""  # The release of NCCL that torch loaded: ``2.27.5``.
    warnings: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    libraries: tuple[str, ...] = ()  # CUDA libraries that were mapped into the process.
    backends: tuple[str, ...] = ()  # Other backends of torch that work here: ``mps``, ``xpu``.

    def step(self, name: str) -> Step | None:
        """The step of that name, if it was reached."""
        return next((step for step in self.steps if step.name == name), None)

    @property
    def cuda_works(self) -> bool:
        """Whether a kernel ran on a GPU."""
        step = self.step("kernel")
        return step is not None and step.ok


class Driver(Plain):
    """The driver's libraries, and what they report."""

    libraries: DriverLibraries = DriverLibraries()
    nvml: Nvml = Nvml()
    cuda: Cuda = Cuda()
    experiments: tuple[Experiment, ...] = ()


class Machine(Plain):
    """A host, layer by layer."""

    transload: str = ""
    taken: str = ""  # When it was examined, UTC: ``2026-11-15T04:57:54Z``.
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
    extensions: tuple[ExtensionPackage, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    torch_run: TorchRun = TorchRun()
    problems: dict[str, str] = field(default_factory=dict)  # Probe → what stopped it. Its facts keep their defaults.

    @property
    def capabilities(self) -> dict[str, tuple[int, ...]]:
        """Compute capability of each card, by name: from CUDA, else NVML; empty if neither works."""
        cards: tuple[CudaGpu | NvmlGpu, ...] = (*self.driver.cuda.gpus, *self.driver.nvml.gpus)
        return {gpu.name: gpu.capability for gpu in reversed(cards) if len(gpu.capability) == 2}
