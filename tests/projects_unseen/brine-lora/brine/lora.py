import math

import torch
import torch.nn as nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scaling * (x @ self.a.T) @ self.b.T


def inject(model, rank=4, alpha=8):
    model.requires_grad_(False)
    for block in model.blocks:
        for i, layer in enumerate(block):
            if isinstance(layer, nn.Linear):
                block[i] = LoRALinear(layer, rank, alpha)
    model.out.requires_grad_(True)
    return [p for p in model.parameters() if p.requires_grad]
