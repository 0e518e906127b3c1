"""The host as probes see it: files under a root and an environment. A directory tree can stand in for a real host.

Nothing here raises for the state of a host: what cannot be read is an ``Unknown`` with the reason.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transload.machine import Unknown

_LIMIT = 1 << 20  # bytes read of a file by default: some files in /proc never end
_LINKS = 40  # symbolic links followed, the kernel's own limit
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_UNSET: Any = None


@dataclass(frozen=True)
class Host:
    """Where probes look. Paths are absolute POSIX paths on the host; ``root`` is prepended to each of them.

    ``python`` is the interpreter to examine, ``cwd`` the current directory and ``uname`` is ``(system, kernel release,
    machine)``. With root ``/``, unset fields are taken from this process. With any other root they stay unknown, so
    that nothing of this machine is taken for the other's.
    """

    root: str = "/"
    environ: Mapping[str, str] = _UNSET
    python: str = _UNSET
    cwd: str = _UNSET
    uname: tuple[str, str, str] = _UNSET
    uid: int = _UNSET

    def __post_init__(self) -> None:
        defaults: dict[str, Any] = {"environ": {}, "python": "", "cwd": "/", "uname": ("Linux", "", ""), "uid": -1}
        if self.root == "/":
            try:
                cwd = os.getcwd()
            except OSError:  # it was deleted
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
            if getattr(self, name) is _UNSET:
                object.__setattr__(self, name, value)

    def at(self, path: str) -> str:
        """A path of the host as a path of this machine; links are not followed."""
        return path if self.root == "/" else os.path.join(self.root, path.lstrip("/"))

    def real(self, path: str) -> str:
        """The same with links resolved: below a root, links lead to files below it."""
        return path if self.root == "/" else self.at(self.target(path))

    def host_path(self, real: str) -> str:
        """A path of this machine as a path of the host, the inverse of ``at``. Paths outside the root are unchanged.

        >>> Host(root="/tmp/tree").host_path("/tmp/tree/usr/lib/libcuda.so.1")
        '/usr/lib/libcuda.so.1'
        """
        root = self.root.rstrip("/")
        return (real[len(root) :] or "/") if root and (real == root or real.startswith(root + "/")) else real

    def dlopen(self, name: str) -> str:
        """The name with which a child process loads a driver library; empty under another root.

        There the loader would find the libraries of this machine.
        """
        return name if self.root == "/" else ""

    def child_environ(self) -> dict[str, str]:
        """The environment for a child process. A host over a tree may override it to move paths under the root."""
        return dict(self.environ)

    def text(self, path: str, limit: int = _LIMIT) -> str | Unknown:
        """The first ``limit`` bytes of a file as text. Bytes that are not UTF-8 are kept as surrogates."""
        data = self.data(path, limit)
        return data if isinstance(data, Unknown) else data.decode("utf-8", "surrogateescape")

    def data(self, path: str, limit: int = _LIMIT, start: int = 0) -> bytes | Unknown:
        """At most ``limit`` bytes of a file. Only regular files are opened: a pipe or a device might block."""
        real = self.real(path)
        try:
            if not stat.S_ISREG(os.stat(real).st_mode):
                return Unknown(f"{path} is not a file")
            # Buffered, since one read(2) of a file in /proc returns at most a page; but not beyond the limit.
            with open(real, "rb", buffering=min(max(limit, 2), 1 << 13)) as stream:
                if start:  # some files in /proc refuse any seek
                    stream.seek(start)
                return stream.read(limit)
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    def line(self, path: str) -> str:
        """The first line of a file, stripped; empty if the file is empty or cannot be read."""
        text = self.text(path, 4096)
        return text.partition("\n")[0].strip().strip("\0") if isinstance(text, str) else ""

    def findall(self, pattern: str | re.Pattern[str], path: str, limit: int = _LIMIT) -> list[Any]:
        """What ``re.findall`` finds in a file, with ``re.MULTILINE``; nothing if it cannot be read."""
        return re.compile(pattern, re.MULTILINE).findall(self.text(path, limit) or "")

    def listdir(self, path: str) -> tuple[str, ...] | Unknown:
        """The names in a folder, sorted."""
        try:
            return tuple(sorted(os.listdir(self.real(path))))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    def paths(self, folder: str, start: str = "", end: str = "") -> Iterator[str]:
        """The paths in a folder whose names begin with ``start`` and end with ``end``; none if it cannot be read."""
        for name in self.listdir(folder) or ():
            if name.startswith(start) and name.endswith(end):
                yield f"{folder.rstrip('/')}/{name}"

    def glob(self, pattern: str) -> Iterator[str]:
        """The paths for a pattern with one ``*``, which matches any text in a name; without, the pattern itself."""
        before, star, after = pattern.partition("*")
        folder, _, start = before.rpartition("/")
        end, slash, below = after.partition("/")
        return (f"{path}{slash}{below}" for path in self.paths(folder, start, end)) if star else iter((pattern,))

    def distinct(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths without those that lead to the same place as an earlier one."""
        seen: set[str] = set()
        for path in paths:
            target = self.target(path)
            if target not in seen:
                seen.add(target)
                yield path

    def exists(self, path: str) -> bool:
        """Whether ``path`` exists, with links followed inside the root."""
        return os.path.lexists(self.at(self.target(path)))

    def is_dir(self, path: str) -> bool:
        """Whether ``path`` is a folder."""
        return os.path.isdir(self.real(path))

    def stat(self, path: str) -> os.stat_result | Unknown:
        """``os.stat`` with links followed inside the root."""
        try:
            return os.stat(self.real(path))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    def readlink(self, path: str) -> str:
        """The target that a symbolic link names; empty for anything else."""
        folder, _, name = path.rstrip("/").rpartition("/")
        return self._readlink(path if self.root == "/" else f"{self.target(folder)}/{name}")

    def _readlink(self, path: str) -> str:
        """The same for a path whose folders are not links."""
        try:
            return os.readlink(self.at(path))
        except (OSError, ValueError):
            return ""

    def target(self, path: str) -> str:
        """The path with all links resolved inside the root, as ``os.path.realpath``."""
        if self.root == "/":
            try:
                return os.path.realpath(path)
            except ValueError:  # a NUL or a lone surrogate: no file has such a name
                return path
        done, rest, links = "/", path.strip("/").split("/"), 0
        while rest:
            step = rest.pop(0)
            here = os.path.normpath(f"{done.rstrip('/')}/{step}")
            to = self._readlink(here)
            if not to or links > _LINKS:
                done = here
                continue
            links += 1
            rest = to.strip("/").split("/") + rest
            done = "/" if to.startswith("/") else done
        return done

    def open_error(self, path: str) -> str:
        """Try to open a device for reading and writing: the name of the errno, empty if it opens."""
        try:
            os.close(os.open(self.real(path), os.O_RDWR | os.O_NONBLOCK))
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno))
        return ""


def pairs(text: str, separator: str) -> dict[str, str]:
    r"""The lines ``name SEPARATOR value`` of a text as a dict, without the spaces and quotes around values.

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
    if isinstance(error, OSError) and error.errno in _ABSENT:
        return f"{path} does not exist"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{path}: {words[:1].lower()}{words[1:]}"


_DIGITS = 20  # of a 64-bit number


def int_or(text: str, default: int) -> int:
    """The number in a text; ``default`` if it is anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else default


# -- memory ------------------------------------------------------------------------------------------------------------

_V1 = "/sys/fs/cgroup/memory"
_NO_LIMIT = 1 << 60  # without a limit, cgroup v1 reports a little less than 2**63


def memory(host: Host) -> tuple[int, int]:
    """Total and available bytes, -1 if unknown. The limit of a container counts if it is lower."""
    sizes = {name: int(kib) * 1024 for name, kib in host.findall(r"^(\w+):\s*(\d{1,19})\b", "/proc/meminfo")}
    total, free = sizes.get("MemTotal", -1), sizes.get("MemAvailable", sizes.get("MemFree", -1))
    # Every cgroup above this process may have a limit.
    paths = host.findall(r"^0::(/.*)", "/proc/self/cgroup")
    steps = [step for step in "".join(paths[:1]).split("/") if step and step != ".."]
    groups = ["/".join(["/sys/fs/cgroup", *steps[:depth]]) for depth in range(len(steps) + 1)]
    names = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    v1_names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
    for group, (most, used, statistics, inactive) in (*((each, names) for each in groups), (_V1, v1_names)):
        limit = int_or(host.line(f"{group}/{most}"), -1)
        if 0 <= limit < _NO_LIMIT:
            cached = host.findall(rf"^{inactive} (\d{{1,19}})$", f"{group}/{statistics}")  # reclaimable
            taken = int_or(host.line(f"{group}/{used}"), 0) - int(cached[0] if cached else 0)
            left = max(0, limit - max(0, taken))
            total = min(total, limit) if total >= 0 else limit
            free = min(free, left) if free >= 0 else left
    return total, free
