"""All rules, in the order in which they are checked: pure functions, one module for each layer or two."""

from __future__ import annotations

from transload.diagnose.rules import (  # noqa: F401  each registers its rules
    driver,
    fit,
    hardware,
    kernel,
    libraries,
    nodes,
    python,
    run,
    surroundings,
    torch_libraries,
    variables,
)
from transload.diagnose.rules.rule import RULES as BY_CODE

__all__ = ["BY_CODE"]
