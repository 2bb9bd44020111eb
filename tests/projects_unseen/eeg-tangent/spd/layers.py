import torch
import torch.nn as nn


class TemporalFilter(nn.Module):
    """One FIR filter per channel."""

    def __init__(self, channels, taps=15):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, taps, padding=taps // 2, groups=channels, bias=False)
        with torch.no_grad():
            self.conv.weight.mul_(0.3)
            self.conv.weight[:, :, taps // 2] += 1.0

    def forward(self, x):
        return self.conv(x)


class Covariance(nn.Module):
    def __init__(self, ridge=1e-3):
        super().__init__()
        self.ridge = ridge

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        cov = x @ x.transpose(1, 2) / (x.shape[-1] - 1)
        return cov + self.ridge * torch.eye(x.shape[1])


class LogEig(nn.Module):
    """Matrix logarithm of symmetric positive definite matrices."""

    def forward(self, cov):
        vals, vecs = torch.linalg.eigh(cov)
        return vecs @ torch.diag_embed(vals.log()) @ vecs.transpose(1, 2)


class TangentNet(nn.Module):
    def __init__(self, channels=8, classes=2):
        super().__init__()
        self.temporal = TemporalFilter(channels)
        self.cov = Covariance()
        self.logeig = LogEig()
        rows, cols = torch.triu_indices(channels, channels)
        self.register_buffer("rows", rows)
        self.register_buffer("cols", cols)
        self.head = nn.Sequential(nn.Linear(len(rows), 32), nn.ELU(), nn.Dropout(0.2), nn.Linear(32, classes))

    def forward(self, x):
        s = self.logeig(self.cov(self.temporal(x)))
        return self.head(s[:, self.rows, self.cols])
