import torch.nn as nn
import torch.nn.functional as F


class WeibullNet(nn.Module):
    """Predicts scale (days) and shape of a Weibull law for every patient."""

    def __init__(self, n_in, hidden, dropout):
        super().__init__()
        layers, d = [], n_in
        for h in hidden:
            layers += [nn.Linear(d, h), nn.LayerNorm(h), nn.SiLU(), nn.Dropout(dropout)]
            d = h
        self.trunk = nn.Sequential(*layers)
        self.scale = nn.Linear(d, 1)
        self.shape = nn.Linear(d, 1)
        nn.init.constant_(self.scale.bias, 12.0)

    def forward(self, x):
        h = self.trunk(x)
        scale = F.softplus(self.scale(h)).squeeze(-1) + 0.1
        shape = F.softplus(self.shape(h)).squeeze(-1) + 0.05
        return scale, shape
