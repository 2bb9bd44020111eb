import torch
import torch.nn as nn


class EnergyPool(nn.Module):
    """Texture energy: the power of every filter response over the tile, on a log scale."""

    def forward(self, x):
        return torch.log1p(x.float().pow(2).sum(dim=(2, 3)))


class TextureNet(nn.Module):
    def __init__(self, width=12, out=32):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.pool = EnergyPool()
        self.head = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, out))

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        return self.head(self.pool(torch.relu(self.conv2(x))))
