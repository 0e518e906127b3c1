"""What a file needs of a machine: the packages that its names live in, and for compiled code the right CUDA."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from transload.diagnose.tables import cuda_text, numbers_of, runs_on
from transload.errors import TransloadError
from transload.frozen import Plain, facts
from transload.judge.names import PLAIN_VALUES

if TYPE_CHECKING:
    from transload.checkpoint import Checkpoint
    from transload.machine import Machine, Python


def raw_bytes(path: str, start: int, count: int) -> bytes:
    """Up to ``count`` bytes of a file from ``start`` on; none if it cannot be read."""
    from transload.io.sources import open_source

    try:
        with closing(open_source(path)) as source:
            return source.read(start, count)
    except TransloadError:
        return b""


# -- packages

_OF_THE_SCRIPT = frozenset({"__main__", "__mp_main__"})
_NO_PACKAGE = frozenset({"__torch__", "__builtin__", "copy_reg", "torch"})
_LONGEST_FINDER = 1 << 20

# Packages that write classes of their own into checkpoints. Of any other no command is given: anybody may have taken
# its name on PyPI.
_ON_PYPI = frozenset(
    {
        *("accelerate", "bitsandbytes", "causal_conv1d", "deepspeed", "diffusers", "flash_attn", "lightning"),
        *("lightning_fabric", "mamba_ssm", "numpy", "omegaconf", "pandas", "peft", "pytorch_lightning", "safetensors"),
        *("scipy", "sentencepiece", "sklearn", "timm", "tokenizers", "torch_geometric", "torch_tensorrt", "torchao"),
        *("torchaudio", "torchvision", "transformer_engine", "transformers", "triton", "ultralytics", "xformers"),
        *("PIL", "addict", "cv2", "easydict", "gym", "gymnasium", "joblib", "skimage", "stable_baselines3"),
        *("torchmetrics", "yacs", "yaml"),
    }
)
# By pip; the others have a hyphen for each underscore.
_CALLED = {
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "skimage": "scikit-image",
}
_CUDA_ONLY = frozenset(
    {
        *("apex", "auto_gptq", "awq", "bitsandbytes", "causal_conv1d", "cupy", "diff_gaussian_rasterization"),
        *("exllamav2", "flash_attn", "flash_attn_interface", "flash_mla", "mamba_ssm", "MinkowskiEngine", "nvdiffrast"),
        *("spconv", "tensorrt", "tinycudann", "torch_tensorrt", "torchsparse", "transformer_engine", "triton"),
    }
)
"""Packages whose code runs on NVIDIA GPUs alone, or is built to."""


@facts(frozen=True)
class Package(Plain):
    """A package that a loader would import for a file, and the names it is asked for."""

    name: str
    """As it is imported: ``flash_attn``."""
    names: tuple[str, ...]
    found: bool
    missing: str = ""
    """The module that is not there: the package itself, or one inside it that another release has."""
    on_pypi: str = ""
    """What to install, where that is known."""
    cuda_only: bool = False
    problem: str = ""
    """Why it would not work though it is installed."""

    @property
    def of_the_script(self) -> bool:
        """Whether it is not a package: the names were defined in the script that saved the file."""
        return self.name in _OF_THE_SCRIPT


def packages(checkpoint: Checkpoint, machine: Machine, *, cwd: str = "") -> tuple[Package, ...]:
    """What loading without ``weights_only`` would import, beside torch and the standard library. Nothing is imported.

    Scripts are run from some directory; ``cwd`` is searched as theirs would be.
    """
    from transload.loading.refusal import loaded_pickles

    modules: dict[str, list[tuple[str, str]]] = {}
    streams = {pickle.name for pickle in loaded_pickles(checkpoint)}
    for use in checkpoint.globals:
        package = use.module.partition(".")[0] if use.stream in streams else "torch"
        if use.verdict != "data" and package not in _NO_PACKAGE and package not in sys.stdlib_module_names:
            # What transload.load makes itself needs the package, wherever in that the release has it.
            module = package if use.full_name in PLAIN_VALUES else use.module
            modules.setdefault(package, []).append((module, use.full_name.removeprefix(f"{module}.")))
    if checkpoint.path.endswith(".safetensors"):
        modules.setdefault("safetensors", []).append(("safetensors.torch", "load_file"))
    broken = {each.package.replace("-", "_"): each for each in reversed(machine.extensions)}
    result = []
    for name, uses in modules.items():
        parts = [] if name in _OF_THE_SCRIPT else [_missing(module, machine.python, cwd) for module, _ in uses]
        missing = next(filter(None, parts), "")
        extension = broken.get(name)
        lacks = extension.missing or extension.undefined if extension and not missing else ()
        result.append(
            Package(
                name,
                tuple(f"{module}.{attribute}" for module, attribute in uses),
                found=not missing and name not in _OF_THE_SCRIPT,
                missing=missing,
                on_pypi=_CALLED.get(name, name.replace("_", "-")) if name in _ON_PYPI else "",
                cuda_only=name in _CUDA_ONLY,
                problem=f"it needs {lacks[0]}, which is not there" if lacks else "",
            )
        )
    return tuple(result)


def _missing(module: str, python: Python, cwd: str) -> str:
    """The first part of a module's name that an interpreter would not find; empty where nothing is missing or known."""
    places = place = [*([cwd] if cwd else []), *python.path]
    parts = module.split(".") if place else []
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        try:
            spec = PathFinder.find_spec(name, place)
        except (ImportError, ValueError, OSError):  # nothing is found in a place that is broken
            spec = None
        if spec is None:
            return name if count > 1 or not _found_otherwise(name, python, places) else ""
        if spec.submodule_search_locations is None or spec.origin is None:
            return ""  # a single file, which may create modules; or a folder without one, of any content
        place = list(spec.submodule_search_locations)
    return ""


def _found_otherwise(name: str, python: Python, places: list[str]) -> bool:
    """Whether it is found without the path: by an import hook of this process, or an editable install."""
    for finder in sys.meta_path if python.executable == sys.executable else ():
        try:
            if finder is not PathFinder and finder.find_spec(name, None) is not None:
                return True
        except Exception:  # noqa: BLE001, PERF203, S112  somebody's hook may raise anything, and must not stop us
            continue
    from pathlib import Path  # it costs more than all the rest, and is seldom needed

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
# PTX ISA → the first CUDA whose driver compiles it: the release history in NVIDIA's PTX ISA manual. From 7.0 on the
# number has followed that of CUDA, except for these.
_PTX_CUDA = {(8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9)}
_PTX_MAJOR = {7: 11, 8: 12, 9: 13}
_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


@facts(frozen=True)
class Compatibility(Plain):
    """An answer with its reason; true where the file can be used here as far as CUDA is concerned.

    ``origin`` are the versions that the file records of where it was made; hardly any file records one.
    """

    compatible: bool
    reason: str
    evidence: tuple[str, ...] = ()
    origin: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return self.compatible

    def __str__(self) -> str:
        """The reason, then what shows it."""
        return "\n  ".join((f"{'yes' if self.compatible else 'no'}: {self.reason}", *self.evidence))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**super().to_dict(), "origin": dict(self.origin)}


def is_cuda_compatible(path: str | os.PathLike[str], *, machine: Machine | None = None) -> Compatibility:
    """Whether a checkpoint is compatible with the CUDA of this machine, or of another one that was examined.

    Tensors carry no CUDA version. Only compiled parts depend on one: kernels of an AOTInductor package run on GPUs of
    their architecture alone, and PTX needs a driver that can compile it.

    >>> transload.is_cuda_compatible("model.pt").reason  # doctest: +SKIP
    'tensors carry no CUDA version: they load under any, and without CUDA'
    """
    from transload.judge import inspect

    if machine is None:
        from transload.diagnose.probes import probe

        machine = probe(torch=False)
    return compatibility(inspect(path), machine)


def compatibility(checkpoint: Checkpoint, machine: Machine) -> Compatibility:
    """The same for a file and a machine that were examined already."""
    recorded = checkpoint.written_by.recorded
    compared = tuple(_compared(dict(recorded), machine))
    kernels = list(_kernels(checkpoint))
    if not kernels:
        reason = _TENSORS if checkpoint.tensors else "there is no code for a GPU in it"
        return Compatibility(True, reason, compared, recorded)
    driver = machine.driver.cuda
    evidence = []
    for codes in dict.fromkeys(kernel.codes for kernel in kernels):
        same = [kernel for kernel in kernels if kernel.codes == codes]
        evidence.append(f"{', '.join(codes)}: {same[0].name}{f' and {len(same) - 1} more' if len(same) > 1 else ''}")
    able = []
    for name, card in machine.capabilities.items():
        lost = next((kernel.name for kernel in kernels if not kernel.runs(card, driver.version)), "")
        told = f"does not run {lost}" if lost else "runs"
        evidence.append(f"{name}, compute capability {'.'.join(map(str, card))}: {told}")
        able += [] if lost else [name]
    evidence += compared
    targets = ", ".join(sorted({code for kernel in kernels for code in kernel.codes})[:8])
    against = _against(checkpoint, dict(recorded), machine)
    if not against and not (machine.capabilities and driver.works):
        against = "there is no NVIDIA GPU here that works"
    if against:
        return Compatibility(False, f"it holds compiled code for {targets}, and {against}", tuple(evidence), recorded)
    reason = f"it holds compiled code for {targets}, which {'runs on' if able else 'does not run on'}"
    cards = " or ".join(able or machine.capabilities)
    return Compatibility(bool(able), f"{reason} {cards}", tuple(evidence), recorded)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel, or all that a library holds: it runs on a card if one of its codes does."""

    name: str
    codes: tuple[str, ...]
    cuda: int = 0
    """The CUDA version that its PTX needs of the driver, numbered as drivers do: ``12080``; 0 where it does not say."""

    def runs(self, card: tuple[int, ...], driver: int) -> bool:
        able = not driver or self.cuda <= driver
        return able and any(runs_on(code, card) for code in self.codes)


def _kernels(checkpoint: Checkpoint) -> Iterator[_Kernel]:
    for part in checkpoint.parts:
        facts = dict(part.facts)
        if part.kind == "PTX":
            cuda = 0
            record = next((record for record in checkpoint.records if record.name == part.name), None)
            if record is not None and record.offset is not None and not record.method:
                head = raw_bytes(checkpoint.path, record.offset, min(record.stored, _PTX_HEAD))
                if found := _PTX_VERSION.search(head):
                    written = int(found[1]), int(found[2])
                    major, minor = _PTX_CUDA.get(written, (_PTX_MAJOR.get(written[0], 0), written[1]))
                    cuda = major * 1000 + minor * 10
            yield _Kernel(part.name, (facts.get("target", "").replace("sm_", "compute_"),), cuda)
        elif part.kind in ("cubin", "AMD GPU code", "Intel GPU code", "GPU code for several architectures"):
            yield _Kernel(part.name, (facts.get("target", part.kind),))
        elif "GPU code inside" in facts:
            yield _Kernel(part.name, tuple(facts["GPU code inside"].split(", ")))


def _against(checkpoint: Checkpoint, origin: dict[str, str], machine: Machine) -> str:
    """Why compiled code does not run here whatever the card is: it is for another processor, or for a newer CUDA."""
    here = _PROCESSORS.get(machine.platform.machine.lower(), machine.platform.machine)
    built = {dict(part.facts).get("machine", here) for part in checkpoint.parts if part.kind == "library"}
    other = sorted(built - {here})
    if other:
        return f"its library is for {other[0]} processors, not {here}"
    # The driver does not run what a torch has compiled for a CUDA of a later generation.
    build = re.search(r"\+cu(\d{2})(\d)", origin.get("torch", ""))
    recorded = re.match(r"\d{1,2}\.\d", origin.get("cuda", ""))
    cuda = recorded[0] if recorded else f"{build[1]}.{build[2]}" if build else ""
    driver = machine.driver.cuda.version
    if not cuda or not driver or numbers_of(cuda)[0] <= driver // 1000:
        return ""
    return f"it was made with CUDA {cuda}, while this driver stops at {cuda_text(driver)}"


def _compared(origin: dict[str, str], machine: Machine) -> Iterator[str]:
    """What the file records of its origin, beside what is here."""
    torch = machine.torch.first
    here = {
        "torch": torch.version if torch else "",
        "cuda": torch.cuda if torch else "",
        "driver": machine.driver.nvml.driver or machine.kernel.version,
        "gpu": ", ".join(dict.fromkeys(gpu.name for gpu in machine.driver.cuda.gpus)),
    }
    for name, value in origin.items():
        yield f"made with {name} {value}{f'; here {here[name]}' if here.get(name) else ''}"
    if not origin:
        yield "no origin is recorded in the file"
