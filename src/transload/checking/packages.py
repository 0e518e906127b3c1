"""The packages that a file's names live in: whether the examined environment has them. Nothing is imported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from transload.checkpoint import Checkpoint
    from transload.machine import Machine, Python

__all__ = ["Package", "packages"]


_OF_THE_SCRIPT = frozenset({"__main__", "__mp_main__"})
_NO_PACKAGE = frozenset({"__torch__", "__builtin__", "copy_reg", "torch"})
_FINDERS = "__editable___*_finder.py"
_LONGEST_FINDER = 1 << 20

# Import name → what pip calls it, of packages that write classes of their own into checkpoints. For a name that is not
# here no command is given: anybody may have taken it on PyPI.
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
        """Whether it is not a package: the names were defined in the script that saved the file."""
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

    modules: dict[str, list[tuple[str, str]]] = {}
    streams = {pickle.name for pickle in loaded_pickles(checkpoint)}
    for use in checkpoint.globals:
        package = use.module.partition(".")[0] if use.stream in streams else "torch"
        if use.verdict != "data" and package not in _NO_PACKAGE and package not in sys.stdlib_module_names:
            modules.setdefault(package, []).append((use.module, use.name))
    if checkpoint.path.endswith(".safetensors"):
        modules.setdefault("safetensors", []).append(("safetensors.torch", "load_file"))
    search = _Search(machine.python, cwd)
    broken = {each.package.replace("-", "_"): each for each in reversed(machine.extensions)}
    result = []
    for name, uses in modules.items():
        parts = [] if name in _OF_THE_SCRIPT else [search.missing(module) for module, _ in uses]
        missing = next(filter(None, parts), "")
        extension = broken.get(name)
        lacks = extension.missing or extension.undefined if extension and not missing else ()
        result.append(
            Package(
                name,
                tuple(f"{module}.{attribute}" for module, attribute in uses),
                found=not missing and name not in _OF_THE_SCRIPT,
                missing=missing,
                on_pypi=_ON_PYPI.get(name, ""),
                cuda_only=name in _CUDA_ONLY,
                problem=f"it needs {lacks[0]}, which is not there" if lacks else "",
            )
        )
    return tuple(result)


class _Search:
    """Looks modules up as the import of an interpreter would, along its path."""

    def __init__(self, python: Python, cwd: str) -> None:
        self.places = [*([cwd] if cwd else []), *python.path]
        self.ours = python.executable == sys.executable

    def missing(self, module: str) -> str:
        """The first part of a module's name that is not found; empty where all of it is, or nothing is known."""
        place = self.places
        parts = module.split(".") if place else []
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            try:
                spec = PathFinder.find_spec(name, place)
            except (ImportError, ValueError, OSError):  # nothing is found in a place that is broken
                spec = None
            if spec is None:
                return name if count > 1 or not self._found_otherwise(name) else ""
            if spec.submodule_search_locations is None or spec.origin is None:
                return ""  # a single file, which may create modules; or a folder without one, of any content
            place = list(spec.submodule_search_locations)
        return ""

    def _found_otherwise(self, name: str) -> bool:
        """Whether it is found without the path: by an editable install, or an import hook of this process."""
        if self.ours and any(_finds(finder, name) for finder in sys.meta_path if finder is not PathFinder):
            return True
        from pathlib import Path  # it costs more than all the rest, and is seldom needed

        files = (file for place in self.places for file in Path(place).glob(_FINDERS))
        return any(f"'{name}'" in _text(file) for file in files)


def _finds(finder: Any, name: str) -> bool:
    try:
        return finder.find_spec(name, None) is not None
    except Exception:  # noqa: BLE001  somebody's hook may raise anything, and must not stop us
        return False


def _text(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_LONGEST_FINDER)
    except OSError:
        return ""
