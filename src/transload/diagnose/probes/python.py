"""The interpreter to examine: what it is, where it finds packages, what manages it, and which others there are.

Our own interpreter is examined in place, another one in a child process. Everything else is read from files.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

from transload.diagnose.host import Host, pairs
from transload.diagnose.tables import table
from transload.machine import Python, TorchInstall, Unknown

_DEADLINE = 5.0  # seconds; an interpreter on a cold network disk takes two


def choose(host: Host) -> tuple[Host, str]:
    """The host with the interpreter to examine if the user named none, and why it is that one.

    It is ours if that has torch, else the first likely one that has. pipx and uvx install transload into an environment
    of its own, which is not examined even if no torch is found at all.
    """
    if any(host.exists(f"{entry}/torch/{name}") for entry in own()["path"] for name in _TORCH):
        return host, ""
    interpreters = [(interpreter(host, path), how) for path, how in likely(host)]
    found = [(each, how) for each, how in interpreters if each and each.prefix != sys.prefix]
    for each, how in found:
        if each.torch:
            return replace(host, python=each.executable), f"transload's own environment has no torch; {how} has one"
    if found and environment(host, sys.prefix, sys.base_prefix)[0] in ("pipx", "uv-tool"):
        first, how = found[0]
        why = f"transload has an environment of its own, and no torch was found; this is the one of {how}"
        return replace(host, python=first.executable), why
    return host, "no environment with a torch was found; this is transload's own"


def python(host: Host, why: str = "", deadline: float = _DEADLINE) -> Python:
    """The interpreter that ``host.python`` names by its path, the folder of its environment, or its name on PATH."""
    executable, absent = located(host)
    report = own() if _is_own(host, executable) else absent or ask_interpreter(host, executable, deadline)
    if isinstance(report, str):
        return Python(executable or host.python, why=why, problem=report)
    path = tuple(os.path.join(host.cwd, entry) for entry in report["path"])
    stdlib, prefix, base_prefix = report.pop("stdlib"), report["prefix"], report["base_prefix"]
    kind, tool = environment(host, prefix, base_prefix)
    relevant = tuple(table("packages")["relevant"].split())
    found = [each for each in installed(host, path) if each.name.startswith(relevant)]
    packages = {each.name: each.stated or each.version for each in reversed(found)}  # the first on the path counts
    return Python(
        **{**report, "executable": report["executable"] or executable, "path": path},
        environment=kind,
        tool=tool,
        project=host.exists(f"{os.path.dirname(prefix)}/{tool}.lock"),
        pip=any(host.exists(f"{entry}/pip/__main__.py") for entry in path),
        externally_managed=prefix == base_prefix and host.exists(f"{stdlib}/EXTERNALLY-MANAGED"),
        why=why,
        others=tuple(others(host, prefix, path)),
        packages=dict(sorted(packages.items())),
    )


def located(host: Host) -> tuple[str, str]:
    """The path that the user means, empty for a folder without an interpreter; and why it cannot be examined."""
    name = host.python
    if name.startswith("~/"):
        name = host.environ.get("HOME", "~") + name[1:]
    if name and not os.path.isabs(name):
        here = os.path.normpath(f"{host.cwd}/{name}")
        name = here if os.sep in name or host.exists(here) else host.program(name, host.search_path()) or name
    if not os.path.isabs(name):
        return name, f"{name} is neither in the current folder nor on PATH" if name else "no Python was named"
    if host.is_dir(name):
        usual_place = f"{name.rstrip('/')}/bin/python"
        name = _in_folder(host, name) or (usual_place if host.readlink(usual_place) else "")
        if not name:
            return "", f"{host.python} contains no Python: it has no bin/python"
    target = host.target(name)
    if host.exists(name):
        return name, ""
    return name, f"{name if target == name else f'{name} leads to {target}, which'} does not exist"


def _is_own(host: Host, executable: str) -> bool:
    """Whether it is the interpreter we run in, and we were started as a user's program would be."""
    flags = sys.flags
    unusual = flags.ignore_environment or flags.no_site or flags.no_user_site or getattr(flags, "safe_path", False)
    theirs, mine = (  # the variables that change how an interpreter starts
        {name: value for name, value in environ.items() if name == "HOME" or name.startswith("PYTHON")}
        for environ in (host.environ, os.environ)
    )
    return executable == (sys.executable or "") and theirs == mine and not unusual


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
        "free_threaded": "free-threading" in sys.version or "t" in getattr(sys, "abiflags", ""),
        "prefix": text(sys.prefix),
        "base_prefix": text(getattr(sys, "base_prefix", 0) or getattr(sys, "real_prefix", 0) or sys.prefix),
        "stdlib": text(os.path.dirname(getattr(os, "__file__", ""))),
        "user_site": text(getattr(site, "USER_SITE", 0) or ""),
        "user_site_enabled": bool(getattr(site, "ENABLE_USER_SITE", False)),
        "path": [text(each) for each in path if isinstance(each, (bytes, type(u"")))],
    }
"""  # runs here and in other interpreters, from Python 2.7 on

# -c puts the empty entry there, the current folder: remove it before anything is imported from it.
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
told = facts(sys.path)
told["done"] = True
os.write(1, ("\\n\\x1e" + repr(told) + "\\n").encode("ascii", "backslashreplace"))
"""


def own() -> dict[str, Any]:
    """What the interpreter we run in reports, without the path entry of our script, module or zipapp."""
    first, target = sys.path[0] if sys.path else "", Host().target
    main = sys.modules.get("__main__")
    file = target(getattr(main, "__file__", None) or os.sep)
    real = target(first)
    starts = {os.path.dirname(file)}
    if getattr(main, "__spec__", None) is not None:  # -m puts the current folder there
        starts.add(target("."))
    ours = first == "" or (os.path.isfile(real) and (file + os.sep).startswith(real + os.sep))
    ours = ours or (not getattr(sys.flags, "safe_path", False) and real in starts)
    space: dict[str, Any] = {}
    exec(_FACTS, space)  # noqa: S102  our own text, a few lines up
    report: dict[str, Any] = space["facts"](sys.path[1:] if ours else sys.path)
    return report


def ask_interpreter(host: Host, executable: str, deadline: float) -> dict[str, Any] | str:
    """What another interpreter reports, in the user's environment and current folder; or why it does not."""
    from transload.diagnose.children import Child, Question

    with Child(Question(_FACTS + _SAY, host.real(executable), host, ("-B",)), deadline) as child:
        outcome = child.outcome()
    if outcome.state == "answered":
        ours, facts = own(), outcome.facts
        report: dict[str, Any] = {name: facts.get(name) for name in ours}
        valid = all(type(report[name]) is type(ours[name]) for name in ours)
        valid = valid and all(type(each) is str for each in report["path"])
        return report if valid else f"{executable} is not a Python interpreter: its answer makes no sense"
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

_MANY = 40  # interpreters examined: clusters and collectors of environments have hundreds
_NAMES = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe", "bin/pypy3")
_TORCH = ("version.py", "__init__.py")
_EXECUTABLE = re.compile(r"python(?:3(?:\.\d+t?)?)?(?:\.exe)?", re.ASCII)
_VERSION = re.compile(r"(?:python|pypy)(3\.\d+)", re.ASCII)


class Interpreter(NamedTuple):
    """An interpreter, the environment it belongs to, and the folder of its torch; empty if it has none."""

    executable: str
    prefix: str
    torch: str


def others(host: Host, prefix: str, path: Sequence[str]) -> Iterator[str]:
    """Interpreters with another torch than the one of ``prefix``, whose import path is ``path``.

    One for each torch: ``/usr/bin/python3: torch 2.8.0+cu128``.
    """
    seen = {host.target(f"{entry}/torch") for entry in path}
    paths = chain((path for path, _ in likely(host)), _more(host, prefix))
    for each in islice(filter(None, (interpreter(host, path) for path in paths)), _MANY):
        if each.torch and each.prefix != prefix and host.target(each.torch) not in seen:
            seen.add(host.target(each.torch))
            yield f"{each.executable}: torch {build(host, each.torch).version or 'of unknown version'}"


def _more(host: Host, prefix: str) -> Iterator[str]:
    """Paths of interpreters that are cheap to find: on PATH, and those of Jupyter kernels, conda and pyenv."""
    for folder in host.distinct(host.search_path()):
        yield from (f"{folder}/{name}" for name in host.listdir(folder) or () if _EXECUTABLE.fullmatch(name))
    home = host.environ.get("HOME", "")
    data = host.environ.get("XDG_DATA_HOME") or f"{home}/.local/share"
    roots = (f"{data}/jupyter", f"{home}/Library/Jupyter", f"{prefix}/share/jupyter")
    for root in (*roots, "/usr/local/share/jupyter", "/usr/share/jupyter"):
        for folder in islice(host.paths(f"{root}/kernels"), _MANY):
            try:
                first = json.loads(host.text(f"{folder}/kernel.json") or "{}")["argv"][0]
            except (ValueError, LookupError, TypeError, RecursionError):
                continue
            if isinstance(first, str) and first.startswith("/"):
                yield first
    remembered = islice((host.text(f"{home}/.conda/environments.txt") or "").splitlines(), _MANY)
    yield from (_in_folder(host, line.strip()) for line in remembered if line.startswith("/"))
    pyenv = host.environ.get("PYENV_ROOT") or f"{home}/.pyenv"
    yield from (f"{path}/bin/python" for path in host.paths(f"{pyenv}/versions"))


def likely(host: Host) -> Iterator[tuple[str, str]]:
    """Paths the user most likely means, and why: the active environment, one in this folder, ``python3`` on PATH."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := host.environ.get(name):
            yield _in_folder(host, folder), name
    for name in (".venv", "venv") if host.cwd else ():
        yield _in_folder(host, f"{host.cwd}/{name}"), f"./{name}"
    for name in ("python3", "python"):
        yield host.program(name, host.search_path()), f"{name} on PATH"


def _in_folder(host: Host, folder: str) -> str:
    """The interpreter in the folder of an environment; empty if there is none."""
    places = (f"{folder.rstrip('/')}/{name}" for name in _NAMES)
    return next((place for place in places if host.exists(place)), "")


def interpreter(host: Host, executable: str) -> Interpreter | None:
    """The interpreter at a path, judged by its files; ``None`` if there is none."""
    root, shims, name = executable.rpartition("/shims/")
    if shims and host.is_dir(f"{root}/versions"):  # a script of pyenv that starts the chosen version
        chosen = host.environ.get("PYENV_VERSION", "").partition(":")[0]
        chosen = chosen or host.line(f"{host.cwd}/.python-version") or host.line(f"{root}/version")
        executable = f"{root}/versions/{chosen}/bin/{name}"
    if not executable or not host.exists(executable):
        return None
    folder = executable.rpartition("/")[0]
    places = (folder.rpartition("/")[0], folder)
    environments = (at for at in places if host.exists(f"{at}/pyvenv.cfg") or host.exists(f"{at}/conda-meta"))
    prefix = next(environments, host.target(executable).rpartition("/")[0].rpartition("/")[0])
    torches = (f"{folder}/torch" for folder in _folders(host, executable, prefix))
    torch = next((place for place in torches if any(host.exists(f"{place}/{name}") for name in _TORCH)), "")
    return Interpreter(executable, prefix, torch)


def _folders(host: Host, executable: str, prefix: str) -> Iterator[str]:
    """Where it finds packages: the user's, its own, and those of its base if it shares them."""
    named = _VERSION.match(host.target(executable).rpartition("/")[2])
    settings = _config(host, prefix)
    version = named[1] if named else ""
    shares = settings.get("include-system-site-packages", "").lower() == "true"
    if not host.environ.get("PYTHONNOUSERSITE") and (shares or not settings):
        base = host.environ.get("PYTHONUSERBASE") or f"{host.environ.get('HOME', '')}/.local"
        yield f"{base}/lib/python{version}/site-packages"
    home = settings.get("home", "") if shares else ""
    for each in (prefix, *([home.rstrip("/").rpartition("/")[0]] if home.startswith("/") else ())):
        for folder in (*host.paths(f"{each}/lib"), *host.paths(f"{each}/lib64")):
            found = _VERSION.match(folder.rpartition("/")[2])
            if found and version in ("", found[1]):
                yield f"{folder}/site-packages"
        yield f"{each}/Lib/site-packages"
        if each in ("", "/usr"):  # where Debian installs packages
            yield f"/usr/local/lib/python{version}/dist-packages"
            yield "/usr/lib/python3/dist-packages"


def _config(host: Host, prefix: str) -> dict[str, str]:
    """The settings in ``pyvenv.cfg``; empty if there is none."""
    settings = pairs(host.text(f"{prefix}/pyvenv.cfg", 1 << 16) or "", "=")
    return {name.lower(): value for name, value in settings.items()}


# -- the kind of environment, and the tool that installs packages there ------------------------------------------------

_LOCKS = (("uv.lock", "uv"), ("poetry.lock", "poetry"), ("pdm.lock", "pdm"))
_TABLE = r"^\[tool\.(poetry|pdm)\b"
_ONE_TOOL = re.compile(r"/uv/(?:tools|archive-v\d+)/")  # of `uv tool install` and `uvx`


def environment(host: Host, prefix: str, base_prefix: str) -> tuple[str, str]:
    """The kind of environment of an interpreter with these prefixes, and the tool for a user in ``host.cwd``.

    Kinds are ``venv``, ``conda``, ``pixi``, ``pipx``, ``uv-tool``, ``pyenv``, ``nix`` and ``system``.
    """

    def project(folder: str) -> list[str]:
        """The tools of a project, by their lock files and its settings."""
        locked = [tool for lock, tool in _LOCKS if host.exists(f"{folder}/{lock}")]
        return locked + host.findall(_TABLE, f"{folder}/pyproject.toml")

    if host.is_dir(f"{prefix}/conda-meta"):
        return ("pixi", "pixi") if "/.pixi/envs/" in f"{prefix}/" else ("conda", "conda")
    settings = _config(host, prefix)
    if settings or prefix != base_prefix:
        one_tool = _ONE_TOOL.search(f"{prefix}/") or host.exists(f"{prefix}/uv-receipt.toml")
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
    root = host.environ.get("PYENV_ROOT") or "/.pyenv"
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
        """The files that its RECORD lists and ``pattern`` matches, relative to ``site``: their sizes, -1 if not there.

        ``pattern`` is part of the match, since most of the 15,000 lines of torch's RECORD then end at their first
        letters. It must not match quotes, commas and line ends, nor contain groups that capture.
        """
        line = re.compile(rf'"?({pattern})"?,[^,\n]*,(\d{{0,19}})'.encode())
        lines = (self.host.data(f"{self.path}/RECORD", _RECORD) or b"").split(b"\n")  # a search takes twice as long
        found = filter(None, map(line.match, lines))
        return {each[1].decode("utf-8", "surrogateescape"): int(each[2] or -1) for each in found}


def installed(host: Host, path: Iterable[str]) -> Iterator[Distribution]:
    """Every distribution on an import path, in order."""
    for folder in dict.fromkeys(path):
        for name in host.listdir(folder) or ():
            if name.endswith("-info") and (found := _METADATA.fullmatch(name)):
                normal = re.sub(r"[-_.]+", "-", found["name"]).lower()
                yield Distribution(host, normal, found["version"] or "", f"{folder.rstrip('/')}/{name}")


# -- torch/version.py, which says what torch was built for: read as text, never imported -------------------------------

_VERSION_FILE = 1 << 16  # the real file has ten lines
_ASSIGNED = re.compile(
    r"^(__version__|cuda|hip|rocm|xpu)[ \t]*(?::[^=\n]*)?=[ \t]*(?:None\b|[bBrRuU]{0,2}(['\"])([\w.+!-]{0,100})\2)",
    re.ASCII | re.MULTILINE,
)


def assigned(text: str) -> dict[str, str]:
    r"""The names that a ``version.py`` assigns a text, or ``None``, which is empty here. The last assignment counts.

    >>> assigned("__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    {'__version__': '2.8.0+cu128', 'cuda': '12.8', 'hip': ''}
    """
    return {found[1]: found[3] or "" for found in _ASSIGNED.finditer(text.removeprefix("\ufeff"))}


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
