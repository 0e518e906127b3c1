"""Other vendors' accelerators, other systems, and the words of other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.rules.row import Seen, Table
from transload.diagnose.rules.torch_facts import cards, complaint, failed, has_nvidia, said
from transload.diagnose.tables import index_builds, releases
from transload.machine import AMD

if TYPE_CHECKING:
    from transload.findings import Severity
    from transload.machine import Accelerator, Machine, TorchInstall

__all__ = ["TABLE"]

TABLE = Table("build")

Lines = tuple[str, ...]

# What the ROCm wheels have code for among AMD's own cards.
_ROCM_CARDS = frozenset(
    (
        *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950"),
        *("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"),
    )
)


@TABLE.row(
    "T06",
    "this torch is built for another vendor's GPU",
    about="""A torch for ROCm (AMD) or XPU (Intel) cannot use an NVIDIA card. torch.cuda.is_available() is False;
the ROCm build may say "No HIP GPUs are available". It is told by hip or xpu in torch/version.py.""",
    fix="Uninstall torch and install a build with CUDA.",
    sources=("https://github.com/ROCm/legacy-rocm-build/issues/2354",),
)
def other_vendor(machine: Machine) -> Seen | None:
    """A ROCm or XPU build where the only card is NVIDIA's."""
    first = machine.torch.first
    if first is None or machine.torch.shadow or first.cuda or not (first.hip or first.xpu) or not has_nvidia(machine):
        return None
    rivals = any(card.display and card.vendor == AMD for card in machine.hardware.pci or ()) or machine.accelerators
    if rivals or machine.torch_run.available or machine.torch_run.backends:
        return None
    kind = f"ROCm {first.hip}" if first.hip else "Intel's XPU"
    gpus = tuple(map(str, cards(machine)[:4])) or ("the GPU is NVIDIA's",)
    return Seen((f"{first.location}/version.py says {first.version}: built for {kind}", *gpus), fixes.wheel(machine))


@TABLE.row(
    "T07",
    "this torch is not built for the GPU of this machine",
    about="""The GPU is AMD's or Intel's, and torch was built for CUDA or for no GPU. AMD's cards need a ROCm build,
which calls them "cuda" as well; Intel's need an XPU build and are the device "xpu".

A graphics part of the processor beside a CUDA build is no fault, and is at most mentioned.""",
    fix="Install torch from https://download.pytorch.org/whl/rocm6.4 or newer for AMD, from …/whl/xpu for Intel.",
    sources=("https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/16861",),
)
def other_gpu(machine: Machine) -> Seen | None:
    """Error for an AMD card that ROCm wheels support; a note for what torch might use otherwise."""
    first = machine.torch.first
    if first is None or not first.known or first.hip or has_nvidia(machine) or machine.torch.shadow:
        return None
    usable = [other for other in machine.accelerators if other.usable]
    amd = next((other for other in usable if other.kind == "rocm"), None)
    intel = next((other for other in usable if other.kind == "xpu"), None)
    if amd:
        sure = amd.detail in _ROCM_CARDS and not amd.integrated and machine.platform.system == "Linux"
        return Seen(_other(first, amd), _index_of(machine, "rocm"), severity="error" if sure else "note")
    if intel and not first.xpu and "xpu" not in machine.torch_run.backends:
        return Seen(_other(first, intel), _index_of(machine, "xpu"), severity="note")
    return None


def _other(first: TorchInstall, gpu: Accelerator) -> Lines:
    return (f"torch is {first.version}", f"the GPU is {' '.join(filter(None, (gpu.name, gpu.detail)))}, for {gpu.kind}")


def _index_of(machine: Machine, kind: str) -> Lines:
    from transload.diagnose.tables.wheels import INDEX

    builds = [build.build for each in releases() for build in index_builds(each) if build.build.startswith(kind)]
    remove = fixes.uninstall(machine, "torch")
    return (*remove, *fixes.install(machine, "torch", index=f"{INDEX}/{builds[-1]}")) if builds else remove


@TABLE.row(
    "T08",
    "macOS has no CUDA",
    about="""There is no CUDA for macOS, and torch.cuda.is_available() is always False there. On a Mac with Apple
silicon the GPU is the device "mps". For Macs with an Intel processor the last release is torch 2.2.2, which uses
the CPU.""",
    fix='Use the device "mps" where torch.backends.mps.is_available(), else "cpu".',
)
def macos(machine: Machine) -> Seen | None:
    """A note on every Mac."""
    first = machine.torch.first
    if machine.platform.system != "Darwin" or first is None:
        return None
    if machine.platform.machine == "arm64":
        return Seen(("this is a Mac with Apple silicon",), ('Use the device "mps".',), severity="note")
    return Seen(("this is a Mac with an Intel processor",), ("torch uses the CPU here.",), severity="note")


@TABLE.row(
    "R01",
    "AMD's compute device cannot be opened",
    layer="nodes",
    about="""ROCm works through /dev/kfd and /dev/dri/renderD*. Where these are not there or not readable torch says
"No HIP GPUs are available", or "HIP initialization: Unexpected error from hipGetDeviceCount() … Error 101:
hipErrorInvalidDevice", while rocm-smi may still list the cards.""",
    fix="""sudo usermod -aG render,video $USER, then log in again. In a container: docker run --device=/dev/kfd
--device=/dev/dri --group-add <the host's group id of render> …""",
    sources=(
        "https://github.com/ROCm/legacy-rocm-build/issues/1770",
        "https://github.com/ROCm/legacy-rocm-build/issues/2838",
    ),
)
def kfd(machine: Machine) -> Seen | None:
    """A ROCm build, a card of AMD's, and a node that does not open."""
    first = machine.torch.first
    amd = any(card.vendor == AMD for card in machine.hardware.pci or ())
    if first is None or not first.hip or not amd or machine.torch_run.available:
        return None
    node = machine.nodes.at("/dev/kfd")
    usable = any(other.kind == "rocm" and other.usable for other in machine.accelerators)
    if not node.error or not machine.nodes.found or (usable and node.error == "ENOENT"):
        return None
    evidence = (f"/dev/kfd: {node.error}", *said(complaint(machine, "HIP")))
    if machine.surroundings.container:
        fix = ("Start the container with the devices:", "$ docker run --device=/dev/kfd --device=/dev/dri …")
        return Seen(evidence, (*fix, "And with --group-add, the number of the host's group render."))
    if node.error == "ENOENT":
        return Seen(evidence, ("The kernel driver has no compute device: update the kernel, or install amdgpu-dkms.",))
    group = fixes.sudo(machine, "usermod -aG render,video $USER")
    return Seen(evidence, (group, "Then log in again."))


@TABLE.row(
    "R02",
    "this torch has no code for the AMD card",
    layer="fit",
    about="""A ROCm build of torch has code for certain chips (gfx1100, gfx90a …). On another it fails with "HIP
error: invalid device function" or crashes. It is told by the chip's name and torch's own list.""",
    fix="""Set HSA_OVERRIDE_GFX_VERSION to a near relative that is in the list (10.3.0 for gfx103x, 11.0.0 for
gfx110x), or install a build that has the chip.""",
    sources=("https://github.com/lllyasviel/Fooocus/issues/1079",),
)
def other_gfx(machine: Machine) -> Seen | None:
    """The chip is not in the list, nothing overrides its name, and torch was not seen to compute."""
    codes = machine.torch_libraries.architectures or machine.torch_run.architectures
    known = {code.partition(":")[0] for code in codes if code.startswith("gfx")}
    found = [other for other in machine.accelerators if other.kind == "rocm" and other.detail.startswith("gfx")]
    chips = [other.detail for other in found if other.usable]
    override = machine.variables.get("HSA_OVERRIDE_GFX_VERSION")
    if not known or not chips or override or set(chips) & known or machine.torch_run.cuda_works:
        return None
    fix = _relative(machine, chips[0])
    return Seen((f"the card is {chips[0]}", f"torch has code for {' '.join(sorted(known))}"), fix)


def _relative(machine: Machine, chip: str) -> Lines:
    near = "10.3.0" if chip.startswith("gfx103") else "11.0.0" if chip.startswith("gfx110") else ""
    if not near:
        return ("Install a build of torch that has this chip, or use the CPU.",)
    return ("Let it pass for its nearest relative:", *fixes.set_variable(machine, "HSA_OVERRIDE_GFX_VERSION", near))


@TABLE.row(
    "W01",
    "Windows has no NVIDIA driver",
    layer="kernel",
    likely=True,
    about="""torch finds no nvcuda.dll, which NVIDIA's driver puts into System32: none is installed, or Windows
drives the card with its own Basic Display Adapter. torch says "Found no NVIDIA driver on your system".""",
    fix="Install the driver: https://www.nvidia.com/drivers",
)
def windows_driver(machine: Machine) -> Seen | None:
    """On Windows the driver's library is not found; without knowing of a card only a note."""
    first = machine.torch.first
    absent = machine.driver.cuda.answer.state == "no-library"
    if machine.platform.system != "Windows" or not absent or first is None or not first.cuda:
        return None
    severity: Severity = "error" if has_nvidia(machine) else "note"
    step = failed(machine, "init")
    evidence = ("nvcuda.dll is not there", *said(step.error if step else ""))
    return Seen(evidence, fixes.install_driver(machine), severity=severity)


@TABLE.row(
    "W02",
    "torch with CUDA needs a 64-bit Python for x64",
    layer="python",
    likely=True,
    about="""On Windows torch's CUDA builds are for 64-bit Pythons on x64 processors. A Python for ARM gets CPU
builds only, and there is no CUDA driver for Windows on ARM.""",
    fix="Install the x64 Python from python.org, on an x64 machine.",
)
def windows_arm(machine: Machine) -> Seen | None:
    """Windows on ARM, and no torch in this Python."""
    arm = machine.platform.machine.lower() in ("arm64", "aarch64")
    if machine.platform.system != "Windows" or not arm or machine.torch.installs != ():
        return None
    return Seen((f"the processor is {machine.platform.machine}",), ("Use an x64 Python, or torch on the CPU.",))


TABLE.page(
    "N03",
    "a program says that torch cannot use the GPU",
    layer="run",
    about="""Programs hide the reason behind a sentence of their own: stable-diffusion-webui "Torch is not able to
use GPU; add --skip-torch-cuda-test to COMMANDLINE_ARGS", ultralytics "Invalid CUDA 'device=0' requested", vLLM
"Failed to infer device type", ComfyUI "Torch not compiled with CUDA enabled". Each means that
torch.cuda.is_available() was False.""",
    fix="Run transload doctor with the Python of that program: transload doctor --python /path/to/its/python",
    avoid="Adding --skip-torch-cuda-test: it hides the question, and the program runs on the CPU or fails later.",
    sources=(
        "https://github.com/AUTOMATIC1111/stable-diffusion-webui/issues/783",
        "https://github.com/vllm-project/vllm/issues/12847",
    ),
)
