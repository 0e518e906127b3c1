"""Write the checkpoints that the scripts next to this one load, as if saved on a machine with two GPUs.

Usage: python examples/scripts/make.py [FOLDER]

No GPU is needed: they are saved from the CPU, and then every storage in them is tagged ``cuda:1``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from infer import Classifier
from lightning_like import Regressor
from resume import Autoencoder

import transload


def main() -> int:
    """Write all three checkpoints."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    torch.manual_seed(0)
    for name, content in {
        "classifier.pt": Classifier().state_dict(),
        "training.ckpt": trained(),
        "regressor.ckpt": {
            "epoch": 3,
            "global_step": 120,
            "hyper_parameters": {"width": 16, "depth": 2},
            "state_dict": Regressor(width=16, depth=2).state_dict(),
        },
    }.items():
        torch.save(content, folder / name)
        transload.retag(folder / name, "cuda:1")
        print(f"{folder / name}: saved on cuda:1")
    return 0


def trained() -> dict[str, object]:
    """A model and its optimizer after two steps."""
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        inputs = torch.randn(8, 12)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"epoch": 2, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


if __name__ == "__main__":
    sys.exit(main())
