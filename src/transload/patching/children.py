"""Children of ``multiprocessing``. One that is forked has all of its parent; any other is told before it does anything.

A child that is spawned, or forked from the server, first unpickles what its parent has prepared for it, and only then
imports the main module. One more entry, which patches where it is unpickled, is thus in time for all of it.
"""

from __future__ import annotations

import os
from functools import wraps

from transload.patching import landing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from transload.patching.changes import Changes

__all__ = ["begin", "prepare"]

# The child may not have us on its path yet, and must not fail if it never has.
_JOIN = """
import sys
sys.path.append({home!r})
try:
    from transload.patching.children import begin
    begin({wish!r}, {told!r})
except ImportError:
    pass
finally:
    if {home!r} in sys.path:
        sys.path.pop(len(sys.path) - 1 - sys.path[::-1].index({home!r}))
"""


class _Joining:
    def __reduce__(self) -> tuple[Any, ...]:
        home = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
        return exec, (_JOIN.format(home=home, wish=landing.wish, told=landing.told()), {})


def prepare(spawn: Any, changes: Changes) -> None:
    """Have what is prepared for a child carry the patch."""
    real = spawn.get_preparation_data

    @wraps(real)
    def get_preparation_data(*args: Any, **kwargs: Any) -> Any:
        data = real(*args, **kwargs)
        return {**data, "transload": _Joining()} if landing.wish else data

    changes.set(spawn, "get_preparation_data", get_preparation_data)


def begin(wish: str, told: list[str]) -> None:
    """In the child: patch as the parent did, and do not repeat what it has said."""
    from transload.patching import switch

    landing.tell_no_more(told)
    switch.turn(wish, explaining=False)
