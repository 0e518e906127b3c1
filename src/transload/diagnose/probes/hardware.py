"""The cards on the buses, NVIDIA's kernel driver, the device nodes, and accelerators that are not NVIDIA's."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from transload.diagnose.children import in_fork
from transload.diagnose.host import Host, pairs
from transload.diagnose.probes.system import PROGRAMS, group_names, mount_of, mounts
from transload.diagnose.tables import is_listed
from transload.machine import AMD, NVIDIA, Accelerator, Hardware, Kernel, Node, Nodes, PciDevice, ProcGpu, Unknown

_BUS = "/sys/bus/pci/devices"
_DISPLAY, _ACCELERATOR = 0x03, 0x12
_MEMORY, _UNSET = 0x00000200, 0x20000000  # IORESOURCE_MEM, IORESOURCE_UNSET of the kernel
_TREE = "/proc/device-tree"


def hardware(host: Host) -> Hardware:
    """The cards on the PCI bus, and GPUs that are not on it: Windows' under WSL, and those of a Jetson."""
    compatible = host.text(f"{_TREE}/compatible", 4096) or ""
    release = host.line("/etc/nv_tegra_release").lstrip("# ").partition(", GCID")[0]
    tegra = ""
    if release or "nvidia,tegra" in compatible or host.uname[1].endswith("-tegra"):
        tegra = ", ".join(part for part in (host.line(f"{_TREE}/model"), release) if part) or "Tegra"
    on_linux = host.uname[0] == "Linux"
    addresses = host.listdir(_BUS) if on_linux else Unknown(f"the PCI bus is not examined on {host.uname[0]}")
    devices = addresses if isinstance(addresses, Unknown) else tuple(_devices(host, addresses))
    return Hardware(pci=devices, dxg=host.exists("/dev/dxg"), tegra=tegra)


def _devices(host: Host, addresses: tuple[str, ...]) -> Iterator[PciDevice]:
    for address in addresses:
        folder = f"{_BUS}/{address}"
        vendor, kind = _hex(host.line(f"{folder}/vendor")), _hex(host.line(f"{folder}/class"))
        if vendor != NVIDIA and kind >> 16 not in (_DISPLAY, _ACCELERATOR):
            continue
        power = host.line(f"{folder}/power_state")
        # Reading the configuration space would wake a suspended card, so it is left alone. Of others no byte more is
        # read: every word comes from the card, and a page takes 20 ms in a virtual machine.
        asleep = power == "D3cold" or host.line(f"{folder}/power/runtime_status") == "suspended"
        begin = host.data(f"{folder}/config", 4) if vendor == NVIDIA and not asleep else b""
        yield PciDevice(
            address,
            vendor,
            _hex(host.line(f"{folder}/device")),
            kind,
            driver=host.readlink(f"{folder}/driver").rpartition("/")[2],
            power=power,
            bars=_bars(host.text(f"{folder}/resource", 4096) or ""),
            dead=begin == b"\xff\xff\xff\xff",
        )


def _hex(text: str) -> int:
    """A hexadecimal number of sysfs; 0 for anything else.

    >>> _hex("0x10de"), _hex("garbage")
    (4318, 0)
    """
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text) else 0


def _bars(text: str) -> tuple[int, ...]:
    """Sizes of the memory regions in the first six lines of ``resource``: start, end, flags.

    >>> _bars("0x0000004000000000 0x000000400007ffff 0x0000000000140204")
    (524288,)
    """
    sizes = []
    for line in text.split("\n")[:6]:
        start, end, flags = (_hex(word) for word in line.split()) if line.count(" ") == 2 else (0, 0, 0)
        if flags & _MEMORY:
            sizes.append(max(0, end - start + 1) if start and not flags & _UNSET else 0)
    return tuple(sizes)


# -- NVIDIA's kernel driver: whether it is loaded, and what could keep it from loading ---------------------------------

_PROC = "/proc/driver/nvidia"
_VERSION = re.compile(r"\b(\d{3,4}\.\d{1,3}(?:\.\d{1,3})?)\b")
_MODULES = re.compile(r"nvidia(?:_\w+)?|nouveau|nova_\w+|nvgpu|vfio_pci|dxgkrnl|amdgpu|i915|xe|habanalabs", re.ASCII)
_MODULE_ROOTS = ("/lib/modules", "/usr/lib/modules", "/run/booted-system/kernel-modules/lib/modules")
# A line of modules.dep. Debian adds the flavour to the name: nvidia-current.ko, nvidia-tesla-470.ko.
_OBJECT = re.compile(rb"^(\S*/nvidia(?:-(?:current|open|tesla|legacy)[\w-]*)?\.ko(?:\.\w+)?):", re.MULTILINE)
_FIRMWARE = ("/lib/firmware", "/usr/lib/firmware", "/lib/firmware/updates", "/run/current-system/firmware")
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_MOST = 64  # cards, kernels, and nodes of a folder: every MIG instance of every card can have its own
_DEPENDENCIES = 8 << 20  # a modules.dep has about one megabyte
_STANZA = 1 << 14  # of a package
DRIVER_PATIENCE = 0.5  # Seconds for reading the files of all cards: a broken driver may never answer.


def kernel(host: Host) -> Kernel:
    """What the kernel reports about NVIDIA's driver. Nothing is known on systems other than Linux."""
    if host.uname[0] != "Linux":
        return Kernel(loaded=Unknown(f"not examined on {host.uname[0]}"))
    banner, listed = host.text(f"{_PROC}/version", 4096) or "", host.text("/proc/modules")
    names = {line.partition(" ")[0] for line in (listed or "").split("\n")}
    modules = tuple(sorted(name for name in names if _MODULES.fullmatch(name)))
    loaded: bool | Unknown = host.is_dir("/sys/module/nvidia") or "NVRM version" in banner or "nvidia" in modules
    if not loaded and isinstance(listed, Unknown) and not host.listdir("/sys/module"):
        loaded = listed  # some containers hide all three
    stated = _VERSION.search(banner.partition("\n")[0])
    version = host.line("/sys/module/nvidia/version") or (stated[1] if stated else "")

    # Drivers have firmware since 465. Without any firmware folder this is a container, which uses the host's.
    firmware: bool | Unknown = Unknown("the driver's version is not known")
    if version:
        own = host.line("/sys/module/firmware_class/parameters/path")
        folders = [folder for folder in (own, *_FIRMWARE) if folder and host.is_dir(f"{folder}/nvidia")]
        found = any(host.is_dir(f"{folder}/nvidia/{version}") for folder in folders)
        firmware = found if folders else Unknown("/lib/firmware/nvidia does not exist")

    secure_boot: bool | Unknown
    data = host.data(_SECURE_BOOT, 16)
    if isinstance(data, Unknown):
        there = host.listdir("/sys/firmware")
        # A container sees an empty folder. A machine that did not boot with EFI has other things in it.
        secure_boot = False if there and "efi" not in there else data
    else:
        secure_boot = data[4] == 1 if len(data) > 4 else Unknown(f"{_SECURE_BOOT} is too short")

    line = host.text("/proc/cmdline", 1 << 14)
    daemons, stuck = daemons_and_stuck(host) if loaded else ((), ())
    mps = host.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108  where the daemon puts it
    return Kernel(
        loaded=loaded,
        version=version,
        flavour="open" if "Open Kernel Module" in banner else "proprietary" if "Kernel Module" in banner else "",
        modules=modules,
        built_for=_built_for(host),
        secure_boot=secure_boot,
        uvm_disable_hmm=host.line("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"),
        kaslr=line if isinstance(line, Unknown) else "nokaslr" not in line.split(),
        parameters=pairs(host.text(f"{_PROC}/params", 1 << 16) or "", ":"),
        gpus=tuple(_gpus(host)),
        firmware=firmware,
        log=kernel_log(host),
        daemons=daemons,
        stuck=stuck,
        fabric_manager=_fabric_manager(host),
        mps_directory=mps if host.is_dir(mps) else "",
    )


def _built_for(host: Host) -> tuple[str, ...] | Unknown:
    """The kernels with a driver, according to depmod: modprobe loads nothing else. The file must exist."""
    root = next((root for root in _MODULE_ROOTS if host.is_dir(root)), _MODULE_ROOTS[0])
    releases = host.listdir(root)
    if isinstance(releases, Unknown):
        return releases
    found = []
    for release in releases[:_MOST]:
        folder = f"{root}/{release}"
        dependencies = host.data(f"{folder}/modules.dep", _DEPENDENCIES) or b""
        objects = (match[1].decode("utf-8", "surrogateescape") for match in _OBJECT.finditer(dependencies))
        if any(host.exists(path if path.startswith("/") else f"{folder}/{path}") for path in objects):
            found.append(release)
    return tuple(found)


def _gpus(host: Host) -> Iterator[ProcGpu]:
    """The driver's own list. A broken driver may hang while it is read."""
    addresses = (host.listdir(f"{_PROC}/gpus") or ())[:_MOST]
    files = [f"{_PROC}/gpus/{address}/information" for address in addresses]
    questions = [lambda path=file: host.text(path, 1 << 14) or "" for file in files]
    for address, text in zip(addresses, in_fork(questions, DRIVER_PATIENCE), strict=True):
        values = pairs(text or "", ":")
        minor = values.get("Device Minor", "")
        yield ProcGpu(
            address,
            model=values.get("Model", ""),
            minor=int(minor) if re.fullmatch(r"\d{1,6}", minor, re.ASCII) else None,
            firmware=values.get("GPU Firmware", ""),
            excluded=values.get("GPU Excluded") == "Yes",
        )


def _fabric_manager(host: Host) -> str:
    """Its version from the list of installed packages, else from the program, if that names only one."""
    program = host.program("nv-fabricmanager", PROGRAMS)
    if program or any(host.paths("/var/lib/dpkg/info", "nvidia-fabricmanager", ".list")):
        status = host.text("/var/lib/dpkg/status", 64 << 20) or ""
        for start in re.finditer(r"^Package: nvidia-fabricmanager(?:-\d+)?$", status, re.MULTILINE):
            stanza = status[start.start() : start.start() + _STANZA].partition("\n\n")[0]
            found = re.search(r"^Version: (?:\d+:)?(\d+(?:\.\d+)+)", stanza, re.MULTILINE)
            if found and re.search(r"^Status: .* installed$", stanza, re.MULTILINE):
                return found[1]
    data = host.data(program, 32 << 20) if program else b""
    versions = set(re.findall(rb"\b\d{3}\.\d{2,3}\.\d{2}\b", data or b""))
    return versions.pop().decode() if len(versions) == 1 else ""


# -- the kernel log ----------------------------------------------------------------------------------------------------

_WORDS = ("NVRM", "nvidia", "nouveau", "Xid", "nova_core", "fallen off the bus", "request_free_mem_region")
_NOISE = re.compile(
    r"audit: .*apparmor=.(?:STATUS|ALLOWED)|ommand line:|input: .*HDMI|systemd\[\d+\]:|\]: segfault at |\btraps: "
)
_BEFORE = re.compile(r"^(?:<\d+>)?(?:.{0,80}? kernel: )?(?:\[ *[\d.]+\] ?)?")
_BANNER = "Linux version "
_LINES = 40
_TAIL = 512 << 10  # bytes: most ring buffers are smaller, and log files may be huge
_LINE = 1 << 11  # characters: the kernel itself writes at most half of that at once
_FILES = ("/var/log/kern.log", "/var/log/dmesg", "/var/log/messages")


def kernel_log(host: Host) -> tuple[str, ...] | Unknown:
    """The last lines about a GPU since boot: from the kernel, else from a log file.

    A line is the message without its time and host, and repeated messages appear once.
    """
    log = host.kernel_ring(_TAIL)
    booted = host.findall(r"^btime (\d{1,12})$", "/proc/stat")
    for path in _FILES if isinstance(log, Unknown) else ():
        status = host.stat(path)
        if isinstance(status, Unknown) or status.st_mtime < int(booted[0] if booted else 0):
            continue  # written before the last boot
        if data := host.data(path, _TAIL, max(0, status.st_size - _TAIL)):
            text = data.decode("utf-8", "replace")
            log = text[max(text.rfind(_BANNER), 0) :]
            break
    if isinstance(log, Unknown):
        return log
    lines = (line for line in log.split("\n") if any(word in line for word in _WORDS) and not _NOISE.search(line))
    messages = [_BEFORE.sub("", line[:_LINE].strip(), count=1) for line in lines]
    newest = tuple(dict.fromkeys(reversed(messages)))[:_LINES]  # the last one of equal messages is kept
    return newest[::-1]


# -- other processes that use a GPU ------------------------------------------------------------------------------------

_DAEMONS = (
    *("nv-fabricmanager", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
    *("nvidia-gridd",),
)
_COMM = 15  # characters of a process name that the kernel keeps: the two of MPS have the same
_STAT = re.compile(r"\d+ \((.*)\) (\S)", re.DOTALL)
_WAITS = re.compile(r"_*(?:nv|uvm|rm_|os_acquire)")
_MOST_PROCESSES = 4096
_MOST_FILES = 256


def daemons_and_stuck(host: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The running daemons, and the processes in uninterruptible sleep that wait for an NVIDIA device."""

    def name_and_state(folder: str) -> tuple[str, str]:
        found = _STAT.match(host.text(f"{folder}/stat", 512) or "")
        return (found[1], found[2]) if found else ("", "")

    def waits_for_nvidia(folder: str) -> bool:
        """Whether it waits in the driver, by its kernel stack; if that is hidden, whether it has a device open."""
        if stack := host.text(f"{folder}/stack", 1 << 14):
            return "[nvidia" in stack
        if _WAITS.match(host.line(f"{folder}/wchan")):
            return True
        files = (host.listdir(f"{folder}/fd") or ())[:_MOST_FILES]
        return any(host.readlink(f"{folder}/fd/{number}").startswith("/dev/nvidia") for number in files)

    numbers = [name for name in host.listdir("/proc") or () if name.isascii() and name.isdigit()]
    running, stuck = set(), []
    for number in numbers[:_MOST_PROCESSES]:
        folder = f"/proc/{number}"
        name, state = name_and_state(folder)
        alike = [each for each in _DAEMONS if name == each[:_COMM]] if state not in ("Z", "X") else []
        if len(alike) > 1 and state != "D":  # reading the command line of a hanging process may hang as well
            program = (host.text(f"{folder}/cmdline", 4096) or "").partition("\0")[0].rpartition("/")[2]
            alike = [program] if program in alike else alike
        running.update(alike[:1])
        if state == "D" and name_and_state(folder)[1] == "D" and waits_for_nvidia(folder):
            stuck.append(f"{name} ({number})")
    return tuple(name for name in _DAEMONS if name in running), tuple(stuck)


# -- device nodes ------------------------------------------------------------------------------------------------------

_ALWAYS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")
_CARD = re.compile(r"/dev/nvidia\d+")
_NAMES = re.compile(r"nvidia\d+|nvidiactl|nvidia-(?:uvm|uvm-tools|modeset|nvswitchctl|nvlink)|dxg|nvmap|nvhost-.*|kfd")
_FOLDERS = (("/dev/nvidia-caps", "nvidia-cap"), ("/dev/dri", "renderD"), ("/dev/accel", "accel"))
_MAJORS = re.compile(r"^ *(\d{1,4}) (nvidia\S*|kfd|drm|accel)$", re.MULTILINE)
_CGROUP = r"^\d+:(?:\w+,)*devices(?:,\w+)*:(/.*)$"

PATIENCE = 0.25  # Seconds. A refusal is immediate; an open that takes longer was allowed, and initializes a card.


def nodes(host: Host) -> Nodes:
    """The nodes of NVIDIA's driver and of other compute drivers, and their device numbers."""
    if host.uname[0] != "Linux":
        return Nodes()
    present = [f"/dev/{name}" for name in host.listdir("/dev") or () if _NAMES.fullmatch(name)]
    for folder, start in _FOLDERS:
        present += tuple(host.paths(folder, start))[:_MOST]
    statuses = {path: host.stat(path) for path in (*_ALWAYS, *present)}
    # Cards are opened last: initializing one takes a while.
    there = sorted(filter(statuses.get, statuses), key=lambda path: bool(_CARD.fullmatch(path)))
    answers = in_fork([lambda path=path: host.open_error(path) for path in there], PATIENCE)  # type: ignore[misc]
    errors = dict(zip(there, answers, strict=True))
    groups, around = group_names(host), mounts(host)
    found = []
    for path, status in statuses.items():
        mount = mount_of(around, path)
        nodev = mount is not None and "nodev" in mount.options
        if isinstance(status, Unknown):
            link = bool(host.readlink(path))
            found.append(Node(path, exists=link, kind="link" if link else "", mode=0, error="ENOENT", nodev=nodev))
            continue
        mode, device, error = status.st_mode, getattr(status, "st_rdev", 0), errors[path]
        if isinstance(error, Unknown):
            error = "" if os.access(host.real(path), os.R_OK | os.W_OK) else "EACCES"
        elif error == "EACCES" and "/nvidia-caps/" in path and mode & stat.S_IROTH:
            error = ""  # the driver only reads these
        node = Node(
            path,
            kind="char" if stat.S_ISCHR(mode) else "directory" if stat.S_ISDIR(mode) else "file",
            mode=stat.S_IMODE(mode),
            uid=status.st_uid,
            gid=status.st_gid,
            group=groups.get(str(status.st_gid), ""),
            major=os.major(device),
            minor=os.minor(device),
            error=error,
            nodev=nodev,
        )
        found.append(node)

    characters = (host.text("/proc/devices", 1 << 16) or "").partition("Block devices")[0]
    majors = {name: int(number) for number, name in _MAJORS.findall(characters)}
    if "nvidia-frontend" in majors:  # its name in drivers before 550
        majors = {"nvidia": majors["nvidia-frontend"], "nvidiactl": majors["nvidia-frontend"]} | majors

    # cgroup v1 has a list of rules; those of v2 are a BPF program that only root can see.
    folders = [path.rstrip("/") for path in (*host.findall(_CGROUP, "/proc/self/cgroup")[:1], "/")]
    lists = (host.text(f"/sys/fs/cgroup/devices{folder}/devices.list", 1 << 14) for folder in folders)
    rules = next((text for text in lists if isinstance(text, str)), "")
    allowed = tuple(line.strip() for line in rules.split("\n") if line.strip())
    return Nodes(tuple(found), majors, allowed)


# -- accelerators of other vendors, each with the torch build it needs -------------------------------------------------

_KFD = "/sys/class/kfd/kfd/topology/nodes"
_PROPERTY = r"^(simd_count|gfx_target_version|location_id|domain) (\d{1,12})$"
# Integrated graphics of AMD: Raven, Renoir, Van Gogh, Rembrandt, Raphael, Phoenix, Strix.
_APU = re.compile(r"gfx(?:90[29c]|103[3567]|1103|115\d)")

_LEVEL_ZERO = ("/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")

_INTEL, _HABANA, _GOOGLE = 0x8086, 0x1DA3, 0x1AE0
_DEVICES = (
    (re.compile(r"davinci\d+"), "npu", "Huawei Ascend"),
    (re.compile(r"hl\d+"), "hpu", "Intel Gaudi"),
    (re.compile(r"neuron\d+"), "neuron", "AWS Neuron"),
    (re.compile(r"cambricon_dev\d+"), "mlu", "Cambricon MLU"),
    (re.compile(r"mtgpu\.\d+"), "musa", "Moore Threads"),
)


def accelerators(host: Host, found: Hardware) -> tuple[Accelerator, ...]:
    """Accelerators other than NVIDIA's, the usable ones first."""
    return tuple(sorted(_others(host, found.pci or ()), key=lambda each: (not each.usable, each.integrated)))


def _others(host: Host, cards: tuple[PciDevice, ...]) -> Iterator[Accelerator]:
    if host.uname[0] == "Darwin" and host.uname[2] == "arm64":
        yield Accelerator("mps", "Apple GPU", usable=True, integrated=True)

    # The GPUs of AMD's compute driver, then cards on the bus that it does not list.
    ready, driven = host.exists("/dev/kfd"), set()
    for folder in host.paths(_KFD):
        values = {name: int(value) for name, value in host.findall(_PROPERTY, f"{folder}/properties")}
        if values.get("simd_count"):
            gfx, place = _gfx(values.get("gfx_target_version", 0)), values.get("location_id", 0)
            address = f"{values.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            driven.add(address)
            name = host.line(f"{_BUS}/{address}/product_name") or "AMD GPU"
            yield Accelerator("rocm", name, gfx, usable=ready, integrated=bool(_APU.fullmatch(gfx)))

    ids = {card.address: f"{card.vendor:04x}:{card.device:04x}" for card in cards}
    for card in cards:
        if card.vendor == AMD and card.address not in driven:
            yield Accelerator("rocm", "AMD GPU", ids[card.address])

    # Intel's are usable only with both parts of the driver: the kernel's, and the Level Zero library.
    intel = [card for card in cards if card.vendor == _INTEL]
    folders = (folder.format(machine=host.uname[2]) for folder in _LEVEL_ZERO)
    library = bool(intel) and any(any(host.paths(folder, "libze_intel_gpu.so")) for folder in folders)
    for card in intel:
        usable = library and card.driver in ("xe", "i915")
        if is_listed(card.device, "intel_cards"):
            yield Accelerator("xpu", "Intel GPU", ids[card.address], usable=usable)
        elif is_listed(card.device, "intel_processors"):
            yield Accelerator("xpu", "Intel Core Ultra graphics", ids[card.address], usable=usable, integrated=True)

    # Others by the nodes that their drivers create, or by the bus if their vendor makes nothing else.
    names = host.listdir("/dev") or ()
    for pattern, kind, name in _DEVICES:
        if count := sum(bool(pattern.fullmatch(each)) for each in names):
            yield Accelerator(kind, name, f"{count} in /dev", usable=True)
    for card in cards:
        if card.vendor == _HABANA and not any(each.startswith("hl") for each in names):
            yield Accelerator("hpu", "Intel Gaudi", ids[card.address], usable=card.driver == "habanalabs")
        elif card.vendor == _GOOGLE:
            usable = any(each.startswith("accel") for each in names)
            yield Accelerator("tpu", "Google TPU", ids[card.address], usable=usable)


def _gfx(version: int) -> str:
    """The name of an architecture from the driver's ``gfx_target_version``.

    >>> _gfx(90402), _gfx(90010), _gfx(110000)
    ('gfx942', 'gfx90a', 'gfx1100')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
