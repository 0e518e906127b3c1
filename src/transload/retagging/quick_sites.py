"""The same places as ``sites`` finds, for ids as torch writes them, without a walk over everything between them.

Each id ends where the pickle machine met it, so it is enough to look back from there. Who else reads the text of a tag
is not looked for; where somebody does, the proof of the plan fails, and the walk is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from transload.nodes import Persistent, Pickle
from transload.retagging.sites import LITERALS, PUTS, Found, Op, Site, tag_of

__all__ = ["find_quickly"]

_GET = rb"h.|j...."
_PUT = rb"(q.|r....)?"
_NUMBER = rb"K.|M..|J....|\x8a[\x01-\x08].{1,8}?"
_ID = (
    rb"\((X\x07\0\0\0storage|U\x07storage|" + _GET + rb")" + _PUT + rb"(c[^\n]+\n[^\n]+\n|" + _GET + rb")" + _PUT,
    rb"(X.\0\0\0[0-9]+|U.[0-9]+|" + _GET + rb")" + _PUT,
    rb"(" + _NUMBER + rb")(N)?t" + _PUT + rb"Q",
)
_TAG_GROUP = 7
_LAST_GROUP = 10  # what follows the tuple is no part of it
_BACK = 512
_TRIES = 16  # a byte of a memo index may look like MARK


def find_quickly(pickle: Pickle, data: bytes, renamed: Callable[[str], str]) -> Found | None:
    """The sites of the tags that change; ``None`` if one of them is not as torch writes it."""
    patterns: dict[str, re.Pattern[bytes]] = {}
    sites: list[Site] = []
    for node in pickle.persistent:
        tag = tag_of(node)
        if tag is None or renamed(tag) == tag:
            continue
        pattern = patterns.get(tag) or patterns.setdefault(tag, _pattern(tag))
        site = _site(node, data, pattern)
        if site is None:
            return None
        sites.append(site)
    return Found(tuple(sites), {}, (), ())


def _pattern(tag: str) -> re.Pattern[bytes]:
    raw = tag.encode()
    wide, short = len(raw).to_bytes(4, "little"), bytes([min(len(raw), 255)])
    text = rb"(" + re.escape(b"X" + wide + raw) + rb"|" + re.escape(b"U" + short + raw) + rb"|" + _GET + rb")" + _PUT
    head, key, tail = _ID
    return re.compile(head + key + text + tail, re.DOTALL)


def _site(node: Persistent, data: bytes, pattern: re.Pattern[bytes]) -> Site | None:
    end = mark = node.position
    for _ in range(_TRIES):
        mark = data.rfind(b"(", max(0, end - _BACK), mark)
        if mark < 0:
            return None
        match = pattern.fullmatch(data, mark, end)
        if match is not None:
            return _read(node, data, match)
    return None


def _read(node: Persistent, data: bytes, match: re.Match[bytes]) -> Site:
    tag = _op(data, *match.span(_TAG_GROUP))
    if tag.code not in LITERALS:
        return Site(node, (tag,), tag, tag.entry)
    spans = [match.span(group) for group in range(1, _LAST_GROUP + 1)]
    ops = tuple(_op(data, at, end) for at, end in spans if at >= 0)
    place = ops.index(tag)
    after = ops[place + 1]
    return Site(node, ops, ops[place], after.entry if after.code in PUTS else -1)


def _op(data: bytes, at: int, end: int) -> Op:
    code = data[at]
    return Op(code, at, end, int.from_bytes(data[at + 1 : end], "little") if code in b"hjqr" else -1)
