"""Load a checkpoint that was saved on a GPU, on whatever this machine has, and print where everything landed.

Usage: python examples/load.py [FILE]
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import transload


def main() -> int:
    """Load it, tell the one warning in our own words, and list the tensors."""
    path = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "model_cuda0.pt"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", transload.LandingWarning)
        try:
            state = transload.load(path)
        except transload.NoTorchError:
            print(f"There is no torch in this Python, so this is only where it would land:\n\n{transload.check(path)}")
            return 0
    for warning in told:
        print(warning.message)
    for name, tensor in state.items():
        print(f"  {name:<28} {tensor.dtype!s:<16} {list(tensor.shape)!s:<14} on {tensor.device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
