"""The parts of a Windows machine: its cards and their driver, the driver's libraries, and where variables are set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from transload import machine as facts
from transload.diagnose.host import Host
from transload.diagnose.pe import Pe, read_pe
from transload.diagnose.windows import Registry
from transload.machine import NVIDIA, Library, Unknown

_CONTROL = "HKLM/SYSTEM/CurrentControlSet"
_DISPLAY = "{4d36e968-e325-11ce-bfc1-08002be10318}"  # the class of display adapters
_SERVICE = "nvlddmkm"  # NVIDIA's driver
_NEW_NUMBERS = 22000  # the first build of Windows 11, which still calls itself 10 in some places
_MOST = 256  # the most devices of one kind, and the most Pythons

# -- the system --------------------------------------------------------------------------------------------------------


def platform(host: Host) -> facts.Platform:
    """The operating system, its memory and the user's shell."""
    system, kernel, machine = host.uname
    version = _key(host, "HKLM/SOFTWARE/Microsoft/Windows NT/CurrentVersion")
    build = version.text("CurrentBuildNumber")
    release = "11" if build.isdigit() and int(build) >= _NEW_NUMBERS else kernel
    long_paths = host.registry(f"{_CONTROL}/Control/FileSystem")
    status = host.memory_status()
    return facts.Platform(
        system,
        machine,
        kernel,
        distribution_name=" ".join(filter(None, ("Windows", release, version.text("DisplayVersion")))),
        shell=_shell(host),
        memory=status.total,
        memory_free=status.free,
        commit_limit=status.commit_limit,
        commit_free=status.commit_free,
        long_paths=long_paths.values.get("LongPathsEnabled") == 1 if long_paths else long_paths,
    )


def _shell(host: Host) -> str:
    """``powershell``, ``cmd``, or the name of a Unix shell; empty if the variables that they set do not agree.

    PowerShell adds the user's folder of modules to that of all users. Programs that cmd starts see its prompt. Git's
    bash names itself.
    """
    environ = {name.upper(): value for name, value in host.environ.items()}
    unix = host.slashed(environ.get("SHELL", "")).rpartition("/")[2].removesuffix(".exe")
    modules = (folder.strip() for folder in host.slashed(environ.get("PSMODULEPATH", "")).lower().split(";"))
    for_all = (host.slashed(environ.get("PROGRAMFILES", "C:/Program Files")).lower(), "%programfiles%")
    own = any(folder.endswith("powershell/modules") and not folder.startswith(for_all) for folder in modules)
    named = [name for name, said in ((unix, unix), ("powershell", own), ("cmd", "PROMPT" in environ)) if said]
    return named[0] if len(named) == 1 else ""


def _key(host: Host, key: str) -> Registry:
    """A key of the registry; an empty one if it cannot be read."""
    return host.registry(key) or Registry({})


# -- cards and their driver --------------------------------------------------------------------------------------------


def hardware(host: Host) -> facts.Hardware:
    """The cards that are present; if Windows does not tell, all that the registry remembers."""
    bus, present = host.registry(f"{_CONTROL}/Enum/PCI"), host.devices()
    if isinstance(bus, Unknown) and not present:
        return facts.Hardware(() if present == () and "does not exist" in bus.reason else bus)
    cards = tuple(card for card, _ in _adapters(host))
    why = present.reason if isinstance(present, Unknown) else "" if present else "cfgmgr32 lists no device"
    known = {device.id.lower() for device in present or ()}
    ids = (f"PCI/{name}/{at}" for name in _key(host, f"{_CONTROL}/Enum/PCI").keys for at in _instances(host, name))
    gone = [_card(host, at, 0)[0] for at in ids if present and at.lower() not in known and "VEN_10DE" in at.upper()]
    names = tuple(dict.fromkeys(card.name for card in gone if card.display and card.driver == _SERVICE))
    return facts.Hardware(cards, unconfirmed=why if cards else "", absent=names)


def kernel(host: Host) -> facts.Kernel:
    """NVIDIA's driver as the cards have it: the version and the provider of one that it drives, else of any."""
    loaded, version, provider = False, "", ""
    adapters = [pair for pair in _adapters(host) if pair[0].vendor == NVIDIA and pair[0].display]
    for card, entry in sorted(adapters, key=lambda pair: (pair[0].driver == _SERVICE, not pair[0].problem)):
        driver = _key(host, f"{_CONTROL}/Control/Class/{host.slashed(entry.text('Driver'))}")
        provider = driver.text("ProviderName")
        version = nvidia_version(driver.text("DriverVersion")) if card.driver == _SERVICE else ""
        loaded = card.driver == _SERVICE and not card.problem
    return facts.Kernel(loaded, version, provider=provider)


def has_own_driver(card: facts.PciDevice) -> bool:
    """Whether the driver of its vendor drives a card, and not Windows' own, which only shows a picture."""
    return card.driver not in ("", "BasicDisplay", "BasicRender") and not card.problem


def _adapters(host: Host) -> Iterator[tuple[facts.PciDevice, Registry]]:
    """The display devices and accelerators that are present, and all devices of NVIDIA, with their entries."""
    devices = [(device.id, device.problem) for device in host.devices() or ()]
    if not devices:
        names = _key(host, f"{_CONTROL}/Enum/PCI").keys
        devices = [(f"PCI/{name}/{instance}", 0) for name in names for instance in _instances(host, name)]
    for name, problem in devices:
        card, entry = _card(host, name, problem)
        if card.vendor == NVIDIA or card.kind >> 16 in (0x03, 0x12):  # display, accelerator
            yield card, entry


def _instances(host: Host, name: str) -> tuple[str, ...]:
    """The devices of one kind."""
    return _key(host, f"{_CONTROL}/Enum/PCI/{name}").keys[:_MOST]


def _card(host: Host, name: str, problem: int) -> tuple[facts.PciDevice, Registry]:
    """The device with an id, and its entry in the registry."""
    ids, entry = re.match(r"PCI/VEN_([0-9A-F]{4})&DEV_([0-9A-F]{4})", name, re.IGNORECASE), Registry({})
    if ids:
        entry = _key(host, f"{_CONTROL}/Enum/{name}")
    place = re.search(r"\((\d{1,5}),(\d{1,2}),(\d)\)\s*$", entry.text("LocationInformation"))
    bus, device, function = map(int, place.groups()) if place else (0, 0, 0)
    card = facts.PciDevice(
        f"{bus >> 8:04x}:{bus & 0xFF:02x}:{device:02x}.{function}" if place else name.rpartition("/")[2],
        *((int(ids[1], 16), int(ids[2], 16)) if ids else (0, 0)),
        _class_code(entry),
        driver=entry.text("Service"),
        problem=problem,
        name=(entry.text("FriendlyName") or entry.text("DeviceDesc")).rpartition(";")[2],
    )
    return card, entry


def _class_code(entry: Registry) -> int:
    """The class code of a PCI device: 0x030000 for a display; 0 if the registry has none."""
    lists = (value for value in entry.values.values() if isinstance(value, tuple))
    codes = (re.search(r"CC_([0-9A-Fa-f]{4,6})$", name) for names in lists for name in names)
    longest = max((code[1] for code in codes if code), key=len, default="")
    return int(longest.ljust(6, "0"), 16) if longest else 0x030000 if entry.text("ClassGUID").lower() == _DISPLAY else 0


def nvidia_version(version: str) -> str:
    """The version of a driver of NVIDIA, or of one of its files, from the one that Windows shows; empty if it has none.

    >>> nvidia_version("32.0.15.8180"), nvidia_version("27.21.14.5671"), nvidia_version("10.0.26100.1")
    ('581.80', '456.71', '')
    """
    numbers = version.split(".")
    if len(numbers) != 4 or not all(number.isdigit() for number in numbers) or len(numbers[3]) != 4:
        return ""
    digits = "".join(numbers[2:])[-5:]
    return f"{digits[:3]}.{digits[3:]}"


# -- the driver's libraries --------------------------------------------------------------------------------------------


def driver_libraries(host: Host, python: facts.Python) -> facts.DriverLibraries:
    """The files of the driver's libraries, in the order in which Windows searches for them."""
    return facts.DriverLibraries(
        tuple(_libraries(host, python, "nvcuda.dll")),
        tuple(_libraries(host, python, "nvml.dll")),
        (),  # part of another library
        smi=host.program("nvidia-smi", (system_folder(host), *_old_folders(host), *host.search_path())),
    )


def nvml_library(host: Host) -> str:
    """What to load as NVML: before 2018 it was in a folder that Windows does not search."""
    found = host.exists(f"{system_folder(host)}/nvml.dll")
    old = (f"{folder}/nvml.dll" for folder in _old_folders(host))
    return "nvml.dll" if found else next(filter(host.exists, old), "nvml.dll")


def system_folder(host: Host, bits: int = 64) -> str:
    """The folder of Windows' own libraries for programs with that many bits."""
    root = host.slashed(host.environ.get("SYSTEMROOT", "C:/Windows")).rstrip("/")
    return f"{root}/{'System32' if bits == 64 or not host.is_dir(f'{root}/SysWOW64') else 'SysWOW64'}"


def _old_folders(host: Host) -> Iterable[str]:
    names = ("PROGRAMW6432", "PROGRAMFILES")
    roots = (host.slashed(host.environ.get(name, "C:/Program Files")).rstrip("/") for name in names)
    return dict.fromkeys(f"{root}/NVIDIA Corporation/NVSMI" for root in roots)


def _libraries(host: Host, python: facts.Python, name: str) -> Iterator[Library]:
    """Every file of that name, once: beside the interpreter, in the system's folder, in the old folder of NVML."""
    beside = host.slashed(python.base_prefix)
    folders = {beside: "the folder of python.exe"} if beside else {}
    system = system_folder(host, python.bits)
    folders |= {system: system.rpartition("/")[2], **dict.fromkeys(_old_folders(host), "disk")}
    for folder, via in folders.items():
        path = f"{folder}/{name}"
        if host.exists(path) and not host.is_dir(path):
            pe, version = read_pe(host.real(path)), ""
            problem = f"for another machine ({pe.machine})" if isinstance(pe, Pe) and pe.bits != python.bits else ""
            if isinstance(pe, Pe):
                version = nvidia_version(pe.version() or "")
            else:
                problem = pe.reason if host.data(path, 1) else "empty"
            yield Library(name, path, host.target(path), via, version, problem=problem)


# -- variables and Pythons ---------------------------------------------------------------------------------------------

_VARIABLES = ("HKCU/Environment", f"{_CONTROL}/Control/Session Manager/Environment")
"""Where the variables of the user and of the machine are set. New processes get them."""


def origins(host: Host, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Where variables are set for good, unless the process has another value than that."""
    found: dict[str, list[str]] = {}
    for key in _VARIABLES:
        texts = {name.upper(): str(value) for name, value in _key(host, key).values.items()}
        for name in sorted(names):
            text = texts.get(name.upper())
            # PATH of a process is that of the machine and that of the user; %NAME% is replaced by a value
            if text is not None and ("%" in text or text in host.environ[name]):
                found.setdefault(name, []).append(key.replace("/", "\\"))
    return {name: tuple(keys) for name, keys in found.items()}


def pythons(host: Host) -> Iterator[str]:
    """The interpreters that are registered, as ``py -0p`` lists them."""
    for root in ("HKCU/Software/Python", "HKLM/Software/Python", "HKLM/Software/Wow6432Node/Python"):
        for company in _key(host, root).keys[:_MOST]:
            for tag in _key(host, f"{root}/{company}").keys[:_MOST]:
                place = _key(host, f"{root}/{company}/{tag}/InstallPath")
                folder = host.slashed(place.text("")).rstrip("/")
                yield host.slashed(place.text("ExecutablePath")) or (f"{folder}/python.exe" if folder else "")
