import torch
import torch.nn as nn

from .rotations import from_6d


class PointPose(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.local = nn.Sequential(
            nn.Conv1d(3, width, 1), nn.GroupNorm(8, width), nn.ReLU(),
            nn.Conv1d(width, 2 * width, 1), nn.GroupNorm(8, 2 * width), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 6))
        with torch.no_grad():
            self.head[-1].bias.copy_(torch.tensor([1., 0, 0, 0, 1, 0]))

    def forward(self, points):
        h = self.local(points.transpose(1, 2))
        h = torch.cat([h.amax(2), h.mean(2)], 1)
        return from_6d(self.head(h))
