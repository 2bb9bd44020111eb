"""Trajectory forecasting: K modes, each with a 2x2 covariance per future step, trained by Gaussian NLL."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)
torch.set_num_threads(1)
HIST, FUT, MODES = 10, 8, 3


def sample_agents(n, g):
    """Agents with constant turn rate; returns relative history and future positions."""
    speed = torch.rand(n, 1, generator=g) * 0.8 + 0.4
    turn = (torch.rand(n, 1, generator=g) - 0.5) * 0.4
    head = torch.rand(n, 1, generator=g) * 2 * math.pi
    t = torch.arange(HIST + FUT).float()[None]
    ang = head + turn * t
    d = torch.stack([speed * ang.cos(), speed * ang.sin()], -1)
    pos = d.cumsum(1) + 0.03 * torch.randn(n, HIST + FUT, 2, generator=g)
    pos = pos - pos[:, HIST - 1:HIST]
    return pos[:, :HIST], pos[:, HIST:]


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.rnn = nn.GRU(2, dim, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())

    def forward(self, hist):
        _, h = self.rnn(hist)
        return self.mlp(h[0])


class MultiPathHead(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.mode = nn.Linear(dim, MODES)
        self.mean = nn.Linear(dim, MODES * FUT * 2)
        self.cov = nn.Linear(dim, MODES * FUT * 3)

    def forward(self, h):
        b = h.size(0)
        mean = self.mean(h).view(b, MODES, FUT, 2)
        a, d, c = self.cov(h).view(b, MODES, FUT, 3).unbind(-1)
        var_x, var_y = F.softplus(a + 1.0) + 1e-3, F.softplus(d + 1.0) + 1e-3
        cov = torch.stack([torch.stack([var_x, c], -1), torch.stack([c, var_y], -1)], -2)
        return self.mode(h), mean, cov


class MultiPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = MultiPathHead()

    def forward(self, hist):
        return self.head(self.encoder(hist))


def nll_with_covariances(logits, mean, cov, target):
    diff = (target[:, None] - mean).unsqueeze(-1)
    maha = (diff * torch.linalg.solve(cov, diff)).sum(dim=(-1, -2))
    log_det = torch.logdet(cov)
    log_p = -0.5 * (maha + log_det).sum(-1) - FUT * math.log(2 * math.pi)
    return -torch.logsumexp(F.log_softmax(logits, -1) + log_p, dim=-1).mean()


def main():
    g = torch.Generator().manual_seed(5)
    model = MultiPath()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        hist, fut = sample_agents(48, g)
        logits, mean, cov = model(hist)
        loss = nll_with_covariances(logits, mean, cov, fut)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
