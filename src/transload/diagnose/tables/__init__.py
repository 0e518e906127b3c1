"""What is known of drivers, chips, torch builds and result codes, as data with sources and dates; and what follows.

The data is in the JSON files here; ``wheels`` chooses a wheel by it and is imported by those who need one.
"""

from __future__ import annotations

from transload.diagnose.tables._data import (
    INDEX,
    Capability,
    Sure,
    System,
    Version,
    numbers_of,
    parse_capability,
    parse_version,
)
from transload.diagnose.tables.builds import (
    PLATFORMS,
    Build,
    Platform,
    build_of,
    default_build,
    index_builds,
    releases,
)
from transload.diagnose.tables.chips import Chip, chip_of, is_data_centre, is_nvswitch
from transload.diagnose.tables.cubins import TEGRA, covers, runs_on
from transload.diagnose.tables.drivers import (
    Generation,
    branch_of,
    branch_of_cuda,
    cuda_of_branch,
    cuda_text,
    driver_floor,
    first_branch,
    generation,
    generation_of,
    toolkit_driver,
)
from transload.diagnose.tables.results import Result, cu_result, nvml_result

__all__ = [
    "INDEX",
    "PLATFORMS",
    "TEGRA",
    "Build",
    "Capability",
    "Chip",
    "Generation",
    "Platform",
    "Result",
    "Sure",
    "System",
    "Version",
    "branch_of",
    "branch_of_cuda",
    "build_of",
    "chip_of",
    "covers",
    "cu_result",
    "cuda_of_branch",
    "cuda_text",
    "default_build",
    "driver_floor",
    "first_branch",
    "generation",
    "generation_of",
    "index_builds",
    "is_data_centre",
    "is_nvswitch",
    "numbers_of",
    "nvml_result",
    "parse_capability",
    "parse_version",
    "releases",
    "runs_on",
    "toolkit_driver",
]
