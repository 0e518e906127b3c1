"""The one table of known texts, a file a subject.

A row knows a text in all its wordings, from torch 1.0 on, and what it means; see ``explaining.known.Known``.
"""

from __future__ import annotations

from transload.explaining.known import Known
from transload.explaining.texts import (
    archives,
    around,
    devices,
    driver,
    formats,
    legacy,
    libraries,
    machine,
    pickles,
    results,
    state_dicts,
    weights_only,
)

__all__ = ["BY_CODE", "FILES", "TABLE"]

FILES = (
    devices,
    archives,
    legacy,
    pickles,
    weights_only,
    state_dicts,
    formats,
    driver,
    results,
    libraries,
    machine,
    around,
)

TABLE: tuple[Known, ...] = tuple(known for file in FILES for known in file.TABLE)
BY_CODE: dict[str, Known] = {known.code: known for known in TABLE}
