"""Where a checkpoint goes: which devices this machine has, the plan, and the map from saved to local devices.

``devices_here`` asks torch for the devices, and touches no accelerator that the file does not call for. ``place`` makes
the ``Plan``: what goes where and why, whether it fits, and the one warning about it. It is pure, so ``transload check``
makes the same plan without torch. A ``DeviceMap`` carries the plan out, storage by storage.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

from transload.checkpoint import Storage, Tensor
from transload.devices import Device, Devices, devices_of, local_rank, split
from transload.errors import DoesNotFitError, LoadError, NoDeviceError
from transload.frozen import facts

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from transload.checkpoint import Checkpoint
    from transload.render.lines import Block, Line

__all__ = [
    "AUTO",
    "UNDECIDED",
    "Device",
    "DeviceMap",
    "Devices",
    "MapLocation",
    "Move",
    "Plan",
    "Reason",
    "Shortage",
    "devices_here",
    "devices_of",
    "landing",
    "listed",
    "local_rank",
    "place",
    "tags_of",
    "wanted_devices",
]


Reason = Literal["saved", "here", "absent", "lost", "rank", "float64", "asked", "function"]

UNDECIDED = "?"
"""The device of what a function of the caller's will decide on."""

_WORDS: dict[Reason, str] = {
    "saved": "it was saved there",
    "here": "it is here",
    "absent": "there is no {tag} here{detail}",
    "lost": "there is no {detail} here",
    "rank": "this process has local rank {detail}",
    "float64": "{detail} cannot hold float64",
    "asked": "you asked for it",
    "function": "your function decides",
}
_SHOWN = 8
_LONGEST = 40
_TAGS = 16


_MOVE = ("tag", "device", "reason", "why", "tensors", "nbytes")
_SHORTAGE = ("device", "needed", "free", "missing")


@facts(frozen=True)
class Move:
    """All storages of one tag: where they were, where they go, and why."""

    tag: str
    device: str
    """Empty where nothing here can take them; ``UNDECIDED`` where a function of the caller's decides."""
    reason: Reason
    tensors: int = 0
    nbytes: int = 0
    detail: str = ""
    """What the reason alone does not tell."""

    @property
    def moved(self) -> bool:
        """Whether it lands elsewhere than it was: ``cuda`` names any of its kind, and ``mps:0`` is ``mps``.

        >>> Move("cuda", "cuda:0", "here").moved, Move("cuda:1", "cuda:0", "absent").moved
        (False, True)
        """
        if self.tag == self.device:
            return False
        (kind, _), (before, index) = split(self.device), split(self.tag)
        same = self.tag == kind or (index == 0 and before == self.device)
        return not same and self.device != UNDECIDED

    @property
    def why(self) -> str:
        """The reason in a phrase.

        >>> Move("cuda:1", "cpu", "absent").why
        'there is no cuda:1 here'
        """
        return _why(self.reason, listed([self.tag]), self.detail)


@facts(frozen=True)
class Shortage:
    """A device that has too little memory."""

    device: str
    needed: int
    free: int
    instead: tuple[str, ...] = ()
    """What would fit, in words."""

    @property
    def missing(self) -> int:
        """Bytes it lacks."""
        return self.needed - self.free

    def __str__(self) -> str:
        """What it lacks, in a phrase.

        >>> str(Shortage("cuda:0", 14_000_000_000, 10_000_000_000))
        'cuda:0 has 10.0 GB free and would need 14.0 GB: 4.00 GB too little'
        """
        from transload.render.sizes import size

        lack = f"{size(self.missing)} too little"
        return f"{self.device} has {size(self.free)} free and would need {size(self.needed)}: {lack}"


@facts(frozen=True)
class Plan:
    """Where a checkpoint lands.

    >>> plan = Plan((Move("cuda:1", "cpu", "absent", 2, 1024),), surprising=True)
    >>> plan.device_of("cuda:1"), plan.device_of("cpu")
    ('cpu', 'cpu')
    >>> plan.warning
    '2 tensors saved on cuda:1 land on cpu: there is no cuda:1 here'
    """

    moves: tuple[Move, ...] = ()
    """One for each tag, that of the most bytes first."""
    shortages: tuple[Shortage, ...] = ()
    refused: str = ""
    """Why it cannot land as wished, in a sentence; empty where it can."""
    fix: tuple[str, ...] = ()
    surprising: bool = False
    """Whether something lands elsewhere than its tag says though the caller did not ask for it."""
    how: str = ""
    """How its bytes would be moved, in a phrase; empty where nobody has looked."""

    @property
    def ok(self) -> bool:
        """Whether it lands, and fits."""
        return not self.refused and not self.shortages

    def device_of(self, tag: str) -> str:
        """Where storages of a tag go; a tag the plan does not know stays what it is."""
        return next((move.device for move in self.moves if move.tag == tag), tag)

    @property
    def warning(self) -> str:
        """The one sentence on what was moved and why; empty where nothing was that the caller did not ask for."""
        if not self.surprising:
            return ""
        groups: dict[tuple[str, Reason, str], list[Move]] = {}
        for move in self.moves:
            if move.moved:
                groups.setdefault((move.device, move.reason, move.detail), []).append(move)
        return "; ".join(_told(together) for together in groups.values())

    def __str__(self) -> str:
        """The plan as ``transload check`` shows it, without colour."""
        from transload.render.lines import layout, plain
        from transload.render.style import Style

        return "\n".join(plain(line) for line in layout(landing(self), Style()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "ok": self.ok,
            "refused": self.refused,
            "fix": list(self.fix),
            "warning": self.warning,
            "how": self.how,
            "moves": [{name: getattr(move, name) for name in _MOVE} for move in self.moves],
            "shortages": [
                {**{name: getattr(short, name) for name in _SHORTAGE}, "instead": list(short.instead)}
                for short in self.shortages
            ],
        }


def listed(names: Sequence[str], joint: str = "and") -> str:
    r"""Some names as people write them. A tag is a stranger's text: it may be of any length, and unprintable.

    >>> listed(["cuda:0", "cuda:1", "cpu"]), listed(["a", "b"], "or"), listed(["no\nsuch"])
    ('cuda:0, cuda:1 and cpu', 'a or b', "'no\\nsuch'")
    """
    short = [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in names[:_SHOWN]]
    shown = [name if name.isprintable() and name else ascii(name) for name in short]
    if len(names) > _SHOWN:
        shown.append(f"{len(names) - _SHOWN:,} more")
    *most, last = shown
    return f"{', '.join(most)} {joint} {last}" if most else last


def _why(reason: Reason, tag: str, detail: str) -> str:
    detail = f"; {detail}" if reason == "absent" and detail else detail
    return _WORDS[reason].format(tag=tag, detail=detail)


def _told(together: Sequence[Move]) -> str:
    """What to say of tags that go the same way for the same reason."""
    count = sum(move.tensors for move in together)
    tensors = "1 tensor" if count == 1 else f"{count:,} tensors"
    tags = [move.tag for move in together]
    first = together[0]
    why = _why(first.reason, listed(tags, "or"), first.detail)
    return f"{tensors} saved on {listed(tags)} land on {first.device}: {why}"


def landing(plan: Plan) -> Iterator[Block]:
    """A line for each tag, and what stands against it, as blocks of text."""
    from transload.render.escape import printable
    from transload.render.lines import Prose, Table
    from transload.render.sizes import plural, size

    def dim(text: str) -> Block:
        return Prose(((text, "dim"),), lead=(("  ", ""),))

    def against(text: str) -> Block:
        return Prose(((printable(text, None), "strong"),), lead=(("✗ ", "bad"),))

    def fix(text: str) -> Block:
        return Prose(((printable(text, None), ""),), lead=(("  → ", "good"),))

    if not plan.moves:
        yield dim("there is nothing to place")
    rows: list[tuple[Line, ...]] = []
    for move in plan.moves[:_TAGS]:
        target = "undecided" if move.device == UNDECIDED else printable(move.device, 24) or "nowhere"
        role = "bad" if not move.device else "trust" if move.moved else "good"
        rows.append(
            (
                ((listed([move.tag]), ""),),
                (("→ ", "dim"), (target, role)),
                ((printable(move.why, None), "" if move.moved else "dim"),),
                ((plural(move.tensors, "tensor"), "dim"),),
                ((size(move.nbytes), ""),),
            )
        )
    yield Table(rows, right=frozenset({4}), drops=(3, 4))
    if len(plan.moves) > _TAGS:
        yield dim(f"… and {len(plan.moves) - _TAGS:,} more devices")
    if plan.how and plan.ok:
        yield dim(f"read by {plan.how}")
    if plan.refused:
        yield against(plan.refused)
    for short in plan.shortages:
        yield against(str(short))
        yield from map(fix, short.instead)
    yield from map(fix, plan.fix)


AUTO = "auto"
MapLocation = Any
"""What torch takes as ``map_location`` (``None``, a name, a ``torch.device``, a mapping, a function), or ``auto``."""

_Chosen = tuple[str, Reason, str]
"""A device, why, and what more is to be said of that."""
_Chooser = Callable[[str], _Chosen]

_WIDE = frozenset({"float64", "complex128"})
"""What mps has not: https://github.com/pytorch/pytorch/issues/79019"""
_HALVED = {"float32": 2, "float64": 4}
_MAPPED = frozenset({"torch-zip", "safetensors"})


def _fields(of: type[Storage | Tensor], *names: str) -> Callable[[Any], Any]:
    """Some fields of a named tuple, many at a time as fast as C."""
    return itemgetter(*(of._fields.index(name) for name in names))


_OF_STORAGE = _fields(Storage, "device", "dtype", "nbytes")
_OF_TENSOR = _fields(Tensor, "device", "dtype", "kind")
_TAG = _fields(Storage, "device")
_TENSOR_TAG = _fields(Tensor, "device")


@dataclass(slots=True)
class _Load:
    """What carries one tag."""

    tensors: int = 0
    nbytes: int = 0
    slim: int = 0
    """Bytes it would take with its floats as bfloat16."""
    wide: bool = False
    """Whether something of it is too wide for mps."""

    def add(self, count: int, nbytes: int, dtype: str) -> None:
        """So many more, each of so many bytes."""
        self.nbytes += count * nbytes
        self.slim += count * (nbytes // _HALVED.get(dtype, 1))


def place(checkpoint: Checkpoint, devices: Devices, map_location: MapLocation = AUTO) -> Plan:
    """Where each storage goes, by its tag.

    ``auto``: a tag whose device is here keeps it, and the CPU stays the CPU; one that is not here goes to the
    accelerator of this process, or to the CPU where there is none. Where a checkpoint is spread over several devices,
    the absent ones are laid out over those that are here by free memory. Under torchrun every rank takes its own. Any
    other map_location means what it means to ``torch.load``.
    """
    loads = _loads(checkpoint)
    nonsense = _nonsense(map_location)
    if nonsense:
        moves = tuple(Move(tag, "", "asked", load.tensors, load.nbytes) for tag, load in loads.items())
        return Plan(moves, refused=nonsense[0], fix=nonsense[1:])
    choose = _chooser(loads, devices, map_location)
    chosen = [(tag, load, *choose(tag)) for tag, load in loads.items()]
    moves = tuple(Move(tag, name, why, load.tensors, load.nbytes, detail) for tag, load, name, why, detail in chosen)
    lost = [move for move in moves if not move.device]
    if lost:
        fix = "Ask for a device that is here, or leave map_location out."
        if map_location is None:
            fix = "Leave map_location out (it is 'auto'), or pass map_location='cpu'."
        return Plan(moves, refused=_refusal(lost, devices), fix=(fix,))
    automatic = isinstance(map_location, str) and map_location == AUTO
    shortages = tuple(_shortages(checkpoint, moves, loads, devices))
    return Plan(moves, shortages, surprising=automatic and any(move.moved for move in moves))


def _refusal(lost: list[Move], devices: Devices) -> str:
    if lost[0].reason == "float64":
        return f"it holds float64, which {lost[0].detail} does not have"
    wanted = listed(list(dict.fromkeys(move.detail for move in lost)), "or")
    here = listed([device.name for device in devices.available])
    reason = f"; {devices.absent}" if devices.absent else ""
    return f"there is no {wanted} here, only {here}{reason}"


def tags_of(checkpoint: Checkpoint) -> list[str]:
    """The devices that the storages and tensors of a checkpoint are tagged with."""
    counted = (tag for tag, _ in checkpoint.counted)
    return [*dict.fromkeys(chain(map(_TAG, checkpoint.storages), map(_TENSOR_TAG, checkpoint.tensors), counted))]


def _loads(checkpoint: Checkpoint) -> dict[str, _Load]:
    """Tensors and bytes by tag, the most bytes first; what is shared counts once."""
    loads: dict[str, _Load] = defaultdict(_Load)
    for (tag, dtype, nbytes), count in Counter(map(_OF_STORAGE, checkpoint.storages)).items():
        loads[tag].add(count, nbytes, dtype)
    for tag, count in checkpoint.counted:
        loads[tag].tensors += count
        loads[tag].wide |= any(storage.dtype in _WIDE and storage.device == tag for storage in checkpoint.storages)
    kinds = Counter(map(_OF_TENSOR, checkpoint.tensors))
    for (tag, dtype, _), count in kinds.items():
        loads[tag].tensors += count
        loads[tag].wide |= dtype in _WIDE
    if any(kind == "device" for _, _, kind in kinds):
        for tensor in (tensor for tensor in checkpoint.tensors if tensor.kind == "device"):
            # Its bytes are a CPU tensor's in the file, and copied when it is made.
            loads[tensor.device].add(1, tensor.nbytes, tensor.dtype)
    return dict(sorted(loads.items(), key=lambda pair: (-pair[1].nbytes, pair[0])))


# -- wishes


def _nonsense(map_location: MapLocation) -> tuple[str, ...]:
    """What is wrong with a ``map_location`` that torch would not take either, and the fix; empty where nothing is."""
    named = map_location is None or isinstance(map_location, str | bytes | Mapping)
    if named or _is_torch_device(map_location) or callable(map_location):
        return ()
    kind = type(map_location).__name__
    meant = "a name such as 'cpu' or 'cuda:0'"
    if kind == "int" and 0 <= map_location < 256:
        meant = f"'cuda:{map_location}'"
    return f"map_location is of type {kind}, which does not name a device", f"Pass map_location={meant}."


def _is_torch_device(map_location: MapLocation) -> bool:
    """Recognised by its name: torch is not imported here. In some releases it is callable, too."""
    return (type(map_location).__module__, type(map_location).__name__) == ("torch", "device")


def _chooser(loads: Mapping[str, _Load], devices: Devices, map_location: MapLocation) -> _Chooser:
    if isinstance(map_location, str) and map_location == AUTO:
        return _automatic(loads, devices)
    if map_location is None:
        return _mapped({}, loads, devices)

    def named(device: object) -> str:
        return device.decode("ascii", "backslashreplace") if isinstance(device, bytes) else str(device)

    if isinstance(map_location, Mapping):
        wanted = {tag: named(device) for tag, device in map_location.items() if isinstance(tag, str)}
        return _mapped(wanted, loads, devices)
    if callable(map_location) and not _is_torch_device(map_location):
        return lambda _: (UNDECIDED, "function", "")
    name = named(map_location)
    return _mapped({tag: name for tag in loads if tag != "meta"}, loads, devices)


def _mapped(wanted: Mapping[str, str], loads: Mapping[str, _Load], devices: Devices) -> _Chooser:
    """Each tag to what is wanted for it, else to its own device; to nothing where that is not here."""

    def choose(tag: str) -> _Chosen:
        name = wanted.get(tag, tag)
        if name == "meta":
            return name, "asked" if tag in wanted else "saved", ""
        found = devices.get(name)
        if found is None:
            return "", "lost", name
        if found.name == "mps" and loads[tag].wide:
            return "", "float64", found.name
        return found.name, "asked" if tag in wanted else "saved", ""

    return choose


def _automatic(loads: Mapping[str, _Load], devices: Devices) -> _Chooser:
    spread = _spread(loads, devices)

    def device_of(tag: str) -> _Chosen:
        here = devices.get(tag)
        if tag == "meta" or (here and here.name == "cpu"):
            return here.name if here else tag, "saved", ""
        if devices.rank is not None and devices.own:
            return devices.own, "rank", str(devices.rank)
        if here is not None:
            return here.name, "here", ""
        if devices.own:
            return spread.get(tag, devices.own), "absent", ""
        return "cpu", "absent", devices.absent

    def choose(tag: str) -> _Chosen:
        device, reason, detail = device_of(tag)
        return ("cpu", "float64", "mps") if device == "mps" and loads[tag].wide else (device, reason, detail)

    return choose


def _spread(loads: Mapping[str, _Load], devices: Devices) -> dict[str, str]:
    """The absent devices of a spread checkpoint over those that are here: the largest to where the most room is.

    What stays takes its room first. Where free memory is not known, all are taken to have the same.
    """
    tags = [tag for tag in loads if tag != "meta" and split(tag)[0] != "cpu"]
    cards = devices.accelerators
    if len(tags) < 2 or len(cards) < 2 or devices.rank is not None:
        return {}
    known = all(card.free >= 0 for card in cards)
    room = {card.name: card.free if known else 0 for card in cards}
    absent = []
    for tag in tags:
        here = devices.get(tag)
        if here is None:
            absent.append(tag)
        elif here.name in room:
            room[here.name] -= loads[tag].nbytes
    placed: dict[str, str] = {}
    for tag in absent:
        placed[tag] = max(room, key=lambda name: (room[name], name == devices.own))
        room[placed[tag]] -= loads[tag].nbytes
    return placed


# -- room


def _shortages(
    checkpoint: Checkpoint, moves: Iterable[Move], loads: Mapping[str, _Load], devices: Devices
) -> Iterable[Shortage]:
    if all(device.free < 0 for device in devices.available):
        return
    needed: dict[str, int] = {}
    slim: dict[str, int] = {}
    for move in moves:
        needed[move.device] = needed.get(move.device, 0) + move.nbytes
        slim[move.device] = slim.get(move.device, 0) + loads[move.tag].slim
    for name, nbytes in needed.items():
        device = devices.get(name)
        if device is not None and 0 <= device.free < nbytes:
            thinner = slim[name] if slim[name] <= device.free else 0
            mapped = _is_mapped(checkpoint)
            instead = tuple(_instead(name, sum(needed.values()), thinner, devices, mapped=mapped))
            yield Shortage(name, nbytes, device.free, instead)


def _instead(short: str, nbytes: int, thinner: int, devices: Devices, *, mapped: bool) -> Iterable[str]:
    """What would fit: another device, mapping the file, half the precision."""
    from transload.render.sizes import size

    roomy = [device for device in devices.available if device.name != short and device.free >= nbytes]
    for device in sorted(roomy, key=lambda device: device.name == "cpu"):
        yield f"map_location='{device.name}', which has {size(device.free)} free"
    if mapped and not any(device.name == "cpu" for device in roomy):
        yield "map_location='cpu' with mmap=True, which reads what is touched"
    if thinner:
        yield f"as bfloat16 it would take {size(thinner)}"


def _is_mapped(checkpoint: Checkpoint) -> bool:
    """Whether torch could map the file in place of reading it."""
    return checkpoint.format in _MAPPED and not any(
        storage.compressed or storage.big_endian or storage.offset is None for storage in checkpoint.storages
    )


# -- what torch has

_PLAIN = frozenset({"cpu", "meta"})
_LITTLE = 16 << 20
_KINDS = ("cuda", "xpu", "hpu", "mtia")


def devices_here(wanted: Iterable[str], nbytes: int = _LITTLE) -> Devices:
    """The devices torch can use, as far as these names make it necessary to ask.

    Where only the CPU is wanted no accelerator is woken: a worker process that was forked could not do that, and the
    first use of a GPU costs half a second and half a gigabyte. Free memory is asked of the devices that may be used,
    and of the host only if ``nbytes``, which are to go somewhere, are not so few that the question takes longer.
    """
    names = [name for name in wanted if name not in _PLAIN]
    host = _host() if nbytes >= _LITTLE else Device("cpu")
    rank = local_rank(os.environ)
    if not names:
        return Devices((host,), rank=rank)
    import torch

    # torch.cuda and its like, those that work; the one a program computes on first. The last is the kind that a package
    # from outside has added to torch (npu, mlu …), which torch has no public way to ask for.
    added = str(torch._C._get_privateuse1_backend_name())  # noqa: SLF001
    modules: dict[str, Any] = {}
    for kind in (*_KINDS, *(() if added == "privateuseone" else (added,))):
        module: Any = getattr(torch, kind, None)
        complete = all(hasattr(module, name) for name in ("is_available", "device_count", "current_device"))
        if complete and module.is_available() and module.device_count():
            modules[kind] = module
    here = [f"{kind}:{index}" for kind, module in modules.items() for index in range(module.device_count())]
    alone = _mps(torch)
    if not here and not alone:
        why = "CUDA does not work here, and `transload doctor` says why"
        if not torch.version.cuda and not torch.version.hip:
            why = f"this torch ({torch.__version__}) is built without CUDA"
        return Devices((host,), rank=rank, absent=why)
    current = next((f"{kind}:{module.current_device()}" for kind, module in modules.items()), "mps")
    silent = Devices((host, *map(Device, here), *alone), current, rank)
    asked = _asked(names, silent)
    cards = [_card(modules[split(name)[0]], name) if name in asked else Device(name) for name in here]
    return Devices((host, *cards, *alone), current, rank)


def _host() -> Device:
    from transload.diagnose.host import Host
    from transload.diagnose.probes.system import memory

    total, free = memory(Host())
    return Device("cpu", free, total)


def _mps(torch: ModuleType) -> list[Device]:
    if not torch.backends.mps.is_available():
        return []
    most = getattr(torch.mps, "recommended_max_memory", None)
    total = int(most()) if most else -1
    return [Device("mps", total - int(torch.mps.driver_allocated_memory()) if most else -1, total)]


def _asked(names: list[str], devices: Devices) -> set[str]:
    """The devices whose free memory matters: all of them if what is not here may be laid out over them."""
    absent = any(devices.get(name) is None for name in names)
    if absent and len(set(names)) > 1 and devices.rank is None:
        return {device.name for device in devices.accelerators}
    found = (devices.get(name) for name in names)
    return {devices.own, *(device.name for device in found if device)}


def _card(module: Any, name: str) -> Device:
    index = split(name)[1]
    label = str(module.get_device_name(index)) if hasattr(module, "get_device_name") else ""
    if not hasattr(module, "mem_get_info"):
        return Device(name, label=label)
    try:
        free, total = module.mem_get_info(index)
        reserve = module.memory_reserved(index) - module.memory_allocated(index)  # can be used, too
    except RuntimeError:  # some devices do not tell
        return Device(name, label=label)
    return Device(name, int(free + max(0, reserve)), int(total), label)


class DeviceMap:
    """Puts storages where a plan says, or where the function says that the caller gave as ``map_location``."""

    def __init__(self, plan: Plan, map_location: Any, where: str) -> None:
        self._devices = {move.tag: move.device for move in plan.moves}
        self._choose: Callable[[Any, str], Any] | None = map_location if _is_function(map_location) else None
        self._where = where

    def is_meta(self, tag: str) -> bool:
        """Whether storages of a tag keep no bytes, so that none need to be read."""
        return self._choose is None and self._devices.get(tag, tag) == "meta"

    def known(self, tag: str) -> str:
        """The device for a tag, with its index; empty where the caller's function is to be asked."""
        import torch

        if self._choose is not None:
            return ""
        device = self._devices.get(tag, tag)
        return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device

    def put(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        """A storage of the CPU on its device."""
        if self._choose is None:
            return self._moved(storage, self._devices.get(tag, tag))
        chosen = self._choose(storage, tag)
        return self._moved(storage, tag) if chosen is None else self._checked(chosen)

    def _moved(self, storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        import torch

        if device == "cpu":
            return storage
        try:
            moved: torch.UntypedStorage = torch.serialization.default_restore_location(storage, device)
        except torch.cuda.OutOfMemoryError as error:
            raise DoesNotFitError(f"{device} has no room left: {error}", where=self._where) from error
        except RuntimeError as error:
            fix = "Leave map_location out (it is 'auto'), or pass map_location='cpu'."
            raise NoDeviceError(f"{device} does not take it: {error}", where=self._where, fix=fix) from error
        return moved

    def _checked(self, chosen: Any) -> torch.UntypedStorage:
        """What the caller's function gave, if it is a storage."""
        import torch

        if isinstance(chosen, torch.storage.TypedStorage):
            chosen = chosen._untyped_storage  # noqa: SLF001 - the public way warns
        if isinstance(chosen, torch.UntypedStorage):
            return chosen
        what = f"the function given as map_location returned {type(chosen).__name__}, which is not a storage"
        fix = "Return the storage, moved or not, or None for the device it was saved on."
        raise LoadError(what, where=self._where, fix=fix)

    def device(self, tag: str) -> str:
        """Where a tensor goes that has no storage in the file, but is rebuilt on a device of that tag."""
        import torch

        if self._choose is None:
            if tag in self._devices:
                return self._devices[tag]
            # Where devices of the same kind go: a program names ``cuda`` for its own.
            kind = tag.partition(":")[0]
            return next((device for known, device in self._devices.items() if known.partition(":")[0] == kind), tag)
        chosen = self._choose(torch.UntypedStorage(0), tag)
        return tag if chosen is None else str(self._checked(chosen).device)

    @property
    def locations(self) -> dict[str, str]:
        """The plan as torch would take it for map_location."""
        return {} if self._choose else dict(self._devices)


def _is_function(map_location: Any) -> bool:
    return callable(map_location) and not isinstance(map_location, str | Mapping)


def wanted_devices(tags: list[str], map_location: Any) -> list[str]:
    """The devices that storages of these tags may go to, by name, as far as ``map_location`` tells.

    >>> wanted_devices(["cuda:1", "cpu"], {"cuda:1": "cuda:0"})
    ['cuda:0', 'cpu']
    """
    if map_location is None or (isinstance(map_location, str) and map_location == "auto"):
        return tags
    if isinstance(map_location, Mapping):
        table = {str(tag): str(device) for tag, device in map_location.items()}
        return [table.get(tag, tag) for tag in tags]
    return [] if _is_function(map_location) else [str(map_location)]
