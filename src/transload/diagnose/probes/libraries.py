"""The libraries that a process would load, without loading any: the driver's, torch's, and those of extensions."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain

from transload import machine as facts
from transload.diagnose.binary import Needs
from transload.diagnose.elf import Elf, Loader, Process, SharedObject, UndefinedSymbol, elements, read_elf
from transload.diagnose.host import Host
from transload.diagnose.pe import Pe, read_pe
from transload.diagnose.probes.python import Distribution, assigned, installed
from transload.diagnose.tables import CUDA_LIBRARY, table
from transload.frozen import replace
from transload.machine import ExtensionPackage, Library, Python, Resolved, TorchInstall, Unknown

# -- the driver's ------------------------------------------------------------------------------------------------------

_RELEASE = re.compile(rb"Version (\d{3,4}(?:\.\d+){1,2})\. Copyright \(C\)|\0\d\d\.(\d{3,4}(?:\.\d+){1,2})\0")
"""The release among the constants of libcuda and NVML."""
_CONSTANTS = 1 << 21
_PROGRAMS = ("/usr/bin", "/bin", "/usr/local/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib", "/opt/nvidia/bin")


def driver_libraries(loader: Loader) -> facts.DriverLibraries:
    """The files of the driver's libraries: those that the loader finds, others on the disk, and their releases."""
    host = loader.host
    if host.uname[0] != "Linux":
        why = Unknown(f"the loader of {host.uname[0]} is not known")
        return facts.DriverLibraries(why, why, why)
    path = elements("" if loader.musl else host.environ.get("LD_LIBRARY_PATH", ""))
    relative = [element for element in path if element and not element.startswith(("/", "$"))]
    searched = ["LD_LIBRARY_PATH has an empty element"] if "" in path else []
    searched += [f"LD_LIBRARY_PATH has a relative element: {element}" for element in relative[:1]]
    folders = [folder for folder in host.search_path() if not folder.startswith("/mnt/")]  # of Windows in WSL: slow
    return facts.DriverLibraries(
        cuda=_libraries(loader, "libcuda.so.1"),
        nvml=_libraries(loader, "libnvidia-ml.so.1"),
        ptx_compiler=_libraries(loader, "libnvidia-ptxjitcompiler.so.1"),
        smi=host.program("nvidia-smi", (*_PROGRAMS, *folders)),
        preload=loader.preload_file,
        cwd_searched=tuple(searched),
    )


def _libraries(loader: Loader, name: str) -> tuple[Library, ...]:
    """Every file of that name, once: those that the loader finds, in order, then the others."""
    host = loader.host
    paths = [(lib.path, lib.via) for listed, lib in loader.preloaded() if name in (lib.elf.soname, listed)]
    paths += loader.candidates(name, loader.program).items()
    patterns = [f"{folder}/{name}" for folder in table("drivers")["folders"]]
    patterns.append(f"/usr/local/cuda*/lib64/stubs/{name.removesuffix('.1')}")
    paths += ((path, "disk") for pattern in patterns for path in host.glob(pattern))
    seen: dict[str, Library] = {}
    unseen: dict[str, Library] = {}
    for path, via in paths:
        taken = loader.examine(path) is not None
        if not taken and not (host.readlink(path) or host.exists(path)):
            continue
        target, elf, problem = host.target(path), read_elf(host.real(path)), ""
        if isinstance(elf, Unknown):
            problem = elf.reason if host.exists(path) else f"a link to {host.readlink(path)}, which does not exist"
        elif loader.foreign(elf):
            named = f"{elf.machine}, {elf.bits} bits" if elf.bits != 64 else elf.machine
            problem = f"for another machine ({named})"
        # The release from the file's name, else from its constants: containers may mount it under another name.
        suffix, constants = re.search(r"\.so\.(\d{3,4}\.\d+(?:\.\d+)*)$", target), b""
        if not suffix and isinstance(elf, Elf):
            constants = elf.section_bytes(".rodata", _CONSTANTS) or b""
        release = _RELEASE.search(constants)
        version = suffix[1] if suffix else (release[1] or release[2]).decode() if release else ""
        folders = {*path.split("/")[:-1], *target.split("/")[:-1]}
        kind: facts.Kind = "driver" if version or folders & {"tegra", "nvidia"} else "other"
        if "stubs" in folders:
            kind = "stub"
        elif any(folder == "compat" or folder.startswith("cuda-compat") for folder in folders):
            kind = "compat"
        elif path.startswith("/usr/lib/wsl/") or target.startswith("/usr/lib/wsl/"):
            kind = "wsl"
        library = Library(name, path, target, via if taken else "disk", version, kind, problem)
        (unseen if library.via == "disk" else seen).setdefault(target, library)
    return (*seen.values(), *(library for target, library in unseen.items() if target not in seen))


# -- what importing torch loads ----------------------------------------------------------------------------------------
# Before its own libraries torch loads libtorch_global_deps.so, and with it, or if that fails, NVIDIA's libraries from
# site-packages, by their full paths. Which ones, in which order and when has changed with nearly every release, so it
# is read from the installed torch/__init__.py.

_PAIR = re.compile(
    r"""["'](?P<folder>\w+)["']\]?\s*(?:[,:=]|,\s*["']lib["']\s*,)\s*["'](?P<name>lib[\w-]+\.so\.[^"']+)["']"""
    r"""(?P<optional>,\s*required=False)?"""
)
_LAZY = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")  # Opened at first use, not by the import.
Preload = tuple[str, str, bool]
"""A folder of NVIDIA's packages, a pattern for the name of a library in it, and whether the library must load."""


def preloads(source: str) -> tuple[list[Preload], str, list[Preload]]:
    """What a ``torch/__init__.py`` loads besides its own libraries; nothing if its code is not recognized.

    The first list is loaded after ``libtorch_global_deps.so`` if a mapped file has the text in its path; torch silently
    stops at a library that fails. The second list is loaded if ``libtorch_global_deps.so`` fails because one of them is
    missing; a library that fails then ends the import.
    """

    def pairs(text: str) -> list[Preload]:
        return [(pair["folder"], pair["name"], not pair["optional"]) for pair in _PAIR.finditer(text)]

    start = source.find("def _preload_cuda")
    text = source[start : source.find("USE_RTLD_GLOBAL_WITH_LIBTORCH or", start)] if start >= 0 else ""
    text = re.sub(r"#.*", "", text)
    head, _, body = text.partition("def _load_global_deps")
    after, _, failed = body.partition("except OSError")
    every = pairs(head) or pairs(failed)
    marker = re.search(r"""["']([^"']+)["'] not in _maps""", after)
    if not marker:
        return [], "", every
    optional = "_preload_cuda_deps(required=False)" in after
    always = [(folder, name, required and not optional) for folder, name, required in pairs(after) or every]
    return always, marker[1], every


# -- NVIDIA's libraries as pip installs them: which distribution contains which file -----------------------------------


def package_of(name: str, cuda: str) -> str:
    """The distribution that should contain a library for that CUDA version; empty if unknown."""
    match = CUDA_LIBRARY.fullmatch(name)
    major = cuda.partition(".")[0]
    stem = (match["stem"] or "") if match else ""
    if not stem or not major.isdecimal():
        return ""
    names = table("packages")["nvidia_wheels"]
    stem = "cudnn" if stem.startswith("cudnn") else stem
    package = names.get(stem, stem.lower())
    plain = int(major) >= 13 and package not in names["with_major"].split()
    return f"nvidia-{package}" if plain else f"nvidia-{package}-cu{major}"


# -- an import of torch ------------------------------------------------------------------------------------------------


class _TorchImport:
    """A simulated process that has imported torch and opened what torch opens later."""

    def __init__(self, loader: Loader, path: Sequence[str], install: TorchInstall) -> None:
        """Import ``install`` in a process whose ``sys.path`` is ``path``."""
        self.loader, self.path, self.install = loader, path, install
        self.process = Process(loader)
        host, lib = loader.host, f"{install.location}/lib"
        always, marker, rescue = preloads(host.text(f"{install.location}/__init__.py") or "")
        self.missing = self.process.open(f"{lib}/libtorch_global_deps.so")
        first = self.missing[0].name if self.missing else ""
        if any(name.partition(".")[0] in first for _, name, _ in rescue):
            self._preload(rescue)
            self.missing = self.process.open(f"{lib}/libtorch_global_deps.so")
        elif marker and any(marker in host.target(library.path) for library in self.process.names.values()):
            self._preload(always)
        extension = host.paths(install.location, "_C.", ".so")
        for file in (*extension, *(f"{lib}/{name}" for name in _LAZY if host.exists(f"{lib}/{name}"))):
            self.missing += self.process.open(file, anyway=True)
        loader.imports[install.location] = self.process
        # Library → NVIDIA's distributions whose RECORDs list it, with their versions; the file may be missing.
        self.owners: dict[str, dict[str, str]] = {}
        for dist in installed(host, path):
            if dist.name.startswith("nvidia") and dist.name not in ("nvidia-cuda-cccl", "nvidia-ml-py"):
                for file in dist.files(r'[^",\n]*/lib/[^/",\n]+\.so[.\d]*'):
                    self.owners.setdefault(f"{dist.site}/{file}", {}).setdefault(dist.name, dist.stated)

    def _preload(self, libraries: Sequence[Preload]) -> None:
        """Load one after the other, up to the first required one that cannot be loaded."""
        major = self.install.cuda.partition(".")[0]
        for package, name, required in libraries:
            # in every entry of sys.path the folder of the package, then that of its CUDA version
            folders = (f"nvidia/{package}", f"nvidia/cu{major}", package)
            paths = (f"{entry}/{folder}/lib" for entry in self.path for folder in folders)
            files = (file for path in paths for file in self.loader.host.paths(path))
            file = next((file for file in files if fnmatchcase(os.path.basename(file), name)), "")
            if self.process.open(file) if file else required:
                return

    # -- which files

    def overlaps(self) -> Iterator[str]:
        """Files that several distributions list: ``…/nvidia/cudnn/lib/libcudnn.so.9: nvidia-cudnn-cu12 9.1, …``."""
        for path, packages in self.owners.items():
            if len(packages) > 1:
                yield f"{path}: {', '.join(f'{name} {version}' for name, version in packages.items())}"

    def needed(self) -> Iterator[Resolved]:
        """NVIDIA's libraries, each with the first library that needs it, torch's own first; then what is missing."""
        names = self.process.names
        seen: set[str] = set()
        torch_folder = f"{self.install.location}/"
        for asker in sorted(self.process.opened, key=lambda library: not library.path.startswith(torch_folder)):
            for name in asker.elf.needed:
                if not CUDA_LIBRARY.fullmatch(name) or name in seen or name not in names:
                    continue
                seen.add(name)
                got, (expected, package) = names[name], self._expected(name)
                path, via = self._clean(got.path, expected), "loaded" if got.via == "path" else got.via
                yield Resolved(name, path, via, os.path.basename(asker.path), self._version(path), expected, package)
        for missing in self.missing:
            if missing.name in seen or missing.name.startswith(_OF_DRIVER):
                continue
            seen.add(missing.name)
            expected, package = self._expected(missing.name)
            by = os.path.basename(missing.needed_by.path) if missing.needed_by else "torch"
            path = self._clean(missing.path, expected)
            yield Resolved(missing.name, path, missing.via, by, "", expected, package, missing.problem)

    def _expected(self, name: str) -> tuple[str, str]:
        """The expected file in site-packages, empty if there is none, and the distribution that should contain it."""
        location = self.install.location
        site = location.rpartition("/")[0]
        bundled = f"{location}/lib/{name}"
        if self.loader.host.exists(bundled):
            return bundled, "torch"
        # The run path shows whether this torch takes NVIDIA's libraries from their wheels.
        torch_libraries = (library for library in self.process.opened if library.path.startswith(location))
        folders = (
            posixpath.normpath(folder) for library in torch_libraries for folder in self.loader.run_path(library)
        )
        if not any(folder.startswith(f"{site}/nvidia/") for folder in folders):
            return "", ""
        fitting = [path for path in self.owners if os.path.basename(path) == name]
        fitting.sort(key=lambda path: not path.startswith(f"{site}/"))
        if fitting:
            return fitting[0], next(iter(self.owners[fitting[0]]))
        return "", package_of(name, self.install.cuda)

    def _clean(self, path: str, expected: str) -> str:
        """The path without ``..``, spelled as ``expected`` if it is the same file."""
        target = self.loader.host.target
        spellings = (spelling for spelling in (expected, posixpath.normpath(path)) if path and spelling)
        return next((spelling for spelling in spellings if target(spelling) == target(path)), path)

    def _version(self, path: str) -> str:
        suffix = re.search(r"\.so\.(\d+\.\d[\d.]*)$", self.loader.host.target(path))
        return next(iter(self.owners.get(path, {}).values()), suffix[1] if suffix else "")

    # -- whether they are compatible

    def unresolved(self) -> Iterator[str]:
        """Symbols of NVIDIA's libraries, and versions of other libraries, that are needed and not defined."""
        names = self.process.names
        needs: list[tuple[str, str, list[UndefinedSymbol]]] = []  # the library that needs them, the file, the symbols
        wanted: dict[str, set[UndefinedSymbol]] = {}
        for asker in self.process.opened:
            of_torch = asker.path.startswith(self.install.location)
            of_nvidia = [name for name in asker.elf.needed if CUDA_LIBRARY.fullmatch(name)]
            by_file: dict[str, list[UndefinedSymbol]] = {}
            for symbol in (asker.elf.undefined(of_nvidia) or ()) if of_torch or of_nvidia else ():
                if symbol.file in names and (symbol.name if symbol.file in of_nvidia else of_torch):
                    by_file.setdefault(symbol.file, []).append(symbol)
            for file, symbols in by_file.items():
                needs.append((os.path.basename(asker.path), file, symbols))
                wanted.setdefault(file, set()).update(symbols)
        lost = {file: {*(names[file].elf.not_defined(symbols) or ())} for file, symbols in wanted.items()}
        for asking, file, symbols in needs:
            absent = [symbol for symbol in symbols if symbol in lost[file]]
            absent = absent[:_MOST_SYMBOLS] if symbols[0].name else absent  # versions are few
            yield from (f"{symbol.name or symbol.version} of {file}, needed by {asking}" for symbol in absent)

    def split_cudnn(self) -> Iterator[str]:
        """Parts of cuDNN that would be loaded from another folder, in a different release than cuDNN's own."""
        loader, target = self.loader, self.loader.host.target
        for soname, cudnn in self.process.names.items():
            named = re.fullmatch(r"libcudnn\.so\.\d+", soname)
            release = self._version(self._clean(cudnn.path, "")) if named else ""
            if not release:
                continue
            numbers, begin = release.split(".")[:3], re.match(r"[0-9]{1,4}", release)
            major = int(begin[0]) if begin else 0
            askers: list[tuple[SharedObject, tuple[str, ...]]] = [(cudnn, _BY_CUDNN.get(major, _BY_CUDNN_9))]
            graph = f"{os.path.dirname(cudnn.path)}/libcudnn_graph.so.{major}"
            if isinstance(elf := loader.examine(graph), Elf):
                askers.append((SharedObject(graph, elf), _BY_GRAPH))
            folder = os.path.dirname(target(cudnn.path))
            for asker, part in ((asker, part) for asker, parts in askers for part in parts):
                names = (f"libcudnn_{part}.so.{'.'.join(numbers[:length])}" for length in range(len(numbers), 0, -1))
                pairs = ((name, library) for name in names for library in loader.search(name, asker))
                name, sublibrary = next(pairs, ("", None))
                if sublibrary is None or os.path.dirname(target(sublibrary.path)) == folder:
                    continue
                constants = asker.elf.section_bytes(".rodata", _CONSTANTS_OF_CUDNN) or b""
                # A newer cuDNN on the system may have parts that this one does not know.
                mention = re.search(rf"cudnn_{part}\b".encode(), constants)
                if mention and not target(sublibrary.path).endswith(f".so.{'.'.join(numbers)}"):
                    yield f"{name}: {sublibrary.path}, by {sublibrary.via}"

    def cwd_searched(self) -> Iterator[str]:
        """Libraries whose run path includes the current directory."""
        for library in dict.fromkeys(self.process.opened):
            if "" in elements(library.elf.run_path, ":") and not self.loader.musl:
                kind = "RUNPATH" if library.elf.has_runpath else "RPATH"
                yield f"{os.path.basename(library.path)}: {kind} has an empty element"


# cuDNN is a small library that opens its parts at run time, by name: they may come from another release. It requests
# the exact release first (libcudnn_ops.so.9.20.0), then libcudnn_ops.so.9.20, then libcudnn_ops.so.9, each time through
# the whole search of the loader. NVIDIA's wheels contain only the last. So a file in LD_LIBRARY_PATH comes first if
# cuDNN has a DT_RUNPATH, as in 9.1 to 9.20.

_BY_CUDNN = {8: ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train")}
_BY_CUDNN_9 = ("graph", "ops", "cnn", "adv", "ext")
_BY_GRAPH = ("heuristic", "engines_precompiled", "engines_runtime_compiled", "engines_tensor_ir")
_CONSTANTS_OF_CUDNN = 1 << 25


# -- torch's -----------------------------------------------------------------------------------------------------------

_CONSTANTS_OF_TORCH = 1 << 26  # libtorch_python has 1 MB of them
_DLL = 1 << 27
_LISTED = re.compile(rb"\0((?:(?:sm_|compute_|gfx)\w+(?: |(?=\0)))+)\0")
_KERNELS = ("torch_cuda", "torch_cuda_cu", "torch_cuda_cpp")
"""The last two until torch 1.13. Others, such as torch_cuda_linalg, contain code that was built elsewhere."""
_MOST_SYMBOLS = 8  # Symbols named for each library: a wrong one lacks hundreds.


def torch_libraries(loader: Loader, python: Python, install: TorchInstall) -> facts.TorchLibraries:
    """The architectures that torch has code for, and the libraries that it loads in that Python."""
    listed = _arch_list(loader.host, install)
    if loader.host.windows:
        from transload.diagnose.probes.dlls import DllImport

        dlls = DllImport(loader.host, python, install)
        return facts.TorchLibraries(
            architectures=listed,
            cubins=_cubins(loader, install),
            needed=tuple(dlls.needed()),
            unresolved=tuple(dlls.unresolved()),
            toolset=dlls.toolset(),
            committed=dlls.committed(),
        )
    if loader.host.uname[0] != "Linux":
        return facts.TorchLibraries(architectures=listed, cubins=Unknown("read on Linux and Windows only"))
    imported = _TorchImport(loader, python.path, install)
    return facts.TorchLibraries(
        architectures=listed,
        cubins=_cubins(loader, install),
        needed=tuple(imported.needed()),
        unresolved=tuple(imported.unresolved()),
        overlaps=tuple(imported.overlaps()),
        split_cudnn=tuple(imported.split_cudnn()),
        cwd_searched=tuple(imported.cwd_searched()),
    )


def _arch_list(host: Host, install: TorchInstall) -> tuple[str, ...] | Unknown:
    """The list that ``torch.cuda.get_arch_list()`` returns: a text among the constants of libtorch_python."""
    if install.cpu_only:
        return ()
    if host.uname[0] == "Windows":
        constants = host.data(f"{install.location}/lib/torch_python.dll", _DLL)
    else:
        elf = read_elf(host.real(f"{install.location}/lib/libtorch_python.so"))
        constants = elf.section_bytes(".rodata", _CONSTANTS_OF_TORCH) if isinstance(elf, Elf) else elf
    if isinstance(constants, Unknown):
        return Unknown(f"libtorch_python: {constants.reason}")
    lists = (text.decode().split() for text in _LISTED.findall(constants))
    longest: list[str] = max(lists, key=len, default=[])
    return tuple(longest) or Unknown("libtorch_python has no list of architectures")


def _cubins(loader: Loader, install: TorchInstall) -> dict[str, int] | Unknown:
    if install.known and not install.cuda:
        return {}
    total: dict[str, int] = {}
    for stem in _KERNELS:
        name = f"{stem}.dll" if loader.host.windows else f"lib{stem}.so"
        path = f"{install.location}/lib/{name}"
        if stem != _KERNELS[0] and not loader.host.exists(path):
            continue
        library = read_pe(loader.host.real(path)) if loader.host.windows else loader.examine(path)
        codes = library.architectures() if isinstance(library, Elf | Pe) else library
        if not isinstance(codes, dict):
            return Unknown(f"{name}: {'not there, or not for this machine' if codes is None else codes.reason}")
        for architecture, count in codes.items():
            total[architecture] = total.get(architecture, 0) + count
    return total


# -- extensions: which cards they have code for, and whether they are compatible with this torch -----------------------

_MOST_LIBRARIES = 64

_OF_TORCH = re.compile(r"_Z(?:T[IVST]|GV)?(?:N[VKRO]*)?(?:3c10|2at|5torch)|_Z\d+THP|aoti_torch_")
"""Mangled names from the namespaces c10, at and torch."""
_OF_DRIVER = ("libcuda.so", "libnvidia-", "nvcuda.dll", "nvml.dll")
_CODECS = re.compile(r"lib(?:av|sw|postproc|sox)\w*\.so|(?:lib)?(?:av|sw|postproc|sox)\w*(?:-\d+)?\.dll")
"""FFmpeg and SoX: packages contain a library for each of their releases, and try one after the other."""
_BITSANDBYTES = re.compile(r".*/libbitsandbytes_([a-z]+)(\d*)\.(?:so|dll)")
Examine = Callable[[Sequence[str]], dict[str, Needs]]
"""Returns what the libraries at some paths need; without those that are for another machine, or no libraries."""


def extensions(loader: Loader, python: Python, install: TorchInstall | None) -> tuple[ExtensionPackage, ...]:
    """The extensions that a Python can import, checked against the torch that it would import."""
    host = loader.host
    packages = table("packages")["extensions"].split()
    distributions: dict[str, Distribution] = {}
    for distribution in installed(host, python.path):
        if distribution.name in packages:
            distributions.setdefault(distribution.name, distribution)  # the first on the path is imported
    examine: Examine | None = None
    if distributions and host.uname[0] == "Linux":
        if install and install.location not in loader.imports:
            _TorchImport(loader, python.path, install)
        examine = partial(_examined, loader.imports[install.location] if install else Process(loader), install)
    elif distributions and install and host.windows:
        from transload.diagnose.probes.dlls import DllImport

        examine = DllImport(host, python, install).examined
    return tuple(_extension(examine, install, distribution) for distribution in distributions.values())


def _extension(examine: Examine | None, install: TorchInstall | None, dist: Distribution) -> ExtensionPackage:
    """What its metadata says, and what its libraries contain and need."""
    host, module, stated = dist.host, dist.name.replace("-", "_"), dist.version
    written = assigned(host.text(f"{dist.site}/{module}/version.py", 4096) or "").get("__version__", "")
    if written.partition("+")[0] == stated.partition("+")[0]:
        stated = written  # wheels on PyPI have no local version, but their version.py may have one
    wants = ""  # the torch that it requires, such as ==2.8.0; empty for any
    for need in dist.fields("Requires-Dist"):
        pinned = re.fullmatch(r"torch\s*\(?((?:[<>=!~][^;()]*)?)\)?\s*(;.*)?", need, re.IGNORECASE)
        if pinned and "extra" not in (pinned[2] or ""):
            wants = pinned[1].replace(" ", "")
            break
    bare = ExtensionPackage(dist.name, stated, wants_torch=wants, local=stated.partition("+")[2])
    if examine is None:
        return bare
    # The libraries in RECORD, else those with its name.
    end, pattern = (".pyd", r"\.(?:pyd|dll)") if host.windows else (".so", r"\.so")
    paths = [f"{dist.site}/{path}" for path in dist.files(rf'[^",\n]+{pattern}')]
    if not host.data(f"{dist.path}/RECORD", 1):
        paths = [*host.paths(f"{dist.site}/{module}", end=end), *host.paths(dist.site, module, end)]
    if dist.name == "bitsandbytes":
        paths = _bitsandbytes_library(paths, install or TorchInstall(""))
        if not paths and install:
            name = f"libbitsandbytes_cuda{install.cuda.replace('.', '')}"
            return replace(bare, missing=(f"{name}.dll" if host.windows else f"{name}.so",))
    libraries = [
        replace(
            bare,
            library=path,
            architectures=tuple(needs.architectures),
            undefined=tuple(needs.undefined[:_MOST_SYMBOLS]),
            missing=tuple(dict.fromkeys(name for name in needs.missing if not name.startswith(_OF_DRIVER))),
        )
        if not any(map(_CODECS.match, needs.missing))
        else replace(bare, library=path)
        for path, needs in examine(paths[:_MOST_LIBRARIES]).items()
    ]
    libraries = [lib for lib in libraries if lib.architectures or lib.undefined or lib.missing] or libraries
    libraries.sort(key=lambda lib: (not lib.missing, not lib.undefined, -len(lib.architectures)))  # the worst first
    every = {name for library in libraries for name in library.architectures}
    # cubins before PTX, each by number: sm_90a before sm_100
    ordered = sorted(every, key=lambda name: (not name.startswith("sm_"), len(name.rstrip("af")), name))
    return replace([*libraries, bare][0], architectures=tuple(ordered))


def _examined(process: Process, install: TorchInstall | None, paths: Sequence[str]) -> dict[str, Needs]:
    """The libraries of a package on Linux, in a process that has imported torch."""
    examined = ((path, process.loader.examine(path)) for path in paths)
    elves = {path: elf for path, elf in examined if isinstance(elf, Elf)}
    missing = {path: [missing.name for missing in process.open(path)] for path in elves}
    loaded = {path: elf for path, elf in elves.items() if not any(map(_CODECS.match, missing[path]))}
    wanted: dict[str, list[UndefinedSymbol]] = {}
    lacking: set[UndefinedSymbol] = set()
    if install:
        folder = f"{install.location}/lib/"
        for path, elf in loaded.items():
            wanted[path] = [symbol for symbol in elf.undefined() or () if _OF_TORCH.match(symbol.name)]
        torch_elves = (library.elf for library in process.files.values() if library.path.startswith(folder))
        left = tuple(dict.fromkeys(chain.from_iterable(wanted.values())))
        for library in chain(torch_elves, elves.values()):
            rest = library.not_defined(left) if left else ()
            left = left if isinstance(rest, Unknown) else rest
        lacking.update(left)
    return {
        path: Needs(
            tuple(elf.architectures() or ()) if path in loaded else (),
            [symbol.name for symbol in wanted.get(path, ()) if symbol in lacking],
            missing[path],
        )
        for path, elf in elves.items()
    }


def _bitsandbytes_library(paths: Sequence[str], install: TorchInstall) -> list[str]:
    """The library that bitsandbytes loads: the one for torch's CUDA, else the nearest of the same major version."""
    kind, wanted = ("rocm", install.hip) if install.hip else ("cuda", install.cuda) if install.cuda else ("cpu", "")
    fitting = {match[2]: match[0] for match in map(_BITSANDBYTES.fullmatch, paths) if match and match[1] == kind}
    if kind == "cpu":
        return list(fitting.values())
    major, minor = (*wanted.split("."), "0")[:2]
    minors = {number[len(major) :]: path for number, path in fitting.items() if number.startswith(major)}
    distance = {path: int(number or 0) - int(minor) if minor.isdecimal() else 0 for number, path in minors.items()}
    return sorted(minors.values(), key=lambda path: (distance[path] > 0, abs(distance[path])))[:1]
