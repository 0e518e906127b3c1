"""Which of two names of a record is right: one bit of its header or of the directory was flipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from operator import itemgetter
from typing import NamedTuple

__all__ = ["Chosen", "Knowledge", "chosen_names"]

_CAPITALS = frozenset(range(65, 91))
_DIGITS = re.compile(rb"\d+")
_FOLDER = b"/"  # before a folder among the words: no word has one
_BETWEEN = re.compile(rb"[/._\-]+")
_ORDINARY = re.compile(rb"[A-Za-z0-9_.\-/]+")
_KNOWN = frozenset(
    b"data.pkl version byteorder constants.pkl .format_version .storage_alignment .data/serialization_id "
    b".data/version .transload/origin.json model.json attributes.pkl archive_format archive_version "
    b"traced_inputs.pkl extra/producer_info.json bytecode.pkl models/model.json data/sample_inputs/model.pt "
    b"data/weights/model_weights_config.json data/constants/model_constants_config.json .data/extern_modules "
    b".data/python_version".split()
)
_PARTS = frozenset(
    b"code data debug constants tensors weights models extra .py .py.debug_pkl .pkl .json .so .cubin .cpp .txt .pt "
    b"__torch__ torch nn modules aotinductor model".split()
)
_SETTLING = 4  # the first reasons for a name are facts, the others what names look like
_NUMBERED = re.compile(
    rb"(data/|tensors/|constants/|traced_inputs/|bytecode/|data/weights/weight_|data/constants/tensor_)(\d{1,20})"
)


class Knowledge(NamedTuple):
    """What a file tells about names: the keys of its storages, and whether a word is in its texts."""

    storages: Callable[[], Container[str]]
    occurs: Callable[[bytes], bool]


class Chosen(NamedTuple):
    """A name, and whether the file itself settles it: the index, the other records, or what torch calls its own."""

    name: bytes
    settled: bool = True


def chosen_names(names: Sequence[Sequence[bytes]], knowledge: Knowledge) -> list[Chosen]:
    """One name for each record, out of the one or two it has.

    >>> knowledge = Knowledge(lambda: {"0", "1"}, lambda word: False)
    >>> [chosen.name for chosen in chosen_names([[b"a/data.pkl"], [b"a/data/1", b"a/data/5"]], knowledge)]
    [b'a/data.pkl', b'a/data/1']
    """
    roots = Counter(name.partition(b"/")[0] for each in names for name in each if b"/" in name)
    root = roots.most_common(1)[0][0] if roots else b""
    taken = Counter(each[0] for each in names if len(each) == 1)
    words = Counter(word for each in names for name in each for word in _words(name))
    words.update(_FOLDER + name.rpartition(b"/")[0] for each in names for name in each)
    out: list[Chosen] = []
    for each in names:
        weights = [(_weight(name, root, taken, words, knowledge), name) for name in each] if len(each) > 1 else []
        if weights:
            (best, name), (second, _) = sorted(weights, key=itemgetter(0), reverse=True)[:2]
            out.append(Chosen(name, best[:_SETTLING] > second[:_SETTLING]))
        else:
            out.append(Chosen(each[0] if each else b""))
    return out


def _follows(name: bytes, numbered: re.Match[bytes], taken: Counter[bytes]) -> bool:
    """Whether a record has a number that comes after that of another one."""
    number = int(numbered[2])
    before = name[: len(name) - len(numbered[2])] + b"%d" % (number - 1)
    return not number or before in taken


def _words(name: bytes) -> set[bytes]:
    """The parts of a path, the words in them, and the endings of the last; all numbers are one word."""
    plain = _DIGITS.sub(b"0", name)
    parts = plain.split(b"/")
    stem, dot, ending = parts[-1].partition(b".")
    return {*parts[:-1], stem, dot + ending, *filter(None, _BETWEEN.split(plain))}


def _weight(
    name: bytes, root: bytes, taken: Counter[bytes], words: Counter[bytes], knowledge: Knowledge
) -> tuple[object, ...]:
    """What speaks for a name, the most telling first."""
    top, _, below = name.partition(b"/")
    folder, _, last = name.rpartition(b"/")
    stem, dot, ending = last.partition(b".")
    numbered = _NUMBERED.fullmatch(below)
    stored = below.startswith((b"data/", b"tensors/")) and last.decode("latin-1") in knowledge.storages()
    return (
        top == root,
        not taken[name],
        stored,
        below in _KNOWN or (numbered is not None and _follows(name, numbered, taken)),
        numbered is not None,
        bool(_ORDINARY.fullmatch(name)) and bool(last),
        knowledge.occurs(below),
        words[_FOLDER + folder] > 1,
        words[dot + ending] > 1 or dot + ending in _PARTS,
        knowledge.occurs(stem),
        -sum(words[word] < 2 and word not in _PARTS for word in _words(name)),
        -sum(letter in _CAPITALS for letter in name),
        sum(min(words[word], 3) for word in _words(name)),
        sum(knowledge.occurs(word) for word in _words(name)),
    )
