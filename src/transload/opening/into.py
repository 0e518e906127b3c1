"""``transload.load_into``: each tensor of a file read straight into the parameter it belongs to."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from transload.checkpoint import Tensor
from transload.errors import TransloadError, UsageError
from transload.formats import no_collecting
from transload.loading.arguments import check_settings
from transload.loading.errors import BrokenFileError, LoadError
from transload.loading.transfer import Ended, Settings, Want, bring
from transload.opening.destinations import Destinations, caller
from transload.opening.fitting import Fit, Task, fit, values, versions
from transload.opening.keys import Match, find
from transload.opening.mismatch import Mismatch
from transload.opening.one import changed, check_one, fill, read_one, straight
from transload.opening.opened import Opened, open_checkpoint
from transload.opening.own_way import Held, OwnWay, State
from transload.opening.slots import has_post_hooks, modules, slots
from transload.opening.subtree import build_node

if TYPE_CHECKING:
    import torch

    from transload.io.sources import SourceLike

__all__ = ["KeysWarning", "Loaded", "MismatchError", "load_into"]


class MismatchError(LoadError):
    """The file and the model do not fit. The text says how, in groups; every name is in the attributes."""

    def __init__(self, what: str, mismatch: Mismatch, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.missing_keys = list(mismatch.missing)
        self.unexpected_keys = list(mismatch.unexpected)
        self.shapes = mismatch.shapes
        self.dtypes = mismatch.dtypes


class KeysWarning(UserWarning):
    """Keys of a file were changed to fit the model, though nobody had asked for that."""


class _Keys(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]


class Loaded(_Keys):
    """What ``load_state_dict`` gives, and beside it where the state dict was found and what was done to its keys."""

    found: str
    """The place in the file, as ``prefix`` takes it; empty for the whole file."""
    notes: tuple[str, ...]
    """What was done that the caller may want to know of."""

    def __new__(  # noqa: PYI034 - typing.Self is newer than Python 3.10
        cls, missing_keys: list[str], unexpected_keys: list[str], found: str = "", notes: tuple[str, ...] = ()
    ) -> Loaded:
        """Two lists, to be unpacked; the rest are attributes."""
        made = super().__new__(cls, missing_keys, unexpected_keys)
        made.found = found
        made.notes = notes
        return made

    def __repr__(self) -> str:
        keys = f"missing_keys={self.missing_keys}, unexpected_keys={self.unexpected_keys}"
        head = keys if self.missing_keys or self.unexpected_keys else "All keys matched successfully"
        return f"<{'; '.join([head, *([f'found in {self.found}'] if self.found else []), *self.notes])}>"

    __str__ = __repr__


def load_into(  # noqa: PLR0913 - options by name
    model: torch.nn.Module,
    f: SourceLike,
    *,
    strict: bool = True,
    prefix: str | None = None,
    device: Any = None,
    cast: bool = False,
    threads: int | None = None,
    pinned_mb: int | None = None,
    direct: bool | None = None,
) -> Loaded:
    """Read the weights in a file into a model, each tensor straight into its parameter, without a second copy.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save({"epoch": 3, "state_dict": torch.nn.Linear(2, 2).state_dict()}, file)
    >>> load_into(torch.nn.Linear(2, 2), file)
    <All keys matched successfully; found in state_dict>

    The state dict is looked for in the whole file (``prefix`` says where it is, if several would do), and ``module.``,
    ``_orig_mod.`` or ``model.`` is taken off its keys, or put before them, where that makes them the model's.
    Parameters stay where they are; those on the meta device are made on ``device``, or where ``transload.load`` would
    have put them. A dtype is converted only with ``cast``. ``threads``, ``pinned_mb`` and ``direct`` are as for
    ``transload.load``.

    Everything is compared before the first byte is written: if keys are missing or not expected (with ``strict``), or
    shapes or dtypes differ, ``MismatchError`` says how and the model is as it was. Only modules that load by code of
    their own, and hooks, have their say while it is loaded, as in torch.
    """
    settings = check_settings(threads, pinned_mb, direct)
    if not callable(getattr(model, "named_parameters", None)):
        fix = "For a dictionary of tensors there is transload.load."
        raise UsageError(f"expected a module, not {type(model).__name__}", fix=fix)
    opened = open_checkpoint(f)
    try:
        loading = _Loading(model, opened, "auto" if device is None else device, strict=strict, cast=cast)
        loading.settings = settings
        loaded = loading.run(prefix)
        opened.check_unchanged()
        return loaded
    finally:
        opened.close()


class _Loading:
    """One call of ``load_into``."""

    def __init__(self, model: torch.nn.Module, opened: Opened, wish: Any, *, strict: bool, cast: bool) -> None:
        self._model = model
        self._opened = opened
        self._strict = strict
        self._cast = cast
        self._slots = slots(model)
        self._goal = Destinations(opened.checkpoint, wish)
        self._own = OwnWay(model)
        self.settings = Settings()

    def run(self, prefix: str | None) -> Loaded:
        """Match, compare, read."""
        checkpoint = self._opened.checkpoint
        with no_collecting():
            match = find(checkpoint, {key: slot.shape for key, slot in self._slots.items()}, prefix)
            found = fit(match, self._slots, self._opened, cast=self._cast)
            self._leave_out(found)
            self._check(match, found)
        extras = self._extras(found)
        errors = self._let_own(match, found)
        self._read(found.tasks)
        for key, value in extras.items():
            self._slots[key].module.set_extra_state(value)
        _post_hooks(self._model, found)
        if errors or (self._strict and (found.missing or found.unexpected)):
            raise self._error(match, found, errors, "it was loaded as far as it fits: ")
        if match.notes:
            warnings.warn(f"{checkpoint.path}: {'; '.join(match.notes)}", KeysWarning, stacklevel=caller())
        return Loaded(found.missing, found.unexpected, match.branch.name, match.notes)

    def _leave_out(self, found: Fit) -> None:
        """Leave what modules load in their own way to them."""
        own = self._own
        if own:
            found.tasks = [task for task in found.tasks if not own.covers(task.key)]
            for listed in (found.missing, found.unexpected):
                listed[:] = [key for key in listed if not own.covers(key)]
            for differences in (found.shapes, found.dtypes):
                differences[:] = [each for each in differences if not own.covers(each.key)]
            found.extras = {key: node for key, node in found.extras.items() if not own.covers(key)}

    def _check(self, match: Match, found: Fit) -> None:
        """Raise for all that can be known before a byte is read."""
        later = bool(self._own) or has_post_hooks(self._model)  # they may yet strike keys off
        keys = (found.missing or found.unexpected) and self._strict and not later
        nothing = not match.tensors and not self._own and bool(self._slots)
        if found.shapes or found.dtypes or keys or nothing:
            raise self._error(match, found)
        for task in found.tasks:
            check_one(self._opened, task.tensor)

    def _error(self, match: Match, found: Fit, errors: list[str] | None = None, lead: str = "") -> MismatchError:
        report = Mismatch(
            {key: slot.shape if (slot := self._slots.get(key)) else None for key in found.missing},
            {key: tensor.shape if (tensor := match.rest.get(key)) else None for key in found.unexpected},
            tuple(found.shapes),
            tuple(found.dtypes),
            tuple(errors or ()),
        )
        place = f" › {match.branch.name}" if match.branch.name else ""
        what = f"{lead}it does not fit {type(self._model).__name__}, of whose {len(self._slots):,} keys it has "
        what += f"{len(match.tensors):,}\n{report.text}"
        where = f"{self._opened.checkpoint.path}{place}"
        return MismatchError(what, report, where=where, fix=_advice(report, match))

    def _extras(self, found: Fit) -> dict[str, Any]:
        """The values of extra state, as ``transload.load`` would make them."""
        return {
            key: read_one(self._opened, held) if isinstance(held, Tensor) else build_node(*held, self._goal.arrival)
            for key, held in found.extras.items()
        }

    def _let_own(self, match: Match, found: Fit) -> list[str]:
        """Let modules that load by code of their own do so; what they complain of."""
        errors: list[str] = []
        if self._own:
            state = State({**match.rest, **match.tensors, **self._values(match)}, self._opened, self._goal)
            self._own.load(state, versions(match, self._opened), (found.missing, found.unexpected, errors))
            self._keep_ties()
        return errors

    def _values(self, match: Match) -> dict[str, Held]:
        """What is no tensor in the state dict, by key."""
        names = values(match, self._opened.checkpoint)
        nodes = {match.rename(name): self._opened.node((*match.branch.path, name)) for name in names}
        return {key: Held(*node) for key, node in nodes.items() if node and key not in match.tensors}

    def _keep_ties(self) -> None:
        """Give a parameter that a module has made anew to the other places of the one that was described."""
        made = {id(slot.tensor): slot.now for slot in self._slots.values() if slot.now is not slot.tensor}
        for slot in self._slots.values():
            if slot.tensor is not None and slot.tensor.is_meta and id(slot.tensor) in made:
                slot.put(made[id(slot.tensor)])

    def _read(self, tasks: list[Task]) -> None:
        """Fill every parameter. What was half done when reading failed is said."""
        made = {index: self._made(task) for index, task in enumerate(tasks) if _is_described(task)}
        goals = [made.get(index, task.places[0].tensor) for index, task in enumerate(tasks)]
        rest = self._read_straight(tasks, goals)
        done = before = len(tasks) - len(rest)
        try:
            for done, index in enumerate(rest, before):  # noqa: B007 - told below
                goal = goals[index]
                if goal is not None:
                    fill(self._opened, tasks[index].tensor, goal, index=tasks[index].part)
        except TransloadError as error:
            error.fix = f"{_half(done, len(tasks))}{error.fix}".rstrip()
            raise
        except (RuntimeError, NotImplementedError) as error:
            what = f"{tasks[index].key} does not take what was read for it: {error}"
            raise LoadError(what, where=self._opened.checkpoint.path, fix=_half(done, len(tasks))) from error
        for index, parameter in made.items():
            for place in tasks[index].places:
                place.put(parameter)

    def _read_straight(self, tasks: list[Task], goals: list[torch.Tensor | None]) -> list[int]:
        """Fill those whose bytes only have to be moved, all at once; the indexes of the others."""
        found = {
            index: straight(self._opened, task.tensor, goal, index=task.part)
            for index, (task, goal) in enumerate(zip(tasks, goals, strict=True))
            if goal is not None
        }
        ready = {index: way for index, way in found.items() if way is not None}
        if not ready:
            return list(range(len(tasks)))
        ways = list(ready.values())
        sources = list({id(way.source): way.source for way in ways}.values())
        numbers = {id(source): number for number, source in enumerate(sources)}
        wants = [Want(numbers[id(way.source)], way.offset, way.nbytes, way.device) for way in ways]
        try:
            bring(sources, wants, lambda index: ways[index].address, settings=self.settings, fresh=False)
        except Ended as end:
            key = tasks[list(ready)[end.want]].key
            what = f"the file ends {wants[end.want].nbytes - end.came:,} bytes before {key} does"
            fix = f"Some of the {len(tasks):,} tensors are in the model already."
            raise BrokenFileError(what, where=self._opened.checkpoint.path, fix=fix) from end
        for index in ready:
            changed(goals[index])
        return [index for index in range(len(tasks)) if index not in ready]

    def _made(self, task: Task) -> torch.Tensor:
        """A parameter in the place of one that is only described."""
        import torch

        target: Any = task.places[0].tensor
        made = torch.empty_like(target, device=self._goal.device(task.tensor.device))
        if isinstance(target, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=target.requires_grad)
        vars(made).update(vars(target))
        return made


def _is_described(task: Task) -> bool:
    target = task.places[0].tensor
    return target is not None and target.is_meta


def _half(done: int, count: int) -> str:
    return f"{done:,} of {count:,} tensors are in the model already. " if done else ""


def _advice(report: Mismatch, match: Match) -> str:
    """The one line that helps: a part of the file that fits, or not to insist where some of it does."""
    place = match.branch.name
    whole = next((renamed.theirs for renamed in report.renames if not renamed.ours), "")
    if whole:
        lead = f"{place}/" if place else ""
        return f"prefix={lead + whole!r} takes that part of the file."
    stuck = report.shapes or report.dtypes or report.others or not match.tensors
    return "" if stuck else "strict=False loads what fits."


def _post_hooks(model: torch.nn.Module, found: Fit) -> None:
    """Hooks that look at the keys afterwards, children before their parents."""
    keys = _Keys(found.missing, found.unexpected)
    for _, module in reversed(list(modules(model))):
        for hook in module._load_state_dict_post_hooks.values():  # noqa: SLF001 - as load_state_dict calls them
            hook(module, keys)
