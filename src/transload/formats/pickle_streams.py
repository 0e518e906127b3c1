"""Pickles of unknown length: one at an offset of a source, or several that follow one another."""

from __future__ import annotations

from transload.formats.pickle_machine import MAX_STREAM, Reader, add_uses, run
from transload.formats.pickle_state import MAX_IRREGULAR
from transload.io.sources import Source
from transload.nodes import Pickle

# Two bytes can be a pickle: a file of a megabyte could be half a million of them.
MAX_KEPT = 1000


def run_at(
    source: Source, offset: int, name: str, window: int = 1 << 20, most: int = MAX_STREAM, reader: Reader = None
) -> tuple[Pickle, int]:
    """Run the pickle at an offset without knowing its length; return it, and where it ends in the source.

    The window grows until the pickle fits, so this reads twice the size of the pickle at most, not the whole file,
    and at most ``most`` bytes, since there may be no pickle at all.
    """
    while True:
        data = source.read(offset, min(window, most))
        pickle = run(data, name=name, reader=reader)
        if not pickle.cut or len(data) < window or window >= most:
            return pickle, offset + pickle.end
        window *= 4


def run_all(data: bytes, name: str = "") -> list[Pickle]:
    """All pickles that follow one another from the start of ``data``, until one breaks or the data ends.

    What pickles beyond ``MAX_KEPT`` would do is added to the last one; nothing else of them is kept.
    """
    pickles: list[Pickle] = []
    position = 0
    while position < len(data):
        pickle = run(data, position, name)
        if len(pickles) < MAX_KEPT:
            pickles.append(pickle)
        else:
            # Add its names, calls and irregularities, but not its value.
            into = pickles[-1]
            into.end, into.broken, into.cut = pickle.end, pickle.broken, pickle.cut
            into.protocol = max(into.protocol, pickle.protocol)
            into.python2 |= pickle.python2
            into.python2_texts |= pickle.python2_texts
            into.undecoded += pickle.undecoded
            into.rare |= pickle.rare
            add_uses(into, pickle)
            into.persistent += pickle.persistent
            into.irregular += pickle.irregular[: MAX_IRREGULAR - len(into.irregular)]
            into.ambiguous += pickle.ambiguous[: MAX_IRREGULAR - len(into.ambiguous)]
        if pickle.broken:
            break
        position = pickle.end
    return pickles
