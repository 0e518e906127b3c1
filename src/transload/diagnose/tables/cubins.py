"""Which compiled code runs on which card."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transload.diagnose.tables._data import Capability

__all__ = ["TEGRA", "covers", "runs_on"]

# Chips of Jetson and Drive boards. Before CUDA 13.2 they share no cubins with the cards of their generation.
TEGRA: frozenset[Capability] = frozenset({(5, 3), (6, 2), (7, 2), (8, 7)})
_TEGRA_WITH_DESKTOP_CODE: frozenset[Capability] = frozenset({(7, 2), (8, 7)})
_DESKTOP_CODE_FOR_TEGRA_SINCE = (13, 2)

_CODE = re.compile(r"(sm|compute)_([0-9]{1,4})([0-9])([af]?)")


def runs_on(code: str, capability: Capability, build_cuda: tuple[int, int] | None = None) -> bool:
    """Whether code for an architecture (``sm_86``, ``sm_90a``, ``sm_100f``, ``compute_90``) runs on a card.

    A cubin runs on its own major version from its own minor on; so it does with ``f``, which names that family, and
    with ``a`` it runs on that chip alone. PTX runs on anything newer, if the driver can compile it.
    ``build_cuda`` is the CUDA the code was built with; unknown counts as older than 13.2. Nonsense runs nowhere.

    >>> runs_on("sm_86", (8, 9)), runs_on("sm_86", (8, 0)), runs_on("sm_90a", (9, 0)), runs_on("compute_90", (12, 0))
    (True, False, True, True)
    >>> runs_on("sm_80", (8, 7), (12, 6)), runs_on("sm_80", (8, 7), (13, 2)), runs_on("sm_101", (11, 0))
    (False, True, True)
    """
    parts = _CODE.fullmatch(code)
    if parts is None:
        return False
    kind, suffix = parts[1], parts[4]
    made = _renamed((int(parts[2]), int(parts[3])))
    card = _renamed(capability)
    if suffix == "a":
        return made == card
    if kind == "compute" and not suffix:
        return made <= card
    if kind == "sm" and (card in TEGRA or made in TEGRA) and made != card:
        return _desktop_code_on_tegra(made, card, build_cuda)
    return made[0] == card[0] and made[1] <= card[1]


def _renamed(capability: Capability) -> Capability:
    # Thor was 10.1 until CUDA 13 renamed it.
    return (11, 0) if capability == (10, 1) else capability


def _desktop_code_on_tegra(made: Capability, card: Capability, build_cuda: tuple[int, int] | None) -> bool:
    if made in TEGRA or card not in _TEGRA_WITH_DESKTOP_CODE or build_cuda is None:
        return False
    return build_cuda >= _DESKTOP_CODE_FOR_TEGRA_SINCE and made[0] == card[0] and made[1] <= card[1]


def covers(codes: Iterable[str], capability: Capability, build_cuda: tuple[int, int] | None = None) -> bool:
    """Whether any of the architectures of a build runs on a card.

    >>> covers(("sm_75", "sm_80", "sm_86"), (8, 9)), covers(("sm_75", "sm_80"), (6, 1))
    (True, False)
    """
    return any(runs_on(code, capability, build_cuda) for code in codes)
