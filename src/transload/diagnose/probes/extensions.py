"""Packages with compiled code beside torch: for which cards they were built, and whether they fit this torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from transload.diagnose.elf import Elf
from transload.diagnose.fatbin import architectures
from transload.diagnose.host import Host
from transload.diagnose.loader import Loader
from transload.diagnose.probes.distributions import Distribution, distributions, fields, version
from transload.diagnose.process import Process
from transload.diagnose.symbols import Wanted, lacking, undefined
from transload.diagnose.torch_import import import_torch
from transload.machine import Extension, Python, TorchInstall

__all__ = ["KNOWN", "extensions"]

KNOWN = frozenset({
    *("apex", "auto-gptq", "autoawq-kernels", "bitsandbytes", "causal-conv1d", "deep-ep", "deep-gemm", "deepspeed"),
    *("detectron2", "exllamav2", "fbgemm-gpu", "flash-attn", "flash-attn-3", "flash-mla", "flashinfer-jit-cache"),
    *("gptqmodel", "grouped-gemm", "k2", "mamba-ssm", "megablocks", "minkowskiengine", "mmcv", "natten", "nvdiffrast"),
    *("pyg-lib", "pytorch3d", "sageattention", "sgl-kernel", "spconv", "tinycudann", "torch-cluster", "torch-scatter"),
    *("torch-sparse", "torch-spline-conv", "torchao", "torchaudio", "torchcodec", "torchsparse", "torchvision"),
    *("transformer-engine-torch", "vllm", "vllm-flash-attn", "xformers"),
})  # fmt: skip
"""Distributions whose libraries are looked at."""

_RECORD = 1 << 24
_LIBRARY = re.compile(rb"^\"?([^,\n\"]+\.so)\"?,", re.MULTILINE)
_MOST_LIBRARIES = 64
_MOST_SYMBOLS = 8

_OF_TORCH = re.compile(r"_Z(?:T[IVST]|GV)?(?:N[VKRO]*)?(?:3c10|2at|5torch)|_Z\d+THP|aoti_torch_")
"""Mangled names of what lies in the namespaces c10, at and torch."""
_DRIVER = re.compile(r"libcuda\.so|libnvidia-")
_CODECS = re.compile(r"lib(?:av|sw|postproc|sox)\w*\.so")
"""FFmpeg and SoX: packages bring a library for every release of them, and try one after the other."""
_BITSANDBYTES = re.compile(r".*/libbitsandbytes_([a-z]+)(\d*)\.so")


def extensions(
    host: Host, python: Python, install: TorchInstall | None, loader: Loader | None = None
) -> tuple[Extension, ...]:
    """The extensions on the import path of ``python``, held against the torch that would be imported.

    ``loader`` is one that has already looked at this host, if there is one.
    """
    found = list(_distributions(host, python.path))
    if not found or host.uname[0] != "Linux":
        return tuple(_bare(host, each) for each in found)
    view = _View(host, _process(loader or Loader(host), python, install), install)
    return tuple(view.extension(each) for each in found)


def _distributions(host: Host, path: Sequence[str]) -> Iterator[Distribution]:
    """Those that are known, each once: the first on the path is imported."""
    met: set[str] = set()
    for folder in dict.fromkeys(path):
        for each in distributions(folder, host.names(folder) or ()):
            if each.name in KNOWN and each.name not in met:
                met.add(each.name)
                yield each


def _bare(host: Host, dist: Distribution) -> Extension:
    """What its metadata says."""
    told = _told(host, dist)
    return Extension(dist.name, told, wants_torch=_wants(host, dist), local=told.partition("+")[2])


def _told(host: Host, dist: Distribution) -> str:
    """Its version; that of a wheel on PyPI has no local part, and its ``version.py`` still may."""
    stated = version(host, dist)
    site = dist.path.rpartition("/")[0]
    text = host.text(f"{site}/{dist.name.replace('-', '_')}/version.py", 4096) or ""
    written = re.search(r"""(?m)^__version__\s*(?::[^=\n]*)?=\s*["']([^"'\s]+)["']""", text)
    return written[1] if written and written[1].partition("+")[0] == stated.partition("+")[0] else stated


def _wants(host: Host, dist: Distribution) -> str:
    """The torch it asks for: ``==2.8.0``; empty where any will do."""
    for need in fields(host, dist, "Requires-Dist"):
        found = re.fullmatch(r"torch\s*\(?((?:[<>=!~][^;()]*)?)\)?\s*(;.*)?", need, re.IGNORECASE)
        if found and "extra" not in (found[2] or ""):
            return found[1].replace(" ", "")
    return ""


def _process(loader: Loader, python: Python, install: TorchInstall | None) -> Process:
    """A process that has imported torch, as every extension does first."""
    process = Process(loader)
    process.start()
    if install:
        import_torch(process, loader.host, python.path, install)
    return process


@dataclass(frozen=True, slots=True)
class _Examined:
    path: str
    architectures: frozenset[str]
    undefined: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _View:
    host: Host
    process: Process
    install: TorchInstall | None
    absent: dict[str, bool] = field(default_factory=dict)
    """Symbol → whether torch lacks it: extensions ask for the same ones."""

    def extension(self, dist: Distribution) -> Extension:
        bare = _bare(self.host, dist)
        paths = list(self._libraries(dist))
        if dist.name == "bitsandbytes" and self.install:
            paths = _of_build(paths, self.install)
            if not paths:
                return replace(bare, missing=(f"libbitsandbytes_cuda{self.install.cuda.replace('.', '')}.so",))
        elves = dict(self._elves(paths))
        found = [self._examined(path, elf, elves.values()) for path, elf in elves.items()]
        found = [each for each in found if each.architectures or each.undefined or each.missing] or found
        if not found:
            return bare
        worst = max(found, key=lambda each: (bool(each.missing), bool(each.undefined), len(each.architectures)))
        every = frozenset(name for each in found for name in each.architectures)
        return replace(
            bare,
            library=worst.path,
            architectures=tuple(sorted(every, key=_order)),
            undefined=worst.undefined,
            missing=worst.missing,
        )

    def _elves(self, paths: Sequence[str]) -> Iterator[tuple[str, Elf]]:
        for path in paths[:_MOST_LIBRARIES]:
            elf = self.process.loader.examine(path)
            if isinstance(elf, Elf):
                yield path, elf

    def _libraries(self, dist: Distribution) -> Iterator[str]:
        """Its libraries: those that RECORD lists, else those in the folders called as it is."""
        site = dist.path.rpartition("/")[0]
        record = self.host.data(f"{dist.path}/RECORD", _RECORD) or b""
        if record:
            yield from (f"{site}/{line.decode('utf-8', 'surrogateescape')}" for line in _LIBRARY.findall(record))
            return
        module = dist.name.replace("-", "_")
        yield from self.host.paths(f"{site}/{module}", end=".so")
        yield from (path for path in self.host.paths(site, end=".so") if path.startswith(f"{site}/{module}"))

    def _examined(self, path: str, elf: Elf, own: Iterable[Elf]) -> _Examined:
        missing = [each.name for each in self.process.open(path).missing]
        if any(_CODECS.match(name) for name in missing):
            return _Examined(path, frozenset(), (), ())
        code = architectures(elf) or {}
        absent = () if self.install is None else self._absent(elf, own)
        kept = tuple(dict.fromkeys(name for name in missing if not _DRIVER.match(name)))
        return _Examined(path, frozenset(code), absent, kept)

    def _absent(self, elf: Elf, own: Iterable[Elf]) -> tuple[str, ...]:
        """The symbols it takes from torch that neither torch nor the extension itself defines."""
        wanted = [each for each in undefined(elf) or () if _OF_TORCH.match(each.name)]
        asked = [each for each in wanted if each.name not in self.absent]
        left = _left(self._torch(), asked)
        self.absent.update({each.name: each in left for each in asked})
        left = _left(own, [each for each in wanted if self.absent[each.name]])
        return tuple(each.name for each in left[:_MOST_SYMBOLS])

    def _torch(self) -> Iterator[Elf]:
        folder = f"{self.install.location}/lib/" if self.install else ""
        yield from (each.elf for each in self.process.files.values() if folder and each.path.startswith(folder))


def _left(givers: Iterable[Elf], wanted: Sequence[Wanted]) -> Sequence[Wanted]:
    """Those of ``wanted`` that none of the libraries defines."""
    for giver in givers if wanted else ():
        rest = lacking(giver, wanted)
        wanted = rest if isinstance(rest, tuple) else wanted
    return wanted


def _of_build(paths: Sequence[str], install: TorchInstall) -> list[str]:
    """bitsandbytes has a library for every CUDA: it takes that of torch, else the nearest of the same major version.

    >>> _of_build([f"/b/libbitsandbytes_cuda{n}.so" for n in (118, 126, 128, 130)], TorchInstall("", cuda="12.7"))
    ['/b/libbitsandbytes_cuda126.so']
    """
    kind, wanted = ("rocm", install.hip) if install.hip else ("cuda", install.cuda) if install.cuda else ("cpu", "")
    fitting = {each[2]: each[0] for each in map(_BITSANDBYTES.fullmatch, paths) if each and each[1] == kind}
    if kind == "cpu":
        return list(fitting.values())
    major, minor = (*wanted.split("."), "0")[:2]
    minors = {number[len(major) :]: path for number, path in fitting.items() if number.startswith(major)}
    distance = {path: int(each or 0) - int(minor) if minor.isdecimal() else 0 for each, path in minors.items()}
    return sorted(minors.values(), key=lambda path: (distance[path] > 0, abs(distance[path])))[:1]


def _order(name: str) -> tuple[bool, int, str]:
    """Cubins before PTX, each by number."""
    number = re.search(r"\d+", name)
    return not name.startswith("sm_"), int(number[0]) if number else 0, name
