"""Where a checkpoint goes: which devices this machine has, the plan, and the map from saved to local devices.

``devices_here`` asks torch for the devices, and initialises no accelerator that the file does not need. ``place`` makes
the ``Plan``: what goes where and why, whether it fits, and the one warning about it. It is pure, so ``transload check``
makes the same plan without torch. A ``DeviceMap`` carries out the plan, storage by storage.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from transload.devices import Device, Devices, closest_device, local_rank, split
from transload.errors import DoesNotFitError, LoadError, NoDeviceError
from transload.frozen import Frozen, replace
from transload.render import Reported

if TYPE_CHECKING:
    import torch

    from transload.checkpoint import Checkpoint, Storage, Tensor
    from transload.render.lines import Block, Words

Reason = Literal["saved", "here", "absent", "lost", "rank", "float64", "asked", "function"]

UNDECIDED = "?"
"""The device of storages that the caller's map_location function decides on."""

_WORDS: dict[Reason, str] = {
    "saved": "it was saved there",
    "here": "it exists here",
    "absent": "there is no {tag} here{detail}",
    "lost": "there is no {detail} here",
    "rank": "this process has local rank {detail}",
    "float64": "{detail} cannot hold float64",
    "asked": "requested with map_location",
    "function": "your function decides",
}
_SHOWN = 8
_LONGEST = 40
_TAGS = 16
_MOVE = ("tag", "device", "reason", "why", "tensors", "nbytes")
_SHORTAGE = ("device", "needed", "free", "missing")

AUTO = "auto"
MapLocation = Any
"""What torch takes as ``map_location`` (``None``, a name, a ``torch.device``, a mapping, a function), ``auto``, or a
list of devices."""

_Chosen = tuple[str, Reason, str]
"""A device, the reason, and its detail."""

_WIDE = frozenset({"float64", "complex128"})
"""dtypes that mps does not have: https://github.com/pytorch/pytorch/issues/79019"""
_HALVED = {"float32": 2, "float64": 4}


class Move(Frozen):
    """All storages of one tag: where they were, where they go, and why."""

    tag: str
    device: str
    """Empty if no device here can take them; ``UNDECIDED`` if the caller's map_location function decides."""
    reason: Reason
    tensors: int = 0
    nbytes: int = 0
    detail: str = ""
    """More about the reason, such as the missing device."""

    @property
    def moved(self) -> bool:
        """Whether it lands on a different device than it was saved on: ``cuda`` is any GPU, and ``mps:0`` is ``mps``.

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
        return self.why_of([self.tag])

    def why_of(self, tags: Sequence[str]) -> str:
        """The reason for several tags that share it."""
        if self.reason == "saved" and self.detail:
            return self.detail
        detail = f"; {self.detail}" if self.reason == "absent" and self.detail else self.detail
        return _WORDS[self.reason].format(tag=listed(tags, "or"), detail=detail)


class Shortage(Frozen):
    """A device with too little memory."""

    device: str
    needed: int
    free: int
    instead: tuple[str, ...] = ()
    """What would fit instead, as phrases."""

    @property
    def missing(self) -> int:
        """The bytes that it lacks."""
        return self.needed - self.free

    def __str__(self) -> str:
        """The shortage in a phrase.

        >>> str(Shortage("cuda:0", 14_000_000_000, 10_000_000_000))
        'cuda:0 has 10.0 GB free and would need 14.0 GB: 4.00 GB too little'
        """
        from transload.render.words import size

        lack = f"{size(self.missing)} too little"
        return f"{self.device} has {size(self.free)} free and would need {size(self.needed)}: {lack}"


class Plan(Frozen, Reported):
    """Where a checkpoint lands.

    >>> plan = Plan((Move("cuda:1", "cpu", "absent", 2, 1024),), surprising=True)
    >>> plan.device_of("cuda:1"), plan.device_of("cpu")
    ('cpu', 'cpu')
    >>> plan.warning
    '2 tensors saved on cuda:1 land on cpu: there is no cuda:1 here'
    """

    moves: tuple[Move, ...] = ()
    """One for each tag, the one with the most bytes first."""
    shortages: tuple[Shortage, ...] = ()
    refused: str = ""
    """Why it cannot land as requested, in a sentence; empty if it can."""
    fix: tuple[str, ...] = ()
    surprising: bool = False
    """Whether something lands on a different device than its tag says, and the caller did not ask for that."""
    how: str = ""
    """How its bytes would be read, in a phrase; empty if that was not determined."""

    @property
    def ok(self) -> bool:
        """Whether it can land, and fits."""
        return not self.refused and not self.shortages

    def device_of(self, tag: str) -> str:
        """Where storages of a tag go; a tag that is not in the plan keeps its device."""
        return next((move.device for move in self.moves if move.tag == tag), tag)

    @property
    def warning(self) -> str:
        """One sentence on what was moved and why; empty if nothing was moved, or the caller asked for it."""
        if not self.surprising:
            return ""
        groups: dict[tuple[str, Reason, str], list[Move]] = {}
        for move in self.moves:
            if move.moved:
                groups.setdefault((move.device, move.reason, move.detail), []).append(move)
        sentences = []
        for together in groups.values():
            count, tags = sum(move.tensors for move in together), [move.tag for move in together]
            first, verb = together[0], "land" if count > 1 else "lands"
            what = "1 tensor" if count == 1 else f"{count:,} tensors"
            if not count:  # parts of distributed tensors
                from transload.render.words import size

                what = size(sum(move.nbytes for move in together))
            sentences.append(f"{what} saved on {listed(tags)} {verb} on {first.device}: {first.why_of(tags)}")
        return "; ".join(sentences)

    def _blocks(self) -> Iterator[Block]:
        return plan_blocks(self)

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
    r"""Join names into a phrase. A tag comes from a file: it may be of any length, and unprintable.

    >>> listed(["cuda:0", "cuda:1", "cpu"]), listed(["a", "b"], "or"), listed(["no\nsuch"])
    ('cuda:0, cuda:1 and cpu', 'a or b', "'no\\nsuch'")
    """
    short = [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in names[:_SHOWN]]
    shown = [name if name.isprintable() and name else ascii(name) for name in short]
    if len(names) > _SHOWN:
        shown.append(f"{len(names) - _SHOWN:,} more")
    *most, last = shown
    return f"{', '.join(most)} {joint} {last}" if most else last


def plan_blocks(plan: Plan) -> Iterator[Block]:
    """A line for each tag, and the reasons why the plan cannot be carried out, as blocks of text."""
    from transload.render.lines import Prose, Table, note
    from transload.render.words import plural, printable, size

    if not plan.moves:
        yield note("there is nothing to place")
    rows: list[tuple[Words, ...]] = []
    for move in plan.moves[:_TAGS]:
        target = "undecided" if move.device == UNDECIDED else printable(move.device, 24) or "nowhere"
        role = "bad" if not move.device else "trust" if move.moved else "good"
        why = ((printable(move.why, None), "" if move.moved else "dim"),)
        arrow = (("→ ", "dim"), (target, role))
        rows.append((listed([move.tag]), arrow, why, plural(move.tensors, "tensor"), size(move.nbytes)))
    yield Table(rows, right=(4,), dim=(3,), drops=(3, 4))
    if len(plan.moves) > _TAGS:
        yield note(f"… and {len(plan.moves) - _TAGS:,} more devices")
    if plan.how and plan.ok:
        yield note(f"read by {plan.how}")
    shortages = [(str(short), short.instead) for short in plan.shortages]
    for what, fixes in ((plan.refused, ()), *shortages, ("", plan.fix)):
        if what:
            yield Prose(((printable(what, None), "strong"),), lead=(("✗ ", "bad"),))
        for fix in fixes:
            yield Prose(printable(fix, None), lead=(("  → ", "good"),))


class _Total:
    """The tensors of one tag."""

    tensors = 0
    nbytes = 0
    bfloat16_nbytes = 0
    """The bytes they would take as bfloat16."""
    wide = False
    """Whether some have a dtype that mps does not."""


def place(checkpoint: Checkpoint, devices: Devices, map_location: MapLocation = AUTO) -> Plan:
    """Where each storage goes, by its tag.

    ``auto``: tensors of a device that is here, or of the CPU, stay there; others go to the accelerator of this process,
    or to the CPU if there is none. If a checkpoint was saved on several devices, the absent ones are spread over those
    that are here by free memory. Under torchrun every rank uses its own device. The first device of a list that is here
    takes everything. Any other map_location means what it means to ``torch.load``.
    """
    if is_device_list(map_location):
        return _first_available(checkpoint, devices, map_location)
    # The totals of each tag, the one with the most bytes first; shared storages count once.
    by_tag: dict[str, _Total] = defaultdict(_Total)
    # A tensor that is rebuilt on a device has a CPU tensor in the file, which is copied to the device.
    sized: list[Storage | Tensor] = [*checkpoint.storages]
    sized += [tensor for tensor in checkpoint.tensors if tensor.kind == "device"]
    for item in sized:
        total = by_tag[item.device]
        total.nbytes += item.nbytes
        total.bfloat16_nbytes += item.nbytes // _HALVED.get(item.dtype, 1)
    tensors: Sequence[Storage | Tensor] = checkpoint.storages if checkpoint.counted else checkpoint.tensors
    for (tag, dtype), count in Counter((tensor.device, tensor.dtype) for tensor in tensors).items():
        by_tag[tag].wide |= dtype in _WIDE
        by_tag[tag].tensors += 0 if checkpoint.counted else count
    for tag, count in checkpoint.counted:
        by_tag[tag].tensors += count
    totals = dict(sorted(by_tag.items(), key=lambda pair: (-pair[1].nbytes, pair[0])))
    automatic = isinstance(map_location, str) and map_location == AUTO
    refused, fix = "", "Ask for a device that is here, or leave map_location out."
    chosen: Mapping[str, _Chosen]
    if automatic:
        spread: dict[str, str] = {}
        if len(totals) > 1 and len(devices.accelerators) > 1 and devices.rank is None:
            from transload.loading.accelerators import spread_over

            spread = spread_over({tag: total.nbytes for tag, total in totals.items()}, devices)
        chosen = {tag: _auto_device(tag, devices, spread, wide=total.wide) for tag, total in totals.items()}
    elif _is_function(map_location):
        chosen = dict.fromkeys(totals, (UNDECIDED, "function", ""))
    elif map_location is None or isinstance(map_location, str | bytes | Mapping) or _is_torch_device(map_location):
        wanted = {} if map_location is None else map_location
        if not isinstance(wanted, Mapping):  # one device for all
            wanted = dict.fromkeys((tag for tag in totals if tag != "meta"), map_location)
        chosen = {tag: _requested_device(tag, wanted, devices, wide=total.wide) for tag, total in totals.items()}
    else:  # torch does not accept it either
        chosen = dict.fromkeys(totals, ("", "asked", ""))
        kind = type(map_location).__name__
        meant = f"cuda:{map_location}" if kind == "int" and 0 <= map_location < 256 else ""
        refused = f"map_location is of type {kind}, which does not name a device"
        fix = f"Pass map_location='{meant}'." if meant else "Pass map_location=a name such as 'cpu' or 'cuda:0'."
    # In these formats, only a pickle says which device a tensor was on.
    untagged = "the file names no device" if not (checkpoint.traits.tagged or checkpoint.pickles) else ""
    moves = tuple(
        Move(tag, device, why, totals[tag].tensors, totals[tag].nbytes, untagged if why == "saved" else detail)
        for tag, (device, why, detail) in chosen.items()
    )
    unplaced = [move for move in moves if not move.device and not refused]
    if unplaced:
        if map_location is None:
            fix = "Leave map_location out (it is 'auto'), or pass map_location='cpu'."
        if unplaced[0].reason == "float64":
            refused = f"it holds float64, which {unplaced[0].detail} does not have"
        else:
            if meant := closest_device(unplaced[0].detail):
                lands = "each tensor lands on a device that is here"
                fix = f"Did you mean map_location={meant!r}? Or leave it out: {lands}."
            refused = missing_here([*dict.fromkeys(move.detail for move in unplaced)], devices)
    if refused:
        return Plan(moves, refused=refused, fix=(fix,))
    shortages = tuple(_shortages(checkpoint, moves, totals, devices))
    return Plan(moves, shortages, surprising=automatic and any(move.moved for move in moves))


def missing_here(names: Sequence[str], devices: Devices) -> str:
    """The sentence that a machine lacks devices."""
    here = listed([device.name for device in devices.available])
    return f"there is no {listed(names, 'or')} here, only {here}{f'; {devices.absent}' if devices.absent else ''}"


def plan_here(checkpoint: Checkpoint, map_location: MapLocation, nbytes: int, argument: str = "map_location") -> Plan:
    """The plan for torch's devices; ``NoDeviceError``, which calls map_location ``argument``, if there is none."""
    choice = map_location if is_device_list(map_location) else ()
    # Try the devices of a list one by one: those after the first that is here must not be initialised.
    tries = [(device, choice[:count]) for count, device in enumerate(choice, 1)] or [(map_location, map_location)]
    tags = tags_of(checkpoint)
    for device, devices in tries:
        plan = place(checkpoint, devices_here(wanted_devices(tags, device), nbytes), devices)
        if not plan.refused:
            break
    if plan.refused:
        fix = "\n".join(plan.fix).replace("map_location", argument)
        raise NoDeviceError(plan.refused, where=checkpoint.path, fix=fix)
    return plan


def tags_of(checkpoint: Checkpoint) -> list[str]:
    """The devices that the storages and tensors of a checkpoint are tagged with."""
    saved = (item.device for items in (checkpoint.storages, checkpoint.tensors) for item in items)
    counted = (tag for tag, _ in checkpoint.counted)
    return [*dict.fromkeys((*saved, *counted))]


# -- map_location


def is_device_list(map_location: MapLocation) -> bool:
    """Whether it is a list of devices, of which the first that is here is wanted."""
    return isinstance(map_location, list | tuple) and not callable(map_location)


def _first_available(checkpoint: Checkpoint, devices: Devices, names: Sequence[MapLocation]) -> Plan:
    """The plan for the first device that is here; if none is, a refused plan that names them all."""
    fix = "Pass names such as 'cuda:0' and 'cpu'."
    if not names:
        return Plan(refused="the list of devices is empty", fix=(fix,))
    lost: list[str] = []
    reasons: list[str] = []
    for name in names:
        if not isinstance(name, str | bytes) and not _is_torch_device(name):
            what = f"the list of devices has {type(name).__name__} in it, which does not name a device"
            return Plan(refused=what, fix=(fix,))
        plan = place(checkpoint, devices, name)
        if not plan.refused:
            return plan
        missing = [move.detail for move in plan.moves if move.reason == "lost"]
        lost += missing[:1]
        reasons += [] if missing else [plan.refused]
    if lost:
        reasons.insert(0, missing_here(lost, devices))
    fix = "Add a device that is here, or 'auto', at the end of map_location."
    return Plan(plan.moves, refused="; ".join(reasons), fix=(fix,))


def _is_torch_device(map_location: MapLocation) -> bool:
    """Whether it is a ``torch.device``, by its name: torch is not imported here."""
    return (type(map_location).__module__, type(map_location).__name__) == ("torch", "device")


def _is_function(map_location: MapLocation) -> bool:
    """Whether it is a function; in some releases a ``torch.device`` is callable, too."""
    named = isinstance(map_location, str | Mapping) or _is_torch_device(map_location)
    return callable(map_location) and not named


def _name_of(device: Any) -> str:
    return device.decode("ascii", "backslashreplace") if isinstance(device, bytes) else str(device)


def _requested_device(tag: str, wanted: Mapping[Any, Any], devices: Devices, *, wide: bool) -> _Chosen:
    """The device wanted for a tag, or the tag itself; empty if that is not here."""
    name = _name_of(wanted.get(tag, tag))
    if name != "meta":
        device = devices.get(name)
        if device is None:
            return "", "lost", name
        name = device.name
        if name == "mps" and wide:
            return "", "float64", name
    return name, "asked" if tag in wanted else "saved", ""


def _auto_device(tag: str, devices: Devices, spread: Mapping[str, str], *, wide: bool) -> _Chosen:
    here = devices.get(tag)
    chosen: _Chosen = "cpu", "absent", devices.absent
    if tag == "meta" or (here and here.name == "cpu"):
        chosen = here.name if here else tag, "saved", ""
    elif devices.rank is not None and devices.own:
        chosen = devices.own, "rank", str(devices.rank)
    elif here is not None:
        chosen = here.name, "here", ""
    elif devices.own:
        chosen = spread.get(tag, devices.own), "absent", ""
    return ("cpu", "float64", "mps") if chosen[0] == "mps" and wide else chosen


# -- memory


def _shortages(
    checkpoint: Checkpoint, moves: Iterable[Move], totals: Mapping[str, _Total], devices: Devices
) -> Iterable[Shortage]:
    """The devices that have too little memory, each with what would fit instead."""
    needed: Counter[str] = Counter()
    bfloat16_nbytes: Counter[str] = Counter()
    for move in moves:
        needed[move.device] += move.nbytes
        bfloat16_nbytes[move.device] += totals[move.tag].bfloat16_nbytes
    total = sum(needed.values())
    for name, nbytes in needed.items():
        device = devices.get(name)
        if device is None or not 0 <= device.free < nbytes:
            continue
        from transload.render.words import size

        roomy = [other for other in devices.available if other.name != name and other.free >= total]
        roomy.sort(key=lambda other: other.name == "cpu")
        instead = [f"map_location='{other.name}', which has {size(other.free)} free" for other in roomy]
        # Whether torch could map the file instead of reading it.
        mapped = checkpoint.traits.mapped and not any(
            storage.compressed or storage.big_endian or storage.offset is None for storage in checkpoint.storages
        )
        if mapped and not any(other.name == "cpu" for other in roomy):
            instead.append("map_location='cpu' with mmap=True, which reads what is touched")
        if 0 < bfloat16_nbytes[name] <= device.free:
            instead.append(f"as bfloat16 it would take {size(bfloat16_nbytes[name])}")
        yield Shortage(name, nbytes, device.free, tuple(instead))


# -- what torch has

_LITTLE = 16 << 20


def devices_here(wanted: Iterable[str], nbytes: int = _LITTLE) -> Devices:
    """The devices torch can use; accelerators only if one of them is wanted.

    If only the CPU is wanted, no accelerator is initialised: a forked worker process cannot do that, and the first use
    of a GPU costs half a second and half a gigabyte. Free memory is determined for the devices that may be used. That
    of the host takes 1 ms, so it is left out if ``nbytes``, the bytes to load, are few, or if accelerators that are
    here are wanted, and each has room for all.
    """
    every = [*wanted]
    names = [name for name in every if name not in ("cpu", "meta")]
    devices = Devices((Device("cpu"),), rank=local_rank(os.environ))
    if names:
        from transload.loading.accelerators import with_accelerators

        devices = with_accelerators(names, devices.rank)
    found = [devices.get(name) for name in names]
    has_room = names == every != [] and all(device is not None and device.free >= nbytes for device in found)
    if nbytes >= _LITTLE and not has_room:
        from transload.io.limits import memory

        total, free = memory()
        devices = replace(devices, available=(Device("cpu", free, total), *devices.available[1:]))
    return devices


class DeviceMap:
    """Puts storages where a plan says, or where the caller's ``map_location`` function says."""

    def __init__(self, plan: Plan, map_location: Any, where: str) -> None:
        self._devices = {move.tag: move.device for move in plan.moves}
        self._choose: Callable[[Any, str], Any] | None = map_location if _is_function(map_location) else None
        self._where = where

    def planned_device(self, tag: str) -> str:
        """The device for a tag, with its index; empty if the caller's function decides."""
        import torch

        if self._choose is not None:
            return ""
        device = self._devices.get(tag, tag)
        return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device

    def put(self, storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        """Move a storage from the CPU to its device."""
        import torch

        if self._choose is not None and (chosen := self._choose(storage, tag)) is not None:
            return self._as_storage(chosen)
        device = self._devices.get(tag, tag) if self._choose is None else tag
        if device == "cpu":
            return storage
        try:
            moved: torch.UntypedStorage = torch.serialization.default_restore_location(storage, device)
        except torch.cuda.OutOfMemoryError as error:
            raise DoesNotFitError(f"{device} has no room left: {error}", where=self._where) from error
        except RuntimeError as error:
            fix = "Leave map_location out (it is 'auto'), or pass map_location='cpu'."
            raise NoDeviceError(f"it cannot be put on {device}: {error}", where=self._where, fix=fix) from error
        return moved

    def _as_storage(self, chosen: Any) -> torch.UntypedStorage:
        """The untyped storage that the caller's function returned; ``LoadError`` if it returned something else."""
        import torch

        if isinstance(chosen, torch.storage.TypedStorage):
            chosen = chosen._untyped_storage  # noqa: SLF001 - the public way warns
        if isinstance(chosen, torch.UntypedStorage):
            return chosen
        what = f"the function given as map_location returned {type(chosen).__name__}, which is not a storage"
        fix = "Return the storage, moved or not, or None for the device it was saved on."
        raise LoadError(what, where=self._where, fix=fix)

    def device(self, tag: str) -> str:
        """The device for a tensor that has no storage in the file: torch rebuilds it on a device."""
        import torch

        if self._choose is None:
            if tag in self._devices:
                return self._devices[tag]
            # Use the destination of another device of its kind: a program may say ``cuda`` for the current one.
            kind = tag.partition(":")[0]
            return next((device for other, device in self._devices.items() if other.partition(":")[0] == kind), tag)
        chosen = self._choose(torch.UntypedStorage(0), tag)
        return tag if chosen is None else str(self._as_storage(chosen).device)

    @property
    def locations(self) -> dict[str, str]:
        """The plan as a ``map_location`` for torch."""
        return {} if self._choose else dict(self._devices)


def wanted_devices(tags: list[str], map_location: Any) -> list[str]:
    """The names of the devices that storages of these tags may go to, as far as ``map_location`` says.

    >>> wanted_devices(["cuda:1", "cpu"], {"cuda:1": "cuda:0"})
    ['cuda:0', 'cpu']
    """
    if map_location is None or (isinstance(map_location, str) and map_location == "auto"):
        return tags
    if isinstance(map_location, Mapping):
        return [_name_of(map_location.get(tag, tag)) for tag in tags]
    return [] if _is_function(map_location) else [_name_of(map_location)]
