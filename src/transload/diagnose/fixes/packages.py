"""Python packages, with the tool of the environment that was examined; and which torch to install at all."""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING

from transload.diagnose.fixes.driver import install_driver
from transload.diagnose.tables.builds import releases

if TYPE_CHECKING:
    from transload.diagnose.tables.builds import Platform as WheelPlatform
    from transload.diagnose.tables.wheels import WheelChoice
    from transload.machine import Machine

__all__ = ["bring", "install", "uninstall", "wheel", "wheel_choice", "wheel_platform"]

Lines = tuple[str, ...]

_TRIO = ("torchvision", "torchaudio")
_CONDAS = ("conda", "pixi")
_ON_CONDA = {
    **{name: name for name in ("numpy", "torchvision", "torchaudio", "triton", "xformers")},
    "torch": "pytorch",
    **{f"nvidia-cudnn-cu{major}": "cudnn" for major in (11, 12, 13)},
    **{f"nvidia-nccl-cu{major}": "nccl" for major in (11, 12, 13)},
}
"""The name at conda-forge of what the rules install or remove."""
_HOLDS = {
    "libcudnn": "cudnn",
    "libnccl": "nccl",
    "libcudart": "cuda-cudart",
    "libcupti": "cuda-cupti",
    "libnvrtc": "cuda-nvrtc",
    "libnvJitLink": "libnvjitlink",
    **{f"lib{name}": f"lib{name}" for name in ("cublas", "cufft", "curand", "cusolver", "cusparse")},
}
"""The start of a library's name, and conda-forge's package that holds it."""


def wheel_choice(machine: Machine, torch: str | None = None) -> WheelChoice:
    """The torch build that fits the driver, the cards, the Python and the platform of this machine."""
    from transload.diagnose.tables.chips import chip_of
    from transload.diagnose.tables.wheels import choose_wheel

    told = set(machine.capabilities.values())
    capabilities = told
    if not told:
        chips = (chip_of(gpu.device) for gpu in machine.hardware.gpus)
        capabilities = {chip.capability for chip in chips if chip is not None and chip.capability is not None}
    driver = machine.driver.nvml.driver or machine.kernel.version
    return choose_wheel(
        driver=driver or None,
        driver_cuda=max(machine.driver.cuda.version, 0) or max(machine.driver.nvml.cuda, 0) or None,
        capabilities=sorted(capabilities),
        platform=wheel_platform(machine),
        python=_python_version(machine),
        torch=torch,
        driver_sees_cards=bool(told),
    )


def _preferred(machine: Machine) -> WheelChoice:
    """The installed release, for which other packages are made, in a build that fits; else the newest."""
    newest = wheel_choice(machine)
    first = machine.torch.first
    release = first.version.partition("+")[0] if first else ""
    same = wheel_choice(machine, release) if release in releases() else newest
    return same if same.torch_version and (not same.needs_driver or newest.needs_driver) else newest


def wheel(machine: Machine, torch: str | None = None, *, driver: bool = True) -> Lines:
    """Install the torch that fits both the driver and the card, with the tool of this environment.

    It is of the release ``torch``; else of the one that is installed, where that has a build that fits. Without
    ``driver`` another finding says how to install the driver that it may need.
    """
    choice = wheel_choice(machine, torch) if torch else _preferred(machine)
    if not choice.torch_version:
        return (choice.reason,)
    beside = [name for name in _TRIO if name in machine.python.packages]
    lines = (*_reinstall(machine, choice, beside), *_why(machine, choice))
    if not choice.needs_driver:
        return (*lines, *_newer(machine, choice))
    if not driver:
        return ("Once the driver is changed:", *lines)
    branch = int(choice.needs_driver.partition(".")[0])
    older = choice.direction == "older"
    update = install_driver(machine, at_least=0 if older else branch, exactly=branch if older else 0)
    return ("First the driver:", *update, "Then torch:", *lines)


def reinstall(machine: Machine, *, gpu: bool) -> Lines:
    """Install torch once more, with all that it needs: the same release, in the build that fits this machine."""
    from transload.diagnose.tables import default_build
    from transload.diagnose.tables.wheels import INDEX

    first = machine.torch.first
    release, _, build = (first.version if first else "").partition("+")
    if release not in releases():
        return wheel(machine) if gpu else install(machine, "torch", force=True)
    if gpu:
        return wheel(machine, release if wheel_choice(machine, release).torch_version else None)
    default = default_build(release, wheel_platform(machine))
    index = "" if (default and default.build == build) or not build else f"{INDEX}/{build}"
    return install(machine, f"torch=={release}", index=index, force=True)


def _why(machine: Machine, choice: WheelChoice) -> Lines:
    likely = ", which is likely to fit and not certain" if choice.how_sure == "guess" else ""
    if _tool(machine) not in _CONDAS:
        return (f"Why this build{likely}: {choice.reason}",)
    if _conda_again(machine, choice):
        return ()
    return (f"Why CUDA {_cuda(choice)}, judged by PyTorch's wheels{likely}: {choice.reason}",)


def _newer(machine: Machine, choice: WheelChoice) -> Lines:
    first, newest = machine.torch.first, wheel_choice(machine)
    same = first is not None and first.version.partition("+")[0] == choice.torch_version != newest.torch_version
    if not same or newest.needs_driver or _tool(machine) in _CONDAS:
        return ()
    return (f"It is the release you have; the newest that fits this machine is {newest.torch_version} {newest.build}.",)


def _reinstall(machine: Machine, choice: WheelChoice, beside: list[str]) -> Lines:
    tool = _tool(machine)
    if tool in _CONDAS:
        return _conda_torch(machine, choice, beside)
    wanted = (f"torch=={choice.torch_version}", *beside)
    if tool == "poetry" and choice.index:
        source = f"pytorch-{choice.build}"
        return (
            f"$ poetry source add --priority=explicit {source} {choice.index}",
            f"$ poetry add --source {source} {' '.join(wanted)}",
        )
    if _project(machine) == "uv":
        source = f" --index pytorch-{choice.build}={choice.index}" if choice.index else ""
        return (f"$ uv add{source} {' '.join(wanted)}",)
    others = () if _project(machine) else _of_other_cuda(machine, choice)  # a project's tool removes them itself
    remove = uninstall(machine, "torch", *beside, *others)
    return (*remove, *(line for line in install(machine, *wanted, index=choice.index) if line not in remove))


def _of_other_cuda(machine: Machine, choice: WheelChoice) -> Lines:
    """NVIDIA's packages for another CUDA than the chosen build's: they put other files into the same folders."""
    major = _cuda(choice).partition(".")[0]
    found = ((name, re.fullmatch(r"nvidia-.+-cu(\d+)", name)) for name in machine.python.packages)
    return tuple(sorted(name for name, of in found if of and of[1] != major))


def _cuda(choice: WheelChoice) -> str:
    """``12.6`` of ``cu126``."""
    return f"{choice.build[2:-1]}.{choice.build[-1]}"


def _conda_again(machine: Machine, choice: WheelChoice) -> bool:
    """Whether conda's torch is the right one, and only has to be put in its place once more."""
    first = machine.torch.first
    release = first.version.partition("+")[0] if first else ""
    major = first.cuda.partition(".")[0] if first else ""
    return release == choice.torch_version and major == _cuda(choice).partition(".")[0]


def _conda_torch(machine: Machine, choice: WheelChoice, beside: list[str]) -> Lines:
    if _conda_again(machine, choice):  # conda keeps what already meets the request, and so what is broken
        return _conda(machine, f'"pytorch={choice.torch_version}"', *beside, force=True)
    return _conda(machine, "pytorch-gpu", f'"cuda-version={_cuda(choice)}"', *beside)


def _conda(machine: Machine, *names: str, force: bool = False) -> Lines:
    """Install packages of conda-forge."""
    wanted = " ".join(names)
    if machine.python.tool == "pixi":
        anew = ("$ pixi clean", "$ pixi install") if force else ()
        return (f"$ pixi add {wanted}", *anew)
    again = " --force-reinstall" if force else ""
    return (f"$ conda install{_prefix(machine)} -c conda-forge{again} {wanted}",)


def _prefix(machine: Machine) -> str:
    return f" -p {quote(machine.python.prefix)}" if machine.python.prefix else ""


def _conda_names(requirements: tuple[str, ...]) -> Lines:
    """What conda-forge calls some packages of PyPI; nothing where one of them may not be there.

    >>> _conda_names(("--no-deps", "torch==2.5.1", "nvidia-cudnn-cu12==9.1.0.70")), _conda_names(("mmcv",))
    (('pytorch=2.5.1', 'cudnn'), ())
    """
    plain = [each for each in requirements if each not in ("--no-deps", "--upgrade")]
    parts = [each.partition("==") for each in plain]
    if not all(name in _ON_CONDA for name, _, _ in parts):
        return ()
    # NVIDIA's own version numbers are cut differently there
    pinned = ("torch", *_TRIO)
    return tuple(_ON_CONDA[name] + (f"={ver}" if ver and name in pinned else "") for name, _, ver in parts)


def install(machine: Machine, *requirements: str, index: str = "", force: bool = False) -> Lines:
    """Install Python packages into the environment that was examined.

    >>> from transload.machine import Machine, Python
    >>> install(Machine(python=Python("/opt/venv/bin/python")), "torch", force=True)
    ('$ /opt/venv/bin/python -m pip install --force-reinstall torch',)
    """
    tool, project = _tool(machine), _project(machine)
    if tool in _CONDAS and not re.search(r"rocm|xpu|simple", index) and (names := _conda_names(requirements)):
        return _conda(machine, *names, force=force)
    wanted = " ".join(map(quote, requirements))
    source = f" --index-url {index}" if index else ""
    python = quote(machine.python.executable or "python")
    if project and not index and not force:
        return (f"$ {project} add {wanted}",)
    if tool == "uv":
        again = " --reinstall" if force else ""
        return (f"$ uv pip install --python {python}{again} {wanted}{source}", *_record(project, index))
    again = " --force-reinstall" if force else ""
    line = f"$ {python} -m pip install{again} {wanted}{source}"
    if machine.python.externally_managed:
        return (
            "This Python belongs to the system, which refuses pip. Make an environment and use that:",
            f"$ {python} -m venv .venv",
            line.replace(f"$ {python} ", "$ .venv/bin/python ", 1),
        )
    return (*_ensure_pip(machine), line, *_record(project, index))


def _record(project: str, index: str) -> Lines:
    """What to do so that a project's tool does not undo an installation from another index."""
    if not project or not index:
        return ()
    return (f"Name that version and index in pyproject.toml as well, or {project} undoes it at the next sync.",)


def bring(machine: Machine, *libraries: str) -> Lines:
    """Install the packages of conda-forge that hold some libraries again; nothing where it is not conda that does.

    >>> from transload.machine import Machine, Python
    >>> bring(Machine(python=Python(tool="conda")), "libcudnn.so.9", "libcublasLt.so.12")
    ('$ conda install -c conda-forge --force-reinstall cudnn libcublas',)
    """
    names = sorted({package for name in libraries for start, package in _HOLDS.items() if name.startswith(start)})
    return _conda(machine, *names, force=True) if names and _tool(machine) in _CONDAS else ()


def uninstall(machine: Machine, *packages: str) -> Lines:
    """Remove Python packages from the environment that was examined."""
    python = quote(machine.python.executable or "python")
    tool, project = _tool(machine), _project(machine)
    if machine.python.externally_managed:
        return ()
    if tool in _CONDAS and (names := _conda_names(packages)):
        listed = " ".join(names)
        return (f"$ pixi remove {listed}" if tool == "pixi" else f"$ conda remove --force{_prefix(machine)} {listed}",)
    listed = " ".join(packages)
    if project and project != "uv":
        return (f"$ {project} remove {listed}",)
    if tool == "uv":
        return (f"$ uv pip uninstall --python {python} {listed}",)
    return (*_ensure_pip(machine), f"$ {python} -m pip uninstall -y {listed}")


def _ensure_pip(machine: Machine) -> Lines:
    python = quote(machine.python.executable or "python")
    return () if machine.python.pip else (f"$ {python} -m ensurepip",)


def _project(machine: Machine) -> str:
    """The tool that keeps a list of this project's packages, and undoes what is installed past it; empty for none."""
    tool = _tool(machine)
    return tool if tool in ("poetry", "pdm") or (tool == "uv" and machine.python.project) else ""


def _tool(machine: Machine) -> str:
    """What to install torch with: what installed it, where that differs from the environment's own tool."""
    first = machine.torch.first
    if machine.python.tool in _CONDAS and first and first.installer in ("pip", "uv"):
        return first.installer
    return machine.python.tool


def wheel_platform(machine: Machine) -> WheelPlatform:
    """Whose wheels this machine takes."""
    system, arm = machine.platform.system, machine.platform.machine in ("aarch64", "arm64")
    if system == "Darwin":
        return "macos-arm64" if arm else "macos-x86_64"
    return "windows" if system == "Windows" else "linux-aarch64" if arm else "linux-x86_64"


def _python_version(machine: Machine) -> tuple[int, int]:
    found = re.match(r"([0-9]{1,3})\.([0-9]{1,3})", machine.python.version)
    return (int(found[1]), int(found[2])) if found else (3, 12)
