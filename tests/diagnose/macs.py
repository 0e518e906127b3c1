"""Fake Macs: a directory tree, what the kernel says, and the torch that was run there. No real Mac was seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.diagnose.machines import ANSWERED
from tests.diagnose.trees import TreeHost, write

from transload.diagnose.probes import probe
from transload.machine import Machine, Python, Step, Torch, TorchInstall, TorchRun

VERSIONS = {"26.1": "25.1.0", "14.5": "23.5.0", "13.7": "22.6.0", "12.7": "21.6.0", "12.2": "21.3.0"}
"""macOS → the release of its kernel."""
ENVIRONMENT = "/Users/me/my env"
SITE = f"{ENVIRONMENT}/lib/python3.12/site-packages"


@dataclass(frozen=True)
class MacTree(TreeHost):
    """A Mac, with the ``numbers`` that its kernel has under a name."""

    numbers: Mapping[str, int] = field(default_factory=dict)

    def sysctl(self, name: str) -> int:
        return self.numbers.get(name, -1)


@dataclass(frozen=True)
class Mac:
    """A Mac and the codes of what is found there; the first is the cause if that is not a note."""

    codes: tuple[str, ...]
    version: str = "14.5"
    machine: str = "arm64"
    translated: bool = False
    torch: str = "2.13.0"
    backends: tuple[str, ...] = ("mps",)
    python: str = "3.12.4"


MACS = {
    "Apple silicon": Mac(("T08",)),
    "Apple silicon with a new macOS": Mac(("T08",), "26.1"),
    "Apple silicon without torch": Mac(("P01", "T08"), torch=""),
    "Intel": Mac(("T08",), machine="x86_64", torch="2.2.2", backends=()),
    "Intel with a GPU of AMD": Mac(("T08",), machine="x86_64", torch="2.2.2"),
    "Intel without torch": Mac(("P01", "T08"), machine="x86_64", torch=""),
    "Intel with a new Python": Mac(("P07", "T08"), machine="x86_64", torch="", python="3.13.1"),
    "Rosetta": Mac(("Y01", "T08"), machine="x86_64", translated=True, torch="2.2.2", backends=()),
    "Rosetta without torch": Mac(("Y01", "T08"), machine="x86_64", translated=True, torch=""),
    "macOS 13 with a new torch": Mac(("Y02", "T08"), "13.7", backends=()),
    "macOS 13 with an older torch": Mac(("T08",), "13.7", torch="2.9.1"),
    "macOS 12 with a new torch": Mac(("Y02", "T08"), "12.7", backends=()),
    "macOS before mps": Mac(("Y02", "T08"), "12.2", torch="2.2.2", backends=()),
}


def machine_of(mac: Mac, root: Path) -> Machine:
    """The facts about a Mac, and about a torch that works on its CPU and its ``backends``."""
    plist = f"<plist><dict>\n<key>ProductVersion</key>\n<string>{mac.version}</string>\n</dict></plist>\n"
    write(root, {"/System/Library/CoreServices/SystemVersion.plist": plist})
    numbers = {"hw.memsize": 16 << 30} | ({"sysctl.proc_translated": int(mac.translated)} if mac.machine else {})
    uname = ("Darwin", VERSIONS[mac.version], mac.machine)
    host = MacTree({"SHELL": "/bin/zsh", "HOME": "/Users/me"}, uname=uname, root=str(root), numbers=numbers)
    location = f"{SITE}/torch"
    steps = tuple(Step(name, ok=True) for name in ("import", "available", "count", "cpu"))
    run = TorchRun(ANSWERED, mac.torch, location, available=False, count=0, steps=steps, backends=mac.backends)
    failed = Step("import", ok=False, error="ModuleNotFoundError: No module named 'torch'")
    return replace(
        probe(torch=False, host=host),
        python=Python(f"{ENVIRONMENT}/bin/python", mac.python, prefix=ENVIRONMENT, environment="venv"),
        torch=Torch((TorchInstall(location, mac.torch, dist_version=mac.torch, installer="pip"),) if mac.torch else ()),
        torch_run=run if mac.torch else TorchRun(ANSWERED, steps=(failed,)),
        problems={},
    )
