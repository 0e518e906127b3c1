"""What a file needs from a machine: the packages it imports names from, and the right CUDA for compiled code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.machinery import PathFinder
from typing import Any

from transload.checkpoint import Checkpoint
from transload.diagnose.tables import cuda_text, driver_runs, numbers_of, runs_on, table
from transload.errors import TransloadError
from transload.findings import join_names
from transload.frozen import Plain
from transload.io.sources import open_source
from transload.judge import inspect
from transload.judge.names import PLAIN_VALUES
from transload.loading.refusal import loaded_pickles
from transload.machine import Machine, Python


def read_bytes(path: str, start: int, count: int) -> bytes:
    """Up to ``count`` bytes of a file from ``start`` on; empty if it cannot be read."""
    try:
        with closing(open_source(path)) as source:
            return source.read(start, count)
    except TransloadError:
        return b""


# -- packages

_MAIN_MODULES = frozenset({"__main__", "__mp_main__"})
_NO_PACKAGE = frozenset({"__torch__", "__builtin__", "copy_reg", "torch"})
_LONGEST_FINDER = 1 << 20


class Package(Plain):
    """A package that a loader would import for a file, and the names it would look up there."""

    name: str
    """As it is imported: ``flash_attn``."""
    names: tuple[str, ...]
    found: bool
    missing: str = ""
    """The module that is not found: the package itself, or a module that only another release of it has."""
    on_pypi: str = ""
    """What to install, if that is known."""
    cuda_only: bool = False
    problem: str = ""
    """Why it would not work although it is installed."""


def packages(checkpoint: Checkpoint, machine: Machine, *, cwd: str = "") -> tuple[Package, ...]:
    """What loading without ``weights_only`` would import, besides torch and the standard library; nothing is imported.

    ``cwd`` is the directory that scripts run from: Python finds modules there, too.
    """
    modules: dict[str, list[tuple[str, str]]] = {}
    streams = {pickle.name for pickle in loaded_pickles(checkpoint)}
    for use in checkpoint.globals:
        package = use.module.partition(".")[0] if use.stream in streams else "torch"
        if use.verdict != "data" and package not in _NO_PACKAGE and package not in sys.stdlib_module_names:
            # For a name that transload.load builds itself, any release of the package will do.
            module = package if use.full_name in PLAIN_VALUES else use.module
            modules.setdefault(package, []).append((module, use.full_name.removeprefix(f"{module}.")))
    if checkpoint.path.endswith(".safetensors"):
        modules.setdefault("safetensors", []).append(("safetensors.torch", "load_file"))
    known = table("packages")
    broken = {each.package.replace("-", "_"): each for each in reversed(machine.extensions)}
    result = []
    for name, uses in modules.items():
        parts = [] if name in _MAIN_MODULES else [_missing(module, machine.python, cwd) for module, _ in uses]
        missing = next(filter(None, parts), "")
        extension = broken.get(name)
        lacks = extension.missing or extension.undefined if extension and not missing else ()
        result.append(
            Package(
                name,
                tuple(f"{module}.{attribute}" for module, attribute in uses),
                found=not missing and name not in _MAIN_MODULES,
                missing=missing,
                on_pypi=known["imported_from_pypi"].get(name, ""),
                cuda_only=name in known["cuda_only"].split(),
                problem=f"it needs {lacks[0]}, which is not there" if lacks else "",
            )
        )
    return tuple(result)


def _missing(module: str, python: Python, cwd: str) -> str:
    """The first package or module of a dotted name that an interpreter would not find; empty if all are, or unclear."""
    places = place = [*([cwd] if cwd else []), *python.path]
    parts = module.split(".") if place else []
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            spec = PathFinder.find_spec(name, place)
        except (ImportError, ValueError, OSError):  # a broken path entry or parent
            spec = None
        if spec is None:
            return name if count > 1 or not _found_otherwise(name, python, places) else ""
        if spec.submodule_search_locations is None or spec.origin is None:
            return ""  # a module, which may create submodules at run time; or a namespace package, with any content
        place = list(spec.submodule_search_locations)
    return ""


def _found_otherwise(name: str, python: Python, places: list[str]) -> bool:
    """Whether it is found without ``sys.path``: by an import hook of this process, or an editable install."""
    for finder in sys.meta_path if python.executable == sys.executable else ():
        try:
            if finder is not PathFinder and finder.find_spec(name, None) is not None:
                return True
        except Exception:  # noqa: BLE001, PERF203, S112  somebody's hook may raise anything, and must not stop us
            continue
    from pathlib import Path  # slow to import and seldom needed

    for file in (file for place in places for file in Path(place).glob("__editable___*_finder.py")):
        try:
            with file.open(encoding="utf-8", errors="replace") as stream:
                if f"'{name}'" in stream.read(_LONGEST_FINDER):
                    return True
        except OSError:  # noqa: PERF203 - one that cannot be read does not stop the others
            continue
    return False


# -- CUDA

_TENSORS = "tensors carry no CUDA version: they load under any, and without CUDA"
_PTX_HEAD = 4096
_PTX_VERSION = re.compile(rb"^\.version\s+(\d{1,2})\.(\d{1,2})", re.MULTILINE)
# PTX ISA version → the first CUDA whose driver compiles it, from the release history in NVIDIA's PTX ISA manual. Since
# 7.0 the minor versions are those of CUDA, with these exceptions.
_PTX_CUDA = {(8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)}
_PTX_MAJOR = {7: 11, 8: 12, 9: 13}
_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


class Compatibility(Plain):
    """An answer with its reason; true if CUDA does not prevent using the file here.

    ``origin`` are the versions of the machine that wrote the file; hardly any file records them.
    """

    compatible: bool
    reason: str
    evidence: tuple[str, ...] = ()
    origin: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self.compatible

    def __str__(self) -> str:
        """The reason, then the evidence."""
        return "\n  ".join((f"{'yes' if self.compatible else 'no'}: {self.reason}", *self.evidence))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**super().to_dict(), "origin": dict(self.origin)}


def is_cuda_compatible(path: str | os.PathLike[str], *, machine: Machine | None = None) -> Compatibility:
    """Whether a checkpoint is compatible with the CUDA of this machine, or of another one that was examined.

    Tensors carry no CUDA version. Only compiled parts depend on one: kernels of an AOTInductor package run only on GPUs
    of their architecture, and PTX needs a driver that can compile it.

    >>> transload.is_cuda_compatible("model.pt").reason  # doctest: +SKIP
    'tensors carry no CUDA version: they load under any, and without CUDA'
    """
    if machine is None:
        from transload.diagnose.probes import probe

        machine = probe(torch=False)
    return compatibility(inspect(path), machine)


def compatibility(checkpoint: Checkpoint, machine: Machine) -> Compatibility:
    """As ``is_cuda_compatible``, for a file and a machine that were already examined."""
    recorded, torch, driver = checkpoint.written_by.recorded, machine.torch.first, machine.driver.cuda
    here = {
        "torch": torch.version if torch else "",
        "cuda": torch.cuda if torch else "",
        "driver": machine.driver.nvml.driver or machine.kernel.version,
        "gpu": ", ".join(dict.fromkeys(gpu.name for gpu in driver.gpus)),
    }
    compared = tuple(
        f"made with {name} {value}{f'; here {here[name]}' if here.get(name) else ''}" for name, value in recorded
    ) or ("no origin is recorded in the file",)
    kernels = list(_kernels(checkpoint))
    if not kernels:
        reason = _TENSORS if checkpoint.tensors else "it contains no GPU code"
        return Compatibility(True, reason, compared, recorded)
    by_codes: dict[tuple[str, ...], list[str]] = {}
    for name, codes, _ in kernels:
        by_codes.setdefault(codes, []).append(name)
    evidence = [f"{', '.join(codes)}: {join_names(names, 1)}" for codes, names in by_codes.items()]
    able = []
    for gpu, card in machine.capabilities.items():
        fits = ((name, any(runs_on(code, card) for code in codes), cuda) for name, codes, cuda in kernels)
        failing = next((name for name, runs, cuda in fits if not runs or 0 < driver.version < cuda), "")
        outcome = f"does not run {failing}" if failing else "runs"
        evidence.append(f"{gpu}, compute capability {'.'.join(map(str, card))}: {outcome}")
        able += [] if failing else [gpu]
    evidence += compared
    targets = ", ".join(sorted({code for codes in by_codes for code in codes})[:8])
    processor = _PROCESSORS.get(machine.platform.machine.lower(), machine.platform.machine)
    libraries = (dict(part.facts) for part in checkpoint.parts if part.kind == "library")
    other = sorted({library.get("machine", processor) for library in libraries} - {processor})
    build = re.search(r"\+cu(\d{2})(\d)", dict(recorded).get("torch", ""))
    named = re.match(r"\d{1,2}\.\d", dict(recorded).get("cuda", ""))
    cuda = named[0] if named else f"{build[1]}.{build[2]}" if build else ""
    obstacle = ""
    if other:
        obstacle = f"its library is for {other[0]} processors, not {processor}"
    elif cuda and driver.version > 0 and not driver_runs(driver.version, numbers_of(cuda)):
        obstacle = f"it was made with CUDA {cuda}, while this driver stops at {cuda_text(driver.version)}"
    elif not (machine.capabilities and driver.works):
        obstacle = "there is no NVIDIA GPU here that works"
    if obstacle:
        return Compatibility(False, f"it holds compiled code for {targets}, and {obstacle}", tuple(evidence), recorded)
    reason = f"it holds compiled code for {targets}, which {'runs on' if able else 'does not run on'}"
    cards = " or ".join(able or machine.capabilities)
    return Compatibility(bool(able), f"{reason} {cards}", tuple(evidence), recorded)


def _kernels(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Kernels, or all kernels of a library: a name, the codes of which a GPU must run one, and what their PTX needs.

    That is the CUDA version of the driver, as drivers number it: ``12080``; 0 if unknown.
    """
    for part in checkpoint.parts:
        facts = dict(part.facts)
        if part.kind == "PTX":
            cuda = 0
            record = next((record for record in checkpoint.records if record.name == part.name), None)
            if record is not None and record.offset is not None and not record.method:
                head = read_bytes(checkpoint.path, record.offset, min(record.stored, _PTX_HEAD))
                if found := _PTX_VERSION.search(head):
                    written = int(found[1]), int(found[2])
                    major, minor = _PTX_CUDA.get(written, (_PTX_MAJOR.get(written[0], 0), written[1]))
                    cuda = major * 1000 + minor * 10
            yield part.name, (facts.get("target", "").replace("sm_", "compute_"),), cuda
        elif part.kind in ("cubin", "AMD GPU code", "Intel GPU code", "GPU code for several architectures"):
            yield part.name, (facts.get("target", part.kind),), 0
        elif "GPU code inside" in facts:
            yield part.name, tuple(facts["GPU code inside"].split(", ")), 0
