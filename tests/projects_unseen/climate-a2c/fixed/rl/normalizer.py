import torch
import torch.nn as nn


class RunningNorm(nn.Module):
    """Normalises observations with statistics of everything seen so far."""

    def __init__(self, dim, clip=8.0):
        super().__init__()
        self.clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("total_sq", torch.zeros(dim, dtype=torch.float64))

    @torch.no_grad()
    def update(self, obs):
        self.count += obs.shape[0]
        self.total += obs.double().sum(0)
        self.total_sq += obs.double().square().sum(0)

    def forward(self, obs):
        mean = self.total / self.count
        std = torch.sqrt((self.total_sq / self.count - mean * mean).clamp(min=0))
        return ((obs - mean) / (std + 1e-4)).clamp(-self.clip, self.clip).float()
