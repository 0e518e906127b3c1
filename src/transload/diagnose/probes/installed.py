"""One installed torch: what its version.py, its dist-info and conda's records say of it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from transload.diagnose.probes.distributions import Distribution, distributions, fields, version
from transload.diagnose.probes.record import altered, damaged, listed, unlisted
from transload.diagnose.probes.version_file import build
from transload.machine import TorchInstall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transload.diagnose.host import Host

__all__ = ["best", "elsewhere", "install"]

_BUILD = re.compile(r"pytorch-\d[^-]*-([^/]+)\.json")
_TOGETHER = 60.0  # seconds between the first and the last that one command installs
_NAMED = 5  # packages named as a reason; more say no more
_NEEDS_TORCH = re.compile(r"torch\s*(?:[^\w.\s-]|$)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=//)[^/@]*@")


def install(host: Host, folder: str, dist: Distribution | None, prefix: str) -> TorchInstall:
    """The torch in ``folder``, whose distribution is ``dist``, in the environment at ``prefix``."""
    built = build(host, folder)
    installer = host.line(f"{dist.path}/INSTALLER") if dist else ""
    conda = _conda_build(host, folder, prefix) if installer in ("", "conda") else ""
    files = listed(host, dist.path) if dist else {}
    return TorchInstall(
        folder,
        built.version,
        built.cuda,
        built.hip,
        built.xpu,
        known=not built.problem,
        problem=built.problem,
        dist_info=dist.path if dist else "",
        dist_version=version(host, dist) if dist else "",
        installer=installer or ("conda" if conda else ""),
        conda_build=conda,
        tags=_tags(host, dist.path) if dist else (),
        missing=tuple(damaged(host, folder, files)),
        unlisted=() if conda else unlisted(host, folder, files),  # conda links libraries there from its own folder
        installed=_time(host, dist.path) if dist else 0.0,
        replaced_by=tuple(_reasons(host, dist)) if dist else (),
        altered=tuple(altered(host, folder, files)),
        origin=_CREDENTIALS.sub("", str(_direct(host, dist.path).get("url", ""))) if dist else "",
    )


def best(dists: Sequence[Distribution], torch_version: str) -> Distribution | None:
    """Of several distributions of one folder that to which its files belong: the last one installed wrote version.py.

    >>> best([Distribution("torch", "2.8.0", "a"), Distribution("torch", "2.9.1", "b")], "2.9.1+cu128").path
    'b'
    """
    release = torch_version.partition("+")[0]
    fits = (dist for dist in dists if dist.version.partition("+")[0] == release)
    return next(fits, dists[0] if dists else None)


def elsewhere(host: Host, dist: Distribution) -> bool:
    """Whether a distribution says that its files are not beside it: an editable install."""
    info = _direct(host, dist.path).get("dir_info")
    return (isinstance(info, dict) and info.get("editable") is True) or (
        host.exists(f"{dist.path}/RECORD") and "__init__.py" not in listed(host, dist.path)
    )


def _direct(host: Host, dist_info: str) -> dict[str, Any]:
    try:
        data = json.loads(host.text(f"{dist_info}/direct_url.json") or "{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _tags(host: Host, dist_info: str) -> tuple[str, ...]:
    text = host.text(f"{dist_info}/WHEEL", 1 << 16) or ""
    return tuple(re.findall(r"(?mi)^Tag:[ \t]*(\S+)", text))


def _time(host: Host, path: str) -> float:
    status = host.status(path)
    return status.st_mtime if status else 0.0


def _conda_build(host: Host, folder: str, prefix: str) -> str:
    """The build string in conda's record of the package ``pytorch``, where the torch is in its environment."""
    if not folder.startswith(f"{prefix}/"):
        return ""
    found = (_BUILD.fullmatch(name) for name in host.names(f"{prefix}/conda-meta") or ())
    return next((each[1] for each in found if each), "")


def _reasons(host: Host, dist: Distribution) -> Iterator[str]:
    """What was installed with it and needs it, where nobody asked for torch itself: pip marks what was asked for."""
    if host.exists(f"{dist.path}/REQUESTED"):
        return
    site, then = dist.path.rpartition("/")[0], _time(host, dist.path)
    found = [
        each
        for each in distributions(site, host.names(site) or ())
        if each.path != dist.path and abs(_time(host, each.path) - then) <= _TOGETHER and _needs_torch(host, each)
    ]
    found.sort(key=lambda each: not host.exists(f"{each.path}/REQUESTED"))
    yield from (f"{each.name} {version(host, each)}" for each in found[:_NAMED])


def _needs_torch(host: Host, dist: Distribution) -> bool:
    needs = fields(host, dist, "Requires-Dist")
    return any(_NEEDS_TORCH.match(need) and "extra ==" not in need for need in needs)
