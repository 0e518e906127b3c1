"""All rules: pure functions, in a module for each part of the chain. Importing this package registers them."""

from transload.diagnose.case import BY_CODE
from transload.diagnose.rules import dlls, driver, mac, process, torch, windows

__all__ = ["BY_CODE", "dlls", "driver", "mac", "process", "torch", "windows"]
