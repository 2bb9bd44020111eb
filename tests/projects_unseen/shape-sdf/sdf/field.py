import math

import torch
import torch.nn as nn


class Field(nn.Module):
    """MLP with geometric initialisation; returns a truncated signed distance."""

    def __init__(self, hidden, layers, truncation):
        super().__init__()
        self.truncation = truncation
        dims = [3] + [hidden] * layers
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:]))
        self.out = nn.Linear(hidden, 1)
        self.act = nn.Softplus(beta=50)
        for lin in self.linears:
            nn.init.normal_(lin.weight, 0.0, math.sqrt(2) / math.sqrt(lin.out_features))
            nn.init.zeros_(lin.bias)
        nn.init.normal_(self.out.weight, math.sqrt(math.pi) / math.sqrt(hidden), 1e-4)
        nn.init.constant_(self.out.bias, -0.4)

    def forward(self, p):
        h = p
        for lin in self.linears:
            h = self.act(lin(h))
        return torch.clamp(self.out(h), -self.truncation, self.truncation).squeeze(-1)
