"""File systems mounted where device nodes live, and at the root."""

from __future__ import annotations

import re
from dataclasses import dataclass

from transload.diagnose.host import Host

__all__ = ["Mount", "mount_of", "mounts"]

_OCTAL = re.compile(r"\\([0-7]{3})")  # a space in a path, and what else would divide fields
_LIMIT = 16 << 20  # hosts of many containers have thousands of lines


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo: where, of what kind, with which options; ``detail`` are those of the file system."""

    point: str
    kind: str
    options: tuple[str, ...] = ()
    detail: str = ""


def mounts(host: Host) -> tuple[Mount, ...]:
    """What is mounted at / and at or below /dev, in the order in which it was mounted."""
    text = host.text("/proc/self/mountinfo", _LIMIT) or ""
    return tuple(each for each in map(_mount, text.split("\n")) if each is not None)


def _mount(line: str) -> Mount | None:
    fields = line.split(" ", 6)
    if len(fields) < 7 or not (fields[4] == "/" or f"{fields[4]}/".startswith("/dev/")):
        return None
    kind, _, rest = fields[6].partition("- ")[2].partition(" ")
    point = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
    return Mount(point, kind, tuple(fields[5].split(",")), rest.partition(" ")[2])


def mount_of(found: tuple[Mount, ...], path: str) -> Mount | None:
    """The one that ``path`` lies on: the deepest, and of several at one place the last.

    >>> mount_of((Mount("/", "ext4"), Mount("/dev", "devtmpfs")), "/dev/nvidia0").kind
    'devtmpfs'
    """
    over = [each for each in found if path == each.point or path.startswith(each.point.rstrip("/") + "/")]
    return max(reversed(over), key=lambda each: len(each.point), default=None)
