"""The names and words of result codes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from transload.diagnose.tables._data import table

__all__ = ["Result", "cu_result", "nvml_result"]


@dataclass(frozen=True, slots=True)
class Result:
    """A result code. ``name`` and ``text`` are empty for a number not in the table.

    ``runtime_name`` is what the CUDA runtime calls the same number (``cudaErrorNoDevice``); NVML has none.
    """

    code: int
    name: str = ""
    text: str = ""
    runtime_name: str = ""


@cache
def _results(library: str) -> dict[int, Result]:
    return {row["code"]: Result(**row) for row in table("results")[library]}


def cu_result(code: int) -> Result:
    """A code of the CUDA driver, with the words torch prints for it. Code 35 and a few others are the runtime's alone.

    >>> cu_result(802).name, cu_result(802).text, cu_result(35).runtime_name
    ('CUDA_ERROR_SYSTEM_NOT_READY', 'system not yet initialized', 'cudaErrorInsufficientDriver')
    """
    found = _results("cuda").get(code, Result(code))
    return found if found.name else Result(code, found.runtime_name, found.text, found.runtime_name)


def nvml_result(code: int) -> Result:
    """A code of NVML and what it means.

    >>> nvml_result(18).name, nvml_result(12345)
    ('NVML_ERROR_LIB_RM_VERSION_MISMATCH', Result(code=12345, name='', text='', runtime_name=''))
    """
    return _results("nvml").get(code, Result(code))
