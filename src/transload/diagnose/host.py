"""The host as probes see it: files under a root, variables of an environment. A tree of files can take its place.

Nothing here raises for the state of a host: what cannot be read is an ``Unknown`` with the reason.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transload.machine import Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LIMIT = 1 << 20  # no file we read as a whole is longer; /proc has some without an end
_LINKS = 40  # as the kernel's own limit on symbolic links
_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR})
_UNSTATED: Any = None


@dataclass(frozen=True)
class Host:
    """Where probes look. Paths are absolute and POSIX, as on the host; ``root`` is put before each of them.

    ``python`` is the interpreter to examine, ``cwd`` the current directory and ``uname`` is ``(system, kernel release,
    machine)``. What is not stated is taken from this process, but only where the host is this machine. A host under
    another root borrows nothing: what is not stated of it is not known.
    """

    root: str = "/"
    environ: Mapping[str, str] = _UNSTATED
    python: str = _UNSTATED
    cwd: str = _UNSTATED
    uname: tuple[str, str, str] = _UNSTATED
    uid: int = _UNSTATED

    def __post_init__(self) -> None:
        defaults: dict[str, Any] = {"environ": {}, "python": "", "cwd": "/", "uname": ("Linux", "", ""), "uid": -1}
        if self.root == "/":
            try:
                cwd = os.getcwd()
            except OSError:  # it was deleted under us
                cwd = ""
            if hasattr(os, "uname"):
                uname = tuple(os.uname())
            else:
                import platform

                uname = tuple(platform.uname())
            defaults = {
                "environ": dict(os.environ),
                "python": sys.executable,
                "cwd": cwd,
                "uname": (uname[0], uname[2], uname[4]),
                "uid": os.geteuid() if hasattr(os, "geteuid") else -1,
            }
        for name, value in defaults.items():
            if getattr(self, name) is _UNSTATED:
                object.__setattr__(self, name, value)

    def at(self, path: str) -> str:
        """The real path of a path of the host."""
        return path if self.root == "/" else os.path.join(self.root, path.lstrip("/"))

    def real(self, path: str) -> str:
        """The real path of what a path of the host leads to: below a root, links lead to files below it."""
        return path if self.root == "/" else self.at(self.target(path))

    def named(self, real: str) -> str:
        """The path of the host that a real path is: the inverse of ``at``. Paths outside the root stay as they are.

        >>> Host(root="/tmp/tree").named("/tmp/tree/usr/lib/libcuda.so.1")
        '/usr/lib/libcuda.so.1'
        """
        root = self.root.rstrip("/")
        return (real[len(root) :] or "/") if root and (real == root or real.startswith(root + "/")) else real

    def dlopen(self, name: str) -> str:
        """What a child process loads to ask a library of the driver; empty where it cannot be asked.

        Under another root it cannot: the loader that runs here would find the libraries of this machine.
        """
        return name if self.root == "/" else ""

    def child_environ(self) -> dict[str, str]:
        """The environment for a child process. Over a tree, paths in it may have to be put under the root."""
        return dict(self.environ)

    def text(self, path: str, limit: int = _LIMIT) -> str | Unknown:
        """The beginning of a file as text. Bytes that are not UTF-8 are kept as surrogates."""
        data = self.data(path, limit)
        return data if isinstance(data, Unknown) else data.decode("utf-8", "surrogateescape")

    def data(self, path: str, limit: int = _LIMIT) -> bytes | Unknown:
        """The beginning of a file. Only regular files are opened: a pipe or a device might never answer."""
        real = self.real(path)
        try:
            if not stat.S_ISREG(os.stat(real).st_mode):
                return Unknown(f"{path} is not a file")
            with open(real, "rb") as stream:  # buffered: one read(2) of a file in /proc gives a page at most
                return stream.read(limit)
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    def line(self, path: str) -> str:
        """The first line of a file, stripped; empty where there is none or it cannot be read."""
        text = self.text(path, 4096)
        return text.partition("\n")[0].strip().strip("\0") if isinstance(text, str) else ""

    def findall(self, pattern: str | re.Pattern[str], path: str, limit: int = _LIMIT) -> list[Any]:
        """What ``re.findall`` finds in a file, with ``re.MULTILINE``; nothing where it cannot be read."""
        return re.compile(pattern, re.MULTILINE).findall(self.text(path, limit) or "")

    def names(self, path: str) -> tuple[str, ...] | Unknown:
        """What a folder holds, sorted."""
        try:
            return tuple(sorted(os.listdir(self.real(path))))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    def paths(self, folder: str, start: str = "", end: str = "") -> Iterator[str]:
        """Paths in a folder whose names begin and end so; none where it cannot be read."""
        for name in self.names(folder) or ():
            if name.startswith(start) and name.endswith(end):
                yield f"{folder.rstrip('/')}/{name}"

    def glob(self, pattern: str) -> Iterator[str]:
        """The paths that match a pattern with one ``*``, at the end of a name; without a ``*``, the pattern itself."""
        start, star, rest = pattern.partition("*")
        folder, _, name = start.rpartition("/")
        return (f"{path}{rest}" for path in self.paths(folder, name)) if star else iter((pattern,))

    def distinct(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths that lead to different places: of several that lead to one the first."""
        seen: set[str] = set()
        for path in paths:
            target = self.target(path)
            if target not in seen:
                seen.add(target)
                yield path

    def exists(self, path: str) -> bool:
        """Whether there is something at ``path``, links followed inside the root."""
        return os.path.lexists(self.at(self.target(path)))

    def folder(self, path: str) -> bool:
        """Whether it is a folder."""
        return os.path.isdir(self.real(path))

    def status(self, path: str) -> os.stat_result | Unknown:
        """``os.stat`` of what the path leads to."""
        try:
            return os.stat(self.real(path))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    def link(self, path: str) -> str:
        """What a symbolic link says; empty for anything else."""
        folder, _, name = path.rstrip("/").rpartition("/")
        return self._link(path if self.root == "/" else f"{self.target(folder)}/{name}")

    def _link(self, path: str) -> str:
        """The same for a path without links among its folders."""
        try:
            return os.readlink(self.at(path))
        except (OSError, ValueError):
            return ""

    def target(self, path: str) -> str:
        """Where a path leads in the end; absolute links stay inside the root. Itself where it leads nowhere."""
        if self.root == "/":
            try:
                return os.path.realpath(path)
            except ValueError:  # a NUL, or half a pair of surrogates: no file has such a name
                return path
        done, rest, links = "/", path.strip("/").split("/"), 0
        while rest:
            step = rest.pop(0)
            here = os.path.normpath(f"{done.rstrip('/')}/{step}")
            to = self._link(here)
            if not to or links > _LINKS:
                done = here
                continue
            links += 1
            rest = to.strip("/").split("/") + rest
            done = "/" if to.startswith("/") else done
        return done

    def open_error(self, path: str) -> str:
        """The name of the errno of opening a device for reading and writing; empty where it opens."""
        try:
            os.close(os.open(self.real(path), os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)))
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno))
        except ValueError:
            return "EINVAL"
        return ""


def pairs(text: str, separator: str) -> dict[str, str]:
    r"""The lines ``name SEPARATOR value`` of a text, without spaces and quotes around both.

    >>> pairs('ID="ubuntu"\n# a comment\nVERSION_ID = 24.04', "=")
    {'ID': 'ubuntu', 'VERSION_ID': '24.04'}
    """
    lines = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip().strip("\"'") for name, found, value in lines if found}


def reason(path: str, error: Exception) -> str:
    """Why something could not be read, in a few words.

    >>> reason("/proc/modules", PermissionError(13, "Permission denied"))
    '/proc/modules: permission denied'
    """
    if isinstance(error, OSError) and error.errno in _NOTHING:
        return f"{path} is not there"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{path}: {words[:1].lower()}{words[1:]}"


_DIGITS = 20  # a longer number is nonsense


def number_in(text: str, otherwise: int) -> int:
    """A number from a file; ``otherwise`` for anything else, however long or strange."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else otherwise


# -- memory ------------------------------------------------------------------------------------------------------------

_V1 = "/sys/fs/cgroup/memory"
_NO_LIMIT = 1 << 60  # what version 1 writes for none is a little less than 2**63


def memory(host: Host) -> tuple[int, int]:
    """Bytes in all and bytes free; -1 where they are not known. A container's limit counts where it is lower."""
    told = {name: int(amount) * 1024 for name, amount in host.findall(r"^(\w+):\s*(\d{1,19})\b", "/proc/meminfo")}
    total, free = told.get("MemTotal", -1), told.get("MemAvailable", told.get("MemFree", -1))
    # Every control group above this process may have a limit.
    paths = host.findall(r"^0::(/.*)", "/proc/self/cgroup")
    steps = [step for step in "".join(paths[:1]).split("/") if step and step != ".."]
    groups = ["/".join(["/sys/fs/cgroup", *steps[:depth]]) for depth in range(len(steps) + 1)]
    names = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")  # version 1
    for group, (most, used, statistics, inactive) in (*((each, names) for each in groups), (_V1, first)):
        limit = number_in(host.line(f"{group}/{most}"), -1)
        if 0 <= limit < _NO_LIMIT:
            cached = host.findall(rf"^{inactive} (\d{{1,19}})$", f"{group}/{statistics}")  # which can be given back
            taken = number_in(host.line(f"{group}/{used}"), 0) - int(cached[0] if cached else 0)
            left = max(0, limit - max(0, taken))
            total = min(total, limit) if total >= 0 else limit
            free = min(free, left) if free >= 0 else left
    return total, free
