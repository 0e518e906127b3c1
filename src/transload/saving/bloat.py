"""Views that hold much more than they show: what a file would be without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transload.saving.desk import Stored
from transload.saving.views import merged

__all__ = ["bloat_words"]

_LITTLE = 1 << 20  # bytes that nobody needs to hear of
_SHARE = 10  # per cent of the file: less than this neither
_NAMED = 3
_LOOKED_AT = 100_000


def bloat_words(obj: Any, storages: Sequence[Stored]) -> str:
    """A sentence on what is written though no tensor uses it; empty if that is little."""
    unused = {each.storage._cdata: each.nbytes - _used(each) for each in storages if not each.whole}  # noqa: SLF001
    waste, total = sum(unused.values()), sum(each.nbytes for each in storages)
    if waste < _LITTLE or waste * 100 < _SHARE * total:
        return ""
    large = {data for data, nbytes in unused.items() if nbytes >= _LITTLE // 16}
    names = list(_names(obj, large))
    some = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    which = f"views of larger storages ({some})" if names else "views of larger storages"
    return (
        f"{waste / 1e6:,.0f} of {total / 1e6:,.0f} MB in the file are bytes that no saved tensor uses: "
        f"some are {which}; compact=True leaves them out"
    )


def _used(stored: Stored) -> int:
    views = set(stored.views or ())
    if len(views) == 1:
        return min(each.nbytes if each.is_sparse else each.run.nbytes for each in views)
    return sum(run.nbytes for run in merged(each.run for each in views))


def _names(obj: Any, wanted: set[int]) -> Iterator[str]:
    """Where in an object the tensors of some storages are."""
    import torch

    stack: list[tuple[str, Any]] = [("", obj)]
    seen: set[int] = set()
    while stack and len(seen) < _LOOKED_AT:
        place, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if _storage(value) in wanted:
                yield place or "the tensor itself"
        elif isinstance(value, torch.nn.Module):
            stack.append((place, value.state_dict(keep_vars=True)))
        elif isinstance(value, dict):
            stack += [(f"{place}.{key}" if place else str(key), each) for key, each in reversed(value.items())]
        elif isinstance(value, (list, tuple)):
            stack += [(f"{place}[{index}]", each) for index, each in reversed(list(enumerate(value)))]


def _storage(tensor: Any) -> int:
    try:
        data: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - by which torch tells storages apart
    except (RuntimeError, NotImplementedError):  # one without
        return 0
    return data
