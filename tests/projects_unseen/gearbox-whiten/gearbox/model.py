import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self, channels, width, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(channels, width, 7, stride=2, padding=3), nn.GELU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        )
        self.project = nn.Linear(width, dim)

    def forward(self, x):
        return self.project(self.net(x))
