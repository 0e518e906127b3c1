"""Installed distributions, by the names of their metadata folders: quick, and true where the metadata is broken."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from transload.diagnose.host import Host

__all__ = ["Distribution", "distributions", "fields", "normal", "version"]

_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*?)(?:-(?P<version>\d[^-]*))?(?:-py\d[\d.]*)?\.(?:dist|egg)-info", re.ASCII
)
_HEADER = 1 << 16  # the fields come first in METADATA; a description of any length follows


@dataclass(frozen=True, slots=True)
class Distribution:
    """One ``*.dist-info`` or ``*.egg-info``: its normalised name, the version its name says, and where it is."""

    name: str
    version: str
    path: str


def normal(name: str) -> str:
    """The one spelling of a distribution's name.

    >>> normal("NVIDIA_cudnn.cu12")
    'nvidia-cudnn-cu12'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(folder: str, names: Iterable[str]) -> Iterator[Distribution]:
    """Those in a folder of the import path that holds ``names``.

    >>> next(distributions("/site", ["torch-2.13.0+cpu.dist-info"]))
    Distribution(name='torch', version='2.13.0+cpu', path='/site/torch-2.13.0+cpu.dist-info')
    """
    for name in names:
        if name.endswith("-info") and (found := _NAME.fullmatch(name)):
            yield Distribution(normal(found["name"]), found["version"] or "", f"{folder.rstrip('/')}/{name}")


def fields(host: Host, distribution: Distribution, name: str) -> tuple[str, ...]:
    """All values of a field of its metadata; none where there is no metadata.

    The metadata is METADATA, PKG-INFO, or, for an old distutils, the ``egg-info`` itself.
    """
    places = (f"{distribution.path}/METADATA", f"{distribution.path}/PKG-INFO", distribution.path)
    text = next((text for text in (host.text(place, _HEADER) for place in places) if text), "")
    head = re.split(r"\r?\n\r?\n", text or "", maxsplit=1)[0]
    return tuple(line.strip() for line in re.findall(rf"(?mi)^{re.escape(name)}:(.*)$", head))


def version(host: Host, distribution: Distribution) -> str:
    """Its version: as the metadata says, else the name of its folder."""
    return next(iter(fields(host, distribution, "Version")), "") or distribution.version
