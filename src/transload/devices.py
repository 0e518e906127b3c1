"""The kinds of devices that torch knows, and the devices that work on a machine."""

from __future__ import annotations

from collections.abc import Mapping

from transload.frozen import Frozen, Plain

_REGISTERED = ("npu", "musa", "mlu", "gcu", "maia", "ipu", "hip", "vulkan", "lazy")  # by packages
KINDS = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia", "meta", "xla", "privateuseone", *_REGISTERED})
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "amd": "cuda", "metal": "mps", "tpu": "xla", "intel": "xpu"}


def closest_kind(kind: str) -> str:
    """The kind that somebody may have meant; empty if none is similar.

    >>> closest_kind("gpu"), closest_kind("cdua"), closest_kind("abacus")
    ('cuda', 'cuda', '')
    """
    from difflib import get_close_matches

    return _MEANT.get(kind.lower()) or next(iter(get_close_matches(kind.lower(), sorted(KINDS), 1, 0.7)), "")


def closest_device(name: str) -> str:
    """The device that somebody may have meant; empty if none is similar, or if ``name`` is valid.

    >>> closest_device("gpu"), closest_device("cuda1"), closest_device("CUDA:1"), closest_device("cuda:1")
    ('cuda', 'cuda:1', 'cuda:1', '')
    """
    kind = name.rstrip("0123456789").removesuffix(":")
    index = name[len(kind) :].removeprefix(":")
    meant = kind if kind in KINDS else closest_kind(kind)
    device = f"{meant}:{index}" if meant and index else meant
    return "" if device == name else device


def refuse_unknown(name: str, others: str) -> None:
    """Refuse a name that no device has; ``others`` are the words that are also accepted."""
    kind, index = split(name)
    if kind not in KINDS or (index is None and name != kind):
        from transload.errors import UsageError

        near = closest_device(name)
        fix = f"Use {others}, or a name such as cpu, cuda:0 or mps." + (f" Did you mean {near}?" if near else "")
        raise UsageError(f"{name!r} is not a device", fix=fix)


_LONGEST_INDEX = 4  # digits; torch keeps an index in eight bits, but a tag may be anything


class Device(Plain):
    """A device that works. ``free`` and ``total`` are bytes, -1 if they are not known."""

    name: str
    """``cpu``, ``cuda:0``, ``mps``, ``xpu:1`` …"""
    free: int = -1
    total: int = -1
    label: str = ""
    """What a person calls it: ``NVIDIA H200``."""


class Devices(Frozen):
    """All devices that work on a machine. ``current`` is the accelerator that programs use by default.

    >>> two = Devices((Device("cpu"), Device("cuda:0"), Device("cuda:1")), "cuda:0", rank=1)
    >>> two.get("cuda").name, two.own, two.get("cuda:2")
    ('cuda:0', 'cuda:1', None)
    """

    available: tuple[Device, ...] = (Device("cpu"),)
    current: str = ""
    """Empty if there is no accelerator."""
    rank: int | None = None
    """``LOCAL_RANK``, if torchrun or a similar launcher started the process."""
    absent: str = ""
    """Why there is no accelerator, in a sentence; empty if there is one."""

    def get(self, name: str) -> Device | None:
        """The device that a name means in torch: ``cuda`` is the current one, ``mps:0`` is ``mps``."""
        kind, index = split(name)
        alias = kind if index == 0 else ""
        if name == kind:
            first = next((device.name for device in self.of_kind(kind)), "")
            alias = self.current if kind == split(self.current)[0] else first
        named = {device.name: device for device in self.available}
        return named.get(name) or named.get(alias)

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        """All devices of one kind, such as ``cuda``."""
        return tuple(device for device in self.available if split(device.name)[0] == kind)

    @property
    def own(self) -> str:
        """The accelerator of this process; empty if there is none.

        If the program has selected another than the first, that one. Else a rank takes the device of its number; if
        there are more ranks than devices, they share, and if a rank sees only one device, it takes that.
        """
        kind, index = split(self.current)
        peers = self.of_kind(kind)
        if self.rank is None or index or not peers:
            return self.current
        return peers[self.rank % len(peers)].name

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """All devices of the same kind as the current one."""
        return self.of_kind(split(self.current)[0]) if self.current else ()


def split(device: str) -> tuple[str, int | None]:
    """The kind and index of a device, as torch writes it.

    >>> split("cuda:1"), split("mps")
    (('cuda', 1), ('mps', None))
    """
    kind, _, index = device.partition(":")
    numbered = index.isascii() and index.isdigit() and len(index) <= _LONGEST_INDEX
    return kind, int(index) if numbered else None


def local_rank(environ: Mapping[str, str]) -> int | None:
    """The rank of this process on its node, if a launcher has set it."""
    return split(f":{environ.get('LOCAL_RANK', '')}")[1]
