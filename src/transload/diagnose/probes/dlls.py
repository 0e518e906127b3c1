"""What importing torch loads on Windows, without loading it.

torch adds folders to the search, loads every DLL in ``torch/lib`` by its full path, and then imports ``_C``. If a DLL
or something that it needs is not found, torch puts the same folders in front of PATH and tries again without flags.
Which folders has changed with the releases, so it is read from the installed ``torch/__init__.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain

from transload.diagnose.binary import Needs
from transload.diagnose.host import Host
from transload.diagnose.pe import RUNTIME, SYSTEM, TORCH_LIB, Dll, DllProcess, Folder, Pe
from transload.diagnose.tables import numbers_of
from transload.machine import Python, Resolved, TorchInstall

_BUILT_WITH_TORCH = ("c10.dll", "torch_cpu.dll", "torch_python.dll")
_LOADED_BY_NAME = re.compile(r"""ctypes\.CDLL\(["']([\w.]+\.dll)["']\)""")
_OF_DRIVER = ("nvcuda.dll", "nvml.dll")
_MOST_FUNCTIONS = 8  # Functions named for each pair of libraries: a wrong one lacks hundreds.


class DllImport:
    """A simulated process that has imported torch."""

    def __init__(self, host: Host, python: Python, install: TorchInstall) -> None:
        self.host, self.lib = host, f"{install.location}/lib"
        base = python.base_prefix or python.prefix
        # The python.exe of a virtual environment starts that of the base, and waits for it.
        program = f"{base}/python.exe" if host.exists(f"{base}/python.exe") else python.executable
        self.process = process = DllProcess(host, program)
        # A Python that runs has these, wherever it found them.
        release = "".join(python.version.split(".")[:2])
        for name in (f"python{release}.dll", f"python{release}t.dll", "python3.dll", "vcruntime140.dll"):
            process.loaded.setdefault(name, Dll(name, via="path"))
        self.first = {*process.loaded}
        source = host.text(f"{install.location}/__init__.py") or ""
        self.added = added = self._added(source, python, install)
        second_try = [*process.without_flags, *added, *process.path]
        self.known = "kernel32.dll" in process.files(process.system[1])  # else this is no whole Windows
        self.failed: dict[str, Dll] = {}
        for name in _LOADED_BY_NAME.findall(source):
            if name.lower() not in process.loaded:
                dll = process.find(name, [process.program, *added, process.system])
                if dll.path:
                    process.open(dll.path, [process.program, *added, process.system], dll.via)
        mine = (TORCH_LIB, self.lib)
        for name, path in sorted(process.files(self.lib).items()):
            loaded = process.loaded.get(name)
            if name.endswith(".dll") and not (loaded and loaded.path == path):
                failed = process.open(path, [mine, process.program, *added, process.system], TORCH_LIB)
                if failed and not any(dll.problem for dll in failed):
                    failed = process.open(path, second_try, TORCH_LIB)
                self.failed = {dll.name.lower(): dll for dll in failed} | self.failed
        for path in host.paths(install.location, "_C.", ".pyd"):
            failed = process.open(path, [("torch", install.location), process.program, *added, process.system])
            self.failed = {dll.name.lower(): dll for dll in failed} | self.failed

    def _added(self, source: str, python: Python, install: TorchInstall) -> list[Folder]:
        """The folders that this release of torch adds to the search, without those that do not exist."""
        host, user = self.host, python.user_site.rpartition("/")[0].rpartition("/")[0]
        base = python.base_prefix if python.base_prefix != python.prefix else ""
        roots = [python.prefix, base, user if "userbase" in source else ""]
        folders = [(TORCH_LIB, self.lib), *(("Library\\bin", f"{root}/Library/bin") for root in roots if root)]
        if "py_root_bin_path" in source:
            folders.append(("bin", f"{python.prefix}/bin"))
        names = [name for _, folder in folders for name in self.process.files(folder)]
        variables = {name.upper(): host.slashed(value) for name, value in host.environ.items()}
        programs = variables.get("PROGRAMFILES", "C:/Program Files")
        if "NVTOOLSEXT_PATH" in source and "nvtoolsext64_1.dll" not in names:
            tools = variables.get("NVTOOLSEXT_PATH", f"{programs}/NVIDIA Corporation/NvToolsExt")
            folders.append(("NVTOOLSEXT_PATH", f"{tools}/bin/x64"))
        if "CUDA_PATH_V" in source and install.cuda and not any(re.match(r"cudart64.*\.dll", name) for name in names):
            variable = f"CUDA_PATH_V{install.cuda.replace('.', '_')}"
            toolkit = variables.get(variable, f"{programs}/NVIDIA GPU Computing Toolkit/CUDA/v{install.cuda}")
            folders.append((variable, f"{toolkit}/bin"))
        return [(via, folder) for via, folder in folders if host.exists(folder)]

    def needed(self) -> Iterator[Resolved]:
        """What torch needs beside its own DLLs and those of Windows; then what is not found or cannot be loaded."""
        if not self.known:
            return
        for key, dll in self.process.loaded.items():
            of_program = key in self.first and not RUNTIME.fullmatch(key)
            if dll.pe and dll.via not in (TORCH_LIB, "path") and not of_program:
                yield self._resolved(dll)
        failed = [dll for dll in self.failed.values() if dll.path or not self.process.unread]
        yield from map(self._resolved, failed)
        for key, asker in self._delayed().items():
            if key not in (*self.process.loaded, *self.failed, *_OF_DRIVER):
                dll = self.process.find(key, [*self.process.without_flags, *self.process.path], asker)
                if not (dll.path or self.process.unread):
                    yield Resolved(key, via="delayed", needed_by=asker)

    def _resolved(self, dll: Dll) -> Resolved:
        own = self.process.files(self.lib).get(dll.name.lower(), "")
        version = (dll.pe.version() or "") if dll.pe else ""
        return Resolved(dll.name, dll.path, dll.via, dll.needed_by or "torch", version, own, "", dll.problem)

    def _delayed(self) -> dict[str, str]:
        own = [dll for dll in self.process.loaded.values() if dll.via == TORCH_LIB]
        return {name.lower(): dll.name for dll in own if dll.pe for name in dll.pe.delayed}

    def unresolved(self) -> Iterator[str]:
        """Functions that a library needs of another, which does not export them."""
        loaded = self.process.loaded
        wanted: dict[str, dict[str, tuple[str, ...]]] = {}  # library → which one needs it → the functions
        for dll in loaded.values():
            pe = dll.pe if dll.via != SYSTEM and dll.name.lower() not in self.first else None
            for name in pe.needed if pe else ():
                of = loaded.get(name.lower())
                if pe and of and of.pe:
                    wanted.setdefault(name.lower(), {})[dll.name] = pe.functions(name) or ()
        for key, askers in wanted.items():
            of = loaded[key]
            lost = {*((of.pe.not_exported({*chain.from_iterable(askers.values())}) if of.pe else ()) or ())}
            for asker, functions in askers.items():
                absent = [function for function in functions if function in lost][:_MOST_FUNCTIONS]
                yield from (f"{function} of {of.name}, needed by {asker}" for function in absent)

    def examined(self, paths: Sequence[str]) -> dict[str, Needs]:
        """The libraries of a package: Python loads each by its path, and the package may add its own folders."""
        process, found = self.process, {}
        own = dict.fromkeys(("the package", path.rpartition("/")[0]) for path in paths)
        for path in paths:
            pe = process.read(path)
            if not isinstance(pe, Pe) or pe.machine != process.machine:
                continue
            failed = process.open(path, [*own, process.program, *self.added, process.system])
            missing = [dll.name for dll in failed if not dll.path] if self.known and not process.unread else []
            lost: list[str] = []
            for name in pe.needed:
                of = process.loaded.get(name.lower())
                if of and of.pe and of.path.startswith(f"{self.lib}/"):
                    lost += of.pe.not_exported(pe.functions(name) or ()) or ()
            found[path] = Needs(tuple(pe.architectures() or ()), lost, missing)
        return found

    def toolset(self) -> str:
        """The newest version of Visual C++ that linked the libraries which are built together with torch."""
        files = self.process.files(self.lib)
        read = (self.process.read(files[name]) for name in _BUILT_WITH_TORCH if name in files)
        return max((pe.linker for pe in read if isinstance(pe, Pe)), key=numbers_of, default="")

    def committed(self) -> int:
        """Bytes of the commit limit for torch's own DLLs: Windows reserves memory for all their writable parts."""
        read = [self.process.read(path) for name, path in self.process.files(self.lib).items() if name.endswith(".dll")]
        return sum(pe.private for pe in read if isinstance(pe, Pe)) if read else -1
