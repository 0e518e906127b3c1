"""Why torch cannot be installed here: what a message of pip, conda or uv asks for, and which wheels exist.

A page with ``needs: install`` gets the answer of ``check``. The facts of the machine are the doctor's; what matters
here alone (free space, variables and release of pip) is looked up. Nothing is installed, and no index is contacted.
"""

from __future__ import annotations

import ntpath
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from transload.diagnose import fixes, tables
from transload.diagnose.tables import numbers_of
from transload.frozen import NamedTuple
from transload.machine import Machine
from transload.render.words import size
from transload.steps import Steps

if TYPE_CHECKING:
    from transload.diagnose.tables import Version


class Reason(NamedTuple):
    """Why it fails here, in words that follow "this machine has this fault:"; and what shows it, and what to do.

    Without ``fits`` nothing here explains the message, and the title says so.
    """

    title: str
    evidence: tuple[str, ...] = ()
    fix: Steps = ()
    code: str = ""
    fits: bool = True


class Wanted(NamedTuple):
    """What the message says was to be installed: ``torch==2.1.0+cu121``.

    ``indexes`` are those that were asked, as far as they are named; ``python`` is the tag of the Python, if named.
    """

    name: str = "torch"
    relation: str = ""
    release: str = ""
    build: str = ""
    indexes: tuple[str, ...] = ()
    python: str = ""

    @property
    def torch(self) -> str:
        """The release of torch, or its beginning, that a release of this package is made for; empty if unknown."""
        numbers = numbers_of(self.release)
        if self.name == "torchaudio" and numbers[:1] == (0,) and len(numbers) > 1:
            return f"1.{numbers[1]}"
        if self.name == "torchaudio":
            return _dotted(numbers[:2])
        if self.name == "torchvision":  # 0.5 came with torch 1.4, 0.14 with 1.13, 0.15 with 2.0
            minor = numbers[1] if len(numbers) > 1 else 0
            return f"2.{minor - 15}" if minor >= 15 else f"1.{minor - 1}" if minor >= 5 else ""
        return self.release if self.name == "torch" else ""


_NAME = r"(?P<name>torch(?:vision|audio)?)(?P<relation>[=<>~!]=?=?)?(?P<release>\d[\w.]*)?(?:\+(?P<build>[\w.]+))?"
_ASKED = re.compile(rf"(?:you require|depends? on|the requirement|distribution found for|Package ') ?{_NAME}(?![\w-])")
_INDEXES = re.compile(r"(?:Looking in (?:indexes|links): |--(?:extra-)?index-url[ =])((?:[^\s,]+://[^\s,]+(?:, )?)+)")
_TAG = re.compile(r"(?:You require CPython [\d.]+t? \(|matching Python (?:ABI|version) tag \(e\.g\., )`(cp\d+t?)`")
_ITS_INDEX = re.compile(r"download\.pytorch\.org/whl/(?:nightly/)?((?:cu|cpu|xpu|rocm)[\d.]*)")


def wanted(text: str, before: str) -> Wanted:
    """What a message asks for; ``before`` is the text before it."""
    asked, tag = _ASKED.search(text), _TAG.search(text)
    indexes = [url for match in _INDEXES.finditer(before + " " + text) for url in match[1].split(", ")]
    values = {name: value or "" for name, value in asked.groupdict().items()} if asked else {}
    return Wanted(**values, indexes=tuple(dict.fromkeys(indexes)), python=tag[1] if tag else "")


# -- which wheels exist for this machine

_CPUS = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_FIRST_MANYLINUX_2_28 = (2, 7)
_PIP_OF_MANYLINUX = (20, 3)  # the first that knows manylinux_2_28, and Python 3.10


def no_wheel(machine: Machine, asked: Wanted) -> Reason | None:
    """The first of the reasons that applies, from the machine to the index; ``None`` if none does."""
    python, platform = machine.python, machine.platform
    this, version = _this_python(machine), numbers_of(python.version)[:2]
    if asked.python and version and asked.python != _tag(machine):
        why = f"the message is about the Python {asked.python}, and the examined one is {_tag(machine)} ({this})"
        return Reason(f"{why}: transload doctor --python PYTHON", fits=False)
    if python.bits == 32:
        fix = fixes.steps(machine, "P08 bits")
        return Reason("torch has no wheels for a 32-bit Python", (f"{this} is a 32-bit program",), fix, "P08")
    cpu = _CPUS.get(platform.machine.lower(), "")
    if not cpu or platform.system not in ("Linux", "Windows", "Darwin"):
        what = f"{platform.system} on {platform.machine}"
        fix = ("Use a machine with an x86-64 or 64-bit Arm processor, or build torch from source.",)
        return Reason(f"torch has no wheels for {what}", (), fix, "P08")
    if platform.libc.startswith("musl"):
        return Reason(
            "torch has no wheels for musl, the C library of Alpine",
            (f"the C library is {platform.libc}",),
            fixes.steps(machine, "P08"),
            "P08",
        )
    if python.implementation != "cpython":
        return _wrong_python(machine, f"torch has no wheels for {python.implementation}", tables.releases()[-1])
    if platform.system == "Windows" and cpu == "aarch64":
        return _windows_on_arm(machine)
    return _of_release(machine, asked) if version else None


def _of_release(machine: Machine, asked: Wanted) -> Reason | None:
    """Whether a release that was asked for has wheels for this Python, and the index that was asked has them."""
    here, python = fixes.wheel_platform(machine), f"{_dotted(numbers_of(machine.python.version)[:2])}{_t(machine)}"
    every = (*tables.earlier_releases(), *tables.releases())
    suited = [release for release in every if _has_wheel(machine, release)]
    meant = [release for release in every if _meets(release, asked)]
    if not suited:
        return _for_no_python(machine)
    newest = fixes.install_torch(machine, gpu=_gpu(machine))
    with_wheel = f"PyPI has wheels of torch {suited[0]} to {suited[-1]} for Python {python} on {here}"
    if not meant:
        later = numbers_of(asked.torch) > numbers_of(every[-1])
        title = f"transload does not know torch {asked.torch}" if later else f"there is no torch {asked.torch}"
        return Reason(title, (f"the newest is {every[-1]}", with_wheel), ("Install one that exists:", *newest))
    possible = [release for release in meant if release in suited]
    ranges = [pythons for release in meant if (pythons := tables.wheel_pythons(release, here))]
    what = f"torch {meant[-1]}"
    if asked.name != "torch":
        what = f"{asked.name} {asked.release} is made for torch {asked.torch}, which"
    if not possible and not ranges:
        last = next(release for release in reversed(every) if tables.wheel_pythons(release, here))
        ended = f"the last release with wheels for {here} is {last}"
        return Reason(f"{what} has no wheels for {here}", (ended, with_wheel), ("Install one that has:", *newest))
    if not possible:
        low, high = _dotted(ranges[-1][0]), _dotted(ranges[-1][1])
        title = f"{what} has wheels for Python {low} to {high}, and this is {python}"
        return _wrong_python(machine, title, meant[-1], newest, with_wheel)
    libc = machine.platform.libc
    if () < _glibc(libc) < (2, 28) and all(numbers_of(release)[:2] >= _FIRST_MANYLINUX_2_28 for release in possible):
        title = f"torch from {_dotted(_FIRST_MANYLINUX_2_28)} on needs glibc 2.28"
        return Reason(title, (f"the C library is {libc}",), fixes.steps(machine, "P08"), "P08")
    exact = asked.relation in ("==", "===")
    return _of_index(machine, asked, possible[-1] if exact else "", suited) or _old_pip(machine)


def _meets(release: str, asked: Wanted) -> bool:
    """Whether a release is one that was asked for; the last numbers may be left out: ``2.8``, ``2.8.*``."""
    numbers, have = numbers_of(asked.torch), numbers_of(release)
    begins = have[: len(numbers)] == numbers
    if not numbers or asked.relation == "!=":
        return not numbers or not begins
    if asked.relation in ("", "==", "==="):
        return begins
    if asked.relation == "~=":
        return have >= numbers and have[: len(numbers) - 1] == numbers[:-1]
    beyond = have > numbers if asked.relation[0] == ">" else have < numbers
    return asked.relation.endswith("=") if begins else beyond


def _glibc(libc: str) -> Version:
    return numbers_of(libc.removeprefix("glibc ")) if libc.startswith("glibc ") else ()


def _of_index(machine: Machine, asked: Wanted, release: str, suited: Sequence[str]) -> Reason | None:
    """Whether the build that was asked for exists, and is on the index that was asked."""
    here, python = fixes.wheel_platform(machine), numbers_of(machine.python.version)[:2]
    named = [match[1] for index in asked.indexes if (match := _ITS_INDEX.search(index))]
    build = asked.build or (named[0] if len(named) == len(asked.indexes) == 1 else "")
    if not tables.BUILD.fullmatch(build):
        return None
    gpu = fixes.install_torch(machine, gpu=_gpu(machine))
    have = {other: tables.build_of(other, here, build) for other in suited if other in tables.releases()}
    with_build = [other for other, found in have.items() if found]
    wording = f"torch {release}" if release else "torch"
    if release and release in tables.releases() and release not in with_build:
        builds = ", ".join(found.build for found in tables.index_builds(release, here)) or "none"
        also = f"; {build} has torch {with_build[0]} to {with_build[-1]}" if with_build else ""
        title = f"there is no {build} build of {wording} for {here}{also}"
        listed = f"builds of torch {release} for {here}: {builds}"
        return Reason(title, (listed,), ("Install a build that exists:", *gpu))
    if not with_build:
        title = f"the index {build} has no torch for Python {_dotted(python)}{_t(machine)} on {here}"
        every = [other for other in tables.releases() if tables.build_of(other, here, build)]
        ranges = [found.python for other in every if (found := tables.build_of(other, here, build))]
        pythons = f", for Python {_dotted(ranges[0][0])} to {_dotted(ranges[-1][1])}" if ranges else ""
        holds = f"it has torch {every[0]} to {every[-1]}{pythons}" if every else f"it has nothing for {here}"
        return Reason(title, (holds,), ("Use the index for this machine:", *gpu))
    asked_pytorch = any("download.pytorch.org" in index for index in asked.indexes)
    if release and build not in named and (named or not asked_pytorch):  # old links name no build
        other = f"on the index {named[0]}" if named else "on PyPI"
        title = f"torch {release}+{build} is not {other}, but on PyTorch's own index {build}"
        requirement = f"torch=={release}" if asked.name == "torch" else f"{asked.name}=={asked.release}"
        evidence = tuple(f"the index that was asked: {_public(index)}" for index in asked.indexes[:2])
        return Reason(title, evidence, fixes.install(machine, requirement, index=f"{tables.INDEX}/{build}"))
    return None


def _for_no_python(machine: Machine) -> Reason:
    """No release has a wheel for this Python on this platform."""
    here, python = fixes.wheel_platform(machine), numbers_of(machine.python.version)[:2]
    last = next(release for release in reversed(tables.releases()) if tables.wheel_pythons(release, here))
    if here == "macos-x86_64":
        return _wrong_python(machine, f"torch has wheels for Intel Macs up to {last} only", last)
    low, high = tables.wheel_pythons(last, here) or ((), ())
    if machine.python.free_threaded:
        how = "is free-threaded, and torch has wheels for few such Pythons"
    else:
        how = "is too new for torch" if python > high else "is too old for torch" if python < low else "has no wheels"
    return _wrong_python(machine, f"Python {_dotted(python)}{_t(machine)} {how}", last)


def _wrong_python(machine: Machine, title: str, release: str, newest: Steps = (), *more: str) -> Reason:
    """Another Python is needed for a release; unless another release will do."""
    here = fixes.wheel_platform(machine)
    low, high = tables.wheel_pythons(release, here) or (numbers_of("3.10"), numbers_of("3.14"))
    words = {"low": _dotted(low), "high": _dotted(high)}
    wheels = f"torch {release} has wheels for CPython {words['low']} to {words['high']}"
    fix = fixes.steps(machine, "P07", **words)
    evidence = (f"{_this_python(machine)} is examined", *(more or (wheels,)))
    either: Steps = ("Or install a release that has wheels for this Python:", *newest) if newest else ()
    return Reason(title, evidence, (*fix, *either), "P07")


def _windows_on_arm(machine: Machine) -> Reason:
    row, python = tables.table("torch_builds")["windows_arm64"], numbers_of(machine.python.version)[:2]
    low, high = map(numbers_of, row["python"])
    title = "PyPI has no torch for Windows on Arm"
    evidence = (
        f"{_this_python(machine)} is a Python for {machine.platform.machine}",
        f"PyTorch's own index has CPU builds since {row['since']}, for Python {_dotted(low)} to {_dotted(high)}",
    )
    if low <= python <= high:
        fix: Steps = fixes.install(machine, "torch", index=f"{tables.INDEX}/{row['build']}")
    else:
        fix = fixes.steps(machine, "P07", low=_dotted(low), high=_dotted(high))
    return Reason(title, evidence, fix, "W02")


def _old_pip(machine: Machine) -> Reason | None:
    """Before 20.3, pip ignores the wheels that newer platforms and Pythons need."""
    release = pip_release(machine)
    linux = machine.platform.system == "Linux"
    if not () < numbers_of(release) < _PIP_OF_MANYLINUX or not (linux or numbers_of(machine.python.version) >= (3, 10)):
        return None
    title = f"pip {release} is too old to find torch's wheels: it must be 20.3 or newer"
    return Reason(title, (f"{_this_python(machine)} has pip {release}",), fixes.install(machine, "--upgrade", "pip"))


def pip_release(machine: Machine) -> str:
    """The release of pip in the examined Python; empty if unknown."""
    for folder in machine.python.path:
        with suppress(OSError):
            for name in sorted(os.listdir(folder)):
                if match := re.fullmatch(r"pip-([\d.]+)\.dist-info", name):
                    return match[1]
    return ""


def _has_wheel(machine: Machine, release: str) -> bool:
    here, python = fixes.wheel_platform(machine), numbers_of(machine.python.version)[:2]
    if machine.python.free_threaded:
        build = tables.build_of(release, here) if release in tables.releases() else None
        return build is not None and build.supports_python(python, free_threaded=True)
    pythons = tables.wheel_pythons(release, here)
    return pythons is not None and pythons[0] <= python <= pythons[1]


def _gpu(machine: Machine) -> bool | None:
    from transload.diagnose.case import Case

    return Case(machine).has_nvidia_if_known


def _this_python(machine: Machine) -> str:
    version = f" (Python {machine.python.version})" if machine.python.version else ""
    return f"{machine.python.executable or 'the examined Python'}{version}"


def _tag(machine: Machine) -> str:
    kind = "cp" if machine.python.implementation == "cpython" else "pp"
    return f"{kind}{''.join(map(str, numbers_of(machine.python.version)[:2]))}{_t(machine)}"


def _t(machine: Machine) -> str:
    return "t" if machine.python.free_threaded else ""


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


# -- the name of a wheel

_WHEEL = re.compile(
    r"(?P<name>\w[\w.]*)-(?P<release>\d[\w.+!]*)(?:-\d\w*)?-(?P<python>[\w.]+)-(?P<abi>[\w.]+)-(?P<on>[\w.]+)"
)
_SYSTEMS = {"win": "Windows", "linux": "Linux", "manylinux": "Linux", "musllinux": "Linux", "macosx": "Darwin"}


def wrong_wheel(machine: Machine, name: str) -> Reason | None:
    """Which tag in the name of a wheel does not suit this machine."""
    if not (match := _WHEEL.match(name)):
        return None
    tag, abi, on = match["python"], match["abi"], match["on"]
    kind = re.match(r"[a-z]+", on)
    system = _SYSTEMS.get(kind[0], "") if kind else ""
    cpu = "x86_64" if on.endswith(("x86_64", "amd64")) else "aarch64" if on.endswith(("aarch64", "arm64")) else ""
    mine, python = machine.platform, numbers_of(machine.python.version)[:2]
    torch = match["name"] == "torch"
    release, _, build = match["release"].partition("+")
    fix: Steps = ("Use the file whose name has the tags of this Python.",)
    if torch:
        fix = ("Let pip choose the file:", *fixes.install_torch(machine, gpu=_gpu(machine)))
    evidence = (f"{_this_python(machine)} is {_tag(machine)} for {mine.system} on {mine.machine}",)
    if machine.python.bits == 32:
        return no_wheel(machine, Wanted())
    if system and system != mine.system:
        return Reason(f"the wheel is for {_NAMES.get(system, system)}, and this is {mine.system}", evidence, fix)
    if cpu and _CPUS.get(mine.machine.lower(), "") not in ("", cpu):
        return Reason(f"the wheel is for {cpu} processors, and this machine has {mine.machine}", evidence, fix)
    numbers = re.fullmatch(r"cp(\d)(\d+)", tag)
    limited = abi.startswith("abi3") or tag.startswith("py")
    made_for = (int(numbers[1]), int(numbers[2])) if numbers else ()
    if made_for and python and (python < made_for if limited else python != made_for):
        title = f"the wheel is for Python {_dotted(made_for)}, and this is {_dotted(python)}"
        asked = Wanted(relation="==", release=release, build=build)
        return Reason(title, evidence, fix) if not torch else _either(machine, title, evidence, asked, fix)
    if made_for and abi.endswith("t") != machine.python.free_threaded and not limited:
        only, other = (
            ("a free-threaded Python", "has the GIL") if abi.endswith("t") else ("one with the GIL", "has none")
        )
        return Reason(f"the wheel is for {only}, and this Python {other}", evidence, fix)
    libc = re.search(r"manylinux_2_(\d+)", on)
    if libc and (mine.libc.startswith("musl") or () < _glibc(mine.libc) < (2, int(libc[1]))):
        title = f"the wheel needs glibc 2.{libc[1]}, and this system has {mine.libc}"
        return Reason(title, evidence, fixes.steps(machine, "P08"), "P08")
    return None


_NAMES = {"Darwin": "macOS"}


def _either(machine: Machine, title: str, evidence: tuple[str, ...], asked: Wanted, fix: Steps) -> Reason:
    """The wheel of the same release and build for this Python, if there is one."""
    if not _has_wheel(machine, asked.release):
        return Reason(title, evidence, fix)
    here = fixes.wheel_platform(machine)
    default = tables.build_of(asked.release, here)
    build = asked.build if asked.build and tables.build_of(asked.release, here, asked.build) else ""
    index = f"{tables.INDEX}/{build}" if build and not (default and default.build == build) else ""
    same = fixes.install(machine, f"torch=={asked.release}", index=index)
    return Reason(title, evidence, ("The same release for this Python:", *same))


# -- space, proxies, certificates, the system's Python

_ROOM = {False: 2 << 30, True: 8 << 30, None: 8 << 30}
"""Bytes that the CPU build and a CUDA build need, downloaded and unpacked."""


def no_room(machine: Machine) -> Reason | None:
    """Which of the folders that pip writes to is on a disk without room."""
    needed = _ROOM[_gpu(machine)]
    temporary = "TEMP" if machine.platform.system == "Windows" else "TMPDIR"
    folders = {
        f"temporary files ({temporary})": tempfile.gettempdir(),
        "the environment": machine.python.prefix,
        "pip's cache": os.environ.get("PIP_CACHE_DIR") or os.path.expanduser("~"),
    }
    lines: list[str] = []
    full: list[str] = []
    for what, folder in folders.items():
        with suppress(OSError, ValueError):
            free = shutil.disk_usage(folder).free
            lines.append(f"{what}: {folder}, {size(free)} free")
            full += [what] if free < needed else []
    if not full:
        return Reason(f"there is room now; torch needs about {size(needed)}", tuple(lines), fits=False)
    fix: Steps = ("Free some space there, also in pip's cache:", fixes.command("python -m pip cache purge"))
    if full == [next(iter(folders))]:
        path = ntpath if machine.platform.system == "Windows" else posixpath  # of the machine, which may be another
        elsewhere = fixes.set_variable(machine, temporary, path.join(machine.python.prefix, "tmp"))
        fix = ("Create a folder for temporary files on a disk with more room, and name it:", *elsewhere)
    elif _gpu(machine) is False:
        fix = (*fix, "The build for the CPU is much smaller:", *fixes.install_torch(machine, gpu=False))
    return Reason(f"too little room for {' and '.join(full)}", tuple(lines), fix)


def managed(machine: Machine) -> Reason | None:
    """Whether the examined Python is the one that the system manages."""
    if not machine.python.externally_managed:
        title = f"{_this_python(machine)} is not the system's: pip installs into it"
        return Reason(title, fix=fixes.install_torch(machine, gpu=_gpu(machine)), fits=False)
    fix = fixes.install_torch(machine, gpu=_gpu(machine))
    return Reason("this Python belongs to the system", (f"{_this_python(machine)} is examined",), fix)


_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_PROXY")
_CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def proxy(machine: Machine) -> Reason | None:
    """Which variables name a proxy here."""
    names = {name.upper(): name for name in _PROXIES if os.environ.get(name)}.values()
    lines = tuple(f"{name}={_public(os.environ[name])}" for name in names)
    if not lines:
        why = "no variable of this process names a proxy: it is in pip's settings (pip config list)"
        also = " or in those of Windows" if machine.platform.system == "Windows" else ""
        return Reason(f"{why}{also}", fits=False)
    return Reason("a proxy is set here", lines)


def certificates(_: Machine) -> Reason | None:
    """Which variables name certificates here, and whether the files exist."""
    values = {name: os.environ[name] for name in _CERTIFICATES if os.environ.get(name)}
    missing = tuple(f"{name}={value}" for name, value in values.items() if not os.path.exists(value))
    if missing:
        return Reason("a variable names a missing file", missing, ("Correct the variable, or unset it.",))
    if values:
        lines = tuple(f"{name}={value}" for name, value in values.items())
        return Reason("these variables name the certificates to trust", lines, fits=False)
    return None


def long_path(machine: Machine) -> Reason | None:
    """Whether Windows allows long paths here, and how long that of the environment is."""
    allowed, prefix = machine.platform.long_paths, machine.python.prefix
    if machine.platform.system != "Windows" or not isinstance(allowed, bool):
        return None
    evidence = (f"the path of the environment has {len(prefix)} characters: {prefix}",)
    if allowed:
        return Reason("Windows allows long paths here; a terminal opened before that does not", evidence, fits=False)
    return Reason("Windows allows 260 characters for a path here", evidence)


def _public(url: str) -> str:
    """An address without a user and password."""
    with suppress(ValueError):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.username or parts.password:
            return url.replace(parts.netloc.rpartition("@")[0], "…", 1)
    return url


# -- the answer

_OTHERS: dict[str, Callable[[Machine], Reason | None]] = {
    "install-no-room": no_room,
    "externally-managed": managed,
    "install-proxy": proxy,
    "install-certificate": certificates,
    "install-long-path": long_path,
}
_OF_PIP = ("INDEX_URL", "EXTRA_INDEX_URL", "NO_INDEX", "FIND_LINKS", "NO_BINARY", "ONLY_BINARY")
_OF_UV = ("INDEX", "DEFAULT_INDEX", "INDEX_URL", "EXTRA_INDEX_URL", "OFFLINE", "NO_INDEX")
_SETTINGS = (*(f"PIP_{name}" for name in _OF_PIP), *(f"UV_{name}" for name in _OF_UV))
"""Variables that choose what pip and uv find."""


def check(code: str, machine: Machine, text: str, before: str) -> Reason | None:
    """Which of the reasons for an error of ``pages/installing.md`` holds on this machine; ``None`` if unknown."""
    if code in _OTHERS:
        return _OTHERS[code](machine)
    if code == "wheel-not-supported":
        name = re.match(r"(?:\S*[/\\])?(\S+?)(?: \(\d+\))?\.whl", text) or re.search(r"(\S+)\.whl", text)
        return (wrong_wheel(machine, name[1].replace("%2B", "+")) if name else None) or _nothing(machine, ())
    asked = wanted(text, before)
    return no_wheel(machine, asked) or _nothing(machine, asked.indexes)


def _nothing(machine: Machine, indexes: Sequence[str]) -> Reason:
    """Nothing here prevents it: which Python was examined, which index was asked, and the settings that may."""
    title = f"torch has wheels for {_this_python(machine)}"
    usual = ("https://pypi.org/", "https://download.pytorch.org/")
    strange = [index for index in indexes if not index.startswith(usual)]
    lines = (*(f"the index that was asked: {_public(index)}" for index in strange), *_settings())
    rest = "these choose what pip and uv find" if lines else "the message may come from another Python or index"
    return Reason(f"{title}; {rest}", lines, fits=False)


def _settings() -> Iterator[str]:
    for name in _SETTINGS:
        if value := os.environ.get(name):
            yield f"{name}={' '.join(map(_public, value.split()))}"
