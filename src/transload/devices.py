"""Devices: the kinds that torch knows, and those that work here."""

from __future__ import annotations

from collections.abc import Mapping

from transload.frozen import facts

KINDS = frozenset(
    {
        *("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "meta", "xla", "privateuseone"),
        *("npu", "musa", "mlu", "gcu", "maia", "ipu", "hip", "vulkan", "lazy"),  # packages name theirs
    }
)
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "amd": "cuda", "metal": "mps", "tpu": "xla", "intel": "xpu"}


def near_kind(kind: str) -> str:
    """The kind that somebody may have meant; empty where none is near.

    >>> near_kind("gpu"), near_kind("cdua"), near_kind("abacus")
    ('cuda', 'cuda', '')
    """
    from difflib import get_close_matches

    return _MEANT.get(kind.lower()) or next(iter(get_close_matches(kind.lower(), sorted(KINDS), 1, 0.7)), "")


def near_device(name: str) -> str:
    """The device that somebody may have meant by what is not one; empty where none is near, or it is one.

    >>> near_device("gpu"), near_device("cuda1"), near_device("CUDA:1"), near_device("cuda:1")
    ('cuda', 'cuda:1', 'cuda:1', '')
    """
    kind = name.rstrip("0123456789").removesuffix(":")
    index = name[len(kind) :].removeprefix(":")
    meant = kind if kind in KINDS else near_kind(kind)
    device = f"{meant}:{index}" if meant and index else meant
    return "" if device == name else device


_LONGEST_INDEX = 4  # digits; torch keeps an index in eight bits, and a tag may be anything


@facts(frozen=True)
class Device:
    """A device that works here. ``free`` and ``total`` are bytes, -1 where they are not known."""

    name: str
    """``cpu``, ``cuda:0``, ``mps``, ``xpu:1`` …"""
    free: int = -1
    total: int = -1
    label: str = ""
    """What a person calls it: ``NVIDIA H200``."""


@facts(frozen=True)
class Devices:
    """All devices that work here. ``current`` is the accelerator a program computes on unless it says otherwise.

    >>> two = Devices((Device("cpu"), Device("cuda:0"), Device("cuda:1")), "cuda:0", rank=1)
    >>> two.get("cuda").name, two.own, two.get("cuda:2")
    ('cuda:0', 'cuda:1', None)
    """

    available: tuple[Device, ...] = (Device("cpu"),)
    current: str = ""
    """Empty where there is no accelerator."""
    rank: int | None = None
    """``LOCAL_RANK`` of a process that torchrun or its like has started."""
    absent: str = ""
    """Why there is no accelerator, in a sentence; empty where there is one."""

    def get(self, name: str) -> Device | None:
        """The device torch means by a name: ``cuda`` alone is the current one, ``mps:0`` is ``mps``."""
        exact = next((device for device in self.available if device.name == name), None)
        if exact is not None:
            return exact
        kind, index = split(name)
        wanted = {name, kind} if index == 0 else {name}
        if name == kind == split(self.current)[0]:
            wanted = {self.current}
        elif name == kind:
            wanted |= {device.name for device in self.of_kind(kind)[:1]}
        return next((device for device in self.available if device.name in wanted), None)

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        """All of one kind, such as ``cuda``."""
        return tuple(device for device in self.available if split(device.name)[0] == kind)

    @property
    def own(self) -> str:
        """The accelerator of this process; empty where there is none.

        A program that has chosen another than the first means it. Else a rank takes its own; where there are more ranks
        than devices, they share, and where each rank was given one to see, that is the one.
        """
        kind, index = split(self.current)
        peers = self.of_kind(kind)
        if self.rank is None or index or not peers:
            return self.current
        return peers[self.rank % len(peers)].name

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """Those of the current one's kind."""
        return self.of_kind(split(self.current)[0]) if self.current else ()


def split(device: str) -> tuple[str, int | None]:
    """Kind and index of a device, as torch writes them.

    >>> split("cuda:1"), split("mps")
    (('cuda', 1), ('mps', None))
    """
    kind, _, index = device.partition(":")
    numbered = index.isascii() and index.isdigit() and len(index) <= _LONGEST_INDEX
    return kind, int(index) if numbered else None


def local_rank(environ: Mapping[str, str]) -> int | None:
    """The rank of this process on its node, where a launcher has set one.

    >>> local_rank({"LOCAL_RANK": "3"}), local_rank({})
    (3, None)
    """
    return split(f":{environ.get('LOCAL_RANK', '')}")[1]
