"""Machines for tests: a healthy one, its variants on each kind of host, and helpers that change single facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transload.machine import (
    ChildAnswer,
    Cuda,
    CudaGpu,
    Driver,
    DriverLibraries,
    Hardware,
    Kernel,
    Library,
    Machine,
    Node,
    Nodes,
    Nvml,
    NvmlGpu,
    PciDevice,
    Platform,
    ProcGpu,
    Python,
    Resolved,
    Step,
    Surroundings,
    Torch,
    TorchInstall,
    TorchLibraries,
    TorchRun,
    Unknown,
)

VERSION = "580.159.04"
LIB = "/usr/lib/x86_64-linux-gnu"
SITE = "/opt/venv/lib/python3.11/site-packages"
UUID = "GPU-6e1b1a3c-0000-4000-8000-00000000000a"
ANSWERED = ChildAnswer("answered", seconds=0.1)
STEPS = ("import", "available", "init", "kernel", "matmul", "convolution")


def with_facts(machine: Machine, **facts: Any) -> Machine:
    """The machine with some facts changed; ``__`` in a name descends one level: ``driver__cuda__init=999``."""
    for path, value in facts.items():
        machine = _changed(machine, path.split("__"), value)
    return machine


def _changed(record: Any, path: list[str], value: Any) -> Any:
    head, *rest = path
    return replace(record, **{head: _changed(getattr(record, head), rest, value) if rest else value})


def healthy() -> Machine:
    """An Ubuntu server with one H200 and torch 2.13.0+cu130 in a venv, on which everything works."""
    return Machine(
        transload="0",
        platform=Platform(
            kernel="6.8.0-45-generic",
            distribution="ubuntu",
            distribution_like=("debian",),
            distribution_version="24.04",
            distribution_name="Ubuntu 24.04.1 LTS",
            libc="glibc 2.39",
            package_manager="apt",
            shell="bash",
            groups=("user",),
            laptop=False,
        ),
        hardware=Hardware(pci=(pci_gpu(0x2335),)),
        kernel=Kernel(
            loaded=True,
            version=VERSION,
            flavour="open",
            modules=("nvidia", "nvidia_modeset", "nvidia_uvm"),
            built_for=("6.8.0-45-generic",),
            secure_boot=False,
            uvm_disable_hmm="N",
            kaslr=True,
            gpus=(ProcGpu("0000:17:00.0", "NVIDIA H200", 0, VERSION),),
            firmware=True,
            log=Unknown("/dev/kmsg: operation not permitted"),
            daemons=("nvidia-persistenced",),
        ),
        nodes=Nodes(
            found=(
                Node("/dev/nvidiactl", major=195, minor=255),
                Node("/dev/nvidia0", major=195, minor=0),
                Node("/dev/nvidia-uvm", major=238, minor=0),
            ),
            majors={"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 238, "nvidia-caps": 241},
        ),
        driver=Driver(
            libraries=DriverLibraries(
                cuda=(library("libcuda.so.1"),),
                nvml=(library("libnvidia-ml.so.1"),),
                ptx_compiler=(library("libnvidia-ptxjitcompiler.so.1"),),
                smi="/usr/bin/nvidia-smi",
            ),
            nvml=Nvml(
                ANSWERED,
                f"{LIB}/libnvidia-ml.so.{VERSION}",
                0,
                VERSION,
                13000,
                count=1,
                count_code=0,
                gpus=(nvml_gpu(),),
            ),
            cuda=Cuda(ANSWERED, f"{LIB}/libcuda.so.{VERSION}", 0, 13000, count=1, count_code=0, gpus=(cuda_gpu(),)),
        ),
        python=Python(
            executable="/opt/venv/bin/python",
            version="3.11.7",
            prefix="/opt/venv",
            base_prefix="/usr",
            path=("/usr/lib/python311.zip", "/usr/lib/python3.11", "/usr/lib/python3.11/lib-dynload", SITE),
            user_site="/home/user/.local/lib/python3.11/site-packages",
            environment="venv",
            packages={"torch": "2.13.0", "nvidia-cudnn-cu13": "9.20.0.48"},
        ),
        torch=Torch(installs=(install(),)),
        torch_libraries=TorchLibraries(
            architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
            cubins=dict.fromkeys(("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"), 1000),
            needed=(
                resolved_library("libcudart.so.13", "nvidia/cu13/lib"),
                resolved_library("libcudnn.so.9", "nvidia/cudnn/lib"),
            ),
        ),
        torch_run=TorchRun(
            ANSWERED,
            "2.13.0+cu130",
            f"{SITE}/torch/__init__.py",
            "13.0",
            available=True,
            count=1,
            architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
            devices=("NVIDIA H200 (9, 0)",),
            steps=tuple(Step(name, ok=True) for name in STEPS),
        ),
    )


def no_torch_run(machine: Machine) -> Machine:
    """The machine as reported with ``--no-torch``: torch was not run."""
    return replace(machine, torch_run=TorchRun())


def cuda_fails(machine: Machine, *, available: bool = False, warning: str = "", error: str = "") -> Machine:
    """The machine with a torch that can be imported but cannot initialize CUDA."""
    text = error or "RuntimeError: No CUDA GPUs are available"
    steps = (Step("import", ok=True), Step("available", ok=True), Step("init", ok=False, error=text))
    run = replace(
        machine.torch_run, available=available, warnings=(warning,) if warning else (), steps=steps, devices=()
    )
    return replace(machine, torch_run=run)


def cuinit_fails(machine: Machine, code: int) -> Machine:
    """The machine whose ``cuInit`` returns ``code``, and whose torch fails accordingly."""
    cuda = replace(machine.driver.cuda, init=code, count=-1, count_code=3, gpus=())
    return cuda_fails(replace(machine, driver=replace(machine.driver, cuda=cuda)))


def without_gpu() -> Machine:
    """A laptop without an NVIDIA GPU, with a working CPU build of torch."""
    machine = healthy()
    steps = (Step("import", ok=True), Step("available", ok=True), Step("cpu", ok=True))
    return replace(
        machine,
        hardware=Hardware(pci=(PciDevice("0000:00:02.0", 0x8086, 0x9A49, 0x030000, "i915", "D0"),)),
        kernel=Kernel(loaded=False, built_for=(), secure_boot=False),
        nodes=Nodes(found=tuple(Node(f"/dev/{n}", exists=False, kind="", error="ENOENT") for n in _NODES)),
        driver=Driver(
            DriverLibraries(cuda=(), nvml=(), ptx_compiler=()),
            Nvml(
                ChildAnswer(
                    "no-library", "libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
                )
            ),
            Cuda(ChildAnswer("no-library", "libcuda.so.1: cannot open shared object file: No such file or directory")),
        ),
        torch=Torch(installs=(replace(install(), version="2.13.0+cpu", cuda=""),)),
        torch_libraries=TorchLibraries(architectures=(), cubins={}),
        torch_run=TorchRun(ANSWERED, "2.13.0+cpu", f"{SITE}/torch/__init__.py", available=False, count=0, steps=steps),
    )


def in_container(machine: Machine, kind: str = "docker") -> Machine:
    """The machine seen from inside a container that has access to the GPU."""
    inside = Surroundings(container=kind, evidence=("/.dockerenv exists",))
    return replace(
        machine,
        surroundings=inside,
        platform=replace(machine.platform, root=True, shell="bash"),
        kernel=replace(machine.kernel, built_for=Unknown("/lib/modules does not exist")),
    )


def in_slurm(machine: Machine) -> Machine:
    """The machine seen from inside a Slurm job to which the GPU is allocated."""
    values = {"SLURM_JOB_ID": "4711", "SLURM_JOB_GPUS": "0", "SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    return with_facts(machine, surroundings=Surroundings(slurm=True), variables__values=values)


def in_wsl(machine: Machine) -> Machine:
    """A Windows machine with the GPU of ``machine``, seen from WSL 2."""
    lib = "/usr/lib/wsl/lib"
    libcuda = Library("libcuda.so.1", f"{lib}/libcuda.so.1", f"{lib}/libcuda.so.1", "ld.so.cache", "", "wsl")
    nvml = replace(
        libcuda, name="libnvidia-ml.so.1", path=f"{lib}/libnvidia-ml.so.1", target=f"{lib}/libnvidia-ml.so.1"
    )
    libraries = replace(machine.driver.libraries, cuda=(libcuda,), nvml=(nvml,), smi=f"{lib}/nvidia-smi")
    return replace(
        machine,
        surroundings=Surroundings(wsl=2),
        platform=replace(machine.platform, kernel="5.15.167.4-microsoft-standard-WSL2"),
        hardware=Hardware(pci=(), dxg=True),
        kernel=Kernel(loaded=False, built_for=()),
        nodes=Nodes(
            found=(*(Node(f"/dev/{n}", exists=False, kind="", error="ENOENT") for n in _NODES), Node("/dev/dxg"))
        ),
        driver=replace(
            machine.driver,
            libraries=libraries,
            nvml=replace(machine.driver.nvml, library=nvml.path),
            cuda=replace(machine.driver.cuda, library=libcuda.path),
        ),
    )


WINDOWS_SITE = "C:\\Users\\user\\venv\\Lib\\site-packages"


def in_windows(machine: Machine, driver: str = "581.80", model: str = "WDDM") -> Machine:
    """A PC with Windows 11 and the GPU and the torch of ``machine``."""
    system, prefix = "C:\\Windows\\System32", WINDOWS_SITE.removesuffix("\\Lib\\site-packages")
    cuda, nvml = (
        tuple(Library(name, f"{system}\\{name}", f"{system}\\{name}", "System32", driver) for _ in libraries or ())
        for name, libraries in (
            ("nvcuda.dll", machine.driver.libraries.cuda),
            ("nvml.dll", machine.driver.libraries.nvml),
        )
    )
    cards = tuple(
        replace(card, driver="nvlddmkm", power="", bars=(), name="NVIDIA H200") if card.vendor == 0x10DE else card
        for card in machine.hardware.pci or ()
    )
    gpus = tuple(replace(gpu, driver_model=model) for gpu in machine.driver.nvml.gpus)
    run = machine.torch_run
    return replace(
        machine,
        platform=Platform("Windows", "AMD64", "11", distribution_name="Windows 11 24H2", long_paths=False),
        surroundings=Surroundings(),
        hardware=Hardware(pci=cards),
        kernel=Kernel(loaded=machine.kernel.loaded, version=driver if cuda else "", provider="NVIDIA" if cuda else ""),
        nodes=Nodes(),
        driver=replace(
            machine.driver,
            libraries=DriverLibraries(cuda=cuda, nvml=nvml, ptx_compiler=(), smi=f"{system}\\nvidia-smi.exe"),
            nvml=replace(machine.driver.nvml, library=f"{system}\\nvml.dll", driver=driver if gpus else "", gpus=gpus),
            cuda=replace(machine.driver.cuda, library=f"{system}\\nvcuda.dll" if cuda else ""),
        ),
        python=replace(
            machine.python,
            executable=f"{prefix}\\Scripts\\python.exe",
            machine="AMD64",
            prefix=prefix,
            base_prefix="C:\\Python313",
            path=("C:\\Python313\\Lib", WINDOWS_SITE),
            user_site="C:\\Users\\user\\AppData\\Roaming\\Python\\Python313\\site-packages",
        ),
        torch=replace(
            machine.torch,
            installs=tuple(
                replace(at, location=f"{WINDOWS_SITE}\\torch", dist_info="", tags=("cp313-cp313-win_amd64",))
                for at in machine.torch.installs or ()
            ),
        ),
        torch_libraries=replace(machine.torch_libraries, needed=()),
        torch_run=replace(run, file=f"{WINDOWS_SITE}\\torch\\__init__.py" if run.file else ""),
    )


_NODES = ("nvidiactl", "nvidia0", "nvidia-uvm")


def pci_gpu(device: int, driver: str = "nvidia", address: str = "0000:17:00.0") -> PciDevice:
    return PciDevice(address, 0x10DE, device, 0x030200, driver, "D0", bars=(1 << 24, 1 << 37, 1 << 25))


def library(name: str, version: str = VERSION, via: str = "ld.so.cache", folder: str = LIB) -> Library:
    target = f"{folder}/{name.removesuffix('.1')}.{version}"
    return Library(name, f"{folder}/{name}", target, via, version)


def nvml_gpu(index: int = 0, name: str = "NVIDIA H200", capability: tuple[int, ...] = (9, 0)) -> NvmlGpu:
    return NvmlGpu(
        index,
        name=name,
        uuid=UUID[:-1] + str(index),
        capability=capability,
        address="0000:17:00.0",
        memory=150_754_820_096,
        free=150_000_000_000,
        compute_mode="default",
        mig="disabled",
        virtualization="none",
    )


def cuda_gpu(ordinal: int = 0, name: str = "NVIDIA H200", capability: tuple[int, ...] = (9, 0)) -> CudaGpu:
    return CudaGpu(ordinal, name, capability, UUID[:-1] + str(ordinal), 150_110_011_392, 0)


def install(version: str = "2.13.0+cu130", cuda: str = "13.0") -> TorchInstall:
    return TorchInstall(
        f"{SITE}/torch",
        version,
        cuda,
        dist_info=f"{SITE}/torch-{version.partition('+')[0]}.dist-info",
        dist_version=version.partition("+")[0],
        installer="pip",
        tags=("cp311-cp311-manylinux_2_28_x86_64",),
    )


def resolved_library(name: str, folder: str) -> Resolved:
    path = f"{SITE}/{folder}/{name}"
    return Resolved(name, path, "RUNPATH", "libtorch_cuda.so", expected=path)
