"""Classify some images with trained weights, on the second GPU of the machine it was written on.

Usage: python infer.py [--weights classifier.pt]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda:1")


class Classifier(nn.Module):
    """A small convolutional network for images of 16 by 16."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4))
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Ten scores for each image."""
        scores: Tensor = self.head(self.features(images).flatten(1))
        return scores


def main() -> None:
    """Load the weights, move the model to the GPU, classify."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="classifier.pt")
    arguments = parser.parse_args()

    model = Classifier()
    model.load_state_dict(torch.load(arguments.weights))
    model.to(DEVICE).eval()

    images = torch.zeros(4, 1, 16, 16, device=DEVICE)
    images[torch.arange(4, device=DEVICE), 0, :, torch.arange(4).cuda(1)] = 1.0
    with torch.no_grad():
        chosen = model(images).argmax(1)
    for index, label in enumerate(chosen.tolist()):
        print(f"image {index}: class {label}")


if __name__ == "__main__":
    main()
