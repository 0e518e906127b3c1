"""The interpreter to examine: what it is, where it takes packages from, what manages it, and which others there are.

Our own is looked at in place; another is asked in a child process. Everything else is read from files.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.diagnose.host import pairs
from transload.diagnose.tables import table
from transload.machine import Python, TorchInstall, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transload.diagnose.host import Host

_DEADLINE = 5.0  # seconds; an interpreter on a cold network disk takes two


def choose(host: Host) -> tuple[Host, str]:
    """The host with the interpreter to examine where the user named none, and why it is that one.

    Ours where it has a torch; else the first of the usual ones that has. For transload may live in an environment of
    its own, as pipx and uvx make them; then ours is not examined even where no torch is found at all.
    """
    if any(host.exists(f"{entry}/torch/{name}") for entry in own()["path"] for name in _TORCH):
        return host, ""
    interpreters = [(interpreter(host, path), how) for path, how in usual(host)]
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
    """The interpreter that ``host.python`` names: by its path, that of an environment's folder, or its name on PATH."""
    executable, absent = located(host)
    told = own() if _is_own(host, executable) else absent or asked(host, executable, deadline)
    if isinstance(told, str):
        return Python(executable or host.python, why=why, problem=told)
    told |= {
        name: host.host_path(told[name]) for name in ("executable", "prefix", "base_prefix", "stdlib", "user_site")
    }
    path = tuple(host.host_path(os.path.join(host.cwd, entry)) for entry in told["path"])
    stdlib, prefix, base_prefix = told.pop("stdlib"), told["prefix"], told["base_prefix"]
    kind, tool = environment(host, prefix, base_prefix)
    relevant = tuple(table("packages")["relevant"].split())
    packages: dict[str, str] = {}  # of two the first on the path counts, as it does for an import
    for each in installed(host, path):
        if each.name.startswith(relevant) and each.name not in packages:
            packages[each.name] = each.stated or each.version
    return Python(
        **{**told, "executable": told["executable"] or executable, "path": path},
        environment=kind,
        tool=tool,
        project=host.exists(f"{os.path.dirname(prefix)}/{tool}.lock"),
        pip=any(host.exists(f"{entry}/pip/__main__.py") for entry in path),
        externally_managed=prefix == base_prefix and host.exists(f"{stdlib}/EXTERNALLY-MANAGED"),
        why=why,
        others=others(host, prefix, path),
        packages=dict(sorted(packages.items())),
    )


def located(host: Host) -> tuple[str, str]:
    """The path that the user means, empty for a folder that holds no interpreter; and why there is nothing to ask."""
    name = host.python
    if name.startswith("~/"):
        name = host.environ.get("HOME", "~") + name[1:]
    if name and not os.path.isabs(name):
        here = os.path.normpath(f"{host.cwd}/{name}")
        name = here if os.sep in name or host.exists(here) else _first_on_path(host, name) or name
    if not os.path.isabs(name):
        return name, f"{name} is neither in the current folder nor on PATH" if name else "no Python was named"
    if host.is_dir(name):
        usual_place = f"{name.rstrip('/')}/bin/python"
        name = _in_folder(host, name) or (usual_place if host.readlink(usual_place) else "")
        if not name:
            return "", f"{host.python} holds no Python: there is no bin/python in it"
    target = host.target(name)
    if host.exists(name):
        return name, ""
    return name, f"{name if target == name else f'{name} leads to {target}, which'} is not there"


def _is_own(host: Host, executable: str) -> bool:
    """Whether it is the interpreter we run in, and we were started as a program of the user's would be.

    It may be our own by another name: ``bin/python3`` for ``bin/python``. A link from elsewhere is another.
    """
    flags, ours = sys.flags, sys.executable or ""
    plain = not (flags.ignore_environment or flags.no_site) and all(
        bool(getattr(flags, flag, 0)) == bool(os.environ.get(name))
        for flag, name in (("no_user_site", "PYTHONNOUSERSITE"), ("safe_path", "PYTHONSAFEPATH"))
    )
    theirs, mine = (  # the variables that decide what an interpreter is
        {name: value for name, value in environ.items() if name == "HOME" or name.startswith("PYTHON")}
        for environ in (host.environ, os.environ)
    )
    if not plain or host.root != "/" or theirs != mine:
        return False
    pairs = ((executable, ours), (os.path.dirname(executable), os.path.dirname(ours)))
    return executable == ours or all(os.path.realpath(one) == os.path.realpath(other) for one, other in pairs)


# -- what an interpreter says of itself --------------------------------------------------------------------------------

Told = dict[str, Any]
"""What it said: the fields of ``Python`` that an interpreter knows, and ``stdlib``, the folder of its library."""

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
"""  # one text for us and for others, from Python 2.7 on

# The empty entry belongs to -c, which looks into the current folder: it must go before anything is imported.
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


def own() -> Told:
    """What the interpreter we run in says.

    Of its path without the entry that belongs to our script, module or zipapp: another program would not have it.
    """
    first = sys.path[0] if sys.path else ""
    main = sys.modules.get("__main__")
    file = os.path.realpath(getattr(main, "__file__", None) or os.sep)
    real = os.path.realpath(first)
    starts = {os.path.dirname(file)}
    if getattr(main, "__spec__", None) is not None:  # -m puts the current folder there
        starts.add(os.path.realpath("."))
    ours = first == "" or (os.path.isfile(real) and (file + os.sep).startswith(real + os.sep))
    ours = ours or (not getattr(sys.flags, "safe_path", False) and real in starts)
    space: dict[str, Any] = {}
    exec(_FACTS, space)  # noqa: S102  our own text, a few lines up
    told: Told = space["facts"](sys.path[1:] if ours else sys.path)
    return told


def asked(host: Host, executable: str, deadline: float) -> Told | str:
    """What another interpreter says of itself, or why it does not, in words.

    It is asked in the environment and the folder that a program of the user's would have.
    """
    from transload.diagnose.children import Child, Question

    question = Question(_FACTS + _SAY, host.at(executable), host.child_environ(), host.at(host.cwd), ("-B",))
    with Child(question, deadline) as child:
        outcome = child.outcome()
    if outcome.state == "answered":
        ours, facts = own(), outcome.facts
        told: Told = {name: facts.get(name) for name in ours}
        whole = all(type(told[name]) is type(ours[name]) for name in ours)
        whole = whole and all(type(each) is str for each in told["path"])
        return told if whole else f"{executable} is not a Python interpreter: its answer makes no sense"
    if outcome.state == "unasked":
        return f"{executable} {outcome.end}"
    if outcome.state == "hung":
        return f"{executable} did not answer within {deadline:g} s"
    # The line that says most: where Python gave up, the end of a traceback, else how the words began.
    lines = [line.strip() for line in outcome.noise.splitlines() if line.strip()]
    fatal = (line for line in lines if line.startswith("Fatal Python error"))
    line = next(fatal, lines[-1 if any(line.startswith("Traceback") for line in lines) else 0] if lines else "")
    return f"{executable} did not answer: {outcome.end}" + (f"; it printed: {line[:200]}" if line else "")


# -- interpreters, found by files alone: none is run, and each look is cheap and bounded -------------------------------

_MANY = 40  # interpreters looked at; a cluster's module system or a collector of environments has hundreds
_FOLDERS = 64  # of PATH
_NAMES = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe", "bin/pypy3")
_TORCH = ("version.py", "__init__.py")
_EXECUTABLE = re.compile(r"python(?:3(?:\.\d+t?)?)?(?:\.exe)?", re.ASCII)
_VERSION = re.compile(r"(?:python|pypy)(3\.\d+)", re.ASCII)


class Interpreter(NamedTuple):
    """An interpreter, the environment it belongs to, and the folder of its torch; empty where it has none."""

    executable: str
    prefix: str
    torch: str


def others(host: Host, prefix: str, path: Sequence[str]) -> tuple[str, ...]:
    """The interpreters that have a torch of their own, other than that of ``prefix``, whose import path is ``path``.

    One for each torch: ``/usr/bin/python3: torch 2.8.0+cu128``.
    """
    seen = {host.target(f"{entry}/torch") for entry in path}
    found = []
    paths = chain((path for path, _ in usual(host)), _more(host, prefix))
    for each in islice(filter(None, (interpreter(host, path) for path in paths)), _MANY):
        if each.torch and each.prefix != prefix and host.target(each.torch) not in seen:
            seen.add(host.target(each.torch))
            found.append(f"{each.executable}: torch {build(host, each.torch).version or 'of unknown version'}")
    return tuple(found)


def _more(host: Host, prefix: str) -> Iterator[str]:
    """Paths of interpreters that can be found cheaply: on PATH, and those of Jupyter's kernels, of conda, of pyenv."""
    for folder in _search(host):
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


def usual(host: Host) -> Iterator[tuple[str, str]]:
    """Paths a user most likely means, and what led there: the active environment, one here, ``python3`` on PATH."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := host.environ.get(name):
            yield _in_folder(host, folder), name
    for name in (".venv", "venv") if host.cwd else ():
        yield _in_folder(host, f"{host.cwd}/{name}"), f"./{name}"
    for name in ("python3", "python"):
        yield _first_on_path(host, name), f"{name} on PATH"


def _in_folder(host: Host, folder: str) -> str:
    """The interpreter of an environment's folder; empty where it holds none."""
    places = (f"{folder.rstrip('/')}/{name}" for name in _NAMES)
    return next((place for place in places if host.exists(place)), "")


def _first_on_path(host: Host, name: str) -> str:
    """The first file of that name on PATH; empty where there is none."""
    places = (f"{folder}/{name}" for folder in _search(host))
    return next((place for place in places if host.exists(place) and not host.is_dir(place)), "")


def _search(host: Host) -> Iterator[str]:
    folders = host.environ.get("PATH", "").split(":")[:_FOLDERS]
    for folder in host.distinct(folder for folder in folders if folder.startswith("/")):
        yield folder.rstrip("/")


def interpreter(host: Host, executable: str) -> Interpreter | None:
    """The interpreter at a path, as far as its files tell; nothing where there is none."""
    root, shims, name = executable.rpartition("/shims/")
    if shims and host.is_dir(f"{root}/versions"):  # a script of pyenv, which starts another
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
    """Where it takes packages from: the user's, its own, and those of its base where it shares them."""
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
        if each in ("", "/usr"):  # Debian's own places
            yield f"/usr/local/lib/python{version}/dist-packages"
            yield "/usr/lib/python3/dist-packages"


def _config(host: Host, prefix: str) -> dict[str, str]:
    """The settings in ``pyvenv.cfg``; empty where there is none."""
    settings = pairs(host.text(f"{prefix}/pyvenv.cfg", 1 << 16) or "", "=")
    return {name.lower(): value for name, value in settings.items()}


# -- the environment it lives in, and the tool that installs packages there --------------------------------------------

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
        # What manages it, the surest sign first: the project around it, its maker, its place.
        around, _, name = prefix.rpartition("/")
        tools = project(around) if name in (".venv", "venv") else []
        tools += ["uv"] if "uv" in settings else []
        tools += ["poetry"] if "/pypoetry/virtualenvs/" in prefix else []
        tools += [tool for tool in project(host.cwd) if tool != "uv"]  # uv keeps to the project's own .venv
        return kind, (*tools, "pip")[0]
    if prefix.startswith("/nix/store/"):
        return "nix", "pip"
    root = host.environ.get("PYENV_ROOT") or "/.pyenv"
    if f"{root.rstrip('/')}/versions/" in f"{prefix}/":
        return "pyenv", "pip"
    return "system", "uv" if "/uv/python/" in prefix else "pip"


# -- installed distributions, by the names of their metadata folders: quick, and right where the metadata is broken ----

_METADATA = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*?)(?:-(?P<version>\d[^-]*))?(?:-py\d[\d.]*)?\.(?:dist|egg)-info", re.ASCII
)
_RECORD = 1 << 26  # torch's has two megabytes
_LISTED = re.compile(rb'^(?:"([^"\n]+)"|([^",\n]+)),[^,\n]*,(\d{0,19})', re.MULTILINE)
_FIELDS = 1 << 16  # the fields come first in METADATA; a description of any length follows


class Distribution(NamedTuple):
    """One ``*.dist-info`` or ``*.egg-info``: its normalised name, the version its name says, and where it is."""

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
        """Its version: as the metadata says, else the name of its folder."""
        return next(iter(self.fields("Version")), "") or self.stated

    def fields(self, name: str) -> tuple[str, ...]:
        """All values of a field of its metadata; none where there is no metadata.

        The metadata is METADATA, PKG-INFO, or, for an old distutils, the ``egg-info`` itself.
        """
        places = (f"{self.path}/METADATA", f"{self.path}/PKG-INFO", self.path)
        text = next((text for text in (self.host.text(place, _FIELDS) for place in places) if text), "")
        head = re.split(r"\r?\n\r?\n", text or "", maxsplit=1)[0]
        return tuple(line.strip() for line in re.findall(rf"(?mi)^{re.escape(name)}:(.*)$", head))

    def files(self) -> dict[str, int]:
        """The files that its RECORD lists, relative to ``site``, each with its size; -1 where none is stated."""
        lines = _LISTED.findall(self.host.data(f"{self.path}/RECORD", _RECORD) or b"")
        return {(quoted or name).decode("utf-8", "surrogateescape"): int(size or -1) for quoted, name, size in lines}


def installed(host: Host, path: Iterable[str]) -> Iterator[Distribution]:
    """Every distribution on an import path, in its order."""
    for folder in dict.fromkeys(path):
        for name in host.listdir(folder) or ():
            if name.endswith("-info") and (found := _METADATA.fullmatch(name)):
                normal = re.sub(r"[-_.]+", "-", found["name"]).lower()  # the one normal spelling
                yield Distribution(host, normal, found["version"] or "", f"{folder.rstrip('/')}/{name}")


# -- torch/version.py, read as text and never imported: the one place that says what a torch was built for -------------

_VERSION_FILE = 1 << 16  # the real file has ten lines
_ASSIGNED = re.compile(
    r"^(__version__|cuda|hip|rocm|xpu)[ \t]*(?::[^=\n]*)?=[ \t]*(?:None\b|[bBrRuU]{0,2}(['\"])([\w.+!-]{0,100})\2)",
    re.ASCII | re.MULTILINE,
)


def assigned(text: str) -> dict[str, str]:
    r"""The names it gives a text or ``None``, which is empty here. The last one counts, as in Python.

    >>> assigned("__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    {'__version__': '2.8.0+cu128', 'cuda': '12.8', 'hip': ''}
    """
    return {found[1]: found[3] or "" for found in _ASSIGNED.finditer(text.removeprefix("\ufeff"))}


def build(host: Host, folder: str) -> TorchInstall:
    """What the torch in ``folder`` was built for, and no more; with a ``problem`` where that could not be read."""
    path = f"{folder}/version.py"
    text = host.text(path, _VERSION_FILE)
    told = assigned(text or "")
    version = told.get("__version__", "")
    if not version or "cuda" not in told:
        why = f"{path} does not say what it was built for" if version else f"{path} names no version"
        return TorchInstall(folder, version, known=False, problem=text.reason if isinstance(text, Unknown) else why)
    return TorchInstall(folder, version, told["cuda"], told.get("hip") or told.get("rocm", ""), told.get("xpu", ""))
