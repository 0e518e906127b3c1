"""Resume the training of an autoencoder from a checkpoint, and save it again.

Usage: python resume.py training.ckpt [--epochs 6]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

GPU = 1


class Autoencoder(nn.Module):
    """Compresses twelve numbers to four."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(12, 4)
        self.up = nn.Linear(4, 12)

    def forward(self, inputs: Tensor) -> Tensor:
        """The reconstructed inputs."""
        outputs: Tensor = self.up(torch.tanh(self.down(inputs)))
        return outputs


def main() -> None:
    """Load model and optimizer, train, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()

    torch.cuda.set_device(GPU)
    checkpoint = torch.load(arguments.checkpoint, map_location=f"cuda:{GPU}")
    model = Autoencoder().cuda(GPU)
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(checkpoint["optimizer"])

    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 12)), batch_size=16, shuffle=True)
    for epoch in range(checkpoint["epoch"], arguments.epochs):
        losses = []
        for (inputs,) in loader:
            batch = inputs.pin_memory().cuda(GPU, non_blocking=True)
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        torch.cuda.synchronize()
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")
    torch.save(
        {"epoch": arguments.epochs, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
        arguments.checkpoint,
    )


if __name__ == "__main__":
    main()
