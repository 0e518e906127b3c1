"""All rules, in the order in which they are checked: pure functions, a module for each part of the chain."""

from __future__ import annotations

from transload.diagnose.case import RULES as BY_CODE
from transload.diagnose.rules import card, driver, process, run, torch

__all__ = ["BY_CODE", "card", "driver", "process", "run", "torch"]  # importing them registers their rules
