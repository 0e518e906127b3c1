"""Every torch on the import path, in import order, what shadows it, and what happens when it is run.

Nothing is imported into this process: files are read, and torch runs in a child process of the examined interpreter.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from transload.diagnose.children import Outcome, Question, source
from transload.diagnose.host import Host
from transload.diagnose.loader import Elf, read_elf
from transload.diagnose.probes.python import Distribution, assigned, build, installed
from transload.machine import Python, Step, Torch, TorchInstall, TorchRun, Unknown

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
        fits = (dist for dist in hit.dists if dist.stated.partition("+")[0] == release)  # it wrote version.py
        dist = next(fits, hit.dists[0] if hit.dists else stray)
        install = _install(host, hit.path, dist, python.prefix)
        if hit.kind == "remains" and not any(each.startswith("__init__.py:") for each in install.missing):
            install = replace(install, missing=("__init__.py: absent", *install.missing))
        installs.append(install)
    known = {host.target(each.location) for each in installs}
    # The finder that setuptools or scikit-build-core wrote for an editable install says where torch is.
    for finder in (f"{place.folder}/{name}" for place in places for name in place.names if _FINDER.fullmatch(name)):
        path = "".join(host.findall(_MAPPED, finder)[:1]).removesuffix("/__init__.py")
        if path and host.is_dir(path) and host.target(path) not in known:
            installs.append(_install(host, path, stray, python.prefix))

    # Distributions without files. A second one of the same version only repeats the first.
    taken, dangling = {each.dist_info for each in installs}, []
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
    listed = host.environ.get("PYTHONPATH", "").split(":") if host.environ.get("PYTHONPATH") else []
    given = {os.path.normpath(entry if entry[:1] == "/" else f"{host.cwd}/{entry}") for entry in listed}
    ways = [(entry, "PYTHONPATH" if os.path.normpath(entry) in given else "sys.path") for entry in python.path]
    digits = re.findall(r"\d+", python.version)[:2]
    safe = bool(host.environ.get("PYTHONSAFEPATH")) and tuple(map(int, digits)) >= (3, 11)
    if host.cwd and not safe:
        ways.insert(0, (host.cwd, "the current directory"))
    via = dict(reversed(ways))  # the first counts if an entry is listed twice
    for entry in host.distinct(entry for entry, _ in ways):
        folder = entry.rstrip("/")
        if names := host.listdir(entry):
            dists = tuple(each for each in installed(host, [folder]) if each.name == "torch")
            yield _PathEntry(folder, via[entry], names, dists, *_found(host, folder, names, dists))


def _found(host: Host, folder: str, names: Sequence[str], dists: Sequence[Distribution]) -> tuple[Any, str]:
    """The kind and path of what Python's ``PathFinder`` finds: a package first, then a module.

    A folder without ``__init__`` counts only if there is nothing else.
    """
    path = f"{folder}/torch"
    inside = host.listdir(path) or () if "torch" in names else ()
    compiled = any(_COMPILED.fullmatch(name) for name in inside)
    if any(_START.fullmatch(name) for name in inside):
        # With metadata or compiled code it is an install, though perhaps a broken one.
        if dists or compiled:
            return "install", path
        source = {"csrc", "_C"} & set(inside) or "cuda" in assigned(host.text(f"{path}/version.py", 1 << 16) or "")
        return "source" if source else "package", path
    for name in names:
        if _MODULE.fullmatch(name) and not host.is_dir(f"{folder}/{name}"):
            return "file", f"{folder}/{name}"
    return ("remains", path) if compiled or "version.py" in inside else ("", "")


# -- one installed torch: what its version.py, its dist-info and conda's records say about it --------------------------

_BUILD = re.compile(r"pytorch-\d[^-]*-([^/]+)\.json")
_TOGETHER = 60.0  # seconds between the first and the last package that one command installs
_NAMED = 5  # packages named as a reason
_NEEDS_TORCH = re.compile(r"torch\s*(?:[^\w.\s-]|$)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=//)[^/]*@")  # up to the last @: a password may contain others


def _install(host: Host, folder: str, dist: Distribution | None, prefix: str) -> TorchInstall:
    """The torch in ``folder``, whose distribution is ``dist``, in the environment at ``prefix``."""
    installer = host.line(f"{dist.path}/INSTALLER") if dist else ""
    conda = ""
    if installer in ("", "conda") and folder.startswith(f"{prefix}/"):  # the record of its package "pytorch"
        records = (_BUILD.fullmatch(name) for name in host.listdir(f"{prefix}/conda-meta") or ())
        conda = next((each[1] for each in records if each), "")
    files = _listed(dist) if dist else {}
    damaged, altered = _compared(host, folder, files)
    there: Sequence[str] = ()
    if not conda and any(name.startswith("lib/") for name in files):  # conda links libraries from its own folder to it
        there = [f"lib/{name}" for name in host.listdir(f"{folder}/lib") or ()]
    install = replace(
        build(host, folder),
        installer=installer or ("conda" if conda else ""),
        conda_build=conda,
        missing=damaged,
        unlisted=tuple(name for name in there if name not in files and _LIBRARY.fullmatch(name)),
        altered=altered,
    )
    if dist is None:
        return install

    # Packages installed with it that need it, unless the user requested torch: pip marks what was requested.
    then, reasons = _mtime(host, dist.path), []
    for each in installed(host, [dist.site]) if not host.exists(f"{dist.path}/REQUESTED") else ():
        together = each.path != dist.path and abs(_mtime(host, each.path) - then) <= _TOGETHER
        needs = each.fields("Requires-Dist") if together else ()
        if any(_NEEDS_TORCH.match(need) and "extra ==" not in need for need in needs):
            reasons.append(each)
    reasons.sort(key=lambda each: not host.exists(f"{each.path}/REQUESTED"))
    return replace(
        install,
        dist_info=dist.path,
        dist_version=dist.version,
        tags=tuple(host.findall(r"(?i)^Tag:[ \t]*(\S+)", f"{dist.path}/WHEEL", 1 << 16)),
        installed=then,
        replaced_by=tuple(f"{each.name} {each.version}" for each in reasons[:_NAMED]),
        origin=_CREDENTIALS.sub("", str(_direct_url(dist).get("url", ""))),
    )


def _is_editable(dist: Distribution) -> bool:
    """Whether it is an editable install, whose files are elsewhere."""
    info = _direct_url(dist).get("dir_info")
    editable = isinstance(info, dict) and info.get("editable") is True
    return editable or (dist.host.exists(f"{dist.path}/RECORD") and "__init__.py" not in _listed(dist))


def _direct_url(dist: Distribution) -> dict[str, Any]:
    try:
        data = json.loads(dist.host.text(f"{dist.path}/direct_url.json") or "{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _mtime(host: Host, path: str) -> float:
    status = host.stat(path)
    return status.st_mtime if status else 0.0


# -- RECORD, the list of an installed wheel's files, compared with the disk --------------------------------------------

_NEEDED = r'torch/(?:lib/[^/",\n]+|_C\.[^/",\n]+|(?:__init__|version)\.py)'
_MACH_O = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_LIBRARY = re.compile(r"(?!.*_test).+\.(?:so(?:\.[\d.]+)?|dll|pyd|dylib)")  # without those of torch's own tests


def _listed(dist: Distribution) -> dict[str, int]:
    """The files in RECORD that ``import torch`` needs, relative to ``torch/``, with their sizes."""
    listed = ((path.removeprefix("torch/"), size) for path, size in dist.files(_NEEDED).items())
    return {name: size for name, size in listed if name.endswith(".py") or _LIBRARY.fullmatch(name)}


def _compared(host: Host, folder: str, files: dict[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which of ``files`` in ``folder`` are missing or truncated, and which libraries are complete but of another size.

    ``lib/libc10.so: absent``, ``…: cut off after 10 of 20 bytes``; ``lib/libc10.so: 18 bytes instead of 20``
    """

    def loads(path: str) -> bool:
        """Whether an ELF file contains everything that the loader maps. Other formats are trusted."""
        head = host.data(path, 4) or b""
        elf = read_elf(host.real(path))
        complete = isinstance(elf, Elf) and bool(elf.segments)
        return complete or head[:2] == b"MZ" or head in _MACH_O

    damaged, altered = [], []
    for name, expected in files.items():
        path = f"{folder}/{name}"
        status = host.stat(path)
        if isinstance(status, Unknown):
            damaged.append(f"{name}: {status.reason if host.exists(path) else 'absent'}")
        elif not name.endswith(".py") and 0 <= expected != status.st_size:
            if status.st_size > expected or loads(path):
                altered.append(f"{name}: {status.st_size} bytes instead of {expected}")
            else:
                damaged.append(f"{name}: cut off after {status.st_size} of {expected} bytes")
    return tuple(damaged), tuple(altered)


# -- what happens when it is imported and used -------------------------------------------------------------------------

_NOISE = 20  # Lines of output that are kept.


def question(host: Host, executable: str = "") -> Question:
    """Run torch in an interpreter, by default the host's, in the user's environment and current directory.

    The environment is unchanged: its effect on torch is what is examined.
    """
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
    reported = {"available": Unknown(outcome.detail or failed or "not asked"), **outcome.fields_of(TorchRun)}
    return replace(
        TorchRun(outcome.answer, **reported),
        cudnn=_cudnn(facts.get("cudnn", 0)),
        warnings=(*outcome.values("warning"), *printed[-_NOISE:]),
        steps=tuple(steps),
    )


def _cudnn(number: int) -> str:
    """The version of ``torch.backends.cudnn.version()``, whose format changed with cuDNN 9.

    >>> _cudnn(91900), _cudnn(8907), _cudnn(0)
    ('9.19.0', '8.9.7', '')
    """
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}" if number else ""
