"""NVIDIA's driver: which branch and which flavour drive the cards of this machine, and the packages that hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transload.diagnose.fixes.system import on_host, reboot, sudo

if TYPE_CHECKING:
    from collections.abc import Callable

    from transload.diagnose.tables import Generation
    from transload.machine import Machine

__all__ = ["install_driver"]

Lines = tuple[str, ...]

DOWNLOAD = "https://www.nvidia.com/drivers"
_CURRENT = 580  # a branch that the distributions below are known to have, in both flavours
_FIRST_OPEN = 515


@dataclass(frozen=True, slots=True)
class Wanted:
    """A driver: of branch ``low`` or newer and no newer than ``high``, 0 where any will do.

    ``first`` is the branch that first drove the newest of the cards, and ``low`` what something else asks for.
    ``open_module`` is ``None`` where either kernel module drives the cards.
    """

    low: int = 0
    high: int = 0
    first: int = 0
    open_module: bool | None = None
    dropped: Lines = ()
    """Generations of cards that no driver serves beside the others."""
    kept: Lines = ()

    @property
    def branch(self) -> int:
        """The one branch that it must be; 0 where there is a choice."""
        return self.high

    @property
    def words(self) -> str:
        """As in ``NVIDIA's driver of branch 580 or newer with the open kernel module``."""
        least = max(self.low, self.first)
        which = f" of branch {self.high}" if self.high else f" of branch {least} or newer" if least else ""
        flavour = {True: " with the open kernel module", False: " with the proprietary kernel module", None: ""}
        return f"{which}{flavour[self.open_module]}"


@dataclass(frozen=True, slots=True)
class _Card:
    generation: Generation
    first: int


def _cards(machine: Machine) -> list[_Card]:
    """The cards on the bus that a driver of this machine is to drive."""
    from transload.diagnose.tables import chip_of, first_branch, generation

    chips = (chip_of(card.device) for card in machine.hardware.gpus if card.driver != "vfio-pci")
    known = ((generation(chip.generation), chip.capability) for chip in chips if chip)
    return [_Card(found, first_branch(capability) if capability else 0) for found, capability in known if found]


def _together(card: _Card, newest: _Card) -> bool:
    """Whether one driver drives both."""
    flavours = {card.generation.open_module, newest.generation.open_module}
    last = card.generation.last_branch
    return flavours != {"impossible", "required"} and (not last or last >= newest.first)


def wanted(machine: Machine, at_least: int = 0, exactly: int = 0) -> Wanted:
    """The driver for the cards of this machine; where no driver serves all of them, for the newest ones."""
    cards = _cards(machine)
    newest = max(cards, key=lambda card: (card.first, not card.generation.last_branch), default=None)
    served = [card for card in cards if newest and _together(card, newest)]
    last = min((card.generation.last_branch for card in served if card.generation.last_branch), default=0)
    return Wanted(
        at_least,
        exactly or last,
        max((card.first for card in served), default=0),
        _flavour(machine, {card.generation.open_module for card in served}, exactly or last),
        dropped=tuple(sorted({card.generation.name for card in cards if card not in served})),
        kept=tuple(sorted({card.generation.name for card in served})),
    )


def _flavour(machine: Machine, flavours: set[str], branch: int) -> bool | None:
    if "impossible" in flavours or 0 < branch < _FIRST_OPEN:
        return False
    if "required" in flavours:
        return True
    # of a card that is not known, the module that is loaded tells which flavour drives it
    return {"open": True, "proprietary": False}.get(machine.kernel.flavour) if not flavours else None


def install_driver(machine: Machine, *, at_least: int = 0, exactly: int = 0) -> Lines:
    """Install NVIDIA's driver, in the branch and the flavour that drive the cards of this machine.

    ``at_least`` is a floor, which any newer branch meets; ``exactly`` names the one branch that will do.
    """
    want = wanted(machine, at_least, exactly)
    if machine.surroundings.wsl:
        return (
            f"Install or update the driver{want.words if at_least or exactly else ''} in Windows: {DOWNLOAD}",
            "Never install a Linux driver inside WSL: its libcuda would hide the one Windows provides.",
        )
    if machine.platform.system == "Windows":
        return (f"Install the driver{want.words if at_least or exactly else ''}: {DOWNLOAD}",)
    if 0 < want.high < at_least:
        last = f"Branch {want.high} is the last driver for {' and '.join(want.kept) or 'this card'}"
        return (f"{last}: no driver of branch {at_least} or newer drives it.",)
    if machine.surroundings.container:
        return (*on_host(machine), f"Install or update NVIDIA's driver{want.words}, then reboot the host.")
    steps = _DRIVER.get(_distribution(machine), _other)(machine, want)
    return (*_both(want), *steps, reboot(machine))


def _both(want: Wanted) -> Lines:
    if not want.dropped:
        return ()
    kept, dropped = " and ".join(want.kept), " and ".join(want.dropped)
    return (f"No driver drives both {kept} and {dropped}. This is the one for {kept}:",)


def _distribution(machine: Machine) -> str:
    names = (machine.platform.distribution, *machine.platform.distribution_like)
    return next((name for name in names if name in _DRIVER), "")


def _in_words(want: Wanted, how: str) -> Lines:
    return (f"Install NVIDIA's driver{want.words}: {how}",)


def _other(machine: Machine, want: Wanted) -> Lines:
    del machine
    return _in_words(want, f"by your distribution's packages, or from {DOWNLOAD}")


def _ubuntu(machine: Machine, want: Wanted) -> Lines:
    if not want.low and not want.high and not want.open_module:
        return (sudo(machine, "apt install ubuntu-drivers-common"), sudo(machine, "ubuntu-drivers install"))
    branch = want.high or max(want.low, want.first, _CURRENT)
    flavour = "" if want.open_module is False else "-open"
    return (sudo(machine, "apt update"), sudo(machine, f"apt install nvidia-driver-{branch}{flavour}"))


_DEBIANS = 535  # Debian's own package is of this branch or newer since Debian 12, with the proprietary module


def _debian(machine: Machine, want: Wanted) -> Lines:
    if 0 < want.high < _FIRST_OPEN:
        return _in_words(want, f"Debian 11 and 12 have 470 as nvidia-tesla-470-driver; others are at {DOWNLOAD}")
    if not want.low and not want.open_module and want.first <= _DEBIANS:
        return (
            "With the components contrib, non-free and non-free-firmware enabled in Debian's apt sources:",
            sudo(machine, "apt install linux-headers-$(uname -r) nvidia-driver firmware-misc-nonfree"),
        )
    package = _of_nvidia(want) + (f"-{want.high}" if want.high else "")
    return (
        "From NVIDIA's own repository (developer.nvidia.com/cuda-downloads):",
        sudo(machine, f"apt install {package}"),
    )


def _of_nvidia(want: Wanted) -> str:
    return "cuda-drivers" if want.open_module is False else "nvidia-open"


def _fedora(machine: Machine, want: Wanted) -> Lines:
    legacy = {390: "-390xx", 470: "-470xx"}
    if want.high and want.high not in legacy:
        return _in_words(
            want,
            f"RPM Fusion's akmod-nvidia while that is {want.high}, later most likely akmod-nvidia-{want.high}xx",
        )
    suffix = legacy.get(want.high, "")
    packages = f"akmod-nvidia{suffix} xorg-x11-drv-nvidia{suffix}-cuda"
    return (
        "With the RPM Fusion repositories enabled:",
        sudo(machine, f"dnf install {packages}"),
        "Wait until 'modinfo nvidia' prints a version: the module is being built.",
    )


def _rhel(machine: Machine, want: Wanted) -> Lines:
    if want.high:
        return _in_words(want, "from NVIDIA's repository (developer.nvidia.com/cuda-downloads), held at that branch")
    return (
        "With NVIDIA's repository enabled (developer.nvidia.com/cuda-downloads):",
        sudo(machine, f"dnf install {_of_nvidia(want)}"),
    )


def _arch(machine: Machine, want: Wanted) -> Lines:
    if want.high in (390, 470, 580):
        return (f"From the AUR: nvidia-{want.high}xx-dkms and nvidia-{want.high}xx-utils",)
    if want.high or want.open_module is False:
        return _in_words(want, f"from the AUR, or from {DOWNLOAD}")
    return (sudo(machine, "pacman -Syu nvidia-open nvidia-utils"),)


def _suse(machine: Machine, want: Wanted) -> Lines:
    if max(want.low, want.first) > _CURRENT or 0 < want.high < _CURRENT:
        older = "G05 packages are of branch 470" if want.high == 470 else "repository has it"
        return _in_words(want, f"NVIDIA's {older}, or {DOWNLOAD}")
    closed = want.open_module is False
    package = "nvidia-driver-G06-kmp-default" if closed else "nvidia-open-driver-G06-signed-kmp-default"
    return (
        "With NVIDIA's repository for openSUSE or SLES enabled:",
        sudo(machine, f"zypper install {package} nvidia-compute-utils-G06"),
    )


def _nixos(machine: Machine, want: Wanted) -> Lines:
    name = {470: "legacy_470", 535: "legacy_535"}.get(want.high, "")
    package = f" hardware.nvidia.package = config.boot.kernelPackages.nvidiaPackages.{name};" if name else ""
    flavour = "false" if want.open_module is False else "true"
    held = f"And hardware.nvidia.package of branch {want.high}: production while that is one, later a legacy package."
    return (
        "In configuration.nix:",
        f'| services.xserver.videoDrivers = [ "nvidia" ]; hardware.nvidia.open = {flavour};{package}',
        *((held,) if want.high and not name else ()),
        sudo(machine, "nixos-rebuild switch"),
    )


def _alpine(machine: Machine, want: Wanted) -> Lines:
    del machine, want
    return ("NVIDIA publishes no driver for musl: use a distribution with glibc on this machine.",)


_DRIVER: dict[str, Callable[[Machine, Wanted], Lines]] = {
    "ubuntu": _ubuntu,
    "debian": _debian,
    "amzn": _rhel,
    "ol": _rhel,
    "fedora": _fedora,
    "rhel": _rhel,
    "centos": _rhel,
    "arch": _arch,
    "suse": _suse,
    "opensuse": _suse,
    "sles": _suse,
    "nixos": _nixos,
    "alpine": _alpine,
}
