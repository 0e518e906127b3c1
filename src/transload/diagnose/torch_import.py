"""Which libraries ``import torch`` brings into a process, by simulation.

Before its own libraries torch loads ``libtorch_global_deps.so``, and with it, or when that fails, NVIDIA's libraries
from site-packages, by their full paths. Which of them, in which order and when has changed with nearly every release,
so it is read from the installed ``torch/__init__.py`` itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transload.machine import TorchInstall

from .host import Host
from .loader import Object
from .process import Missing, Process

__all__ = ["Imported", "Preloads", "import_torch", "preloads"]

_PAIR = re.compile(
    r"""["'](?P<folder>\w+)["']\]?\s*(?:[,:=]|,\s*["']lib["']\s*,)\s*["'](?P<name>lib[\w-]+\.so\.[^"']+)["']"""
    r"""(?P<optional>,\s*required=False)?"""
)
_LAZY = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")
"""Opened at first use, not by the import."""


@dataclass(frozen=True, slots=True)
class Preload:
    """A library that torch loads by its path: a folder of NVIDIA's packages, and a pattern of a name."""

    folder: str
    name: str
    required: bool = True

    def matches(self, name: str) -> bool:
        """Whether a file of that name is meant: ``libcudnn.so.9`` by ``libcudnn.so.*[0-9]``."""
        start, star, _ = self.name.partition("*")
        return name.startswith(start) and name[-1:].isdigit() if star else name == self.name

    @property
    def stem(self) -> str:
        """Of the name: ``libcudnn``."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Preloads:
    """What ``torch/__init__.py`` loads beside its own libraries."""

    always: tuple[Preload, ...] = ()
    """After ``libtorch_global_deps.so`` was loaded. The first that cannot be ends it, without an error."""
    marker: str = ""
    """``always`` counts only where a file with this in its path is mapped."""
    rescue: tuple[Preload, ...] = ()
    """Where it could not be loaded for want of one of these. The first that cannot be ends the import."""


def preloads(source: str) -> Preloads:
    """What a ``torch/__init__.py`` says it preloads; nothing where it says it in no known way."""
    start = source.find("def _preload_cuda")
    text = source[start : source.find("USE_RTLD_GLOBAL_WITH_LIBTORCH or", start)] if start >= 0 else ""
    text = re.sub(r"#.*", "", text)
    head, _, body = text.partition("def _load_global_deps")
    after, _, failed = body.partition("except OSError")
    every = tuple(_pairs(head)) or tuple(_pairs(failed))
    marker = re.search(r"""["']([^"']+)["'] not in _maps""", after)
    if not marker:
        return Preloads(rescue=every)
    optional = "_preload_cuda_deps(required=False)" in after
    always = tuple(_pairs(after)) or every
    always = tuple(Preload(each.folder, each.name, each.required and not optional) for each in always)
    return Preloads(always, marker[1], every)


def _pairs(text: str) -> Iterator[Preload]:
    for found in _PAIR.finditer(text):
        yield Preload(found["folder"], found["name"], not found["optional"])


@dataclass(frozen=True, slots=True)
class Imported:
    """What came in, in order; what did not, and why the import would fail."""

    objects: tuple[Object, ...]
    missing: tuple[Missing, ...] = ()


@dataclass
class _Import:
    process: Process
    host: Host
    path: Sequence[str]
    install: TorchInstall

    def run(self) -> Imported:
        plan = preloads(self.host.text(f"{self.install.location}/__init__.py") or "")
        lib = f"{self.install.location}/lib"
        first = self.process.open(f"{lib}/libtorch_global_deps.so")
        objects, missing = [*first.objects], [*first.missing]
        if missing and any(each.stem in missing[0].name for each in plan.rescue):
            objects += self.load(plan.rescue)
            first = self.process.open(f"{lib}/libtorch_global_deps.so")
            objects, missing = [*objects, *first.objects], [*first.missing]
        elif any(plan.marker in self.host.target(each.path) for each in self.process.names.values() if plan.marker):
            objects += self.load(plan.always)
        for path in (*self.extension(), *(f"{lib}/{name}" for name in _LAZY if self.host.exists(f"{lib}/{name}"))):
            opened = self.process.open(path, anyway=True)
            objects, missing = [*objects, *opened.objects], [*missing, *opened.missing]
        return Imported(tuple(objects), tuple(missing))

    def extension(self) -> Iterator[str]:
        yield from (path for path in self.host.paths(self.install.location, "_C.", ".so"))

    def load(self, plan: Sequence[Preload]) -> list[Object]:
        """Load one after the other, up to the first that is required and cannot be."""
        objects: list[Object] = []
        for each in plan:
            path = self.find(each)
            opened = self.process.open(path) if path else None
            objects += opened.objects if opened else ()
            if (opened is None and each.required) or (opened and opened.missing):
                break
        return objects

    def find(self, each: Preload) -> str:
        """As torch searches: in every entry of ``sys.path`` the folder of the package, then that of its CUDA."""
        major = self.install.cuda.partition(".")[0]
        for entry in self.path:
            for folder in (f"nvidia/{each.folder}", f"nvidia/cu{major}", each.folder):
                found = next(
                    (path for path in self.host.paths(f"{entry}/{folder}/lib") if each.matches(_name(path))), ""
                )
                if found:
                    return found
        return ""


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def import_torch(process: Process, host: Host, path: Sequence[str], install: TorchInstall) -> Imported:
    """What importing ``install`` brings into a process whose ``sys.path`` is ``path``, and what it opens later."""
    return _Import(process, host, path, install).run()
