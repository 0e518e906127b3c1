"""Interpreters of this host, found by files alone: none is run, and each look is cheap and bounded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from transload.diagnose.probes.version_file import build
from transload.machine import Unknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.diagnose.host import Host

__all__ = ["Interpreter", "all_interpreters", "config", "in_folder", "interpreter", "on_path", "others", "usual"]

_MANY = 40  # interpreters looked at; a cluster's module system or a collector of environments has hundreds
_FOLDERS = 64  # of PATH
_NAMES = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe", "bin/pypy3")
_EXECUTABLE = re.compile(r"python(?:3(?:\.\d+t?)?)?(?:\.exe)?", re.ASCII)
_VERSION = re.compile(r"(?:python|pypy)(3\.\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter, the folders it takes packages from, in order, and what led to it, such as ``VIRTUAL_ENV``."""

    executable: str
    prefix: str
    folders: tuple[str, ...]
    how: str

    def torch(self, host: Host) -> str:
        """The folder of its torch; empty where it has none."""
        places = (f"{folder}/torch" for folder in self.folders)
        return next((p for p in places if host.exists(f"{p}/version.py") or host.exists(f"{p}/__init__.py")), "")


def others(host: Host, prefix: str, path: Sequence[str]) -> tuple[str, ...]:
    """The interpreters that have a torch of their own, other than that of ``prefix``, whose import path is ``path``.

    One for each torch: ``/usr/bin/python3: torch 2.8.0+cu128``.
    """
    seen = {host.target(f"{entry}/torch") for entry in path}
    found = []
    for each in islice(all_interpreters(host, prefix), _MANY):
        folder = each.torch(host)
        if not folder or each.prefix == prefix or host.target(folder) in seen:
            continue
        seen.add(host.target(folder))
        found.append(f"{each.executable}: torch {build(host, folder).version or 'of unknown version'}")
    return tuple(found)


def all_interpreters(host: Host, prefix: str = "") -> Iterator[Interpreter]:
    """Every interpreter that can be found cheaply, the likeliest first."""
    yield from usual(host)
    yield from _each(host, _on_path(host), "PATH")
    yield from _each(host, _kernels(host, prefix), "a Jupyter kernel")
    home = host.environ.get("HOME", "")
    yield from _each(host, _conda(host, home), "conda")
    pyenv = host.environ.get("PYENV_ROOT") or f"{home}/.pyenv"
    yield from _each(host, (f"{path}/bin/python" for path in host.paths(f"{pyenv}/versions")), "pyenv")


def usual(host: Host) -> Iterator[Interpreter]:
    """Those a user most likely means: the active environment, that of the current folder, ``python3`` on PATH."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := host.environ.get(name):
            yield from _each(host, (in_folder(host, folder),), name)
    for name in (".venv", "venv") if host.cwd else ():
        yield from _each(host, (in_folder(host, f"{host.cwd}/{name}"),), f"./{name}")
    for name in ("python3", "python"):
        yield from _each(host, (on_path(host, name),), f"{name} on PATH")


def _each(host: Host, executables: Iterator[str] | Sequence[str], how: str) -> Iterator[Interpreter]:
    for executable in executables:
        if executable and (found := interpreter(host, executable, how)):
            yield found


def in_folder(host: Host, folder: str) -> str:
    """The interpreter of an environment's folder; empty where it holds none."""
    places = (f"{folder.rstrip('/')}/{name}" for name in _NAMES)
    return next((place for place in places if host.exists(place)), "")


def on_path(host: Host, name: str) -> str:
    """The first file of that name on PATH; empty where there is none."""
    places = (f"{folder}/{name}" for folder in _search(host))
    return next((place for place in places if host.exists(place) and not host.folder(place)), "")


def _on_path(host: Host) -> Iterator[str]:
    for folder in _search(host):
        yield from (f"{folder}/{name}" for name in host.names(folder) or () if _EXECUTABLE.fullmatch(name))


def _search(host: Host) -> Iterator[str]:
    folders = host.environ.get("PATH", "").split(":")[:_FOLDERS]
    seen = set()
    for folder in folders:
        real = host.target(folder) if folder.startswith("/") else ""
        if real and real not in seen:
            seen.add(real)
            yield folder.rstrip("/")


def _kernels(host: Host, prefix: str) -> Iterator[str]:
    """What the kernels that Jupyter offers are started with."""
    home = host.environ.get("HOME", "")
    data = host.environ.get("XDG_DATA_HOME") or f"{home}/.local/share"
    roots = (f"{data}/jupyter", f"{home}/Library/Jupyter", f"{prefix}/share/jupyter")
    for root in (*roots, "/usr/local/share/jupyter", "/usr/share/jupyter"):
        for folder in islice(host.paths(f"{root}/kernels"), _MANY):
            yield _argument(host.text(f"{folder}/kernel.json"))


def _argument(text: str | Unknown) -> str:
    try:
        first = json.loads(text or "{}")["argv"][0]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return first if isinstance(first, str) and first.startswith("/") else ""


def _conda(host: Host, home: str) -> Iterator[str]:
    """The environments that conda remembers."""
    text = host.text(f"{home}/.conda/environments.txt") or ""
    for line in islice(text.splitlines(), _MANY):
        yield in_folder(host, line.strip()) if line.startswith("/") else ""


def interpreter(host: Host, executable: str, how: str = "") -> Interpreter | None:
    """The interpreter at a path, as far as its files tell; nothing where there is none."""
    executable = _behind_shim(host, executable)
    if not host.exists(executable):
        return None
    prefix = _prefix(host, executable)
    return Interpreter(executable, prefix, tuple(_folders(host, executable, prefix)), how)


def _behind_shim(host: Host, executable: str) -> str:
    """What pyenv's script of that name starts."""
    root, shims, name = executable.rpartition("/shims/")
    if not shims or not host.folder(f"{root}/versions"):
        return executable
    chosen = host.environ.get("PYENV_VERSION", "").partition(":")[0]
    chosen = chosen or host.line(f"{host.cwd}/.python-version") or host.line(f"{root}/version")
    return f"{root}/versions/{chosen}/bin/{name}"


def _prefix(host: Host, executable: str) -> str:
    folder = executable.rpartition("/")[0]
    above = folder.rpartition("/")[0]
    for place in (above, folder):
        if host.exists(f"{place}/pyvenv.cfg") or host.exists(f"{place}/conda-meta"):
            return place
    return host.target(executable).rpartition("/")[0].rpartition("/")[0]


def _folders(host: Host, executable: str, prefix: str) -> Iterator[str]:
    """Where it takes packages from, each once."""
    named = _VERSION.match(host.target(executable).rpartition("/")[2])
    settings = config(host, prefix)
    version = named[1] if named else ""
    seen = set()
    for folder in (*_user(host, version, settings), *_own(host, prefix, version), *_base(host, settings, version)):
        real = host.target(folder)
        if real not in seen and host.folder(folder):
            seen.add(real)
            yield folder


def _own(host: Host, prefix: str, version: str) -> Iterator[str]:
    for lib in ("lib", "lib64"):
        for name in host.names(f"{prefix}/{lib}") or ():
            found = _VERSION.match(name)
            if found and version in ("", found[1]):
                yield f"{prefix}/{lib}/{name}/site-packages"
    yield f"{prefix}/Lib/site-packages"
    if prefix in ("", "/usr"):  # Debian's own places
        yield f"/usr/local/lib/python{version}/dist-packages"
        yield "/usr/lib/python3/dist-packages"


def _user(host: Host, version: str, settings: dict[str, str]) -> tuple[str, ...]:
    base = host.environ.get("PYTHONUSERBASE") or f"{host.environ.get('HOME', '')}/.local"
    if host.environ.get("PYTHONNOUSERSITE") or (settings and not _shares(settings)):
        return ()
    return (f"{base}/lib/python{version}/site-packages",)


def _base(host: Host, settings: dict[str, str], version: str) -> Iterator[str]:
    """Those of the interpreter that an environment was made of, where it shares them."""
    if _shares(settings) and settings.get("home", "").startswith("/"):
        yield from _own(host, settings["home"].rstrip("/").rpartition("/")[0], version)


def _shares(settings: dict[str, str]) -> bool:
    return settings.get("include-system-site-packages", "").lower() == "true"


def config(host: Host, prefix: str) -> dict[str, str]:
    """The settings in ``pyvenv.cfg``; empty where there is none."""
    text = host.text(f"{prefix}/pyvenv.cfg", 1 << 16) or ""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
