"""Every torch on the import path, in the order of an import, and what stands in its way; nothing is imported."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from transload.diagnose.probes.distributions import Distribution, distributions
from transload.diagnose.probes.installed import best, elsewhere, install
from transload.diagnose.probes.version_file import assigned, build
from transload.machine import Python, Torch, TorchInstall, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.diagnose.host import Host

__all__ = ["torch"]

_SUFFIX = r"(?:\.[\w-]+)?\.(?:so|pyd)"
_MODULE = re.compile(rf"torch(?:{_SUFFIX}|\.pyc?)", re.ASCII)
_START = re.compile(rf"__init__(?:{_SUFFIX}|\.pyc?)", re.ASCII)
_COMPILED = re.compile(rf"_C{_SUFFIX}", re.ASCII)
# pip renames what it removes: "~orch", and if that is taken "~-rch", "~~rch" …, of the same length
_LEFTOVER = re.compile(r"~(?:orch|[-~.=%\d]rch|[-~.=%\d]{2}ch)(?:-\d.*\.(?:dist|egg)-info)?")
_FINDER = re.compile(r"__editable___torch_.*_finder\.py|_torch_editable\.py")
_MAPPED = re.compile(r"""['"]torch['"]\s*:\s*['"]([^'"\n]{1,4096})['"]""")


@dataclass(frozen=True, slots=True)
class _Place:
    """An entry of the import path: what it holds, and how it came there."""

    folder: str
    names: tuple[str, ...]
    via: str
    dists: tuple[Distribution, ...]


@dataclass(frozen=True, slots=True)
class _Hit:
    """What an import of torch finds in a place. ``remains`` are a folder without ``__init__``, which comes last."""

    kind: Literal["install", "remains", "file", "package", "source"]
    path: str
    place: _Place


def torch(host: Host, python: Python) -> Torch:
    """The torch that ``python`` would import from ``host.cwd``, the ones behind it, and what shadows them."""
    if python.problem:
        return Torch(installs=Unknown(python.problem))
    places = tuple(_places(host, python))
    hits = [hit for hit in (_hit(host, place) for place in places) if hit]
    installs = _installs(host, hits, places, python)
    shadow = _shadow(hits)
    return Torch(
        installs=installs,
        shadow=shadow.path if shadow else "",
        leftovers=tuple(f"{p.folder}/{name}" for p in places for name in p.names if _LEFTOVER.fullmatch(name)),
        dangling=tuple(_dangling(host, places, installs)),
        shadow_kind=shadow.kind if shadow else "",
        shadow_via=shadow.place.via if shadow else "",
    )


def _places(host: Host, python: Python) -> Iterator[_Place]:
    """The entries of the path, each once, after the current folder, which ``python -c`` and ``python -m`` put first."""
    given = {os.path.normpath(f"{host.cwd}/{e}" if e[:1] != "/" else e) for e in _list(host, "PYTHONPATH")}
    ways = [(entry, "PYTHONPATH" if os.path.normpath(entry) in given else "sys.path") for entry in python.path]
    if host.cwd and not _safe_path(host, python):
        ways.insert(0, (host.cwd, "the current directory"))
    seen = set()
    for entry, via in ways:
        real, names = host.target(entry), host.names(entry)
        if names and real not in seen:
            seen.add(real)
            folder = entry.rstrip("/")
            yield _Place(folder, names, via, tuple(d for d in distributions(folder, names) if d.name == "torch"))


def _list(host: Host, variable: str) -> list[str]:
    return host.environ.get(variable, "").split(":") if host.environ.get(variable) else []


def _safe_path(host: Host, python: Python) -> bool:
    digits = re.findall(r"\d+", python.version)[:2]
    return bool(host.environ.get("PYTHONSAFEPATH")) and tuple(map(int, digits)) >= (3, 11)


def _hit(host: Host, place: _Place) -> _Hit | None:
    """As Python's own finder: a package before a module; a folder without ``__init__`` only if there is no other."""
    path = f"{place.folder}/torch"
    inside = host.names(path) or () if "torch" in place.names else ()
    if any(_START.fullmatch(name) for name in inside):
        return _Hit(_kind(host, place, inside), path, place)
    for name in place.names:
        if _MODULE.fullmatch(name) and not host.folder(f"{place.folder}/{name}"):
            return _Hit("file", f"{place.folder}/{name}", place)
    return _Hit("remains", path, place) if _compiled(inside) or "version.py" in inside else None


def _kind(host: Host, place: _Place, inside: Sequence[str]) -> Literal["install", "package", "source"]:
    """A distribution that claims it, or compiled code, makes it an install, if perhaps a broken one."""
    if place.dists or _compiled(inside):
        return "install"
    text = host.text(f"{place.folder}/torch/version.py", 1 << 16) or ""
    return "source" if {"csrc", "_C"} & set(inside) or "cuda" in assigned(text) else "package"


def _compiled(inside: Sequence[str]) -> bool:
    return any(_COMPILED.fullmatch(name) for name in inside)


def _shadow(hits: Sequence[_Hit]) -> _Hit | None:
    """The first thing found, where that is no install; remains are passed over."""
    first = next((hit for hit in hits if hit.kind != "remains"), None)
    return first if first and first.kind != "install" else None


def _installs(host: Host, hits: Sequence[_Hit], places: Sequence[_Place], python: Python) -> tuple[TorchInstall, ...]:
    """In the order of an import: packages, then remains, then what an editable install's own finder leads to."""
    with_files = {hit.place.folder for hit in hits if hit.kind in ("install", "remains")}
    strays = (dist for place in places if place.folder not in with_files for dist in place.dists)
    stray = next((dist for dist in strays if elsewhere(host, dist)), None)
    made = [
        _made(host, hit, stray, python.prefix) for kind in ("install", "remains") for hit in hits if hit.kind == kind
    ]
    known = {host.target(each.location) for each in made}
    mapped = [path for path in _mapped(host, places) if host.target(path) not in known]
    return (*made, *(install(host, path, stray, python.prefix) for path in mapped))


def _made(host: Host, hit: _Hit, stray: Distribution | None, prefix: str) -> TorchInstall:
    """``stray`` is an editable install's distribution, which names no files: it is that of a torch without one."""
    dist = best(hit.place.dists, build(host, hit.path).version) or stray
    made = install(host, hit.path, dist, prefix)
    if hit.kind == "install" or any(each.startswith("__init__.py:") for each in made.missing):
        return made
    return replace(made, missing=("__init__.py: absent", *made.missing))


def _mapped(host: Host, places: Sequence[_Place]) -> Iterator[str]:
    """Where the finder that setuptools or scikit-build-core wrote for an editable install says that torch is."""
    for place in places:
        for name in place.names:
            text = host.text(f"{place.folder}/{name}") or "" if _FINDER.fullmatch(name) else ""
            if (found := _MAPPED.search(text)) and host.folder(path := found[1].removesuffix("/__init__.py")):
                yield path


def _dangling(host: Host, places: Sequence[_Place], installs: Sequence[TorchInstall]) -> Iterator[str]:
    """Distributions without files. One beside another of the same version is only a second record of it."""
    taken = {each.dist_info for each in installs}
    for place in places:
        versions = {dist.version for dist in place.dists if dist.path in taken}
        for dist in place.dists:
            if dist.path not in taken and dist.version not in versions and not elsewhere(host, dist):
                yield dist.path
