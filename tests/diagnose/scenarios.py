"""Scenarios with one fault each: a directory tree, a forged driver, and the cause that the doctor must name.

They cover every result of ``cuInit``, and every result of NVML that decides between causes, on a plain host, in a
container, under WSL and in a Slurm job, on x86-64 and on aarch64. The same child processes query the driver as on a
real machine. These can load only libraries for the architecture the tests run on, so each library has a native copy
outside the tree. Nothing of the machine the tests run on is visible, in particular no driver installed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from tests.diagnose import trees
from tests.diagnose.machines import healthy
from tests.diagnose.trees import (
    H200,
    RTX_4090,
    Card,
    Content,
    Device,
    Forged,
    Link,
    TreeHost,
    translate,
    translate_tree,
    write,
)
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
HOST_KINDS = ("host", "docker", "wsl", "slurm")
WORKING_DRIVER = "/cured"
ABSENT = b""


def libcuda(**options: object) -> Forged:
    return forged(fake_libcuda, options)


def libnvml(**options: object) -> Forged:
    return forged(fake_nvml, options)


def forged(make: Callable[..., bytes], options: Mapping[str, object]) -> Forged:
    """A forged library, built once for each architecture: most scenarios share the same libraries."""

    def build(machine: str) -> bytes:
        if "overrides" in options:
            return make(machine=machine, **options)
        key = f"{make.__name__} {machine} {options}"
        if key not in FORGED:
            FORGED[key] = make(machine=machine, **options)
        return FORGED[key]

    return Forged(build)


FORGED: dict[str, bytes] = {}


@dataclass(frozen=True)
class ScenarioHost(TreeHost):
    """A host whose child processes load native copies, in the folder ``native``, of the libraries its loader finds.

    The driver works where ``faulty_variable`` is not set: a forged library cannot read the environment itself.
    """

    faulty_variable: str = ""
    native: str = ""
    targets: dict[str, str] = field(default_factory=dict, compare=False)
    """A cache of resolved paths: the tree does not change."""

    def target(self, path: str) -> str:
        if path not in self.targets:
            self.targets[path] = super().target(path)
        return self.targets[path]

    @property
    def folders(self) -> list[str]:
        repaired = self.faulty_variable and self.faulty_variable not in self.environ
        usual = [*self.environ.get("LD_LIBRARY_PATH", "").split(":"), translate(self.uname[2], LIB), WSL]
        return [f"{self.native}{folder}" for folder in ([WORKING_DRIVER] if repaired else usual) if folder]

    def real(self, path: str) -> str:
        if "/" in path:
            return super().real(path)
        paths = [f"{folder}/{path}" for folder in self.folders]
        return next((candidate for candidate in paths if Path(candidate).exists()), f"{self.native}/{path}")


@dataclass(frozen=True)
class Scenario:
    """How a scenario differs from a host on which everything works."""

    truth: str
    """The codes of the correct diagnoses, separated by ``|``; empty if nothing is wrong."""
    init: int = 0
    nvml: int = 0
    version: int = 13000
    driver: str = trees.VERSION
    """Of the libraries; the kernel module has the default version."""
    card: Card = H200
    gpus: tuple[Gpu, ...] = (Gpu(),)
    cuda: Forged | bytes | None = None
    """Replaces the libcuda built from ``init`` and ``version``; ``ABSENT`` for none."""
    environ: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Content | None] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    uid: int = 1000
    gpu: bool = True
    slurm: str = "0"
    faulty_variable: str = ""
    """The environment variable that causes the fault: without it the driver works."""
    change: Callable[[Machine], Machine] = lambda machine: machine


def driver_libraries(scenario: Scenario, folder: str) -> dict[str, Content]:
    cuda = (
        libcuda(init=scenario.init, version=scenario.version, devices=scenario.gpus)
        if scenario.cuda is None
        else scenario.cuda
    )
    nvml = libnvml(init=scenario.nvml, driver=scenario.driver, cuda=scenario.version, devices=scenario.gpus)
    version = f".{scenario.driver}" if folder == LIB else ".1"
    files: dict[str, Content] = {f"{folder}/libnvidia-ml.so{version}": nvml}
    if cuda:
        files[f"{folder}/libcuda.so{version}"] = cuda
    if folder == LIB:
        files[f"{folder}/libnvidia-ptxjitcompiler.so.1"] = libcuda(devices=())
        files |= {
            path.replace(version, ".1"): Link(path.rpartition("/")[2]) for path in tuple(files) if version in path
        }
    return files


def make_host(scenario: Scenario, host_kind: str, root: Path, architecture: str) -> ScenarioHost:
    more = {**driver_libraries(scenario, WSL if host_kind == "wsl" else LIB), **scenario.more}
    if scenario.faulty_variable:
        more |= driver_libraries(Scenario(""), WORKING_DRIVER)
    tree = root / "tree"
    make: Callable[..., TreeHost]
    if host_kind == "docker":
        more = {path: content for path, content in more.items() if scenario.gpu or not path.startswith(LIB)}
        make = partial(trees.container, card=scenario.card, gpu=scenario.gpu)
    elif host_kind == "wsl":
        make = trees.wsl
    elif host_kind == "slurm":
        make = partial(trees.slurm, gpus=scenario.slurm, card=scenario.card)
    else:
        make = partial(trees.plain_host, card=scenario.card, uid=scenario.uid)
    host = make(
        tree,
        environ=dict(scenario.environ),
        more=more,
        without=scenario.without,
        errors=scenario.errors,
        machine=architecture,
    )
    native = root / "twins"
    removed = (*scenario.without, *(f"{path}/" for path in scenario.without))
    for path, content in more.items():
        if (".so" in path or content is None) and not path.startswith(removed):
            library = content.make(NATIVE) if isinstance(content, Forged) else content
            write(native, translate_tree(architecture, {path: library}))
    values = {item.name: getattr(host, item.name) for item in fields(host)}
    return ScenarioHost(**values, faulty_variable=scenario.faulty_variable, native=str(native))


def probe_host(host: ScenarioHost) -> Machine:
    """The facts from all probes but torch, with the paths of the libraries as on the host."""
    machine = probe(torch=False, host=host)
    driver = machine.driver
    nvml = replace(driver.nvml, library=driver.nvml.library.removeprefix(host.native))
    cuda = replace(driver.cuda, library=driver.cuda.library.removeprefix(host.native))
    return replace(machine, driver=replace(driver, nvml=nvml, cuda=cuda))


def diagnose(scenario: Scenario, host_kind: str, root: Path, architecture: str = "x86_64") -> Diagnosis:
    """The diagnosis of a scenario. Its Python and its torch are those of a healthy machine."""
    machine = probe_host(make_host(scenario, host_kind, root, architecture))
    reference = healthy()
    return judge_machine(
        scenario.change(
            replace(
                machine,
                python=reference.python,
                torch=reference.torch,
                torch_libraries=reference.torch_libraries,
                extensions=(),
            )
        )
    )


def named(diagnosis: Diagnosis) -> str:
    """The codes of the causes that were named, in order."""
    return "+".join(finding.code for finding in diagnosis.findings if finding.severity == "error")


ARCHITECTURES = {"host": ("x86_64", "aarch64"), "docker": ("x86_64",), "wsl": ("x86_64",), "slurm": ("aarch64",)}


def wrong_diagnoses(name: str, folder: Path) -> list[str]:
    """A message for each host kind and architecture on which the scenario ``name`` was diagnosed wrongly."""
    wrong = []
    for host_kind, scenario in scenarios_by_name()[name].items():
        for architecture in ARCHITECTURES[host_kind]:
            diagnosis = diagnose(scenario, host_kind, folder / host_kind / architecture, architecture)
            findings = [(finding.code, finding.title, finding.evidence) for finding in diagnosis.findings]
            if named(diagnosis) not in scenario.truth.split("|") or diagnosis.machine.problems:
                wrong.append(
                    f"{host_kind} {architecture}: not {scenario.truth} but {findings} {diagnosis.machine.problems}"
                )
    return wrong


# -- table of scenarios


def on_all_hosts(scenario: Scenario, **others: Scenario) -> dict[str, Scenario]:
    """The same scenario on all four kinds of host, except those in ``others``."""
    return {host_kind: others.get(host_kind, scenario) for host_kind in HOST_KINDS}


def node(path: str, device: Device) -> dict[str, Content]:
    return {path: device}


STUB_LIBRARY: dict[str, Content] = {
    f"{STUBS}/libcuda.so.1": Link("libcuda.so"),
    f"{STUBS}/libcuda.so": libcuda(init=34, overrides={"cuDriverGetVersion": returns(34)}),
}
OLD = "535.104.05"


def compat(init: int) -> dict[str, Content]:
    """An image's compat library, which the loader finds before the driver's."""
    return {
        f"{COMPAT}/libcuda.so.1": Link(f"libcuda.so.{OLD}"),
        f"{COMPAT}/libcuda.so.{OLD}": libcuda(init=init, version=12020),
    }


def compat_scenario(init: int, truth: str, card: Card, gpu: Gpu) -> Scenario:
    return Scenario(truth, card=card, gpus=(gpu,), environ={"LD_LIBRARY_PATH": COMPAT}, more=compat(init))


GEFORCE = Gpu("NVIDIA GeForce RTX 4090", (8, 9))
NO_DRIVER = Scenario("K01", card=H200, cuda=ABSENT)
UVM = "/dev/nvidia-uvm"


def scenarios_by_name() -> dict[str, dict[str, Scenario]]:
    """Name → kind of host → scenario."""
    return {**cuda_scenarios(), **nvml_scenarios()}


def cuda_scenarios() -> dict[str, dict[str, Scenario]]:
    """Each result of the driver on each kind of host."""
    hidden = Scenario("E01", 100, environ={"CUDA_VISIBLE_DEVICES": "-1"}, faulty_variable="CUDA_VISIBLE_DEVICES")
    fabric = (Gpu(fabric_state=1),)
    return {
        "everything works": on_all_hosts(Scenario("")),
        "no libcuda": {
            "host": Scenario(
                "K01",
                cuda=ABSENT,
                without=("/proc/driver", "/sys/module", "/usr/lib/modules", *trees.NODES),
                more={
                    **trees.bus(H200, ""),
                    "/proc/modules": "ext4 1 0 - Live 0x0\n",
                    f"{LIB}/libnvidia-ml.so.1": None,
                },
            ),
            "docker": Scenario("C01", gpu=False),
            "wsl": Scenario("U08", cuda=ABSENT, without=(f"{WSL}/libcuda.so.1", f"{WSL}/libnvidia-ml.so.1")),
            "slurm": Scenario("U06", cuda=ABSENT),
        },
        "libcuda outside the search path": {
            host_kind: Scenario(
                "U08" if host_kind == "wsl" else "U05|C03" if host_kind == "docker" else "U05",
                cuda=ABSENT,
                more={"/opt/nvidia/lib64/libcuda.so.1": libcuda()},
            )
            for host_kind in ("host", "docker", "slurm")
        },
        "cuInit 100, hidden by a variable": on_all_hosts(hidden),
        "cuInit 100, no access to the GPU": {
            "host": Scenario(
                "D03", 100, errors={"/dev/nvidia0": "EACCES"}, more=node("/dev/nvidia0", Device(195, 0, 0o600))
            ),
            "docker": Scenario("C04", 100, environ={"NVIDIA_VISIBLE_DEVICES": "none"}, without=tuple(trees.NODES)),
            "slurm": Scenario("C09", 100, slurm=""),
        },
        "driver older than the build": on_all_hosts(Scenario("V01", 0, version=12080)),
        "cuInit 35": on_all_hosts(Scenario("V01", 35, version=12080)),
        "cuInit 3": on_all_hosts(Scenario("K10", 3), wsl=Scenario("X08", 3)),
        "cuInit 2": on_all_hosts(
            Scenario("X04", 2, more={"/proc/self/limits": "Max address space         8589934592  8589934592  bytes\n"}),
            wsl=Scenario("U10", 2, gpus=(Gpu(), Gpu(uuid="GPU-00000000-0000-4000-8000-000000000002"))),
        ),
        "cuInit 999, no uvm": {
            "host": Scenario("D01", 999, without=(UVM,)),
            "docker": Scenario("D01", 999, without=(UVM,)),
            "slurm": Scenario("D01", 999, without=(UVM,)),
            "wsl": Scenario("X08", 999),
        },
        "cuInit 999, wrong uvm major": {
            host_kind: Scenario("D02", 999, more=node(UVM, Device(511, 0))) for host_kind in ("host", "docker", "slurm")
        },
        "cuInit 999, no access to uvm": {
            "host": Scenario("D03", 999, errors={UVM: "EACCES"}, more=node(UVM, Device(238, 0, 0o600))),
            "docker": Scenario("D04", 999, errors={UVM: "EPERM"}),
            "slurm": Scenario("D04|C09", 999, errors={UVM: "EPERM"}),
        },
        "cuInit 34": on_all_hosts(Scenario("U04", environ={"LD_LIBRARY_PATH": STUBS}, more=STUB_LIBRARY)),
        "cuInit 46, exclusive mode": on_all_hosts(
            Scenario("S05", 46, gpus=(Gpu(compute_mode=3, processes=((4711, 1 << 30),)),)),
        ),
        "cuInit 101, duplicate id": on_all_hosts(
            Scenario("E03", 101, environ={"CUDA_VISIBLE_DEVICES": "0,0"}, faulty_variable="CUDA_VISIBLE_DEVICES")
        ),
        "cuInit 101, invalid device order": on_all_hosts(
            Scenario("E12", 101, environ={"CUDA_DEVICE_ORDER": "fastest"}, faulty_variable="CUDA_DEVICE_ORDER")
        ),
        "cuInit 304": {
            "host": Scenario("X08", 304),
            "docker": Scenario("C11", 304, more={"/proc/version": "Linux version 4.4.0 (gVisor) #1 SMP\n"}),
            "slurm": Scenario("X08", 304),
            "wsl": Scenario("X08", 304),
        },
        "cuInit 222": on_all_hosts(Scenario("X08|V02", 222)),
        "cuInit 802": on_all_hosts(Scenario("S01", 802, gpus=fabric), wsl=Scenario("X08", 802)),
        "cuInit 803": {
            "host": Scenario("U01", 803, 18, driver="580.95.05"),
            "docker": compat_scenario(803, "U02", H200, Gpu()),
            "slurm": Scenario("U01", 803, 18, driver="580.95.05"),
            "wsl": Scenario(
                "U09",
                more={
                    f"{LIB}/libcuda.so.1": Link(f"libcuda.so.{OLD}"),
                    f"{LIB}/libcuda.so.{OLD}": libcuda(init=803),
                },
            ),
        },
        "cuInit 804": {
            host_kind: compat_scenario(804, "U03", RTX_4090, GEFORCE) for host_kind in ("host", "docker", "slurm")
        },
        "cuInit 805": on_all_hosts(mps(805), wsl=Scenario("X08|S04", 805)),
        "cuInit 807": on_all_hosts(mps(807), wsl=Scenario("X08|S04", 807)),
        "driver hangs": on_all_hosts(Scenario("X02", cuda=libcuda(overrides={"cuInit": hangs()}))),
        "libcuda is a text file": on_all_hosts(Scenario("U13", cuda=b"this is no library\n")),
        "libcuda without cuInit": on_all_hosts(Scenario("U13|X08", cuda=libcuda(overrides={"cuInit": None}))),
    }


def mps(code: int) -> Scenario:
    return Scenario("S04", code, environ={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}, more={"/tmp/mps/control": ""})  # noqa: S108


def nvml_scenarios() -> dict[str, dict[str, Scenario]]:
    """Scenarios in which the result of NVML decides."""
    lost = libnvml(devices=(Gpu(),), overrides={"nvmlDeviceGetHandleByIndex_v2": returns(15)})
    linux = ("host", "docker", "slurm")
    return {
        "NVML 4": {
            host_kind: Scenario(
                "D03", 100, 4, errors={"/dev/nvidiactl": "EACCES"}, more=node("/dev/nvidiactl", Device(195, 255, 0o600))
            )
            for host_kind in linux
        },
        "NVML 9": {
            "host": Scenario(
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
            "wsl": Scenario("", 0, 9),
        },
        "NVML 15": {
            host_kind: Scenario("H02", 999, more={f"{LIB}/libnvidia-ml.so.{trees.VERSION}": lost})
            for host_kind in linux
        },
        "NVML 17": {
            host_kind: Scenario("D02", 100, 17, more=node("/dev/nvidiactl", Device(1, 3))) for host_kind in linux
        },
        "NVML 18": {host_kind: Scenario("U01", 803, 18, driver="580.95.05") for host_kind in ("host", "slurm")}
        | {"docker": Scenario("U01|C07", 803, 18, driver="580.95.05")},
        "NVML 999": {
            "docker": Scenario("D04", 100, 999, errors=dict.fromkeys(trees.NODES, "EPERM")),
        },
    }


def scenarios() -> Iterator[tuple[str, str, Scenario]]:
    for name, by_host in scenarios_by_name().items():
        for host_kind, scenario in by_host.items():
            yield name, host_kind, scenario
