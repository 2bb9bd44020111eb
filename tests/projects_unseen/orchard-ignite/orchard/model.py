import torch
import torch.nn as nn


class TreeNet(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.tree = nn.Sequential(nn.Linear(features, hidden), nn.SiLU())
        self.context = nn.Linear(hidden, hidden)
        self.out = nn.Linear(2 * hidden, 1)

    def forward(self, x):
        h = self.tree(x)
        around = self.context(h.mean(1, keepdim=True)).expand_as(h)
        return self.out(torch.cat([h, around], -1)).squeeze(-1)
