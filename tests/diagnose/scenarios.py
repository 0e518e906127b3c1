"""Worlds with one fault each: a tree for the files, a forged driver for the answers, and the cause that is true.

Every code that ``cuInit`` gives, and every code of NVML that decides something, as it comes about on a plain host, in a
container, under WSL and in a job of Slurm, on x86-64 and on aarch64. The driver is asked by the same child processes as
on a real machine. These can load only what is made for the machine the tests run on, so each library has a twin for it
outside the tree. Of that machine itself nothing is seen, a driver of its own least of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from tests.diagnose import trees
from tests.diagnose.machines import healthy
from tests.diagnose.trees import H200, RTX_4090, Card, Content, Device, Forged, Link, TreeHost, of_machine, on, write
from tests.elf_forge import NATIVE
from tests.fake_driver import Device as Gpu
from tests.fake_driver import fake_libcuda, fake_nvml, hangs, returns

from transload.diagnose.probes import probe
from transload.diagnose.report import Diagnosis, judge_machine
from transload.machine import Machine

LIB = "/usr/lib/x86_64-linux-gnu"
WSL = "/usr/lib/wsl/lib"
COMPAT = "/usr/local/cuda/compat"
STUBS = "/usr/local/cuda/lib64/stubs"
AROUND = ("host", "docker", "wsl", "slurm")
CURED = "/cured"
ABSENT = b""


def libcuda(**options: object) -> Forged:
    return forged(fake_libcuda, options)


def libnvml(**options: object) -> Forged:
    return forged(fake_nvml, options)


def forged(make: Callable[..., bytes], options: Mapping[str, object]) -> Forged:
    """Made once for each machine: most worlds have the same libraries."""

    def made(machine: str) -> bytes:
        if "overrides" in options:
            return make(machine=machine, **options)
        key = f"{make.__name__} {machine} {options}"
        if key not in MADE:
            MADE[key] = make(machine=machine, **options)
        return MADE[key]

    return Forged(made)


MADE: dict[str, bytes] = {}


@dataclass(frozen=True)
class ScenarioHost(TreeHost):
    """A host whose children load the twins, under the folder ``twins``, of the libraries its loader would find.

    Without the variable ``cure`` the driver works: a forged one cannot read its environment.
    """

    cure: str = ""
    twins: str = ""
    targets: dict[str, str] = field(default_factory=dict, compare=False)
    """Where paths lead, remembered: the tree stays as it is."""

    def target(self, path: str) -> str:
        if path not in self.targets:
            self.targets[path] = super().target(path)
        return self.targets[path]

    @property
    def folders(self) -> list[str]:
        cured = self.cure and self.cure not in self.environ
        usual = [*self.environ.get("LD_LIBRARY_PATH", "").split(":"), on(self.uname[2], LIB), WSL]
        return [f"{self.twins}{folder}" for folder in ([CURED] if cured else usual) if folder]

    def real(self, path: str) -> str:
        if "/" in path:
            return super().real(path)
        paths = [f"{folder}/{path}" for folder in self.folders]
        return next((each for each in paths if Path(each).exists()), f"{self.twins}/{path}")


@dataclass(frozen=True)
class World:
    """What is changed in a world that works."""

    truth: str
    """The codes that are right, with ``|`` between; empty where nothing is wrong."""
    init: int = 0
    nvml: int = 0
    version: int = 13000
    driver: str = trees.VERSION
    """Of the libraries; the kernel's is the usual one."""
    card: Card = H200
    gpus: tuple[Gpu, ...] = (Gpu(),)
    cuda: Forged | bytes | None = None
    """Another libcuda than ``init`` and ``version`` make; ``ABSENT`` for none."""
    environ: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Content | None] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    uid: int = 1000
    gpu: bool = True
    slurm: str = "0"
    cure: str = ""
    """The variable without which all is well."""
    change: Callable[[Machine], Machine] = lambda machine: machine


def libraries(world: World, folder: str) -> dict[str, Content]:
    cuda = libcuda(init=world.init, version=world.version, devices=world.gpus) if world.cuda is None else world.cuda
    nvml = libnvml(init=world.nvml, driver=world.driver, cuda=world.version, devices=world.gpus)
    version = f".{world.driver}" if folder == LIB else ".1"
    files: dict[str, Content] = {f"{folder}/libnvidia-ml.so{version}": nvml}
    if cuda:
        files[f"{folder}/libcuda.so{version}"] = cuda
    if folder == LIB:
        files[f"{folder}/libnvidia-ptxjitcompiler.so.1"] = libcuda(devices=())
        files |= {
            path.replace(version, ".1"): Link(path.rpartition("/")[2]) for path in tuple(files) if version in path
        }
    return files


def host_of(world: World, around: str, root: Path, machine: str) -> ScenarioHost:
    more = {**libraries(world, WSL if around == "wsl" else LIB), **world.more}
    if world.cure:
        more |= libraries(World(""), CURED)
    tree = root / "tree"
    make: Callable[..., TreeHost]
    if around == "docker":
        more = {path: content for path, content in more.items() if world.gpu or not path.startswith(LIB)}
        make = partial(trees.container, card=world.card, gpu=world.gpu)
    elif around == "wsl":
        make = trees.wsl
    elif around == "slurm":
        make = partial(trees.slurm, gpus=world.slurm, card=world.card)
    else:
        make = partial(trees.plain_host, card=world.card, uid=world.uid)
    host = make(
        tree,
        environ=dict(world.environ),
        more=more,
        without=world.without,
        errors=world.errors,
        machine=machine,
    )
    twins = root / "twins"
    gone = (*world.without, *(f"{path}/" for path in world.without))
    for path, content in more.items():
        if (".so" in path or content is None) and not path.startswith(gone):
            made = content.make(NATIVE) if isinstance(content, Forged) else content
            write(twins, of_machine(machine, {path: made}))
    known = {each.name: getattr(host, each.name) for each in fields(host)}
    return ScenarioHost(**known, cure=world.cure, twins=str(twins))


def probed(host: ScenarioHost) -> Machine:
    """What the probes find, apart from torch, with the libraries where the host has them."""
    machine = probe(torch=False, host=host)
    driver = machine.driver
    nvml = replace(driver.nvml, library=driver.nvml.library.removeprefix(host.twins))
    cuda = replace(driver.cuda, library=driver.cuda.library.removeprefix(host.twins))
    return replace(machine, driver=replace(driver, nvml=nvml, cuda=cuda))


def diagnose(world: World, around: str, root: Path, machine_name: str = "x86_64") -> Diagnosis:
    """The doctor's word on a world. Its Python and its torch are those of a healthy machine."""
    machine = probed(host_of(world, around, root, machine_name))
    sound = healthy()
    return judge_machine(
        world.change(
            replace(
                machine,
                python=sound.python,
                torch=sound.torch,
                torch_libraries=sound.torch_libraries,
                extensions=(),
            )
        )
    )


def named(diagnosis: Diagnosis) -> str:
    """The causes that were named, in order."""
    return "+".join(found.code for found in diagnosis.findings if found.severity == "error")


MACHINES = {"host": ("x86_64", "aarch64"), "docker": ("x86_64",), "wsl": ("x86_64",), "slurm": ("aarch64",)}


def mistakes(name: str, folder: Path) -> list[str]:
    """Where something else than the truth was said of the worlds of one name."""
    found = []
    for around, world in worlds()[name].items():
        for machine in MACHINES[around]:
            diagnosis = diagnose(world, around, folder / around / machine, machine)
            told = [(each.code, each.title, each.evidence) for each in diagnosis.findings]
            if named(diagnosis) not in world.truth.split("|") or diagnosis.machine.problems:
                found.append(f"{around} {machine}: {world.truth} and not {told} {diagnosis.machine.problems}")
    return found


# -- the table


def everywhere(world: World, **others: World) -> dict[str, World]:
    """The same world on all four kinds of host, but for those that differ."""
    return {around: others.get(around, world) for around in AROUND}


def node(path: str, device: Device) -> dict[str, Content]:
    return {path: device}


STUB: dict[str, Content] = {
    f"{STUBS}/libcuda.so.1": Link("libcuda.so"),
    f"{STUBS}/libcuda.so": libcuda(init=34, overrides={"cuDriverGetVersion": returns(34)}),
}
OLD = "535.104.05"


def compat(init: int) -> dict[str, Content]:
    """An image's compat library, which its loader takes before the driver's."""
    return {
        f"{COMPAT}/libcuda.so.1": Link(f"libcuda.so.{OLD}"),
        f"{COMPAT}/libcuda.so.{OLD}": libcuda(init=init, version=12020),
    }


def compat_world(init: int, truth: str, card: Card, gpu: Gpu) -> World:
    return World(truth, card=card, gpus=(gpu,), environ={"LD_LIBRARY_PATH": COMPAT}, more=compat(init))


GEFORCE = Gpu("NVIDIA GeForce RTX 4090", (8, 9))
NO_DRIVER = World("K01", card=H200, cuda=ABSENT)
UVM = "/dev/nvidia-uvm"


def worlds() -> dict[str, dict[str, World]]:
    """Name → kind of host → world."""
    return {**cuda_worlds(), **nvml_worlds()}


def cuda_worlds() -> dict[str, dict[str, World]]:
    """One for every answer of the driver, crossed with every kind of host."""
    hidden = World("E01", 100, environ={"CUDA_VISIBLE_DEVICES": "-1"}, cure="CUDA_VISIBLE_DEVICES")
    fabric = (Gpu(fabric_state=1),)
    return {
        "everything works": everywhere(World("")),
        "no libcuda": {
            "host": World(
                "K01",
                cuda=ABSENT,
                without=("/proc/driver", "/sys/module", "/usr/lib/modules", *trees.NODES),
                more={
                    **trees.bus(H200, ""),
                    "/proc/modules": "ext4 1 0 - Live 0x0\n",
                    f"{LIB}/libnvidia-ml.so.1": None,
                },
            ),
            "docker": World("C01", gpu=False),
            "wsl": World("U08", cuda=ABSENT, without=(f"{WSL}/libcuda.so.1", f"{WSL}/libnvidia-ml.so.1")),
            "slurm": World("U06", cuda=ABSENT),
        },
        "no libcuda that the loader sees": {
            around: World(
                "U08" if around == "wsl" else "U05|C03" if around == "docker" else "U05",
                cuda=ABSENT,
                more={"/opt/nvidia/lib64/libcuda.so.1": libcuda()},
            )
            for around in ("host", "docker", "slurm")
        },
        "cuInit 100, hidden": everywhere(hidden),
        "cuInit 100, no card given": {
            "host": World(
                "D03", 100, errors={"/dev/nvidia0": "EACCES"}, more=node("/dev/nvidia0", Device(195, 0, 0o600))
            ),
            "docker": World("C04", 100, environ={"NVIDIA_VISIBLE_DEVICES": "none"}, without=tuple(trees.NODES)),
            "slurm": World("C09", 100, slurm=""),
        },
        "driver older than the build": everywhere(World("V01", 0, version=12080)),
        "cuInit 35": everywhere(World("V01", 35, version=12080)),
        "cuInit 3": everywhere(World("K10", 3), wsl=World("X08", 3)),
        "cuInit 2": everywhere(
            World("X04", 2, more={"/proc/self/limits": "Max address space         8589934592  8589934592  bytes\n"}),
            wsl=World("U10", 2, gpus=(Gpu(), Gpu(uuid="GPU-00000000-0000-4000-8000-000000000002"))),
        ),
        "cuInit 999, no uvm": {
            "host": World("D01", 999, without=(UVM,)),
            "docker": World("D01", 999, without=(UVM,)),
            "slurm": World("D01", 999, without=(UVM,)),
            "wsl": World("X08", 999),
        },
        "cuInit 999, uvm of another major": {
            around: World("D02", 999, more=node(UVM, Device(511, 0))) for around in ("host", "docker", "slurm")
        },
        "cuInit 999, uvm refused": {
            "host": World("D03", 999, errors={UVM: "EACCES"}, more=node(UVM, Device(238, 0, 0o600))),
            "docker": World("D04", 999, errors={UVM: "EPERM"}),
            "slurm": World("D04|C09", 999, errors={UVM: "EPERM"}),
        },
        "cuInit 34": everywhere(World("U04", environ={"LD_LIBRARY_PATH": STUBS}, more=STUB)),
        "cuInit 46, exclusive": everywhere(
            World("S05", 46, gpus=(Gpu(compute_mode=3, processes=((4711, 1 << 30),)),)),
        ),
        "cuInit 101, twice the same": everywhere(
            World("E03", 101, environ={"CUDA_VISIBLE_DEVICES": "0,0"}, cure="CUDA_VISIBLE_DEVICES")
        ),
        "cuInit 101, order": everywhere(
            World("E12", 101, environ={"CUDA_DEVICE_ORDER": "fastest"}, cure="CUDA_DEVICE_ORDER")
        ),
        "cuInit 304": {
            "host": World("X08", 304),
            "docker": World("C11", 304, more={"/proc/version": "Linux version 4.4.0 (gVisor) #1 SMP\n"}),
            "slurm": World("X08", 304),
            "wsl": World("X08", 304),
        },
        "cuInit 222": everywhere(World("X08|V02", 222)),
        "cuInit 802": everywhere(World("S01", 802, gpus=fabric), wsl=World("X08", 802)),
        "cuInit 803": {
            "host": World("U01", 803, 18, driver="580.95.05"),
            "docker": compat_world(803, "U02", H200, Gpu()),
            "slurm": World("U01", 803, 18, driver="580.95.05"),
            "wsl": World(
                "U09",
                more={
                    f"{LIB}/libcuda.so.1": Link(f"libcuda.so.{OLD}"),
                    f"{LIB}/libcuda.so.{OLD}": libcuda(init=803),
                },
            ),
        },
        "cuInit 804": {around: compat_world(804, "U03", RTX_4090, GEFORCE) for around in ("host", "docker", "slurm")},
        "cuInit 805": everywhere(mps(805), wsl=World("X08|S04", 805)),
        "cuInit 807": everywhere(mps(807), wsl=World("X08|S04", 807)),
        "a driver that hangs": everywhere(World("X02", cuda=libcuda(overrides={"cuInit": hangs()}))),
        "a libcuda that is a text": everywhere(World("U13", cuda=b"this is no library\n")),
        "a libcuda without symbols": everywhere(World("U13|X08", cuda=libcuda(overrides={"cuInit": None}))),
    }


def mps(code: int) -> World:
    return World("S04", code, environ={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}, more={"/tmp/mps/control": ""})  # noqa: S108


def nvml_worlds() -> dict[str, dict[str, World]]:
    """Where NVML's answer is what decides."""
    lost = libnvml(devices=(Gpu(),), overrides={"nvmlDeviceGetHandleByIndex_v2": returns(15)})
    linux = ("host", "docker", "slurm")
    return {
        "NVML 4": {
            around: World(
                "D03", 100, 4, errors={"/dev/nvidiactl": "EACCES"}, more=node("/dev/nvidiactl", Device(195, 255, 0o600))
            )
            for around in linux
        },
        "NVML 9": {
            "host": World(
                "K02",
                100,
                9,
                without=("/proc/driver", "/sys/module", f"/usr/lib/modules/{trees.KERNEL}", *trees.NODES),
                more={
                    **trees.bus(H200, ""),
                    **trees.module_file("6.8.0-44-generic"),
                    "/proc/modules": "ext4 1 0 - Live 0x0\n",
                },
            ),
            "wsl": World("", 0, 9),
        },
        "NVML 15": {
            around: World("H02", 999, more={f"{LIB}/libnvidia-ml.so.{trees.VERSION}": lost}) for around in linux
        },
        "NVML 17": {around: World("D02", 100, 17, more=node("/dev/nvidiactl", Device(1, 3))) for around in linux},
        "NVML 18": {around: World("U01", 803, 18, driver="580.95.05") for around in ("host", "slurm")}
        | {"docker": World("U01|C07", 803, 18, driver="580.95.05")},
        "NVML 999": {
            "docker": World("D04", 100, 999, errors=dict.fromkeys(trees.NODES, "EPERM")),
        },
    }


def scenarios() -> Iterator[tuple[str, str, World]]:
    for name, hosts in worlds().items():
        for around, world in hosts.items():
            yield name, around, world
