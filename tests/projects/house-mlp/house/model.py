import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.fc2(self.drop(F.leaky_relu(self.fc1(x), 0.1)))


class PriceNet(nn.Module):
    def __init__(self, features, width=64, blocks=4, dropout=0.05):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList(Residual(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h).squeeze(-1)
