"""What hides the card from a process: a scheduler, a service, a container, device nodes, environment variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from shlex import quote

from transload.diagnose import fixes
from transload.diagnose.case import CONTROL, CVD, UVM, Case, Lines, Match, Matches, rules, torch_says
from transload.diagnose.tables import covers
from transload.findings import Severity
from transload.frozen import Frozen
from transload.machine import AMD, Node
from transload.render.words import plural
from transload.steps import Step, Steps

_APPTAINER = ("apptainer", "singularity")
_SYSTEM_CONTAINERS = ("lxc", "nspawn")  # with their own init and packages: their libraries must be updated inside


@rules("surroundings", "C09", "D05")
def not_granted(m: Case) -> Matches:
    """A job or a service whose device cgroup forbids the nodes, or that was given none."""
    around, visible = m.surroundings, m.env(CVD)
    if m.no_gpu or not m.driver_fails:
        return
    nodes = (m.nodes.at(CONTROL), *m.card_nodes)
    forbidden = next((node.path for node in nodes if node.exists and node.error == "EPERM"), "")
    hidden = visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
    bare = m.fails_without_nodes and not around.container
    if around.slurm and ((forbidden and m.driver_broken) or (not m.slurm_granted and (hidden or bare))):
        evidence = (
            f"this is Slurm job {m.env('SLURM_JOB_ID') or '?'}",
            "" if m.slurm_granted else "neither SLURM_JOB_GPUS nor SLURM_GPUS_ON_NODE names a GPU",
            f"opening {forbidden} fails with EPERM: the job's device cgroup forbids it" if forbidden else "",
            f"{CVD} is {visible!r}" if hidden else "",
            m.driver_result_line,
        )
        fix = fixes.start_with_gpu(m, slurm=True)
        yield "C09", Match(evidence, fix, severity=m.no_gpu_severity, likely=not forbidden)

    dxg = around.wsl == 2 and not m.nodes.at("/dev/dxg").exists
    private = around.private_dev and (m.nodes_absent or dxg)
    if around.service and m.driver_broken and (private or forbidden) and not (around.container or around.slurm):
        why = "its /dev contains no hardware devices (PrivateDevices=yes)" if private else f"opening {forbidden}: EPERM"
        names = ("dxg",) if around.wsl else ("nvidiactl", "nvidia0", "nvidia-uvm", "nvidia-uvm-tools")
        allow = tuple(Step("copy", f"DeviceAllow=/dev/{name} rw") for name in names)
        fix = m.steps("D05", service=quote(around.service), allow=allow)
        yield "D05", Match((f"the process runs in the unit {around.service}", why, m.driver_result_line), fix)


# -- a container without the machine's card or with the wrong libraries; or a host that gives containers no card


def _inside(m: Case) -> str:
    signs = m.surroundings.evidence[:2]
    shown = f", detected by: {'; '.join(signs)}" if signs else ""
    return f"the process runs in a container ({m.surroundings.container}){shown}"


def _host_lines(m: Case) -> Lines:
    loaded = f"the host's kernel driver {m.kernel.version} is loaded".replace("  ", " ")
    return (*m.card_lines, loaded if m.kernel.loaded else "")


def _libcuda_missing(m: Case) -> bool:
    return m.no_libcuda and not m.driver.libraries.cuda


@rules("surroundings", "C08", "C05", "C04")
def given_no_gpu(m: Case) -> Matches:
    """Apptainer (C08), a Kubernetes pod (C05), or a container whose NVIDIA_VISIBLE_DEVICES asks for no card (C04)."""
    around, variable = m.surroundings, "NVIDIA_VISIBLE_DEVICES"
    if not m.driver_broken or not m.host_has_gpu:
        return
    if around.container in _APPTAINER and _libcuda_missing(m):
        evidence: Lines = (_inside(m), *_host_lines(m), m.driver_result_line)
        yield "C08", Match(evidence, fixes.start_with_gpu(m), severity=m.no_gpu_severity)
    if around.kubernetes and m.fails_without_nodes:
        evidence = ("this is a Kubernetes pod", "there is no /dev/nvidia*", *_host_lines(m))
        yield "C05", Match(evidence, fixes.start_with_gpu(m), severity=m.no_gpu_severity)
    visible = m.env(variable)
    value = "all" if visible is None else visible.strip().lower()
    in_vain = value in ("", "void", "none") and m.nodes.found and not m.card_nodes
    if in_vain and around.container and not around.kubernetes:
        origins = m.variables.origins.get(variable, ())
        where = f"It is set in: {', '.join(origins)}" if origins else "Look for it in the image's ENV and env files."
        seen = (f"{variable} is {visible!r}", "there is no /dev/nvidia0 or other card node")
        evidence, fix = (_inside(m), *seen, *_host_lines(m)), m.steps("C04", where=where)
        yield "C04", Match(evidence, fix, severity=m.no_gpu_severity, likely=value == "void")


@rules("surroundings", "C03")
def no_compute_capability(m: Case) -> Matches:
    """NVIDIA_DRIVER_CAPABILITIES asks the container runtime for other libraries than CUDA's."""
    capabilities = m.env("NVIDIA_DRIVER_CAPABILITIES")
    if not m.driver_broken or not m.surroundings.container or not capabilities:
        return
    named = {name.strip().lower() for name in capabilities.split(",")}
    has_card = m.nodes.at(CONTROL).exists or m.driver.nvml.answer.answered
    if not named & {"compute", "all"} and _libcuda_missing(m) and has_card:
        asked = f"NVIDIA_DRIVER_CAPABILITIES is {capabilities!r}"
        yield "C03", Match((_inside(m), asked, m.driver_result_line, m.nvml_result_line))


@rules("surroundings", "C10", "C07")
def other_release(m: Case) -> Matches:
    """A container whose libcuda is not of the host's driver; a note for a host whose CDI file names another release."""
    around, kernel, lib = m.surroundings, m.kernel, m.mismatched_libcuda
    if not around.container and around.cdi and kernel.version and kernel.version not in around.cdi:
        other = f"CDI files name driver {', '.join(around.cdi)}"
        yield "C07", Match((other, f"the loaded kernel driver is {kernel.version}"), m.steps("C07 host"), "note")
    if m.driver_broken and around.container and lib is not None and not lib.via.startswith("LD_"):
        which = f"{lib.target or lib.path} is version {lib.version}, but the host's kernel driver is {kernel.version}"
        evidence = (_inside(m), which, m.driver_result_line, m.nvml_result_line)
        if around.container in _SYSTEM_CONTAINERS:
            yield "C10", Match(evidence)
        elif around.container not in _APPTAINER:
            yield "C07", Match(evidence)


@rules("surroundings", "C01")
def container_without_gpu(m: Case) -> Matches:
    """A container that was started without the card, for no other reason."""
    around, visible = m.surroundings, m.env("NVIDIA_VISIBLE_DEVICES")
    if not m.driver_broken or not around.container or m.matches("C08", "C05", "C04", "C11", "C09"):
        return
    jetson, give = bool(m.hardware.tegra) and m.no_libcuda, fixes.start_with_gpu(m)
    if around.wsl == 2 and not m.hardware.dxg:  # a note, since the card cannot be seen
        yield "C01", Match((_inside(m), "there is no /dev/dxg"), give, severity="note", likely=True)
    elif jetson or (m.fails_without_nodes and m.host_has_gpu):
        others = "there is no card node, and the other nodes cannot be opened"
        nodes = "there is no /dev/nvidia*" if m.nodes_absent else others
        ignored = f"NVIDIA_VISIBLE_DEVICES is {visible!r}, but no NVIDIA container runtime applied it"
        evidence = (_inside(m), nodes, ignored if visible else "", *_host_lines(m))
        yield "C01", Match(evidence, give, severity=m.no_gpu_severity, likely=jetson)


@rules("surroundings", "C02")
def docker_without_toolkit(m: Case) -> Matches:
    """A note: the host's Docker gives containers no GPU."""
    around, snap = m.surroundings, m.surroundings.docker == "snap"
    lacking = around.docker and not around.container and (snap or around.container_toolkit is False)
    if lacking and m.host_has_gpu and not around.wsl:
        docker = "Docker is installed as a snap" if snap else "Docker is installed, but nvidia-ctk is not"
        yield "C02", Match((docker,), severity="note")


@rules("surroundings", "N02", likely=("N02",))
def image_built_without_gpu(m: Case) -> Matches:
    """A note: CUDA works in a container, and its torch is built without it."""
    first = m.torch.first
    chosen = first and first.cpu_only and (first.installer in ("uv", "conda") or first.conda_build)
    if first and chosen and m.surroundings.container and m.driver.cuda.works:
        by = f"torch {first.version} was installed by {first.installer or 'conda'}"
        yield "N02", Match((by, "CUDA works in this container"), severity="note")


# -- the device nodes under /dev through which a process reaches the driver

_NVIDIA_MAJOR = 195  # fixed; only nvidia-uvm gets a new one at each boot
_MEM_MAJOR = 1  # /dev/null, /dev/zero …
_STUB = 34
_OURS = "/dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*"


def _bad(m: Case, node: Node) -> bool:
    if node.exists:
        return node.error not in ("", "EIO") or _wrong_device(m, node)
    # the driver's library creates it for root on a host
    module = "nvidia_uvm" in m.kernel.modules or "nvidia-uvm" in m.nodes.majors
    makes = m.platform.root and not m.surroundings.container
    return not (makes and (module or node.path != UVM))


def _wrong_device(m: Case, node: Node) -> bool:
    """Whether a node points to something that is not NVIDIA's driver."""
    if not node.exists or not node.path.startswith("/dev/nvidia"):
        return False
    if node.kind != "char":
        return True
    if node.path == UVM:
        major = m.nodes.majors.get("nvidia-uvm", 0)
        return node.major != major if major else node.major == _MEM_MAJOR
    return node.major != _NVIDIA_MAJOR


def _faulty_node(m: Case) -> Node | None:
    """The node that prevents the driver from starting; ``None`` if nodes are not the reason."""
    code, nodes = m.driver_result, m.nodes
    if not m.driver_broken or code <= 0 or code == _STUB or not nodes.found or m.no_gpu or m.withheld:
        return None
    # seen on a live card: without /dev/nvidiactl or the card's node cuInit returns 100, without /dev/nvidia-uvm 999
    control, cards = nodes.at(CONTROL), m.card_nodes or (nodes.at("/dev/nvidia0"),)
    needed: tuple[Node, ...] = {999: (nodes.at(UVM),), 100: cards}.get(code, ())
    if m.surroundings.wsl:
        needed = tuple(node for node in nodes.found if node.path == "/dev/dxg" and node.exists)
    elif m.hardware.tegra:
        tegra = (node for node in nodes.found if node.path.startswith(("/dev/nvmap", "/dev/nvhost")))
        needed = tuple(node for node in tegra if node.error in ("EACCES", "EPERM"))
    elif m.kernel.loaded is False or (m.nodes_absent and m.surroundings.container):
        return None
    elif _bad(m, control):
        needed = (control,)
    return needed[0] if needed and all(_bad(m, node) for node in needed) else None


def _node_match(m: Case, node: Node, why: Lines, fix: Steps | None = None, *, likely: bool = False) -> Match:
    line = f"{node.path} does not exist"
    if node.exists:
        owner = f"owner {node.uid}, group {node.group or node.gid}"
        state = f"opening it fails with {node.error}" if node.error else "it can be opened"
        line = f"{node.path}: {state} (mode {node.mode:04o}, {owner}, device {node.major}:{node.minor})"
    return Match((line, *why, m.driver_result_line, m.nvml_result_line), fix, likely=likely)


@rules("nodes", "D02", "D04", "D01")
def unusable_node(m: Case) -> Matches:
    """A node that is not the driver's device (D02), that a device cgroup forbids (D04), or that is missing (D01)."""
    node, container = _faulty_node(m), m.surroundings.container
    if node is None:
        return
    is_uvm, wrong = node.path == UVM, _wrong_device(m, node)
    make = "nvidia-modprobe -u -c=0" if is_uvm else "nvidia-modprobe -c 0"
    if wrong or node.error in ("ENXIO", "ENODEV"):
        name, usual = ("nvidia-uvm", 0) if is_uvm else ("nvidia", _NVIDIA_MAJOR)
        major = m.nodes.majors.get(name, usual)
        should = f"/proc/devices gives {name} the number {major}" if major else f"/proc/devices has no {name}"
        why = f"it is a {node.kind}, not a device" if node.kind != "char" else should
        fix = m.steps("D02 container" if container else "D02", path=node.path, make=make)
        if container == "lxc":
            majors = sorted({_NVIDIA_MAJOR, m.nodes.majors.get("nvidia-uvm", 0)} - {0})
            allow = tuple(Step("copy", f"lxc.cgroup2.devices.allow: c {major}:* rwm") for major in majors)
            fix = m.steps("D02 lxc", path=node.path, allow=allow)
        yield "D02", _node_match(m, node, (why,), fix, likely=not wrong)
    elif node.error == "EPERM":
        allowed = f"the devices cgroup allows: {', '.join(m.nodes.cgroup[:4])}" if m.nodes.cgroup else ""
        yield "D04", _node_match(m, node, (allowed,), m.steps("D04 container" if container else "D04"))
    if not node.exists:
        unloaded = is_uvm and m.kernel.modules and "nvidia_uvm" not in m.kernel.modules
        why = "the module nvidia_uvm is not loaded" if unloaded else ""
        yield "D01", _node_match(m, node, (why,), m.steps("D01", path=node.path, make=make, uvm=is_uvm))


@rules("nodes", "D06", "D03", likely=("D06",))
def no_access(m: Case) -> Matches:
    """A node that this user may not open: because of SELinux (D06), its file system or its mode (D03)."""
    node, container = _faulty_node(m), m.surroundings.container
    if node is None or node.error != "EACCES":
        return
    ours = node.group != "" and node.group in m.platform.groups and node.mode & 0o060 == 0o060
    open_to_user = ours or node.mode & 0o006 == 0o006
    allows = m.platform.root or open_to_user  # by mode and groups
    if allows and not node.nodev and m.surroundings.selinux == "enforcing":
        yield "D06", _node_match(m, node, ("SELinux is enforcing",))
    elif node.nodev:
        mounted = "its file system is mounted with nodev: devices cannot be opened there, even by root"
        how, folder = "D03 volume" if container else "D03 nodev", node.path.rpartition("/")[0]
        yield "D03", _node_match(m, node, (mounted,), m.steps(how, path=node.path, folder=folder))
    else:
        other = "its mode would allow it: something else forbids it (AppArmor, a user namespace)" if allows else ""
        mode = m.kernel.parameters.get("DeviceFileMode", "")
        unusual = re.fullmatch(r"[0-9]{1,6}", mode) and int(mode) != 0o666
        asked = f"the module has DeviceFileMode={int(mode):04o}" if unusual else ""
        if container:
            fix = m.steps("D03 container", path=node.path)
        elif open_to_user:  # changing the mode or joining the group does not help
            fix = m.steps("D03 forbidden")
        elif node.group and node.group != "root" and node.mode & 0o060 == 0o060:
            fix = m.steps("D03 group", group=node.group)
        elif not node.path.startswith("/dev/nvidia"):
            fix = m.steps("D03", paths=node.path, option=())
        else:
            option = "options nvidia NVreg_DeviceFileMode=0666"
            fix = m.steps("D03", paths=_OURS, option=fixes.modprobe_option(m, option, "nvidia-device-files.conf"))
        yield "D03", _node_match(m, node, (other, asked), fix, likely=allows)


@rules("nodes", "R01")
def amd_node(m: Case) -> Matches:
    """The node of AMD's driver cannot be opened."""
    first, kfd = m.torch.first, m.nodes.at("/dev/kfd").error
    amd = first and first.hip and any(card.vendor == AMD for card in m.hardware.pci or ())
    needless = m.torch_run.available or (m.usable("rocm") and kfd == "ENOENT")
    if amd and kfd and m.nodes.found and not needless:
        container = m.surroundings.container
        fix = m.steps("R01 container" if container else "R01 absent" if kfd == "ENOENT" else "R01")
        yield "R01", Match((f"/dev/kfd: {kfd}", torch_says(m.complaint("HIP"))), fix)


# -- CUDA_VISIBLE_DEVICES as the CUDA driver reads it

# The grammar was determined value by value with driver 580.159 (Linux, one card): see tests/diagnose/test_visible.py.
# torch has its own parser for device_count(), which differs: it accepts no upper case in a UUID and no UUID
# without dashes, does not truncate numbers to 32 bits, and treats a duplicate as an empty list even after the place
# where the driver stops reading. Then is_available() is True and device_count() is 0.
NO_DEVICE, INVALID_DEVICE = 100, 101
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]*)(?<=[0-9])")
_DIGITS = 20  # more than a 64-bit number has
_UUID = re.compile(r"(?:-*[0-9A-Fa-f]){32}|[0-9A-Fa-f-]*\Z")  # the driver reads no further than 32 digits


class Visible(Frozen):
    """The devices that a process sees, and which part of the value was ignored.

    ``indices`` are positions among the GPUs, ``mig`` among the MIG devices. ``why`` is why reading stopped at ``token``
    (empty if everything was read), and ``dropped`` is the rest from there on. ``error`` is the result of ``cuInit``: 0,
    100 (no device) or 101 (a duplicate). ``known`` is false if it depends on an unknown UUID.
    """

    indices: tuple[int, ...] = ()
    mig: tuple[int, ...] = ()
    why: str = ""
    token: str = ""
    dropped: tuple[str, ...] = ()
    error: int = 0
    known: bool = True

    @property
    def count(self) -> int:
        """How many devices are visible."""
        return len(self.indices) + len(self.mig)


def visible_devices(value: str, gpus: Sequence[str], mig: Sequence[str] = ()) -> Visible:
    """Which of the GPUs with these UUIDs a value of CUDA_VISIBLE_DEVICES shows; an empty UUID is unknown.

    The first element decides whether it is a list of numbers or of UUIDs. Reading stops at the first element that is of
    the other kind, invalid, or names no device. A number is what C's ``strtol`` reads at the start of the element,
    truncated to 32 bits. A UUID begins with ``GPU-`` or ``MIG-`` and may be a prefix that only one device has.

    >>> gpus = ("GPU-6e1b1a3c-0000-4000-8000-00000000000a", "GPU-77aa0000-0000-4000-8000-00000000000b")
    >>> visible_devices("1,7,0", gpus)
    Visible(indices=(1,), mig=(), why='no-such-index', token='7', dropped=('7', '0'), error=0, known=True)
    >>> visible_devices("GPU-77", gpus).indices, visible_devices("", gpus).error, visible_devices("0,0", gpus).error
    ((1,), 100, 101)
    """
    tokens = value.split(",")
    uuids = [_hex(uuid[4:]) for uuid in (*gpus, *mig)]
    by_uuid = value.startswith(("GPU-", "MIG-"))
    taken: list[int] = []  # positions among the GPUs and, after them, the MIG devices
    why, rest, known = "", [""], True
    for place, token in enumerate(tokens):
        device = _by_uuid(token, uuids) if by_uuid else _by_number(token, len(gpus))
        if isinstance(device, str):
            why, rest = device, tokens[place:]
            # Drivers before 470 named a MIG device ``MIG-GPU-…/1/0``, with numbers that NVML does not list.
            unknown = _hex(token[4:]) and not all(uuids)
            known = why != "no-such-uuid" or not (token.startswith("MIG-GPU-") or unknown)
            break
        if device in taken:
            return Visible(why="twice", token=token, dropped=tuple(tokens), error=INVALID_DEVICE)
        taken.append(device)
    indices = tuple(index for index in taken if index < len(gpus))
    slices = tuple(index - len(gpus) for index in taken if index >= len(gpus))
    error = 0 if taken or not known else NO_DEVICE
    return Visible(indices, slices, why, token=rest[0], dropped=tuple(rest) if why else (), error=error, known=known)


def _by_number(token: str, count: int) -> int | str:
    """The device, or what is wrong with the token."""
    digits = _NUMBER.match(token)
    if digits is None:
        return "mixed" if token.startswith(("GPU-", "MIG-")) else "not-a-number" if token.strip() else "empty"
    number = int(f"{digits[1]}{digits[2][:_DIGITS] or 0}")
    low = max(min(number, 2**63 - 1), -(2**63)) & 0xFFFFFFFF  # strtol saturates; then a cast to int
    if low >= 2**31:
        return "negative"
    return low if low < count else "no-such-index"


def _by_uuid(token: str, uuids: Sequence[str]) -> int | str:
    """The device, or what is wrong with the token."""
    if not token.startswith(("GPU-", "MIG-")):
        return "mixed"
    wanted = _hex(token[4:])
    matching = [index for index, uuid in enumerate(uuids) if wanted and uuid.startswith(wanted)]
    return matching[0] if len(matching) == 1 else "ambiguous" if matching else "no-such-uuid"


def _hex(text: str) -> str:
    """The hexadecimal digits that the driver reads, without dashes; empty if anything else is before the 32nd."""
    read = _UUID.match(text)
    return read[0].replace("-", "").lower() if read else ""


# -- environment variables that hide a GPU from a process, or change how CUDA works in it

_ORDER = "CUDA_DEVICE_ORDER"
_WHY = {
    "empty": ("E01", "an empty element ends the list"),
    "negative": ("E01", "a negative number ends the list"),
    "not-a-number": ("E01", "{token} is neither a number nor a UUID, and ends the list"),
    "no-such-index": ("E02", "{token} is not a valid index: they go from 0 to {last}"),
    "twice": ("E03", "{token} names a GPU that is already in the list; CUDA then rejects the whole list"),
    "no-such-uuid": ("E04", "no GPU's UUID begins with {token}"),
    "ambiguous": ("E04", "more than one UUID begins with {token}"),
    "mixed": ("E04", "{token} is of a different kind than the first element: a list has either numbers or UUIDs"),
}
"""Why ``visible_devices`` stopped reading → the rule that reports it, and its words."""


@rules("variables", "E03", "E01", "E02", "E04", "E13", "E07", likely=("E07",))
def hidden_gpus(m: Case) -> Matches:
    """GPUs hidden by CUDA_VISIBLE_DEVICES, an error if none is left; where it is set; values only torch misreads."""
    value, run, nvml = m.env(CVD), m.torch_run, [gpu for gpu in m.driver.nvml.gpus if gpu.code == 0]
    if value is None:
        return
    freed = next((tried.cuda for tried in m.driver.experiments if CVD in tried.change and tried.cuda.works), None)
    gpus: Lines = ("",) * max(len(m.hardware.gpus), len(m.kernel.gpus))  # their UUIDs, empty where unknown
    if nvml:
        gpus = tuple(gpu.uuid for gpu in nvml)
    elif freed:
        gpus = tuple(gpu.uuid for gpu in freed.gpus) or ("",) * freed.count
    mig = tuple(uuid for gpu in nvml for uuid in gpu.mig_devices)
    # not if the GPUs are unknown, or Slurm set it for a job without a GPU
    judged = gpus and m.has_nvidia and not (m.surroundings.slurm and not m.slurm_granted)
    seen = visible_devices(value, gpus, mig) if judged else Visible()
    is_cut = seen.known and seen.why != ""
    correct = m.steps(f"{CVD} in Slurm" if m.surroundings.slurm else CVD)
    if is_cut and not (seen.error and m.cuda_works):
        code, why = _WHY[seen.why]
        hides = "an empty value hides every GPU"
        why = hides if value == "" else why.format(token=repr(seen.token), last=len(gpus) - 1)
        answer = m.driver_result_line if seen.error and m.driver.cuda.answer.state != "unasked" else ""
        without = ""
        if tried := next((tried.cuda for tried in m.driver.experiments if tried.change == (CVD,)), None):
            finds = f"finds {plural(tried.count, 'GPU')}" if tried.works else "does not work either"
            without = f"without {CVD} the driver {finds}"
        evidence = (f"{CVD} is {value!r}", why, answer, without)
        if seen.error:
            yield code, Match(evidence, correct)
        elif seen.why != "negative":  # -1 at the end of a list is a known way to end it
            rest = visible_devices(",".join(seen.dropped[1:]), gpus, mig) if len(seen.dropped) > 1 else Visible()
            severity: Severity = "warning" if rest.count > 0 else "note"  # a warning if that hides a GPU
            left = f"{seen.count} of {len(gpus)} GPUs are visible"
            title = Step("title", f"{CVD} is cut off at {seen.token!r}")
            yield code, Match((*evidence, left), (title, *correct), severity)
    if run.count == 0 and run.cuda_works:
        counted = "torch.cuda.device_count() is 0, but a kernel ran on the GPU"
        yield "E13", Match((f"{CVD} is {value!r}", counted), correct, severity="warning")
    places = m.variables.origins.get(CVD, ())
    if places and not m.cuda_works and is_cut:
        yield "E07", Match(tuple(f"{CVD} is set in {place}" for place in places), severity="note")


@rules("variables", "E12")
def invalid_order(m: Case) -> Matches:
    """CUDA_DEVICE_ORDER has a value that CUDA rejects."""
    order = m.env(_ORDER)
    if order not in (None, "FASTEST_FIRST", "PCI_BUS_ID") and m.has_nvidia and not m.cuda_works:
        yield "E12", Match((f"{_ORDER} is {order!r}", m.driver_result_line))


@rules("variables", "A04")
def compiler_switch(m: Case) -> Matches:
    """A variable that forces or forbids compiling PTX; a note if nothing fails because of it."""
    switches = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT", "CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")
    jit = next((name for name in switches if (m.env(name) or "0").strip() not in ("", "0")), "")
    if jit and m.has_nvidia:
        complaint = m.complaint(r"no kernel image is available|PTX JIT compil")
        # whether none of torch's own kernels can run on any of the cards
        codes = tuple(m.torch_libraries.cubins or ())
        usable = [code for code in codes if code.startswith("compute_") == ("FORCE" in jit)]
        must_fail = bool(codes and m.cards) and not any(covers(usable, card.capability) for card in m.cards)
        severity: Severity = "error" if complaint or (m.torch_not_run and must_fail) else "note"
        yield "A04", Match((f"{jit} is {m.env(jit)!r}", torch_says(complaint)), fixes.unset(m, jit), severity=severity)


@rules("variables", "E09")
def hidden_amd_gpus(m: Case) -> Matches:
    """A variable hides every AMD GPU."""
    first, gpus = m.torch.first, m.usable("rocm")
    if first and first.hip and gpus and m.torch_run.available is False:
        for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", CVD):
            value = m.env(name)
            if value is not None and visible_devices(value, ("",) * len(gpus)).error:
                yield "E09", Match((f"{name} is {value!r}", f"AMD GPUs found: {len(gpus)}"), fixes.unset(m, name))
                break


@rules("variables", "E10")
def check_by_nvml(m: Case) -> Matches:
    """A note: torch asks NVML whether CUDA is available, and CUDA does not work."""
    check = "PYTORCH_NVML_BASED_CUDA_CHECK"
    if m.env(check) == "1" and m.torch_run.available and (not m.cuda_works or m.failed("init")):
        evidence = (f"{check} is '1'", "torch.cuda.is_available() is True, but CUDA does not work")
        yield "E10", Match(evidence, severity="note")


@rules("variables", "E05")
def other_order(m: Case) -> Matches:
    """A note: CUDA numbers the cards in another order than nvidia-smi."""
    cuda = [gpu for gpu in m.driver.cuda.gpus if gpu.uuid]
    uuids = [gpu.uuid for gpu in cuda]
    nvml = [gpu for gpu in m.driver.nvml.gpus if gpu.uuid in uuids]
    differ = len(cuda) == len(nvml) > 1 and uuids != [gpu.uuid for gpu in nvml]
    if differ and not m.env(CVD) and not m.env(_ORDER):
        names = f"CUDA's device 0 is {cuda[0].name}, nvidia-smi's is {nvml[0].name}"
        yield "E05", Match((names,), severity="note")


@rules("variables", "E11")
def unusable_cache(m: Case) -> Matches:
    """A note: compiled kernels cannot be cached."""
    if m.variables.cache_problem and m.cuda_works:
        yield "E11", Match((m.variables.cache_problem,), severity="note")
