"""Moving bytes: from files into the memory of the host and of CUDA devices, as fast as the machine can.

``bring`` is the door. What is wanted is planned (plan.py), the way is chosen (choice.py), lanes do the work (host.py,
ring.py, mapped.py) in threads (crew.py).
"""

from __future__ import annotations

from transload.loading.transfer.choice import Choice, Settings
from transload.loading.transfer.engine import bring
from transload.loading.transfer.files import Ended
from transload.loading.transfer.host import Sums
from transload.loading.transfer.plan import Want

__all__ = ["Choice", "Ended", "Settings", "Sums", "Want", "bring"]
