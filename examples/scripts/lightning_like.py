"""Restore a model from its checkpoint and test it, in the style of Lightning: with a module and a trainer.

Usage: python lightning_like.py [regressor.ckpt]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Module(nn.Module):
    """A model that can be created from a checkpoint alone, which contains its hyperparameters."""

    @classmethod
    def load_from_checkpoint(cls, path: str) -> Any:
        """The model as it was saved, on the device it was saved on."""
        checkpoint = torch.load(path)
        model = cls(**checkpoint["hyper_parameters"])
        model.load_state_dict(checkpoint["state_dict"])
        return model.to(next(iter(checkpoint["state_dict"].values())).device)


class Trainer:
    """Runs the steps of a model on one GPU."""

    def __init__(self, devices: list[int]) -> None:
        self.device = torch.device("cuda", devices[0])

    def test(self, model: Any, loader: DataLoader[Any]) -> float:
        """The mean of what ``test_step`` returns."""
        model.to(self.device).eval()
        with torch.no_grad(), torch.device(self.device):
            total = torch.zeros(())
            for index, batch in enumerate(loader):
                total += model.test_step([tensor.to(self.device) for tensor in batch], index)
        return float(total / len(loader))


class Regressor(Module):
    """A network with ``depth`` hidden layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 1))
        self.width = width

    def test_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The loss on one batch."""
        del index
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)


def main() -> None:
    """Restore the model and test it."""
    model = Regressor.load_from_checkpoint(sys.argv[1] if len(sys.argv) > 1 else "regressor.ckpt")
    torch.manual_seed(0)
    inputs = torch.randn(32, model.width)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    print(f"test loss {Trainer(devices=[1]).test(model, loader):.4f}")


if __name__ == "__main__":
    main()
