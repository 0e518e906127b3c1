"""What the device manager of Windows says about a card, whether it has NVIDIA's driver, and paths that are too long."""

from __future__ import annotations

from ntpath import dirname

from transload.diagnose.case import Case, Match, Matches, rules, torch_says
from transload.diagnose.tables import chip_of
from transload.findings import Severity
from transload.machine import PciDevice, Unknown

_SERVICE = "nvlddmkm"
_DISABLED, _NO_DRIVER, _STOPPED = 22, 28, 43
_WORDS = {
    10: "This device cannot start.",
    12: "This device cannot find enough free resources that it can use.",
    14: "This device cannot work properly until you restart your computer.",
    18: "Reinstall the drivers for this device.",
    21: "Windows is removing this device.",
    22: "This device is disabled.",
    28: "The drivers for this device are not installed.",
    29: "This device is disabled because the firmware of the device did not give it the required resources.",
    31: "Windows cannot load the drivers required for this device.",
    32: "A driver (service) for this device has been disabled.",
    37: "Windows cannot initialize the device driver for this hardware.",
    38: "A previous instance of the device driver is still in memory.",
    39: "The driver may be corrupted or missing.",
    41: "Windows cannot find the hardware device.",
    43: "Windows has stopped this device because it has reported problems.",
    47: "It has been prepared for safe removal.",
    48: "The software for this device has been blocked from starting.",
    52: "Windows cannot verify the digital signature for the drivers required for this device.",
    54: "This device has failed and is undergoing a reset.",
}
"""What the device manager says; of long sentences, the end."""
_RESTART = (14, 21, 38, 47, 54)
_RESOURCES = (12, 29)
_BLOCKED = (48, 52)


def _card_lines(m: Case, card: PciDevice) -> tuple[str, ...]:
    """What Windows says about a card, and about the driver that it has."""
    chip = chip_of(card.device)
    ids = f"10de:{card.device:04x}{f', {chip.code}' if chip else ''}"
    says = _WORDS.get(card.problem, "")
    code = f"the device manager shows code {card.problem}{f': {says}' if says else ''}" if card.problem else ""
    driver = "it has no driver"
    if card.driver == _SERVICE:
        driver = f"its driver is NVIDIA's {m.kernel.version}".rstrip()
    elif card.driver:
        driver = f"its driver is {card.driver}{f' of {m.kernel.provider}' if m.kernel.provider else ''}"
    unsure = f"it may have been removed: {m.hardware.unconfirmed}" if m.hardware.unconfirmed else ""
    name = card.name if "NVIDIA" in card.name else f"{card.name}, an NVIDIA card".lstrip(", ")
    return (f"{name} ({ids}) at {card.address}", code, driver, unsure)


@rules("hardware", "W03", "W04", "W08")
def faulty_card(m: Case) -> Matches:
    """A card that is disabled (W03) or stopped (W04); a note on one that is no longer connected (W08)."""
    if m.platform.system != "Windows":
        return
    severity: Severity = "warning" if m.cuda_works else "error"
    for card in m.hardware.gpus:
        if card.problem == _DISABLED:
            yield "W03", Match(_card_lines(m, card), severity="note" if m.cuda_works else "error")
        elif card.problem == _STOPPED:
            yield "W04", Match(_card_lines(m, card), severity=severity)
    if m.no_gpu and m.hardware.absent:
        known = f"Windows knows {', '.join(m.hardware.absent[:4])}, but it is not connected"
        yield "W08", Match((known,), severity="note")


@rules("kernel", "W06", "W05", "W01")
def no_driver(m: Case) -> Matches:
    """Windows cannot load NVIDIA's driver (W05), must be restarted first (W06), or has no such driver (W01)."""
    if m.platform.system != "Windows":
        return
    cards = [card for card in m.hardware.gpus if card.problem not in (_DISABLED, _STOPPED)]
    severity: Severity = "warning" if m.cuda_works else "error"
    for card in cards:
        evidence = (*_card_lines(m, card), m.kernel_line if m.kernel.loaded else "")
        if card.problem in _RESTART:
            yield "W06", Match(evidence, severity=severity)
        elif card.problem not in (0, _NO_DRIVER):
            resources, blocked = card.problem in _RESOURCES, card.problem in _BLOCKED
            fix = m.steps("W05", resources=resources, blocked=blocked, other=not (resources or blocked))
            yield "W05", Match(evidence, fix, severity)
        elif m.needs_driver and m.kernel.loaded is not True and card.driver != _SERVICE:
            yield "W01", Match(evidence, likely=bool(m.hardware.unconfirmed))

    # if the bus cannot be read, the driver's library tells
    step, first = m.failed("init"), m.torch.first
    if isinstance(m.hardware.pci, Unknown) and m.no_libcuda and first and first.cuda:
        evidence = ("nvcuda.dll is not found", torch_says(step.error if step else ""))
        yield "W01", Match(evidence, severity="error" if m.has_nvidia else "note", likely=True)


_LONGEST_PATH = 259
_LONGEST_FILE = 168
"""Characters of the longest file of torch's wheels, from 2.9 on, in site-packages."""


@rules("python", "W07", likely=("W07",))
def long_paths(m: Case) -> Matches:
    """The files of torch do not fit into the paths that Windows allows: in the Store's Python they never do."""
    python, first, store = m.python, m.torch.first, m.python.environment == "store"
    site = (dirname(first.location) if first else python.user_site if store else "") or (
        f"{python.prefix}\\Lib\\site-packages" if python.prefix else ""
    )
    absent, damaged = m.torch.installs == (), bool(first and first.missing) and not m.torch_imported
    needed = len(site) + 1 + _LONGEST_FILE
    if m.platform.long_paths is False and site and needed > _LONGEST_PATH and (absent or damaged):
        evidence = (
            "this Python is the Microsoft Store's" if store else "",
            f"{site} has {len(site)} characters, and files of torch up to {_LONGEST_FILE} more",
            "Windows allows 259: LongPathsEnabled is 0",
        )
        yield "W07", Match(evidence, severity="error" if damaged else "warning")
