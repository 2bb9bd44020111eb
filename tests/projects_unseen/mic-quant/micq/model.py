import torch.nn as nn
import torch.nn.functional as F

from .quant import Observer


class KeywordNet(nn.Module):
    def __init__(self, cfg, width=24):
        super().__init__()
        self.quant_in = Observer(cfg.mics, cfg.bits)
        self.conv1 = nn.Conv1d(cfg.mics, width, 9, stride=2, padding=4)
        self.quant_mid = Observer(width, cfg.bits)
        self.conv2 = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.head = nn.Linear(width, cfg.words)

    def forward(self, x):
        x = self.conv1(self.quant_in(x))
        x = self.conv2(F.silu(self.quant_mid(x)))
        return self.head(F.silu(x).mean(-1))
