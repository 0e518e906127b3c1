"""``Checkpoint``, what ``inspect`` returns: the facts of ``contents``, shown in a REPL and a notebook by ``render``."""

from __future__ import annotations

from transload.contents import (
    FORMATS,
    Contents,
    DeviceUse,
    GlobalUse,
    Key,
    Leaf,
    Origin,
    Part,
    Record,
    Storage,
    Tensor,
    contiguous,
)

__all__ = [
    "FORMATS",
    "Checkpoint",
    "DeviceUse",
    "GlobalUse",
    "Key",
    "Leaf",
    "Origin",
    "Part",
    "Record",
    "Storage",
    "Tensor",
    "contiguous",
]


class Checkpoint(Contents):
    """Everything known of one checkpoint without running it.

    >>> import transload
    >>> checkpoint = transload.inspect("model.pt")        # doctest: +SKIP
    >>> checkpoint.safety, checkpoint.integrity           # doctest: +SKIP
    ('data-only', 'unchecked')

    ``format`` is one of the names in ``FORMATS``; ``flavour`` a known tree inside it (``"Lightning"``). ``facts`` are
    further words on the container (``("byteorder", "little")``). ``problems`` is what the reader met, ``findings``
    what the judges made of it. ``pickles`` are the inert graphs themselves, for the parts of transload that rebuild
    objects; they are not in ``to_dict()``.
    """

    def __repr__(self) -> str:
        """Ten lines at most: what it is, who wrote it, how big, where it lands, what is wrong."""
        from transload.render.checkpoint import summary_lines

        return "\n".join(summary_lines(self)[:10])

    def _repr_html_(self) -> str:
        """The notebook view: the same summary and the tensors, in pure CSS."""
        from transload.render.html import fragment

        return fragment(self)
