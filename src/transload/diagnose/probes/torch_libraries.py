"""What torch's binaries say: for which cards they were built, and which of NVIDIA's libraries they would be given."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from transload.diagnose.elf import Elf, contents, read_elf
from transload.diagnose.fatbin import architectures
from transload.diagnose.host import Host
from transload.diagnose.loader import Loader, Object, elements
from transload.diagnose.probes.cudnn_parts import strangers
from transload.diagnose.probes.nvidia_packages import NVIDIA, Owned, overlaps, owned, package_of
from transload.diagnose.process import Missing, Process
from transload.diagnose.symbols import lacking, undefined, version_definitions, version_needs
from transload.diagnose.torch_import import Imported, import_torch
from transload.machine import Python, Resolved, TorchInstall, TorchLibraries, Unknown

__all__ = ["torch_libraries"]

_CONSTANTS = 1 << 26  # libtorch_python has 1 MB of them
_DLL = 1 << 27
_LISTED = re.compile(rb"(?:sm_|compute_|gfx)\w+(?: (?:sm_|compute_|gfx)\w+)*")
_KERNELS = ("libtorch_cuda.so", "libtorch_cuda_cu.so", "libtorch_cuda_cpp.so")
"""The latter two until torch 1.13. Others, such as libtorch_cuda_linalg, have code that was built elsewhere."""
_SUFFIX = re.compile(r"\.so\.(\d+\.\d[\d.]*)$")
_MOST_TEXTS = 1000
_MOST = 8
"""Symbols named of one library: a wrong one lacks hundreds."""


def torch_libraries(host: Host, python: Python, install: TorchInstall, loader: Loader | None = None) -> TorchLibraries:
    """The libraries of ``install`` in the environment of ``python``.

    ``loader`` is one that has already looked at this host, if there is one.
    """
    if host.uname[0] != "Linux":
        return TorchLibraries(architectures=_listed(host, install), cubins=Unknown("read on Linux only"))
    loader = loader or Loader(host)
    process = Process(loader)
    process.start()
    imported = import_torch(process, host, python.path, install)
    libraries = owned(host, python.path)
    view = _View(loader, process, imported, install, libraries)
    return TorchLibraries(
        architectures=_listed(host, install),
        cubins=_cubins(loader, install),
        needed=tuple(view.needed()),
        unresolved=tuple(view.unresolved()),
        overlaps=tuple(overlaps(libraries)),
        split_cudnn=tuple(view.split_cudnn()),
        cwd_searched=tuple(view.cwd_searched()),
    )


def _listed(host: Host, install: TorchInstall) -> tuple[str, ...] | Unknown:
    """The list that ``torch.cuda.get_arch_list()`` returns: a text among the constants of libtorch_python."""
    if install.cpu_only:
        return ()
    windows = host.uname[0] == "Windows"
    path = f"{install.location}/lib/{'torch_python.dll' if windows else 'libtorch_python.so'}"
    if windows:
        constants = host.data(path, _DLL)
    else:
        elf = read_elf(host.at(host.target(path)))
        constants = contents(elf, ".rodata", _CONSTANTS) if isinstance(elf, Elf) else elf
    if isinstance(constants, Unknown):
        return Unknown(f"libtorch_python: {constants.reason}")
    found = max(_lists(constants), key=len, default=())
    return found or Unknown("libtorch_python has no list of architectures")


def _lists(constants: bytes) -> Iterator[tuple[str, ...]]:
    """Every text that is a list of architectures and nothing else."""
    for start in (b"\0sm_", b"\0compute_", b"\0gfx"):
        at = -1
        for _ in range(_MOST_TEXTS):
            at = constants.find(start, at + 1)
            if at < 0:
                break
            text = constants[at + 1 : at + 1024].partition(b"\0")[0]
            if _LISTED.fullmatch(text):
                yield tuple(text.decode().split())


def _cubins(loader: Loader, install: TorchInstall) -> dict[str, int] | Unknown:
    if install.known and not install.cuda:
        return {}
    total: dict[str, int] = {}
    for name in _KERNELS:
        elf = loader.examine(f"{install.location}/lib/{name}")
        if elf is None and name != _KERNELS[0]:
            continue
        found = architectures(elf) if isinstance(elf, Elf) else elf
        if not isinstance(found, dict):
            return Unknown(f"{name}: {'not there, or not for this machine' if found is None else found.reason}")
        for architecture, count in found.items():
            total[architecture] = total.get(architecture, 0) + count
    return total


@dataclass(frozen=True, slots=True)
class _View:
    """A simulated import, as the facts want it."""

    loader: Loader
    process: Process
    imported: Imported
    install: TorchInstall
    libraries: tuple[Owned, ...]

    # -- which files

    def needed(self) -> Iterator[Resolved]:
        met: set[str] = set()
        for name, asker in self._asked():
            if name not in met and name in self.process.names:
                met.add(name)
                yield self._resolved(name, asker, self.process.names[name])
        for each in self.imported.missing:
            if each.name not in met and not _of_driver(each.name):
                met.add(each.name)
                yield self._missing(each)

    def _asked(self) -> Iterator[tuple[str, Object]]:
        """The names of NVIDIA's libraries, with who asks for them: torch's own libraries first."""
        ours = f"{self.install.location}/"
        for each in sorted(self.imported.objects, key=lambda each: not each.path.startswith(ours)):
            yield from ((name, each) for name in each.elf.needed if NVIDIA.fullmatch(name))

    def _resolved(self, name: str, asker: Object, got: Object) -> Resolved:
        expected = self._expected(name)
        path = self._clean(got.path, expected.path)
        return Resolved(
            name,
            path,
            "loaded" if got.via == "path" else got.via,
            _name(asker.path),
            self._version(path),
            expected.path,
            expected.package,
        )

    def _missing(self, each: Missing) -> Resolved:
        expected = self._expected(each.name)
        asker = _name(each.needed_by.path) if each.needed_by else "torch"
        path = self._clean(each.path, expected.path)
        return Resolved(each.name, path, each.via, asker, "", expected.path, expected.package, each.problem)

    def _expected(self, name: str) -> Owned:
        """The file in site-packages that is meant; its path is empty where none is."""
        site = self.install.location.rpartition("/")[0]
        bundled = f"{self.install.location}/lib/{name}"
        if self.loader.host.exists(bundled):
            return Owned(bundled, "torch", self.install.version)
        if not self._from_wheels():
            return Owned("", "", "")
        fitting = [each for each in self.libraries if each.name == name]
        fitting.sort(key=lambda each: not each.path.startswith(f"{site}/"))
        return fitting[0] if fitting else Owned("", package_of(name, self.install.cuda), "")

    def _from_wheels(self) -> bool:
        """Whether this torch takes NVIDIA's libraries from their wheels, as its run path tells."""
        start = f"{self.install.location.rpartition('/')[0]}/nvidia/"
        own = (each for each in self.imported.objects if each.path.startswith(self.install.location))
        return any(os.path.normpath(folder).startswith(start) for each in own for folder in self.loader.folders(each))

    def _clean(self, path: str, expected: str) -> str:
        """The path without ``..``, in the spelling of ``expected`` where it is the same file."""
        target = self.loader.host.target
        spellings = (each for each in (expected, os.path.normpath(path)) if path and each)
        return next((each for each in spellings if target(each) == target(path)), path)

    def _version(self, path: str) -> str:
        suffix = _SUFFIX.search(self.loader.host.target(path))
        return next((each.version for each in self.libraries if each.path == path), suffix[1] if suffix else "")

    # -- whether they fit

    def unresolved(self) -> Iterator[str]:
        """Symbols of NVIDIA's libraries, and versions of others, that are asked for and not defined."""
        definitions: dict[str, frozenset[str]] = {}
        for each in dict.fromkeys(self.imported.objects):
            yield from self._symbols(each)
            if each.path.startswith(self.install.location):
                yield from self._versions(each, definitions)

    def _symbols(self, asker: Object) -> Iterator[str]:
        files = [name for name in asker.elf.needed if NVIDIA.fullmatch(name) and name in self.process.names]
        wanted = undefined(asker.elf, files) if files else ()
        for file in files:
            absent = lacking(self.process.names[file].elf, [each for each in wanted or () if each.file == file])
            for each in (absent or ())[:_MOST]:
                yield f"{each.name} of {file}, needed by {_name(asker.path)}"

    def _versions(self, asker: Object, definitions: dict[str, frozenset[str]]) -> Iterator[str]:
        for file, version in version_needs(asker.elf) or ():
            giver = self.process.names.get(file)
            if giver is None or NVIDIA.fullmatch(file):
                continue
            if file not in definitions:
                definitions[file] = version_definitions(giver.elf) or frozenset()
            if definitions[file] and version not in definitions[file]:
                yield f"{version} of {file}, needed by {_name(asker.path)}"

    def split_cudnn(self) -> Iterator[str]:
        for name, cudnn in self.process.names.items():
            if re.fullmatch(r"libcudnn\.so\.\d+", name):
                release = ".".join(self._version(self._clean(cudnn.path, "")).split(".")[:3])
                for part, found in strangers(self.loader, cudnn, release) if release else ():
                    yield f"{part}: {found.path}, by {found.via}"

    def cwd_searched(self) -> Iterator[str]:
        for each in dict.fromkeys(self.imported.objects):
            kind, path = ("RUNPATH", each.elf.runpath) if each.elf.has_runpath else ("RPATH", each.elf.rpath)
            if "" in elements(path, ":") and not self.loader.system.musl:
                yield f"{_name(each.path)}: {kind} has an empty element"


def _of_driver(name: str) -> bool:
    return name.startswith(("libcuda.so", "libnvidia-"))


def _name(path: str) -> str:
    return path.rpartition("/")[2]
