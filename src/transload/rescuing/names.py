"""Which of two names of a record is right: one bit of its header or of the directory was flipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

__all__ = ["Knowledge", "chosen_names"]

_ORDINARY = re.compile(rb"[A-Za-z0-9_.\-/]+")
_KNOWN = frozenset(
    b"data.pkl version byteorder constants.pkl .format_version .storage_alignment .data/serialization_id "
    b".data/version .data/origin.json model.json attributes.pkl archive_format archive_version "
    b"traced_inputs.pkl extra/producer_info.json".split()
)
_PARTS = frozenset(
    b"code data debug constants tensors weights models extra .py .py.debug_pkl .pkl .json .so .cubin .cpp .txt .pt "
    b"__torch__ torch nn modules aotinductor model".split()
)
_NUMBERED = re.compile(rb"(data|tensors|constants|xl_model_weights)/(\d{1,20})")


class Knowledge(NamedTuple):
    """What a file tells about names: the keys of its storages, and whether a word is in its texts."""

    storages: Callable[[], Container[str]]
    occurs: Callable[[bytes], bool]


def chosen_names(names: Sequence[Sequence[bytes]], knowledge: Knowledge) -> list[bytes]:
    """One name for each record, out of the one or two it has.

    >>> knowledge = Knowledge(lambda: {"0", "1"}, lambda word: False)
    >>> chosen_names([[b"a/data.pkl"], [b"a/data/0"], [b"a/data/1", b"a/data/5"]], knowledge)
    [b'a/data.pkl', b'a/data/0', b'a/data/1']
    """
    roots = Counter(name.partition(b"/")[0] for each in names for name in each if b"/" in name)
    root = roots.most_common(1)[0][0] if roots else b""
    taken = Counter(each[0] for each in names if len(each) == 1)
    words = Counter(word for each in names for name in each for word in _words(name))
    out: list[bytes] = []
    for each in names:
        if len(each) < 2:
            out.append(each[0] if each else b"")
            continue
        out.append(max(each, key=lambda name: _weight(name, root, taken, words, knowledge)))
    return out


def _follows(name: bytes, numbered: re.Match[bytes], taken: Counter[bytes]) -> bool:
    """Whether a record has a number that comes after that of another one."""
    number = int(numbered[2])
    before = name[: len(name) - len(numbered[2])] + b"%d" % (number - 1)
    return not number or before in taken


def _words(name: bytes) -> list[bytes]:
    """The parts of a path, and the endings of the last."""
    parts = name.split(b"/")
    stem, dot, ending = parts[-1].partition(b".")
    return [*parts[:-1], stem, dot + ending]


def _weight(
    name: bytes, root: bytes, taken: Counter[bytes], words: Counter[bytes], knowledge: Knowledge
) -> tuple[object, ...]:
    """What speaks for a name, the most telling first."""
    top, _, below = name.partition(b"/")
    numbered = _NUMBERED.fullmatch(below)
    known = below in _KNOWN or (numbered is not None and _follows(name, numbered, taken))
    stored = (
        below.startswith((b"data/", b"tensors/")) and name.rpartition(b"/")[2].decode("latin-1") in knowledge.storages()
    )
    return (
        top == root,
        not taken[name],
        stored,
        known,
        numbered is not None,
        bool(_ORDINARY.fullmatch(name)),
        knowledge.occurs(below),
        -sum(words[word] < 2 and word not in _PARTS for word in _words(name)),
        sum(min(words[word], 3) for word in _words(name)),
        sum(knowledge.occurs(word) for word in _words(name)),
    )
