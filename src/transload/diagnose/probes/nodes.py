"""Device nodes: what they are, and what becomes of opening them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace

from transload.diagnose.host import Host
from transload.diagnose.probes.apart import apart
from transload.diagnose.probes.mounts import mount_of, mounts
from transload.machine import Node, Nodes, Unknown

__all__ = ["nodes"]

_ALWAYS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")
_CARD = re.compile(r"/dev/nvidia\d+")
_NAMES = re.compile(r"nvidia\d+|nvidiactl|nvidia-(?:uvm|uvm-tools|modeset|nvswitchctl|nvlink)|dxg|nvmap|nvhost-.*|kfd")
_FOLDERS = (("/dev/nvidia-caps", "nvidia-cap"), ("/dev/dri", "renderD"), ("/dev/accel", "accel"))
_MAJORS = re.compile(r"^ *(\d{1,4}) (nvidia\S*|kfd|drm|accel)$", re.MULTILINE)
_MOST = 64  # of a folder: every slice of every card can have its nodes

_PATIENCE = 0.25
"""A refusal comes at once; whoever takes longer has been let in, and starts a card."""


def nodes(host: Host) -> Nodes:
    """The nodes of NVIDIA's driver and of others for computing, and the numbers the kernel gave them."""
    if host.uname[0] != "Linux":
        return Nodes()
    groups, around = _groups(host), mounts(host)
    found = [_node(host, path, groups) for path in dict.fromkeys((*_ALWAYS, *_present(host)))]
    mounted = ((node, mount_of(around, node.path)) for node in _opened(host, found))
    return Nodes(
        found=tuple(replace(node, nodev=mount is not None and "nodev" in mount.options) for node, mount in mounted),
        majors=_majors(host),
        cgroup=_cgroup(host),
    )


def _present(host: Host) -> Iterator[str]:
    yield from (f"/dev/{name}" for name in host.names("/dev") or () if _NAMES.fullmatch(name))
    for folder, start in _FOLDERS:
        yield from tuple(host.paths(folder, start))[:_MOST]


def _groups(host: Host) -> dict[int, str]:
    lines = (line.split(":") for line in (host.text("/etc/group") or "").split("\n"))
    return {int(line[2]): line[0] for line in lines if len(line) > 2 and re.fullmatch(r"\d{1,10}", line[2], re.ASCII)}


def _node(host: Host, path: str, groups: dict[int, str]) -> Node:
    status = host.status(path)
    if isinstance(status, Unknown):
        dangling = bool(host.link(path))
        return Node(path, exists=dangling, kind="link" if dangling else "", mode=0, error="ENOENT")
    device = getattr(status, "st_rdev", 0)
    return Node(
        path,
        kind=_kind(status.st_mode),
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        group=groups.get(status.st_gid, ""),
        major=os.major(device),
        minor=os.minor(device),
    )


def _kind(mode: int) -> str:
    return "char" if stat.S_ISCHR(mode) else "directory" if stat.S_ISDIR(mode) else "file"


def _opened(host: Host, found: list[Node]) -> Iterator[Node]:
    """The nodes with what became of opening them. Cards come last: one that must be started first takes its time."""
    there = sorted((node for node in found if node.kind not in ("", "link")), key=lambda node: _is_card(node.path))
    answers = apart([lambda path=node.path: host.open_error(path) for node in there], _PATIENCE)  # type: ignore[misc]
    errors = {node.path: _refusal(host, node, answer) for node, answer in zip(there, answers, strict=True)}
    return (replace(node, error=errors.get(node.path, node.error)) for node in found)


def _is_card(path: str) -> bool:
    return bool(_CARD.fullmatch(path))


def _refusal(host: Host, node: Node, answer: str | Unknown) -> str:
    if isinstance(answer, Unknown):
        return "" if os.access(host.at(node.path), os.R_OK | os.W_OK) else "EACCES"
    if answer == "EACCES" and "/nvidia-caps/" in node.path and node.mode & stat.S_IROTH:
        return ""  # the driver opens these for reading only, and so they are made
    return answer


def _majors(host: Host) -> dict[str, int]:
    characters = (host.text("/proc/devices", 1 << 16) or "").partition("Block devices")[0]
    majors = {name: int(number) for number, name in _MAJORS.findall(characters)}
    if "nvidia-frontend" in majors:  # as drivers before 550 called it
        majors = {"nvidia": majors["nvidia-frontend"], "nvidiactl": majors["nvidia-frontend"]} | majors
    return majors


def _cgroup(host: Host) -> tuple[str, ...]:
    """Version 1 has a list; the rules of version 2 are a program in the kernel that only root can see."""
    own = re.search(
        r"^\d+:(?:\w+,)*devices(?:,\w+)*:(/.*)$", host.text("/proc/self/cgroup", 1 << 14) or "", re.MULTILINE
    )
    for folder in ((own[1].rstrip("/"),) if own else ()) + ("",):
        text = host.text(f"/sys/fs/cgroup/devices{folder}/devices.list", 1 << 14)
        if isinstance(text, str):
            return tuple(line.strip() for line in text.split("\n") if line.strip())
    return ()
