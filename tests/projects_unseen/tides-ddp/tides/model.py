import torch.nn as nn


class TideNet(nn.Module):
    def __init__(self, context, horizon, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(context, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, horizon))

    def forward(self, x):
        scale = x.abs().mean(1, keepdim=True) + 1.0
        return self.net(x / scale) * scale
