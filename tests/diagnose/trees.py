"""Fake hosts: a directory tree and an environment that the probes examine instead of this machine.

    host = plain_host(tmp_path)                                     # an Ubuntu server with a working H200
    host = plain_host(tmp_path, card=RTX_4090, driver="550.54.15", nodes={})
    host = container(tmp_path, "docker", more={"/etc/cdi/nvidia.yaml": "…"}, without=("/dev/nvidia-uvm",))
    host = tree_host(tmp_path, {"/proc/version": "…", "/dev/kfd": Device(234, 0, error="EACCES")})

A tree maps absolute paths to their contents: text or bytes for a file, ``Link`` for a symbolic link, ``FOLDER`` for an
empty folder, ``Device`` for a device node. Tests have no permission to create device nodes, so a node is an empty file,
and the host reports the attributes of the ``Device``. A ``Forged`` library is built for the architecture of the host.
``None`` removes a path, and everything below it, from the tree.

Trees are written for x86-64. A host of another architecture sets it in ``uname``, and its paths are translated:
``/usr/lib/aarch64-linux-gnu``, ``/lib/ld-linux-aarch64.so.1``. Nothing is read from the machine the tests run on.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from transload.diagnose.host import Host
from transload.diagnose.windows import Registry, WindowsDevice
from transload.io.limits import MemoryStatus
from transload.machine import Unknown

VERSION: Final = "580.159.04"
KERNEL: Final = "6.8.0-45-generic"


@dataclass(frozen=True)
class Link:
    to: str


@dataclass(frozen=True)
class Device:
    """A device node: its numbers, owner and mode, and the errno of opening it (empty if it can be opened)."""

    major: int
    minor: int = 0
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    error: str = ""


@dataclass(frozen=True)
class Folder:
    pass


@dataclass(frozen=True)
class Forged:
    """A library: a function that builds it for a given architecture."""

    make: Callable[[str], bytes]


FOLDER: Final = Folder()
Content = str | bytes | Link | Device | Folder | Forged
Tree = Mapping[str, Content | None]


LINKS: Final = 40
"""How many symbolic links are followed, as in the kernel."""


@dataclass(frozen=True)
class TreeHost(Host):
    """A host in the tree at ``root``. Its links stay inside the tree, and nothing outside the tree is visible.

    ``errors`` maps paths to the errnos of opening them, and takes precedence over those of ``device_nodes``.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    cwd: str = "/"
    uname: tuple[str, str, str] = ("Linux", "", "x86_64")
    uid: int = -1
    libc: str = ""
    root: str = "/nowhere"
    device_nodes: Mapping[str, Device] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def real(self, path: str) -> str:
        return self.at(self.target(path) if path.startswith("/") else path)

    def at(self, path: str) -> str:
        """The path on this machine, without following the last link."""
        return f"{self.root}/{path.lstrip('/')}"

    def readlink(self, path: str) -> str:
        folder, _, name = path.rstrip("/").rpartition("/")
        return self._readlink(f"{self.target(folder)}/{name}")

    def _readlink(self, path: str) -> str:
        try:
            return str(Path(self.at(path)).readlink())
        except (OSError, ValueError):
            return ""

    def target(self, path: str) -> str:
        resolved, rest, links = "/", path.strip("/").split("/"), 0
        while rest:
            current = posixpath.normpath(f"{resolved.rstrip('/')}/{rest.pop(0)}")
            link = self._readlink(current)
            if not link or links > LINKS:
                resolved = current
                continue
            links += 1
            rest = link.strip("/").split("/") + rest
            resolved = "/" if link.startswith("/") else resolved
        return resolved

    def kernel_ring(self, size: int) -> Unknown:
        return Unknown(f"the log of a tree is in its files, not in {size} bytes of the kernel")

    def registry(self, key: str) -> Registry | Unknown:
        return Unknown(f"{key} does not exist")

    def devices(self) -> tuple[WindowsDevice, ...] | Unknown:
        return Unknown("a tree has no devices")

    def memory_status(self) -> MemoryStatus:
        return MemoryStatus()

    def open_error(self, path: str) -> str:
        device = self.device_nodes.get(self.target(path))
        return self.errors.get(path) or (device.error if device else super().open_error(path))

    def stat(self, path: str) -> os.stat_result | Unknown:
        device = self.device_nodes.get(self.target(path))
        if device is None:
            return super().stat(path)
        mode = stat.S_IFCHR | device.mode
        number = os.makedev(device.major, device.minor)
        return os.stat_result((mode, 1, 1, 1, device.uid, device.gid, 0, 0, 0, 0), {"st_rdev": number})


AARCH64_TEXTS: Final = {"/lib64/ld-linux-x86-64.so.2": "/lib/ld-linux-aarch64.so.1", "x86_64": "aarch64"}


def translate(machine: str, text: str) -> str:
    """Translate a path or text of an x86-64 machine to another architecture."""
    for old, new in AARCH64_TEXTS.items() if machine == "aarch64" else ():
        text = text.replace(old, new)
    return text


def translate_tree(machine: str, tree: Tree) -> dict[str, Content | None]:
    """Translate a tree to an architecture, and build its forged libraries for it."""

    def converted(content: Content | None) -> Content | None:
        if isinstance(content, str):
            return translate(machine, content)
        if isinstance(content, Link):
            return Link(translate(machine, content.to))
        return content.make(machine) if isinstance(content, Forged) else content

    return {translate(machine, path): converted(content) for path, content in tree.items()}


def write(root: Path, tree: Tree) -> None:
    """Write a tree below ``root``, which may already contain files."""
    folders: set[Path] = set()
    for path, content in tree.items():
        real = root / path.lstrip("/")
        if content is None:
            _remove(real)
            folders.clear()
            continue
        if real.parent not in folders:
            real.parent.mkdir(parents=True, exist_ok=True)
            folders.add(real.parent)
        if isinstance(content, Folder):
            real.mkdir(exist_ok=True)
        elif isinstance(content, Link):
            real.symlink_to(content.to)
        else:
            real.write_bytes(_data(content))


def _remove(real: Path) -> None:
    if real.is_dir() and not real.is_symlink():
        shutil.rmtree(real)
    else:
        real.unlink(missing_ok=True)


def _data(content: str | bytes | Device | Forged) -> bytes:
    if isinstance(content, Device):
        return b""
    if isinstance(content, Forged):
        raise TypeError("a forged library must be built for an architecture first")
    return content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")


def tree_host(
    root: Path,
    tree: Tree,
    environ: Mapping[str, str] | None = None,
    *,
    errors: Mapping[str, str] | None = None,
    uname: tuple[str, str, str] = ("Linux", KERNEL, "x86_64"),
    uid: int = 1000,
    cwd: str = "/home/user/project",
    python: str = "/opt/venv/bin/python",
) -> TreeHost:
    """Write a tree into the folder ``root`` and return its host, whose environment is ``environ`` and nothing else."""
    root.mkdir(parents=True, exist_ok=True)
    tree = translate_tree(uname[2], tree)
    write(root, tree)
    devices = {path: content for path, content in tree.items() if isinstance(content, Device)}
    return TreeHost(dict(environ or {}), python, cwd, uname, uid, "", str(root), devices, dict(errors or {}))


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A GPU as the PCI bus and the driver describe it."""

    name: str
    device: int
    address: str = "0000:17:00.0"
    kind: int = 0x030200
    bars: Sequence[int] = (1 << 24, 1 << 38, 1 << 25)


H200: Final = Card("NVIDIA H200", 0x2335)
RTX_4090: Final = Card("NVIDIA GeForce RTX 4090", 0x2684, "0000:01:00.0", 0x030000, (1 << 24, 1 << 28, 1 << 25))
RTX_5090: Final = Card("NVIDIA GeForce RTX 5090", 0x2B85, "0000:01:00.0", 0x030000, (1 << 26, 1 << 35, 1 << 25))
GTX_1080: Final = Card("NVIDIA GeForce GTX 1080", 0x1B80, "0000:01:00.0", 0x030000, (1 << 24, 1 << 28, 1 << 25))

NODES: Final[Mapping[str, Device]] = {
    "/dev/nvidiactl": Device(195, 255),
    "/dev/nvidia0": Device(195, 0),
    "/dev/nvidia-uvm": Device(238, 0),
    "/dev/nvidia-uvm-tools": Device(238, 1),
    "/dev/nvidia-caps/nvidia-cap1": Device(241, 1, 0o400, error="EACCES"),
    "/dev/nvidia-caps/nvidia-cap2": Device(241, 2, 0o444, error="EACCES"),
}
"""As the driver creates them. The capability nodes are read-only, and opening them for writing fails."""

DEVICES: Final = """\
Character devices:
  1 mem
  5 /dev/tty
 10 misc
195 nvidia
195 nvidiactl
226 drm
238 nvidia-uvm
241 nvidia-caps

Block devices:
259 blkext
"""

MOUNTS: Final = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
23 27 0:22 / /sys rw,nosuid,nodev,noexec,relatime - sysfs sysfs rw
24 27 0:6 / /dev rw,nosuid,relatime shared:2 - devtmpfs udev rw,size=12333904k,mode=755
25 24 0:23 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
"""
CONTAINER_MOUNTS: Final = """\
1051 900 0:110 / / rw,relatime - overlay overlay rw,lowerdir={layers}/l/A:{layers}/l/B,upperdir={layers}/c/diff
1052 1051 0:113 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
1053 1051 0:114 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
1054 1053 0:115 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620
1055 1053 0:6 /nvidia0 /dev/nvidia0 ro,nosuid,noexec,relatime master:2 - devtmpfs udev rw
"""

UBUNTU: Final[Tree] = {
    "/etc/os-release": Link("../usr/lib/os-release"),
    "/usr/lib/os-release": (
        'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\nID_LIKE=debian\n'
    ),
    "/etc/group": "root:x:0:\nadm:x:4:user\nvideo:x:44:\nrender:x:992:\nuser:x:1000:\n",
    "/usr/bin/apt-get": "",
    "/usr/lib/x86_64-linux-gnu/libc.so.6": (
        b"\x7fELF\0\0GNU C Library (Ubuntu GLIBC 2.39-0ubuntu8.3) stable release version 2.39.\n"
    ),
    "/lib": Link("usr/lib"),
    "/proc/self/status": "Name:\tpython\nGid:\t1000\t1000\t1000\t1000\nGroups:\t4 1000 \n",
    "/proc/self/limits": "Max address space         unlimited            unlimited            bytes     \n",
}


def bus(card: Card, driver: str = "nvidia", power: str = "D0") -> dict[str, Content]:
    """A GPU on the PCI bus, bound to a kernel driver (``""`` for none)."""
    folder = f"/sys/bus/pci/devices/{card.address}"
    starts = (0xB0000000, 0x20000000000, 0x30000000000)
    regions = [(start, start + size - 1, 0x14220C) for start, size in zip(starts, card.bars, strict=True)]
    lines = [regions[0], regions[1], (0, 0, 0), regions[2], (0, 0, 0), (0, 0, 0)]
    files: dict[str, Content] = {
        f"{folder}/vendor": "0x10de\n",
        f"{folder}/device": f"{card.device:#06x}\n",
        f"{folder}/class": f"{card.kind:#08x}\n",
        f"{folder}/power_state": f"{power}\n",
        f"{folder}/power/runtime_status": "active\n",
        f"{folder}/resource": "".join(f"{a:#018x} {b:#018x} {c:#018x}\n" for a, b, c in lines),
        f"{folder}/config": b"\xde\x10" + card.device.to_bytes(2, "little") + bytes(60),
    }
    if driver:
        files[f"{folder}/driver"] = Link(f"../../../../bus/pci/drivers/{driver}")
    return files


def module(card: Card, version: str = VERSION, *, flavour: str = "open") -> dict[str, Content]:
    """The loaded kernel driver: its entries in /proc and /sys, and its files for the running kernel."""
    return {
        **proc_driver(card, version, flavour=flavour),
        "/proc/modules": "".join(f"{name} 16384 0 - Live 0x0\n" for name in ("nvidia_uvm", "nvidia", "ext4")),
        "/proc/devices": DEVICES,
        "/sys/module/nvidia/version": f"{version}\n",
        "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "N\n",
        **module_file(KERNEL),
        f"/usr/lib/firmware/nvidia/{version}/gsp_ga10x.bin": b"",
    }


def proc_driver(card: Card, version: str = VERSION, *, flavour: str = "open") -> dict[str, Content]:
    """/proc/driver/nvidia."""
    name = "NVIDIA UNIX Open Kernel Module for x86_64" if flavour == "open" else "NVIDIA UNIX x86_64 Kernel Module"
    return {
        "/proc/driver/nvidia/version": f"NVRM version: {name}  {version}  Release Build  (build@)  \nGCC version: 13\n",
        "/proc/driver/nvidia/params": "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n",
        f"/proc/driver/nvidia/gpus/{card.address}/information": (
            f"Model: \t\t {card.name}\nIRQ:   \t\t 41\nBus Location: \t {card.address}\nDevice Minor: \t 0\n"
            f"GPU Firmware: \t {version}\nGPU Excluded:\t No\n"
        ),
    }


def module_file(release: str, name: str = "updates/dkms/nvidia.ko.zst") -> dict[str, Content]:
    """The kernel module's file for a kernel release, and its entry in modules.dep."""
    folder = f"/usr/lib/modules/{release}"
    return {f"{folder}/modules.dep": f"kernel/fs/ext4/ext4.ko.zst:\n{name}:\n", f"{folder}/{name}": b""}


# -- complete hosts ----------------------------------------------------------------------------------------------------


def _plain(card: Card | None, driver: str, nodes: Mapping[str, Device]) -> dict[str, Content | None]:
    card_files = {**bus(card), **module(card, driver)} if card and driver else bus(card, driver="") if card else {}
    without_driver: Tree = {
        "/proc/modules": "ext4 16384 0 - Live 0x0\n",
        "/proc/devices": DEVICES.replace("nvidia", "other"),
    }
    return {
        **UBUNTU,
        "/proc/version": f"Linux version {KERNEL} (buildd@lcy02) #45-Ubuntu SMP PREEMPT_DYNAMIC\n",
        "/proc/cmdline": f"BOOT_IMAGE=/vmlinuz-{KERNEL} root=/dev/vda1 ro quiet\n",
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
        "/proc/self/mountinfo": MOUNTS,
        "/sys/class/dmi/id/chassis_type": "23\n",
        "/sys/firmware/acpi": FOLDER,
        "/sys/bus/pci/devices": FOLDER,
        "/dev/null": Device(1, 3),
        "/dev/vda": Device(254, 0, 0o660),
        **without_driver,
        **card_files,
        **nodes,
    }


def plain_host(
    root: Path,
    *,
    card: Card | None = H200,
    driver: str = VERSION,
    nodes: Mapping[str, Device] = NODES,
    environ: Mapping[str, str] | None = None,
    more: Tree | None = None,
    without: Sequence[str] = (),
    errors: Mapping[str, str] | None = None,
    uid: int = 1000,
    machine: str = "x86_64",
) -> TreeHost:
    """An Ubuntu server with a GPU and a working driver. ``driver=""`` means no driver, ``card=None`` no GPU.

    ``more`` is added to the tree, and the paths in ``without`` are removed from it.
    """
    tree = {**_plain(card, driver, nodes if card and driver else {}), **(more or {})}
    variables = {"HOME": "/home/user", "SHELL": "/bin/bash", "PATH": "/usr/local/bin:/usr/bin:/bin", **(environ or {})}
    uname = ("Linux", KERNEL, machine)
    return tree_host(root, _without(tree, without), variables, errors=errors, uname=uname, uid=uid)


def _without(tree: Tree, paths: Sequence[str]) -> Tree:
    removed = tuple(paths)
    prefixes = tuple(f"{path}/" for path in removed)
    return {path: content for path, content in tree.items() if path not in removed and not path.startswith(prefixes)}


_LAYERS: Final = {
    "docker": "/var/lib/docker/overlay2",
    "podman": "/home/user/.local/share/containers/storage/overlay",
    "containerd": "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots",
}


def _container_marks(kind: str) -> tuple[dict[str, Content | None], dict[str, str]]:
    """The files and variables that identify each kind of container from inside."""
    marks: dict[str, tuple[dict[str, Content | None], dict[str, str]]] = {
        "docker": ({"/.dockerenv": ""}, {}),
        "podman": ({"/run/.containerenv": 'engine="podman-5.0.3"\n'}, {"container": "podman"}),
        "kubernetes": ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
        "containerd": ({}, {}),
        "apptainer": (
            {"/.singularity.d/libs": FOLDER},
            {"APPTAINER_CONTAINER": "/data/torch.sif", "SINGULARITY_CONTAINER": "/data/torch.sif"},
        ),
        "lxc": ({"/run/systemd/container": "lxc\n"}, {"container": "lxc"}),
        "nspawn": ({"/run/systemd/container": "systemd-nspawn\n"}, {}),
    }
    return marks[kind]


def container(
    root: Path,
    kind: str = "docker",
    *,
    card: Card = H200,
    driver: str = VERSION,
    gpu: bool = True,
    nodes: Mapping[str, Device] = NODES,
    environ: Mapping[str, str] | None = None,
    more: Tree | None = None,
    without: Sequence[str] = (),
    errors: Mapping[str, str] | None = None,
    uid: int = 0,
    machine: str = "x86_64",
) -> TreeHost:
    """A container on ``plain_host``: docker, podman, kubernetes, containerd, apptainer, lxc or nspawn.

    Without ``gpu`` the host's kernel driver is still visible in /sys and /proc/modules, but the device nodes,
    /proc/driver/nvidia and the driver's libraries are absent.
    """
    marks, variables = _container_marks(kind)
    tree: dict[str, Content | None] = {**_plain(card, driver, nodes), **marks}
    layers = _LAYERS.get("containerd" if kind == "kubernetes" else kind)
    if layers:
        tree["/proc/self/mountinfo"] = CONTAINER_MOUNTS.format(layers=layers)
    status = f"Name:\tpython\nGid:\t{uid}\t{uid}\t{uid}\t{uid}\nGroups:\t{uid} \n"
    tree |= {"/proc/self/cgroup": "0::/\n", "/proc/self/status": status, "/sys/firmware": FOLDER, **(more or {})}
    hidden = ["/sys/firmware/acpi", "/usr/lib/modules", "/usr/lib/firmware", "/dev/vda", "/sys/class/dmi"]
    if not gpu:
        hidden += [*nodes, "/proc/driver/nvidia", "/dev/nvidia-caps"]
    visible = _without(tree, [*hidden, *without])
    uname = ("Linux", KERNEL, machine)
    environment = {"PATH": "/usr/bin", **variables, **(environ or {})}
    return tree_host(root, visible, environment, errors=errors, uname=uname, uid=uid)


def wsl(
    root: Path,
    *,
    version: int = 2,
    gpu: bool = True,
    environ: Mapping[str, str] | None = None,
    more: Tree | None = None,
    without: Sequence[str] = (),
    errors: Mapping[str, str] | None = None,
    machine: str = "x86_64",
) -> TreeHost:
    """Ubuntu under the Windows Subsystem for Linux: the GPU is behind /dev/dxg, and no kernel module is loaded."""
    release = "5.15.167.4-microsoft-standard-WSL2" if version == 2 else "4.4.0-19041-Microsoft"
    tree: dict[str, Content | None] = {
        **_plain(None, "", {}),
        "/proc/version": f"Linux version {release} (Microsoft@Microsoft.com) (gcc version 11.2.0) #1 SMP\n",
        "/proc/self/cgroup": "0::/init.scope\n",
    }
    if gpu and version == 2:
        tree |= {"/dev/dxg": Device(10, 125), "/usr/lib/wsl/lib/libcuda.so.1": b"", "/usr/lib/wsl/lib/nvidia-smi": b""}
    variables = {"HOME": "/home/user", "SHELL": "/bin/bash", "WSL_DISTRO_NAME": "Ubuntu", **(environ or {})}
    uname = ("Linux", release, machine)
    return tree_host(root, _without({**tree, **(more or {})}, without), variables, errors=errors, uname=uname)


def slurm(
    root: Path,
    *,
    gpus: str = "0",
    card: Card = H200,
    driver: str = VERSION,
    environ: Mapping[str, str] | None = None,
    more: Tree | None = None,
    without: Sequence[str] = (),
    errors: Mapping[str, str] | None = None,
    machine: str = "x86_64",
) -> TreeHost:
    """A Slurm job on ``plain_host``. ``gpus=""`` is a job without GPUs: its cgroup denies access to them."""
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_PARTITION": "gpu", "SLURM_NTASKS": "1"}
    allocation = {"SLURM_JOB_GPUS": gpus, "SLURM_GPUS_ON_NODE": str(gpus.count(",") + 1), "CUDA_VISIBLE_DEVICES": gpus}
    denied = {} if gpus else {"/dev/nvidia0": "EPERM"}
    return plain_host(
        root,
        card=card,
        driver=driver,
        environ={**job, **(allocation if gpus else {}), **(environ or {})},
        more={"/proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n", **(more or {})},
        without=without,
        errors={**denied, **(errors or {})},
        machine=machine,
    )


def service(
    root: Path,
    *,
    unit: str = "jupyter.service",
    private: bool = False,
    environ: Mapping[str, str] | None = None,
    more: Tree | None = None,
    without: Sequence[str] = (),
    errors: Mapping[str, str] | None = None,
) -> TreeHost:
    """A systemd service on ``plain_host``; with ``private`` it has ``PrivateDevices=yes``."""
    mounts = MOUNTS + "900 24 0:77 / /dev rw,nosuid,noexec - tmpfs tmpfs rw,mode=755\n" if private else MOUNTS
    tree: Tree = {"/proc/self/cgroup": f"0::/system.slice/{unit}\n", "/proc/self/mountinfo": mounts, **(more or {})}
    hidden = ("/dev/vda", "/dev/nvidia-caps") if private else ()
    return plain_host(
        root,
        nodes={} if private else NODES,
        environ=environ,
        more=tree,
        without=(*hidden, *without),
        errors=errors,
    )
