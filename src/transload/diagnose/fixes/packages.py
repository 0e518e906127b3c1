"""Python packages, with the tool of the environment that was examined; and which torch to install at all."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from transload.diagnose.fixes.system import install_driver

if TYPE_CHECKING:
    from transload.diagnose.tables.builds import Platform as WheelPlatform
    from transload.diagnose.tables.wheels import WheelChoice
    from transload.machine import Machine

__all__ = ["install", "uninstall", "wheel", "wheel_choice"]

Lines = tuple[str, ...]

_TRIO = ("torchvision", "torchaudio")


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
        platform=_wheel_platform(machine),
        python=_python_version(machine),
        torch=torch,
        driver_sees_cards=bool(told),
    )


def wheel(machine: Machine, torch: str | None = None) -> Lines:
    """Install the torch that fits both the driver and the card, with the tool of this environment."""
    choice = wheel_choice(machine, torch)
    if not choice.torch_version:
        return (choice.reason,)
    beside = [name for name in _TRIO if name in machine.python.packages]
    lines = (*_reinstall(machine, choice, beside), f"Why this build: {choice.reason}")
    if not choice.needs_driver:
        return lines
    branch = int(choice.needs_driver.partition(".")[0])
    return ("First the driver:", *install_driver(machine, branch), "Then torch:", *lines)


def _reinstall(machine: Machine, choice: WheelChoice, beside: list[str]) -> Lines:
    tool = _tool(machine)
    if tool in ("conda", "pixi"):
        return _conda_torch(machine, choice, tool)
    wanted = (f"torch=={choice.torch_version}", *beside)
    if tool == "poetry" and choice.index:
        source = f"pytorch-{choice.build}"
        return (
            f"$ poetry source add --priority=explicit {source} {choice.index}",
            f"$ poetry add --source {source} {' '.join(wanted)}",
        )
    remove = uninstall(machine, "torch", *beside)
    return (*remove, *install(machine, *wanted, index=choice.index))


def _conda_torch(machine: Machine, choice: WheelChoice, tool: str) -> Lines:
    cuda = f"{choice.build[2:-1]}.{choice.build[-1]}" if choice.build.startswith("cu") else ""
    if tool == "pixi":
        return (f'$ pixi add "pytorch-gpu" "cuda-version={cuda}"',) if cuda else ("$ pixi add pytorch",)
    where = f" -p {quote(machine.python.prefix)}" if machine.python.prefix else ""
    return (f'$ conda install{where} -c conda-forge pytorch-gpu "cuda-version={cuda}"',)


def install(machine: Machine, *requirements: str, index: str = "", force: bool = False) -> Lines:
    """Install Python packages into the environment that was examined.

    >>> from transload.machine import Machine, Python
    >>> install(Machine(python=Python("/opt/venv/bin/python")), "torch", force=True)
    ('$ /opt/venv/bin/python -m pip install --force-reinstall torch',)
    """
    wanted = " ".join(map(quote, requirements))
    source = f" --index-url {index}" if index else ""
    python = quote(machine.python.executable or "python")
    tool = _tool(machine)
    if tool == "uv":
        again = " --reinstall" if force else ""
        return (f"$ uv pip install --python {python}{again} {wanted}{source}",)
    if tool == "poetry" and not index and not force:
        return (f"$ poetry add {wanted}",)
    again = " --force-reinstall" if force else ""
    line = f"$ {python} -m pip install{again} {wanted}{source}"
    if machine.python.externally_managed:
        return (
            "This Python belongs to the system, which refuses pip. Make an environment and use that:",
            f"$ {python} -m venv .venv",
            line.replace(f"$ {python} ", "$ .venv/bin/python ", 1),
        )
    return (line,) if machine.python.pip else (f"$ {python} -m ensurepip", line)


def uninstall(machine: Machine, *packages: str) -> Lines:
    """Remove Python packages from the environment that was examined."""
    python = quote(machine.python.executable or "python")
    names = " ".join(packages)
    tool = _tool(machine)
    if machine.python.externally_managed:
        return ()
    if tool == "uv":
        return (f"$ uv pip uninstall --python {python} {names}",)
    if tool == "poetry":
        return (f"$ poetry remove {names}",)
    return (f"$ {python} -m pip uninstall -y {names}",)


def _tool(machine: Machine) -> str:
    """What to install torch with: what installed it, where that differs from the environment's own tool."""
    first = machine.torch.first
    if machine.python.tool in ("conda", "pixi") and first and first.installer in ("pip", "uv"):
        return first.installer
    return machine.python.tool


def _wheel_platform(machine: Machine) -> WheelPlatform:
    system, cpu = machine.platform.system, machine.platform.machine
    if system == "Darwin":
        return "macos-arm64" if cpu == "arm64" else "macos-x86_64"
    if system == "Windows":
        return "windows"
    return "linux-aarch64" if cpu in ("aarch64", "arm64") else "linux-x86_64"


def _python_version(machine: Machine) -> tuple[int, int]:
    major, _, rest = machine.python.version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (3, 12)
