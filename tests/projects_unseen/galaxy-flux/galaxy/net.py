import torch.nn as nn


class Flux(nn.Module):
    """The light of a galaxy, in counts."""

    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.GroupNorm(2, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1), nn.GroupNorm(2, width), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(4 * width, 1)

    def forward(self, x):
        return self.head(self.body(x / 100)).squeeze(1)
