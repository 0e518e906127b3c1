"""Every cause we know, in the order in which they are asked; pure functions, a file a layer."""

from __future__ import annotations

from transload.diagnose.rules import (
    driver,
    environment,
    extensions,
    fit,
    hardware,
    kernel,
    libraries,
    nodes,
    others,
    python,
    run,
    surroundings,
    torch_build,
    torch_libraries,
)
from transload.diagnose.rules.row import Row

__all__ = ["BY_CODE", "ROWS"]

_FILES = (
    python,
    torch_build,
    torch_libraries,
    hardware,
    kernel,
    surroundings,
    nodes,
    libraries,
    driver,
    environment,
    fit,
    run,
    extensions,
    others,
)

ROWS: tuple[Row, ...] = tuple(row for file in _FILES for row in file.TABLE.rows)
BY_CODE: dict[str, Row] = {row.code: row for row in ROWS}
