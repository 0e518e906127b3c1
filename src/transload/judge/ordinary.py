"""Ordinary pickles: they only contain what a state dict consists of, in the form that torch.save writes.

Most files are ordinary, and do not need ``names`` and ``safety``, which judge all others.
"""

from __future__ import annotations

from collections.abc import Iterable

from transload.contents import GlobalUse
from transload.dtypes import STORAGES
from transload.findings import Finding, Safety
from transload.frozen import NamedTuple
from transload.nodes import Dict, Pickle, is_empty_call

_ORDERED = ("collections", "OrderedDict")
_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
PURPOSES = {
    _ORDERED: "an ordered dictionary, as state_dict() returns",
    _TENSOR: "rebuilds a tensor",
    _PARAMETER: "rebuilds a tensor",
    **{("torch", name): "the dtype of a storage" for name in STORAGES if "Untyped" not in name},
}
"""What each of these names is for."""


class Judgement(NamedTuple):
    """The safety verdict on some pickles, every global they name, and why.

    ``inside`` are names nested in classes that they name, by module and name. ``as_data`` is whether torch refuses some
    names, and ``transload.load`` makes what they stand for without importing them.
    """

    safety: Safety
    globals: tuple[GlobalUse, ...]
    findings: tuple[Finding, ...] = ()
    inside: tuple[tuple[str, str], ...] = ()
    as_data: bool = False


def judge_ordinary(pickles: Iterable[Pickle]) -> Judgement | None:
    """The same judgement as ``safety`` for ordinary pickles; ``None`` for others."""
    found: list[GlobalUse] = []
    for pickle in pickles:
        if pickle.built or pickle.extensions or pickle.data or (found and pickle.globals):
            return None
        if not pickle.globals.keys() <= PURPOSES.keys():
            return None
        ordered, tensor, parameter = map(pickle.globals.get, (_ORDERED, _TENSOR, _PARAMETER))
        called: dict[object, int] = dict.fromkeys(pickle.globals.values(), 0)
        built = 0
        for call in pickle.calls:
            callee, args = call.callee, call.args
            if type(args) is not tuple or callee is None or call.kwargs is not None or call.appended:
                return None
            if callee is ordered:
                odd = bool(args)
                if call.states:  # state_dict() sets nothing else
                    odd = odd or any(type(s) is not Dict or s.items[::2] != ["_metadata"] for s in call.states)
                    built += 1
            else:  # the last two arguments are requires_grad and the hooks
                count = 6 if callee is tensor else 3 if callee is parameter else -1
                odd = bool(call.items or call.states) or len(args) != count or type(args[-2]) is not bool
                odd = odd or not is_empty_call(args[-1], ordered)
            if odd:
                return None
            called[callee] += 1
        for key, node in pickle.globals.items():
            times = built if node is ordered else 0
            found.append(GlobalUse(*key, "data", PURPOSES[key], node.count, called[node], times, "", pickle.name))
    return Judgement("data-only", tuple(found))
