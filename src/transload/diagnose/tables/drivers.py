"""Which driver a CUDA version and a GPU generation need."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from transload.diagnose.tables._data import Capability, Sure, System, numbers_of, parse_capability, parse_version, table

__all__ = [
    "Generation",
    "branch_of",
    "branch_of_cuda",
    "cuda_of_branch",
    "cuda_text",
    "driver_floor",
    "first_branch",
    "generation",
    "generation_of",
    "toolkit_driver",
]

OpenModule = Literal["impossible", "possible", "required"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A GPU generation: the last driver branch that drives it (0: still driven), and if the open modules can."""

    name: str
    last_branch: int
    open_module: OpenModule
    sure: Sure


def driver_floor(cuda: str, system: System = "linux") -> str:
    """The least driver that runs a wheel built with this CUDA; empty if the family is not in the table.

    From CUDA 11 on a driver of the same major version is enough.

    >>> driver_floor("12.8"), driver_floor("13.2"), driver_floor("12.8", "windows"), driver_floor("10.2")
    ('525.60.13', '580.65.06', '528.33', '440.33')
    """
    major, _, rest = cuda.partition(".")
    minor = f"{major}.{rest.partition('.')[0]}"
    for row in table("drivers")["families"]:
        if row["cuda"] in {major, minor}:
            return str(row[system])
    return ""


def toolkit_driver(cuda: str, system: System = "linux") -> str:
    """The driver a toolkit came with, which its PTX and its newest features need; empty if none was published.

    A third number up to 9 is the toolkit's update; a larger one is a library's build and means the first release.

    >>> toolkit_driver("12.8"), toolkit_driver("12.8.1"), toolkit_driver("12.8.90"), toolkit_driver("13.4")
    ('570.26', '570.124.06', '570.26', '')
    """
    numbers = numbers_of(cuda)
    update = numbers[2] if len(numbers) > 2 and numbers[2] < 10 else 0
    found = ""
    for row in table("drivers")["toolkits"]:
        if parse_version(row["cuda"]) == numbers[:2] and row["update"] <= update:
            found = str(row[system])
    return found


@cache
def _branches() -> dict[int, str]:
    """The branches and the CUDA each announces, ascending."""
    return {row["branch"]: row["cuda"] for row in table("drivers")["branches"]}


def cuda_of_branch(branch: int) -> str:
    """The CUDA version a driver branch announces; empty for one not in the table. Better to ask the driver itself.

    >>> cuda_of_branch(570), cuda_of_branch(571)
    ('12.8', '')
    """
    return _branches().get(branch, "")


def branch_of_cuda(cuda: str) -> int:
    """The first driver branch that announces this CUDA version or a newer one; 0 if none does yet.

    >>> branch_of_cuda("13.0"), branch_of_cuda("12.0.1")
    (580, 525)
    """
    wanted = numbers_of(cuda)[:2] or (9999,)
    return next((branch for branch, newest in _branches().items() if parse_version(newest) >= wanted), 0)


def branch_of(driver: str) -> int:
    """The branch of a driver version; Windows drivers of one branch count up past its number. 0 for an older one.

    >>> branch_of("580.65.06"), branch_of("581.29"), branch_of("550.54.14")
    (580, 580, 550)
    """
    known = tuple(_branches())
    at = bisect(known, (numbers_of(driver) or (0,))[0])
    return known[at - 1] if at else 0


def cuda_text(number: int) -> str:
    """What ``cuDriverGetVersion`` returns, as people write it.

    >>> cuda_text(12080), cuda_text(13000)
    ('12.8', '13.0')
    """
    return f"{number // 1000}.{number % 1000 // 10}"


def generation(name: str) -> Generation | None:
    """A generation by its name.

    >>> generation("Pascal")
    Generation(name='Pascal', last_branch=580, open_module='impossible', sure='stated')
    """
    for row in table("drivers")["generations"]:
        if row["name"] == name:
            return Generation(**row)
    return None


@cache
def _capabilities() -> dict[Capability, dict[str, Any]]:
    return {parse_capability(row["capability"]): row for row in table("drivers")["capabilities"]}


def generation_of(capability: Capability) -> Generation | None:
    """The generation of a compute capability; nothing for a capability not in the table.

    >>> generation_of((8, 9)).name, generation_of((8, 7))
    ('Ada', None)
    """
    return generation(_capabilities().get(capability, {}).get("generation", ""))


def first_branch(capability: Capability) -> int:
    """The first driver branch that drives cards of this capability; 0 if not known.

    >>> first_branch((12, 0)), first_branch((8, 7))
    (570, 0)
    """
    return int(_capabilities().get(capability, {}).get("first_branch", 0))
