"""The interpreter to examine: what it is, where it finds packages, what manages it, and every torch that it has.

Our own interpreter is examined in place, another one in a child process, and torch runs in a child process of the
examined interpreter. Everything else is read from files.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal

from transload.diagnose.children import Child, Outcome, Question, source
from transload.diagnose.elf import Elf, read_elf
from transload.diagnose.host import Host, pairs
from transload.diagnose.probes import on_windows
from transload.diagnose.tables import table
from transload.frozen import NamedTuple, replace
from transload.machine import Python, Step, Torch, TorchInstall, TorchRun, Unknown

_DEADLINE = 5.0  # seconds; an interpreter on a cold network disk takes two


def choose(host: Host) -> tuple[Host, str]:
    """The host with the interpreter to examine if the user named none, and why it is that one.

    It is ours if ours has torch, else the first likely one that does. pipx and uvx install transload into a separate
    environment, which is not examined, even if no torch is found, as long as there is another interpreter.
    """
    if any(host.exists(f"{entry}/torch/{name}") for entry in own_facts()["path"] for name in _TORCH):
        return host, ""
    interpreters = [(interpreter(host, path), how) for path, how in likely(host)]
    own = host.slashed(sys.prefix)
    others = [(*interpreter, how) for interpreter, how in interpreters if interpreter and interpreter[1] != own]
    for executable, _, torch, how in others:
        if torch:
            return replace(host, python=executable), f"transload's own environment has no torch; {how} has one"
    if others and environment(host, own, host.slashed(sys.base_prefix))[0] in ("pipx", "uv-tool"):
        executable, _, _, how = others[0]
        why = f"transload has an environment of its own, and no torch was found; this one was found through {how}"
        return replace(host, python=executable), why
    return host, "no environment with a torch was found; this is transload's own"


def python(host: Host, why: str = "", deadline: float = _DEADLINE) -> Python:
    """The interpreter that ``host.python`` names by its path, the folder of its environment, or its name on PATH."""
    executable, absent = located(host)
    # Whether it is the interpreter we run in, and we were started as a user's program would be.
    flags = sys.flags
    unusual = flags.ignore_environment or flags.no_site or flags.no_user_site or getattr(flags, "safe_path", False)
    theirs, mine = (  # the variables that change how an interpreter starts
        {name: value for name, value in environ.items() if name == "HOME" or name.startswith("PYTHON")}
        for environ in (host.environ, os.environ)
    )
    ours = executable == host.slashed(sys.executable or "") and theirs == mine and not unusual
    report = own_facts() if ours else absent or ask_interpreter(host, executable, deadline)
    if isinstance(report, str):
        return Python(executable or host.python, why=why, problem=report)
    texts = {name: host.slashed(value) for name, value in report.items() if isinstance(value, str)}
    report |= {**texts, "path": [host.absolute(host.slashed(entry)) for entry in report["path"]]}
    path = tuple(report["path"])
    stdlib, prefix, base_prefix = report.pop("stdlib"), report["prefix"], report["base_prefix"]
    kind, tool = environment(host, prefix, base_prefix)
    relevant = tuple(table("packages")["relevant"].split())
    distributions = [distribution for distribution in installed(host, path) if distribution.name.startswith(relevant)]
    # The first on the path counts.
    packages = {dist.name: dist.stated or dist.version for dist in reversed(distributions)}
    return Python(
        **{**report, "executable": report["executable"] or executable, "path": path},
        environment=kind,
        tool=tool,
        project=host.exists(f"{posixpath.dirname(prefix)}/{tool}.lock"),
        pip=any(host.exists(f"{entry}/pip/__main__.py") for entry in path),
        externally_managed=prefix == base_prefix and host.exists(f"{stdlib}/EXTERNALLY-MANAGED"),
        why=why,
        others=tuple(others(host, prefix, path)),
        packages=dict(sorted(packages.items())),
    )


def located(host: Host) -> tuple[str, str]:
    """The path that the user means, empty for a folder without an interpreter; and why it cannot be examined."""
    name = host.slashed(host.python)
    if name.startswith("~/"):
        name = (host.home or "~") + name[1:]
    if name and not host.is_absolute(name):
        here = posixpath.normpath(f"{host.cwd}/{name}")
        name = here if "/" in name or host.exists(here) else host.program(name, host.search_path()) or name
    if not host.is_absolute(name):
        return name, f"{name} is neither in the current folder nor on PATH" if name else "no Python was named"
    if host.is_dir(name):
        usual = "Scripts/python.exe" if host.windows else "bin/python"
        usual_place = f"{name.rstrip('/')}/{usual}"
        name = _in_folder(host, name) or (usual_place if host.readlink(usual_place) else "")
        if not name:
            return "", f"{host.python} contains no Python: it has no {usual}"
    target = host.target(name)
    if host.exists(name):
        return name, ""
    return name, f"{name if target == name else f'{name} leads to {target}, which'} does not exist"


# -- what an interpreter reports about itself --------------------------------------------------------------------------

# The fields of ``Python`` that an interpreter knows, and ``stdlib``, the folder of its standard library.
_FACTS = """
def facts(path):
    import os, sys
    try:
        import site
    except Exception:
        site = None
    def text(value):
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    pypy = "__pypy__" in sys.builtin_module_names
    return {
        "executable": text(sys.executable or ""),
        "version": text(sys.version.split()[0]),
        "implementation": text(getattr(getattr(sys, "implementation", 0), "name", "pypy" if pypy else "cpython")),
        "bits": 64 if sys.maxsize > 2 ** 32 else 32,
        "machine": "" if os.name != "nt" else "ARM64" if "(ARM64)" in sys.version else "AMD64" if "AMD64" in sys.version
            else "x86",
        "free_threaded": "free-threading" in sys.version or "t" in getattr(sys, "abiflags", ""),
        "prefix": text(sys.prefix),
        "base_prefix": text(getattr(sys, "base_prefix", 0) or getattr(sys, "real_prefix", 0) or sys.prefix),
        "stdlib": text(os.path.dirname(getattr(os, "__file__", ""))),
        "user_site": text(getattr(site, "USER_SITE", 0) or ""),
        "user_site_enabled": bool(getattr(site, "ENABLE_USER_SITE", False)),
        "path": [text(each) for each in path if isinstance(each, (bytes, type(u"")))],
    }
"""  # runs here and in other interpreters, from Python 2.7 on

# -c puts an empty entry first, for the current folder: remove it before anything is imported from there.
_SAY = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
import os
try:
    import signal
    signal.alarm(int(sys.argv[1]))
except Exception:
    pass
report = facts(sys.path)
report["done"] = True
os.write(1, ("\\n\\x1e" + repr(report) + "\\n").encode("ascii", "backslashreplace"))
"""


def own_facts() -> dict[str, Any]:
    """What the interpreter we run in reports, without the path entry of our script, module or zipapp."""
    first, target = sys.path[0] if sys.path else "", Host().target
    main = sys.modules.get("__main__")
    file = target(getattr(main, "__file__", None) or os.sep)
    real = target(first)
    starts = {posixpath.dirname(file)}
    if getattr(main, "__spec__", None) is not None:  # -m puts the current folder first
        starts.add(target("."))
    ours = first == "" or (os.path.isfile(real) and f"{file}/".startswith(f"{real}/"))
    ours = ours or (not getattr(sys.flags, "safe_path", False) and real in starts)
    namespace: dict[str, Any] = {}
    exec(_FACTS, namespace)  # noqa: S102  our own text, a few lines up
    report: dict[str, Any] = namespace["facts"](sys.path[1:] if ours else sys.path)
    return report


def ask_interpreter(host: Host, executable: str, deadline: float) -> dict[str, Any] | str:
    """What another interpreter reports, in the user's environment and current folder; or why it does not."""
    with Child(Question(_FACTS + _SAY, host.real(executable), host, ("-B",)), deadline) as child:
        outcome = child.outcome()
    if outcome.state == "answered":
        ours, facts = own_facts(), outcome.facts
        report: dict[str, Any] = {name: facts.get(name) for name in ours}
        valid = all(type(report[name]) is type(ours[name]) for name in ours)
        valid = valid and all(type(entry) is str for entry in report["path"])
        return report if valid else f"{executable} is not a Python interpreter: its answer cannot be understood"
    if outcome.state == "unasked":
        return f"{executable} {outcome.end}"
    if outcome.state == "hung":
        return f"{executable} did not answer within {deadline:g} s"
    # The most telling line: a fatal error, the end of a traceback, else the first line.
    lines = [line.strip() for line in outcome.noise.splitlines() if line.strip()]
    fatal = (line for line in lines if line.startswith("Fatal Python error"))
    line = next(fatal, lines[-1 if any(line.startswith("Traceback") for line in lines) else 0] if lines else "")
    return f"{executable} did not answer: {outcome.end}" + (f"; it printed: {line[:200]}" if line else "")


# -- interpreters, found by their files: none is run, and each check is cheap and bounded ------------------------------

_MANY = 40  # the most interpreters to examine: clusters, and people who collect environments, have hundreds
_NAMES = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe", "bin/pypy3")
_TORCH = ("version.py", "__init__.py")
_EXECUTABLE = re.compile(r"python(?:3(?:\.\d+t?)?)?(?:\.exe)?", re.ASCII)
_VERSION = re.compile(r"(?:python|pypy)(3\.\d+)", re.ASCII)


def others(host: Host, prefix: str, path: Sequence[str]) -> Iterator[str]:
    """Interpreters with another torch than ``path`` has, one for each: ``/usr/bin/python3: torch 2.8.0+cu128``."""
    seen = {host.target(f"{entry}/torch") for entry in path}
    paths = chain((path for path, _ in likely(host)), _more(host, prefix))
    for executable, home, torch in islice(filter(None, (interpreter(host, path) for path in paths)), _MANY):
        if torch and home != prefix and host.target(torch) not in seen:
            seen.add(host.target(torch))
            yield f"{executable}: torch {build(host, torch).version or 'of unknown version'}"


def _more(host: Host, prefix: str) -> Iterator[str]:
    """Paths of interpreters that are cheap to find: on PATH, and those of Jupyter kernels, conda and pyenv."""
    for folder in host.distinct(host.search_path()):
        yield from (f"{folder}/{name}" for name in host.listdir(folder) or () if _EXECUTABLE.fullmatch(name))
    home = host.home
    data = host.environ.get("XDG_DATA_HOME") or f"{home}/.local/share"
    roots = [f"{data}/jupyter", f"{home}/Library/Jupyter", "/usr/local/share/jupyter", "/usr/share/jupyter"]
    if host.windows:
        yield from islice(on_windows.pythons(host), _MANY)
        roots = [f"{host.slashed(host.environ.get(name, ''))}/jupyter" for name in ("APPDATA", "PROGRAMDATA")]
    for root in (*roots, f"{prefix}/share/jupyter"):
        for folder in islice(host.paths(f"{root}/kernels"), _MANY):
            command = _json(host, f"{folder}/kernel.json").get("argv")
            program = host.slashed(str(command[0])) if isinstance(command, list) and command else ""
            if host.is_absolute(program):
                yield program
    remembered = islice((host.text(f"{home}/.conda/environments.txt") or "").splitlines(), _MANY)
    folders = (host.slashed(line.strip()) for line in remembered)
    yield from (_in_folder(host, folder) for folder in folders if host.is_absolute(folder))
    pyenv = host.slashed(host.environ.get("PYENV_ROOT", "")) or f"{home}/.pyenv{'/pyenv-win' if host.windows else ''}"
    yield from (_in_folder(host, path) for path in host.paths(f"{pyenv}/versions"))


def likely(host: Host) -> Iterator[tuple[str, str]]:
    """Paths the user most likely means, and why: the active environment, one in this folder, ``python3`` on PATH."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := host.slashed(host.environ.get(name, "")):
            yield _in_folder(host, folder), name
    for name in (".venv", "venv") if host.cwd else ():
        yield _in_folder(host, f"{host.cwd}/{name}"), f"./{name}"
    for name in ("python3", "python"):
        yield host.program(name, host.search_path()), f"{name} on PATH"


def _in_folder(host: Host, folder: str) -> str:
    """The interpreter in the folder of an environment; empty if there is none."""
    places = (f"{folder.rstrip('/')}/{name}" for name in _NAMES)
    return next((place for place in places if host.exists(place)), "")


def interpreter(host: Host, executable: str) -> tuple[str, str, str] | None:
    """The interpreter at a path, its environment, and the folder of its torch, if any; ``None`` if there is nothing."""
    root, shims, name = executable.rpartition("/shims/")
    if shims and host.is_dir(f"{root}/versions"):  # a script of pyenv that starts the chosen version
        chosen = host.environ.get("PYENV_VERSION", "").partition(":")[0]
        chosen = chosen or host.line(f"{host.cwd}/.python-version") or host.line(f"{root}/version")
        executable = f"{root}/versions/{chosen}/bin/{name}"
    if not executable or not host.exists(executable):
        return None
    folder = executable.rpartition("/")[0]
    # Windows puts a python.exe there that only opens the Store, until that has installed one.
    if folder.lower().endswith("/microsoft/windowsapps") and not any(host.paths(folder, "PythonSoftwareFoundation.")):
        return None
    places = (folder.rpartition("/")[0], folder)
    environments = (at for at in places if host.exists(f"{at}/pyvenv.cfg") or host.exists(f"{at}/conda-meta"))
    at = host.target(executable).rpartition("/")[0]
    prefix = next(environments, at if host.windows else at.rpartition("/")[0])
    torches = (f"{folder}/torch" for folder in _folders(host, executable, prefix))
    torch = next((place for place in torches if any(host.exists(f"{place}/{name}") for name in _TORCH)), "")
    return executable, prefix, torch


def _folders(host: Host, executable: str, prefix: str) -> Iterator[str]:
    """Where it finds packages: the user's, its own, and those of its base if it shares them."""
    named = _VERSION.match(host.target(executable).rpartition("/")[2])
    settings = _config(host, prefix)
    version = named[1] if named else ""
    shares = settings.get("include-system-site-packages", "").lower() == "true"
    if not host.environ.get("PYTHONNOUSERSITE") and (shares or not settings):
        base = host.environ.get("PYTHONUSERBASE") or f"{host.home}/.local"
        yield f"{base}/lib/python{version}/site-packages"
        if host.windows:
            release = prefix.rpartition("/")[2]  # Python313
            yield f"{host.slashed(host.environ.get('APPDATA', ''))}/Python/{release}/site-packages"
    home = host.slashed(settings.get("home", "") if shares else "").rstrip("/")
    shared = home if host.windows else home.rpartition("/")[0]
    for base_prefix in (prefix, *([shared] if host.is_absolute(home) else ())):
        for folder in (*host.paths(f"{base_prefix}/lib"), *host.paths(f"{base_prefix}/lib64")):
            numbered = _VERSION.match(folder.rpartition("/")[2])
            if numbered and version in ("", numbered[1]):
                yield f"{folder}/site-packages"
        yield f"{base_prefix}/Lib/site-packages"
        if base_prefix in ("", "/usr"):  # where Debian installs packages
            yield f"/usr/local/lib/python{version}/dist-packages"
            yield "/usr/lib/python3/dist-packages"


def _config(host: Host, prefix: str) -> dict[str, str]:
    """The settings in ``pyvenv.cfg``; empty if there is none."""
    settings = pairs(host.text(f"{prefix}/pyvenv.cfg", 1 << 16) or "", "=")
    return {name.lower(): value for name, value in settings.items()}


# -- the kind of environment, and the tool that installs packages there ------------------------------------------------


def environment(host: Host, prefix: str, base_prefix: str) -> tuple[str, str]:
    """The kind of environment of an interpreter with these prefixes, and the tool for a user in ``host.cwd``."""

    def project(folder: str) -> list[str]:
        """The tools of a project, by their lock files and its settings."""
        locked = [tool for tool in ("uv", "poetry", "pdm") if host.exists(f"{folder}/{tool}.lock")]
        return locked + host.findall(r"^\[tool\.(poetry|pdm)\b", f"{folder}/pyproject.toml")

    if host.is_dir(f"{prefix}/conda-meta"):
        return ("pixi", "pixi") if "/.pixi/envs/" in f"{prefix}/" else ("conda", "conda")
    settings = _config(host, prefix)
    if settings or prefix != base_prefix:
        # of `uv tool install` and `uvx`
        one_tool = re.search(r"/uv/(?:tools|archive-v\d+)/", f"{prefix}/") or host.exists(f"{prefix}/uv-receipt.toml")
        kind = "pipx" if host.exists(f"{prefix}/pipx_metadata.json") else "uv-tool" if one_tool else "venv"
        # What manages it, the surest sign first: the project around it, what created it, where it is.
        around, _, name = prefix.rpartition("/")
        tools = project(around) if name in (".venv", "venv") else []
        tools += ["uv"] if "uv" in settings else []
        tools += ["poetry"] if "/pypoetry/virtualenvs/" in prefix else []
        tools += [tool for tool in project(host.cwd) if tool != "uv"]  # uv only manages the project's .venv
        return kind, (*tools, "pip")[0]
    if prefix.startswith("/nix/store/"):
        return "nix", "pip"
    if "/WindowsApps/" in prefix:
        return "store", "pip"
    root = host.slashed(host.environ.get("PYENV_ROOT", "")) or "/.pyenv"
    if host.windows and "/pyenv-win/versions/" in prefix:
        return "pyenv", "pip"
    if f"{root.rstrip('/')}/versions/" in f"{prefix}/":
        return "pyenv", "pip"
    return "system", "uv" if "/uv/python/" in prefix else "pip"


# -- installed distributions, by the names of their metadata folders: fast, and correct even with broken metadata ------

_METADATA = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*?)(?:-(?P<version>\d[^-]*))?(?:-py\d[\d.]*)?\.(?:dist|egg)-info", re.ASCII
)
_RECORD = 1 << 26  # torch's is two megabytes
_FIELDS = 1 << 16  # the fields come first in METADATA; a description of any length follows


class Distribution(NamedTuple):
    """One ``*.dist-info`` or ``*.egg-info``: its normalised name, the version in the folder's name, and its path."""

    host: Host
    name: str
    stated: str
    path: str

    @property
    def site(self) -> str:
        """The folder that it is installed in."""
        return self.path.rpartition("/")[0]

    @property
    def version(self) -> str:
        """Its version: from the metadata, else from the folder's name."""
        return next(iter(self.fields("Version")), "") or self.stated

    def fields(self, name: str) -> tuple[str, ...]:
        """All values of a field of its metadata: METADATA, PKG-INFO, or of an old distutils the ``egg-info`` itself."""
        places = (f"{self.path}/METADATA", f"{self.path}/PKG-INFO", self.path)
        text = next((text for text in (self.host.text(place, _FIELDS) for place in places) if text), "")
        head = re.split(r"\r?\n\r?\n", text or "", maxsplit=1)[0]
        return tuple(line.strip() for line in re.findall(rf"(?mi)^{re.escape(name)}:(.*)$", head))

    def files(self, pattern: str) -> dict[str, int]:
        """The files in its RECORD that match ``pattern``, relative to ``site``, with their sizes, -1 if it states none.

        Lines are not parsed before they are matched: most of the 15,000 in torch's RECORD fail at their first letters.
        ``pattern`` must not match quotes, commas or line ends, nor contain groups that capture.
        """
        line = re.compile(rf'"?({pattern})"?,[^,\n]*,(\d{{0,19}})'.encode())
        lines = (self.host.data(f"{self.path}/RECORD", _RECORD) or b"").split(b"\n")  # a search takes twice as long
        matches = filter(None, map(line.match, lines))
        return {match[1].decode("utf-8", "surrogateescape"): int(match[2] or -1) for match in matches}


def installed(host: Host, path: Iterable[str]) -> Iterator[Distribution]:
    """Every distribution on an import path, in order."""
    for folder in dict.fromkeys(path):
        for name in host.listdir(folder) or ():
            if name.endswith("-info") and (metadata := _METADATA.fullmatch(name)):
                normal = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
                yield Distribution(host, normal, metadata["version"] or "", f"{folder.rstrip('/')}/{name}")


# -- torch/version.py, which says what torch was built for: read as text, never imported -------------------------------

_VERSION_FILE = 1 << 16  # the real file has ten lines
_ASSIGNED = re.compile(
    r"^(__version__|cuda|hip|rocm|xpu)[ \t]*(?::[^=\n]*)?=[ \t]*(?:None\b|[bBrRuU]{0,2}(['\"])([\w.+!-]{0,100})\2)",
    re.ASCII | re.MULTILINE,
)


def assigned(text: str) -> dict[str, str]:
    r"""The names to which a ``version.py`` assigns a text or ``None``, which is empty here. The last assignment counts.

    >>> assigned("__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    {'__version__': '2.8.0+cu128', 'cuda': '12.8', 'hip': ''}
    """
    return {assignment[1]: assignment[3] or "" for assignment in _ASSIGNED.finditer(text.removeprefix("\ufeff"))}


def build(host: Host, folder: str) -> TorchInstall:
    """What the torch in ``folder`` was built for, and nothing else; with a ``problem`` if that cannot be read."""
    path = f"{folder}/version.py"
    text = host.text(path, _VERSION_FILE)
    names = assigned(text or "")
    version = names.get("__version__", "")
    if not version or "cuda" not in names:
        why = f"{path} does not say what it was built for" if version else f"{path} names no version"
        return TorchInstall(folder, version, known=False, problem=text.reason if isinstance(text, Unknown) else why)
    return TorchInstall(folder, version, names["cuda"], names.get("hip") or names.get("rocm", ""), names.get("xpu", ""))


# -- every torch on the import path, in import order, and what shadows it ----------------------------------------------

_SUFFIX = r"(?:\.[\w-]+)?\.(?:so|pyd)"
_MODULE = re.compile(rf"torch(?:{_SUFFIX}|\.pyc?)", re.ASCII)
_START = re.compile(rf"__init__(?:{_SUFFIX}|\.pyc?)", re.ASCII)
_COMPILED = re.compile(rf"_C{_SUFFIX}", re.ASCII)
# pip renames what it removes: "~orch", or if that exists "~-rch", "~~rch" …, of the same length
_LEFTOVER = re.compile(r"~(?:orch|[-~.=%\d]rch|[-~.=%\d]{2}ch)(?:-\d.*\.(?:dist|egg)-info)?")
_FINDER = re.compile(r"__editable___torch_.*_finder\.py|_torch_editable\.py")
_MAPPED = r"""['"]torch['"]\s*:\s*['"]([^'"\n]{1,4096})['"]"""


class _PathEntry(NamedTuple):
    """An entry of the import path: what put it there, its contents, and what ``import torch`` finds in it.

    ``kind`` is empty if that is nothing. ``remains`` is a folder without ``__init__``, which an import tries last.
    """

    folder: str
    via: str
    names: tuple[str, ...]
    dists: tuple[Distribution, ...]
    kind: Literal["", "install", "remains", "file", "package", "source"]
    path: str


def torch(host: Host, python: Python) -> Torch:
    """The torch that ``python`` would import from ``host.cwd``, those after it on the path, and what shadows them."""
    if python.problem:
        return Torch(installs=Unknown(python.problem))
    places = tuple(_entries(host, python))
    hits = [place for place in places if place.kind]

    # In import order: packages, then folders without __init__, then what the finder of an editable install finds.
    with_files = {hit.folder for hit in hits if hit.kind in ("install", "remains")}
    strays = (dist for place in places if place.folder not in with_files for dist in place.dists)
    stray = next((dist for dist in strays if _is_editable(dist)), None)  # for a torch without its own metadata
    installs = []
    for hit in (hit for kind in ("install", "remains") for hit in hits if hit.kind == kind):
        release = build(host, hit.path).version.partition("+")[0]
        fits = (dist for dist in hit.dists if dist.stated.partition("+")[0] == release)  # which wrote version.py
        dist = next(fits, hit.dists[0] if hit.dists else stray)
        install = _install(host, hit.path, dist, python.prefix)
        if hit.kind == "remains" and not any(file.startswith("__init__.py:") for file in install.missing):
            install = replace(install, missing=("__init__.py: absent", *install.missing))
        installs.append(install)
    locations = {host.target(install.location) for install in installs}
    # The finder that setuptools or scikit-build-core wrote for an editable install says where torch is.
    for finder in (f"{place.folder}/{name}" for place in places for name in place.names if _FINDER.fullmatch(name)):
        path = "".join(host.findall(_MAPPED, finder)[:1]).removesuffix("/__init__.py")
        if path and host.is_dir(path) and host.target(path) not in locations:
            installs.append(_install(host, path, stray, python.prefix))

    # Distributions without files. A second one of the same version only repeats the first.
    taken, dangling = {install.dist_info for install in installs}, []
    for place in places:
        versions = {dist.stated for dist in place.dists if dist.path in taken}
        left = [dist for dist in place.dists if dist.path not in taken and dist.stated not in versions]
        dangling += [dist.path for dist in left if not _is_editable(dist)]

    first = next((hit for hit in hits if hit.kind != "remains"), None)
    shadow = first if first and first.kind != "install" else None
    return Torch(
        installs=tuple(installs),
        shadow=shadow.path if shadow else "",
        leftovers=tuple(f"{p.folder}/{name}" for p in places for name in p.names if _LEFTOVER.fullmatch(name)),
        dangling=tuple(dangling),
        shadow_kind=shadow.kind if shadow else "",
        shadow_via=shadow.via if shadow else "",
    )


def _entries(host: Host, python: Python) -> Iterator[_PathEntry]:
    """The entries of the path, each once, after the current folder, which ``python -c`` and ``python -m`` put first."""
    listed = host.split(host.environ["PYTHONPATH"]) if host.environ.get("PYTHONPATH") else []
    given = {posixpath.normpath(host.absolute(entry)) for entry in listed}
    ways = [(entry, "PYTHONPATH" if posixpath.normpath(entry) in given else "sys.path") for entry in python.path]
    digits = re.findall(r"\d+", python.version)[:2]
    safe = bool(host.environ.get("PYTHONSAFEPATH")) and tuple(map(int, digits)) >= (3, 11)
    if host.cwd and not safe:
        ways.insert(0, (host.cwd, "the current directory"))
    via = dict(reversed(ways))  # the first counts if an entry is listed twice
    for entry in host.distinct(entry for entry, _ in ways):
        folder = entry.rstrip("/")
        if names := host.listdir(entry):
            dists = tuple(dist for dist in installed(host, [folder]) if dist.name == "torch")
            yield _PathEntry(folder, via[entry], names, dists, *_found(host, folder, names, dists))


def _found(host: Host, folder: str, names: Sequence[str], dists: Sequence[Distribution]) -> tuple[Any, str]:
    """The kind and path of what ``PathFinder`` finds: a package, a module, or last a folder without ``__init__``."""
    path = f"{folder}/torch"
    inside = host.listdir(path) or () if "torch" in names else ()
    compiled = any(_COMPILED.fullmatch(name) for name in inside)
    if any(_START.fullmatch(name) for name in inside):
        # With metadata or compiled code it is an install, though perhaps a broken one.
        if dists or compiled:
            return "install", path
        version = assigned(host.text(f"{path}/version.py", _VERSION_FILE) or "")
        source = {"csrc", "_C"} & set(inside) or "cuda" in version
        return "source" if source else "package", path
    for name in names:
        if _MODULE.fullmatch(name) and not host.is_dir(f"{folder}/{name}"):
            return "file", f"{folder}/{name}"
    return ("remains", path) if compiled or "version.py" in inside else ("", "")


# -- one installed torch: what its version.py, its dist-info and conda's records say about it --------------------------

_TOGETHER = 60.0  # seconds between the first and the last package that one command installs
_NAMED = 5  # packages named as a reason
_NEEDS_TORCH = re.compile(r"torch\s*(?:[^\w.\s-]|$)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=//)[^/]*@")  # up to the last @: a password may contain others
_NEEDED = r'torch/(?:lib/[^/",\n]+|_C\.[^/",\n]+|(?:__init__|version)\.py)'
_LIBRARY = re.compile(r"(?!.*_test).+\.(?:so(?:\.[\d.]+)?|dll|pyd|dylib)")  # without those of torch's own tests
_MACH_O = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


def _install(host: Host, folder: str, dist: Distribution | None, prefix: str) -> TorchInstall:
    """The torch in ``folder``, whose distribution is ``dist``, in the environment at ``prefix``."""
    installer = host.line(f"{dist.path}/INSTALLER") if dist else ""
    conda = ""
    if installer in ("", "conda") and folder.startswith(f"{prefix}/"):  # the record of its package "pytorch"
        names = host.listdir(f"{prefix}/conda-meta") or ()
        records = (re.fullmatch(r"pytorch-\d[^-]*-([^/]+)\.json", name) for name in names)
        conda = next((record[1] for record in records if record), "")
    files = _listed(dist) if dist else {}
    damaged, altered = [], []
    for name, expected in files.items():
        path = f"{folder}/{name}"
        status = host.stat(path)
        if isinstance(status, Unknown):
            damaged.append(f"{name}: {status.reason if host.exists(path) else 'absent'}")
        elif not name.endswith(".py") and 0 <= expected != status.st_size:
            # An ELF file is complete if it has everything that the loader maps. Other formats are trusted.
            head, elf = host.data(path, 4) or b"", read_elf(host.real(path))
            complete = (isinstance(elf, Elf) and elf.segments) or head[:2] == b"MZ" or head in _MACH_O
            if status.st_size > expected or complete:
                altered.append(f"{name}: {status.st_size} bytes instead of {expected}")
            else:
                damaged.append(f"{name}: cut off after {status.st_size} of {expected} bytes")
    in_lib: Sequence[str] = ()
    if not conda and any(name.startswith("lib/") for name in files):  # conda links its own libraries into torch/lib
        in_lib = [f"lib/{name}" for name in host.listdir(f"{folder}/lib") or ()]
    install = replace(
        build(host, folder),
        installer=installer or ("conda" if conda else ""),
        conda_build=conda,
        missing=tuple(damaged),
        unlisted=tuple(name for name in in_lib if name not in files and _LIBRARY.fullmatch(name)),
        altered=tuple(altered),
    )
    if dist is None:
        return install

    # Packages installed with it that need it, unless the user requested torch: pip marks what was requested.
    then, reasons = _mtime(host, dist.path), []
    for other in installed(host, [dist.site]) if not host.exists(f"{dist.path}/REQUESTED") else ():
        together = other.path != dist.path and abs(_mtime(host, other.path) - then) <= _TOGETHER
        needs = other.fields("Requires-Dist") if together else ()
        if any(_NEEDS_TORCH.match(need) and "extra ==" not in need for need in needs):
            reasons.append(other)
    reasons.sort(key=lambda other: not host.exists(f"{other.path}/REQUESTED"))
    return replace(
        install,
        dist_info=dist.path,
        dist_version=dist.version,
        tags=tuple(host.findall(r"(?i)^Tag:[ \t]*(\S+)", f"{dist.path}/WHEEL", 1 << 16)),
        installed=then,
        replaced_by=tuple(f"{other.name} {other.version}" for other in reasons[:_NAMED]),
        origin=_CREDENTIALS.sub("", str(_json(host, f"{dist.path}/direct_url.json").get("url", ""))),
    )


def _is_editable(dist: Distribution) -> bool:
    """Whether it is an editable install, whose files are elsewhere."""
    info = _json(dist.host, f"{dist.path}/direct_url.json").get("dir_info")
    editable = isinstance(info, dict) and info.get("editable") is True
    return editable or (dist.host.exists(f"{dist.path}/RECORD") and "__init__.py" not in _listed(dist))


def _json(host: Host, path: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        data = json.loads(host.text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _mtime(host: Host, path: str) -> float:
    status = host.stat(path)
    return status.st_mtime if status else 0.0


def _listed(dist: Distribution) -> dict[str, int]:
    """The files in RECORD that ``import torch`` needs, relative to ``torch/``, with their sizes."""
    listed = ((path.removeprefix("torch/"), size) for path, size in dist.files(_NEEDED).items())
    return {name: size for name, size in listed if name.endswith(".py") or _LIBRARY.fullmatch(name)}


# -- what happens when it is imported and used -------------------------------------------------------------------------

_NOISE = 20  # Lines of output that are kept.


def question(host: Host, executable: str = "") -> Question:
    """Run torch in an interpreter, by default the host's; its environment is the user's, which is examined, too."""
    return Question(source("ask_torch"), host.real(executable or host.python), host, ("-B",))


def torch_run(outcome: Outcome) -> TorchRun:
    """What ``ask_torch`` reported, as far as it got."""
    facts = outcome.facts
    failed = next((record["error"] for record in outcome.records if record.get("error")), "")
    steps = [Step(r["step"], r["ok"], r["error"], r["seconds"]) for r in outcome.records if "step" in r]
    doing = facts.get("doing", "import")
    if outcome.state in {"hung", "crashed"} and doing not in {step.name for step in steps}:  # it did not return
        seconds = max(0.0, outcome.seconds - sum(step.seconds for step in steps))
        steps.append(Step(doing, ok=False, error=outcome.detail, seconds=round(seconds, 3)))
    printed = [line.strip() for line in outcome.printed.splitlines() if line.strip()]
    cudnn = facts.get("cudnn", 0)  # 91900 is 9.19.0, 8907 is 8.9.7
    major, rest = divmod(cudnn, 10000 if cudnn >= 90000 else 1000)
    reported = {"available": Unknown(outcome.detail or failed or "not asked"), **outcome.fields_of(TorchRun)}
    return replace(
        TorchRun(outcome.answer, **reported),
        cudnn=f"{major}.{rest // 100}.{rest % 100}" if cudnn else "",
        warnings=(*outcome.values("warning"), *printed[-_NOISE:]),
        steps=tuple(steps),
    )
