"""The host as probes see it: its files and its environment. In tests a directory tree stands in for it.

Nothing here raises for the state of a host: what cannot be read is an ``Unknown`` with the reason.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from transload.diagnose import windows
from transload.diagnose.windows import Registry, WindowsDevice
from transload.io import limits
from transload.io.limits import MemoryStatus
from transload.machine import Unknown

_LIMIT = 1 << 20  # bytes read of a file by default: some files in /proc never end
_FOLDERS = 64  # the most folders of PATH that are searched


def _cwd() -> str:
    try:
        return os.getcwd().replace(os.sep, "/")
    except OSError:  # it was deleted
        return ""


def _uname() -> tuple[str, str, str]:
    if hasattr(os, "uname"):
        system, _, release, _, machine = os.uname()
    else:
        import platform

        system, _, release, _, machine, *_ = platform.uname()
    return system, release, machine


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError, AttributeError):  # musl lacks that name, and Windows the function
        return ""


@dataclass(frozen=True)
class Host:
    """Where probes look. Paths are absolute, and have forward slashes also on Windows: ``C:/Windows/System32``.

    What comes from outside and may be a path (``sys.path``, the registry, a variable) goes through ``slashed``.
    ``python`` is the interpreter to examine, ``cwd`` the current directory, ``uname`` is ``(system, kernel release,
    machine)``, and ``libc`` the version of glibc in this process. Fields that are not given are those of this process.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = field(default_factory=lambda: (sys.executable or "").replace(os.sep, "/"))
    cwd: str = field(default_factory=_cwd)
    uname: tuple[str, str, str] = field(default_factory=_uname)
    uid: int = field(default_factory=lambda: os.geteuid() if hasattr(os, "geteuid") else -1)
    libc: str = field(default_factory=_libc)

    def real(self, path: str) -> str:
        """The path, or the name of a library, as this process and its children open it. Tests override this."""
        return path

    @property
    def windows(self) -> bool:
        """Whether it runs Windows."""
        return self.uname[0] == "Windows"

    @property
    def home(self) -> str:
        """The user's folder; empty if no variable names it."""
        return self.slashed(self.environ.get("USERPROFILE" if self.windows else "HOME", ""))

    def slashed(self, path: str) -> str:
        """A path as the host writes it, with forward slashes."""
        return path.replace("\\", "/") if self.windows else path

    def is_absolute(self, path: str) -> bool:
        """Whether a path with forward slashes is absolute, on Windows with a drive or a server."""
        return bool(re.match(r"[A-Za-z]:/|//[^/]", path)) if self.windows else path.startswith("/")

    def absolute(self, path: str) -> str:
        """A path that may be relative to the current directory."""
        return path if self.is_absolute(path) else f"{self.cwd.rstrip('/')}/{path}" if path else self.cwd

    def split(self, value: str) -> list[str]:
        """The elements of a variable that lists paths, such as PATH."""
        return [self.slashed(path.strip('"')) for path in value.split(";")] if self.windows else value.split(":")

    def search_path(self) -> list[str]:
        """The folders of PATH that are absolute, without a trailing slash."""
        folders = self.split(self.environ.get("PATH", ""))[:_FOLDERS]
        return [folder.rstrip("/") for folder in folders if self.is_absolute(folder)]

    def program(self, name: str, folders: Iterable[str]) -> str:
        """The first program of that name in the folders; empty if there is none."""
        name += ".exe" if self.windows and not name.endswith(".exe") else ""
        paths = (f"{folder}/{name}" for folder in folders)
        return next((path for path in paths if self.exists(path) and not self.is_dir(path)), "")

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

    def findall(self, pattern: str, path: str, limit: int = _LIMIT) -> list[Any]:
        """What ``re.findall`` finds in a file, with ``re.MULTILINE``; nothing if it cannot be read."""
        return re.findall(pattern, self.text(path, limit) or "", re.MULTILINE)

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
        """The paths that match a pattern with one ``*`` inside a name; without a ``*``, the pattern itself."""
        before, star, after = pattern.partition("*")
        folder, _, start = before.rpartition("/")
        end, slash, below = after.partition("/")
        return (f"{path}{slash}{below}" for path in self.paths(folder, start, end)) if star else iter((pattern,))

    def distinct(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths, without those that resolve to the same file as an earlier one."""
        seen: set[str] = set()
        for path in paths:
            target = self.target(path)
            if target not in seen:
                seen.add(target)
                yield path

    def exists(self, path: str) -> bool:
        """Whether ``path`` exists, with links followed."""
        return os.path.exists(self.real(path))

    def is_dir(self, path: str) -> bool:
        """Whether ``path`` is a folder."""
        return os.path.isdir(self.real(path))

    def stat(self, path: str) -> os.stat_result | Unknown:
        """``os.stat``, which follows links."""
        try:
            return os.stat(self.real(path))
        except (OSError, ValueError) as error:
            return Unknown(reason(path, error))

    def readlink(self, path: str) -> str:
        """The target that a symbolic link names; empty for anything else."""
        try:
            return _plain(os.readlink(path.rstrip("/")))
        except (OSError, ValueError):
            return ""

    def target(self, path: str) -> str:
        """The path with all links resolved."""
        try:
            return _plain(os.path.realpath(path))
        except (OSError, ValueError):  # a relative path in a directory that was deleted; a NUL or a lone surrogate
            return path

    def open_error(self, path: str) -> str:
        """Try to open a device for reading and writing; return the name of the errno, empty if it opens."""
        try:
            os.close(os.open(self.real(path), os.O_RDWR | os.O_NONBLOCK))
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error.errno))
        return ""

    def registry(self, key: str) -> Registry | Unknown:
        """A key of the registry: ``HKLM/SYSTEM/CurrentControlSet/Enum/PCI``."""
        try:
            return windows.registry(key)
        except ImportError:
            return Unknown("this system has no registry")
        except OSError as error:  # it does not exist, is not ours to read, or changed while it was read
            return Unknown(reason(key, error))

    def devices(self) -> tuple[WindowsDevice, ...] | Unknown:
        """The devices on the PCI bus of a Windows machine that are present."""
        try:
            return windows.devices()
        except (OSError, AttributeError) as error:  # Wine lacks some of these functions
            return Unknown(f"cfgmgr32 cannot be asked: {error}")

    def memory_status(self) -> MemoryStatus:
        """How much memory a Windows machine has, and can still promise to this process."""
        return limits.memory_status()

    def sysctl(self, name: str) -> int:
        """A number that macOS has under a name, such as ``sysctl.proc_translated``; -1 if there is none."""
        import ctypes

        try:
            ask = ctypes.CDLL(None).sysctlbyname
        except (OSError, AttributeError, TypeError):
            return -1
        value, length = ctypes.c_int64(0), ctypes.c_size_t(8)
        failed = ask(name.encode(), ctypes.byref(value), ctypes.byref(length), None, ctypes.c_size_t(0))
        return -1 if failed else value.value

    def kernel_ring(self, size: int) -> str | Unknown:
        """The end of the kernel's log in one call: /dev/kmsg returns up to 100,000 lines one by one, oldest first."""
        import ctypes

        try:
            ask = ctypes.CDLL(None, use_errno=True).klogctl
        except (OSError, AttributeError, TypeError):
            return Unknown("this system has no klogctl")
        buffer = ctypes.create_string_buffer(size)
        length = ask(3, buffer, size)  # SYSLOG_ACTION_READ_ALL
        if length < 0:
            code = ctypes.get_errno()
            return Unknown(reason("the kernel's log", OSError(code, os.strerror(code))))
        return ctypes.string_at(buffer, length).decode("utf-8", "replace")


def _plain(path: str) -> str:
    """A path of this system as a host writes it: without the prefix that on Windows lifts the limit on its length."""
    return path.removeprefix("\\\\?\\").replace(os.sep, "/")


def pairs(text: str, separator: str) -> dict[str, str]:
    r"""The lines ``name SEPARATOR value`` of a text as a dict, without the spaces and quotes around values.

    >>> pairs('ID="ubuntu"\n# a comment\nVERSION_ID = 24.04', "=")
    {'ID': 'ubuntu', 'VERSION_ID': '24.04'}
    """
    lines = (line.partition(separator) for line in text.splitlines())
    return {name.strip(): value.strip().strip("\"'") for name, separator, value in lines if separator}


def reason(path: str, error: Exception) -> str:
    """Why something could not be read, in a few words.

    >>> reason("/proc/modules", PermissionError(13, "Permission denied"))
    '/proc/modules: permission denied'
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path} does not exist"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{path}: {words[:1].lower()}{words[1:]}"


_DIGITS = 20  # of a 64-bit number


def int_or(text: str, default: int) -> int:
    """The number in a text; ``default`` if it is anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < _DIGITS else default


def memory(host: Host) -> tuple[int, int]:
    """Total and available bytes, -1 if unknown. The limit of a container counts if it is lower."""
    if host.windows:
        status = host.memory_status()
        return status.total, status.free
    return limits.memory(lambda path: host.text(path) or "")
