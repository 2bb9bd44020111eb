import torch
import torch.nn as nn

from .tours import FEATURES


class SoftSort(nn.Module):
    """Row i of the output says which stop is visited as i-th."""

    def __init__(self):
        super().__init__()
        self.tau = 1.0

    def forward(self, scores):
        ordered = scores.sort(dim=1, descending=True).values
        gap = (ordered.unsqueeze(2) - scores.unsqueeze(1)).abs()
        return torch.softmax(-gap / self.tau, dim=-1)


class Ranker(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.sort = SoftSort()

    def forward(self, x):
        return self.sort(self.score(x).squeeze(-1))
