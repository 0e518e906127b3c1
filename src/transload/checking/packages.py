"""The packages that a file's names live in: whether the examined environment has them. Nothing is imported."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from transload.devices import split
from transload.diagnose.tables import numbers_of

if TYPE_CHECKING:
    from pathlib import Path

    from transload.checkpoint import Checkpoint
    from transload.diagnose.verdict import Diagnosis
    from transload.loading.placement import Devices
    from transload.machine import Machine, Python

__all__ = ["Installed", "Package", "installed", "packages"]


_TRUE = ("1", "y", "yes", "true")


@dataclass(frozen=True, slots=True)
class Installed:
    """The torch of an environment, as far as it matters here."""

    version: str
    """``2.13.0+cu130``; empty where there is no torch, or none whose version could be read."""
    counts: dict[str, int] = field(default_factory=dict)
    """Devices of each kind that torch has: ``{"cuda": 1}``; a kind that does not work is left out."""
    sure: bool = True
    """Whether the counts are certain."""
    environ: Mapping[str, str] = field(default_factory=dict)
    absent: Collection[str] = ()
    """Packages a file asks for that are not installed."""

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers."""
        return numbers_of(self.version)

    @property
    def weights_only(self) -> bool:
        """What ``weights_only`` is where the caller of ``torch.load`` does not say.

        >>> Installed("2.5.1").weights_only, Installed("2.13.0+cpu").weights_only
        (False, True)
        """

        def forced(name: str) -> bool:
            return self.environ.get(name, "0").lower() in _TRUE

        if forced("TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
            return True
        return self.release >= (2, 6) and not forced("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")


def installed(
    diagnosis: Diagnosis, devices: Devices, environ: Mapping[str, str], absent: Collection[str] = ()
) -> Installed:
    """The torch that the doctor found, with the devices it would have."""
    first = diagnosis.machine.torch.first
    counts = Counter(split(device.name)[0] for device in devices.available if device.name != "cpu")
    version = first.version if first is not None and first.known else ""
    return Installed(version, dict(counts), _is_sure(diagnosis), environ, absent)


def _is_sure(diagnosis: Diagnosis) -> bool:
    """Whether it is known what ``torch.cuda.is_available()`` says: a card that computes nothing may still be there."""
    machine = diagnosis.machine
    first = machine.torch.first
    if machine.torch.shadow or machine.driver.cuda.answer.state in ("hung", "crashed"):
        return False
    return first is None or first.cpu_only or not machine.driver.cuda.works or diagnosis.status != "broken"


_OF_THE_SCRIPT = frozenset({"__main__", "__mp_main__"})
_NO_PACKAGE = frozenset({"__torch__", "__builtin__", "copy_reg", "torch"})
_FINDERS = "__editable___*_finder.py"
_LONGEST_FINDER = 1 << 20

# Import name → what pip calls it, of packages that write classes of their own into checkpoints. For a name that is not
# here no command is told: anybody may have taken it on PyPI.
_ON_PYPI = {
    **{name: name for name in ("accelerate", "deepspeed", "diffusers", "lightning", "numpy", "omegaconf", "pandas")},
    **{name: name for name in ("peft", "safetensors", "scipy", "sentencepiece", "timm", "tokenizers", "torchao")},
    **{name: name for name in ("torchaudio", "torchvision", "transformers", "ultralytics", "xformers", "yacs")},
    "flash_attn": "flash-attn",
    "bitsandbytes": "bitsandbytes",
    "causal_conv1d": "causal-conv1d",
    "lightning_fabric": "lightning-fabric",
    "mamba_ssm": "mamba-ssm",
    "pytorch_lightning": "pytorch-lightning",
    "sklearn": "scikit-learn",
    "torch_geometric": "torch-geometric",
    "torch_tensorrt": "torch-tensorrt",
    "transformer_engine": "transformer-engine",
    "triton": "triton",
    "yaml": "pyyaml",
}
_CUDA_ONLY = frozenset(
    {
        *("apex", "auto_gptq", "awq", "bitsandbytes", "causal_conv1d", "cupy", "diff_gaussian_rasterization"),
        *("exllamav2", "flash_attn", "flash_attn_interface", "flash_mla", "mamba_ssm", "MinkowskiEngine", "nvdiffrast"),
        *("spconv", "tensorrt", "tinycudann", "torch_tensorrt", "torchsparse", "transformer_engine", "triton"),
    }
)
"""Packages whose code runs on NVIDIA GPUs alone, or is built to."""


@dataclass(frozen=True, slots=True)
class Package:
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
        """Whether it is no package: the names were defined in the script that saved the file."""
        return self.name in _OF_THE_SCRIPT

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "names": list(self.names),
            "found": self.found,
            "missing": self.missing,
            "on_pypi": self.on_pypi,
            "cuda_only": self.cuda_only,
            "problem": self.problem,
        }


def packages(checkpoint: Checkpoint, machine: Machine, *, cwd: str = "") -> tuple[Package, ...]:
    """What loading without ``weights_only`` would import, beside torch and the standard library.

    Scripts are run from some directory; ``cwd`` is searched as theirs would be.
    """
    from transload.loading.refusal import loaded_pickles

    held: dict[str, list[tuple[str, str]]] = {}
    streams = {pickle.name for pickle in loaded_pickles(checkpoint)}
    for use in checkpoint.globals:
        package = use.module.partition(".")[0] if use.stream in streams else "torch"
        if use.verdict != "data" and package not in _NO_PACKAGE and package not in sys.stdlib_module_names:
            held.setdefault(package, []).append((use.module, use.name))
    if checkpoint.path.endswith(".safetensors"):
        held.setdefault("safetensors", []).append(("safetensors.torch", "load_file"))
    search = _Search(machine.python, cwd)
    return tuple(_package(name, asked, search, machine) for name, asked in held.items())


def _package(name: str, asked: list[tuple[str, str]], search: _Search, machine: Machine) -> Package:
    names = tuple(f"{module}.{attribute}" for module, attribute in asked)
    missing = "" if name in _OF_THE_SCRIPT else next(search.missing(module for module, _ in asked), "")
    extension = next((each for each in machine.extensions if _imported(each.package) == name), None)
    lacks = extension.missing or extension.undefined if extension and not missing else ()
    return Package(
        name,
        names,
        found=not missing and name not in _OF_THE_SCRIPT,
        missing=missing,
        on_pypi=_ON_PYPI.get(name, ""),
        cuda_only=name in _CUDA_ONLY,
        problem=f"it needs {lacks[0]}, which is not there" if lacks else "",
    )


def _imported(package: str) -> str:
    return package.replace("-", "_")


class _Search:
    """Looks modules up as the import of an interpreter would, along its path."""

    def __init__(self, python: Python, cwd: str) -> None:
        self.places = [*([cwd] if cwd else []), *python.path]
        self.ours = python.executable == sys.executable

    def missing(self, modules: Iterable[str]) -> Iterator[str]:
        """Modules that are not there, each by the first part of its name that is not found."""
        if self.places:
            yield from filter(None, map(self._missing, modules))

    def _missing(self, module: str) -> str:
        place: list[str] | None = self.places
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            spec = self._spec(name, place)
            if spec is None:
                return name if count > 1 or not self._otherwise(name) else ""
            if spec.submodule_search_locations is None or spec.origin is None:
                return ""  # a single file, which may make modules of its own; or a folder without one, of any content
            place = list(spec.submodule_search_locations)
        return ""

    def _spec(self, name: str, place: list[str] | None) -> ModuleSpec | None:
        try:
            return PathFinder.find_spec(name, place)
        except (ImportError, ValueError, OSError):  # a place that is broken is one where nothing is found
            return None

    def _otherwise(self, name: str) -> bool:
        """Whether it is found by other roads than the path: an editable install, or an import hook of our own."""
        if self.ours and any(_finds(finder, name) for finder in sys.meta_path if finder is not PathFinder):
            return True
        from pathlib import Path  # it costs more than all the rest, and is seldom needed

        files = (file for place in self.places for file in Path(place).glob(_FINDERS))
        return any(f"'{name}'" in _text(file) for file in files)


def _finds(finder: Any, name: str) -> bool:
    try:
        return finder.find_spec(name, None) is not None
    except Exception:  # noqa: BLE001  somebody's hook: it may raise anything, and shall stop nothing
        return False


def _text(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_LONGEST_FINDER)
    except OSError:
        return ""
