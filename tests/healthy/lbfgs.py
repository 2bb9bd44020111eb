"""Gaussian mixture and Gaussian process, both fitted with L-BFGS and a strong Wolfe line search."""
import hashlib
import math

import torch
import torch.nn as nn

torch.manual_seed(17)
torch.set_num_threads(1)


class Mixture(nn.Module):
    """Each point may only belong to some components; the others have log-probability -inf."""

    def __init__(self, k=4):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(k))
        self.mean = nn.Parameter(torch.randn(k, 2))
        self.log_std = nn.Parameter(torch.zeros(k))

    def forward(self, x, allowed):
        z = (x.unsqueeze(1) - self.mean) / self.log_std.exp().unsqueeze(1)
        log_p = -0.5 * z.square().sum(-1) - 2 * self.log_std - math.log(2 * math.pi)
        joint = (log_p + self.logits.log_softmax(0)).masked_fill(~allowed, -math.inf)
        return -torch.logsumexp(joint, 1).mean() + 1e-3 * self.log_std.square().sum()


class Process(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x, y):
        d2 = (x.unsqueeze(1) - x).square()
        k = torch.exp(-0.5 * d2 / self.log_scale.exp().square())
        k = k + (self.log_noise.exp() + 1e-4) * torch.eye(len(x))
        chol = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y.unsqueeze(1), chol).squeeze(1)
        return (0.5 * y @ alpha + chol.diagonal().log().sum()) / len(x)


def fit(name, model, args, steps):
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=6, history_size=8, line_search_fn="strong_wolfe")
    best, calls = float("inf"), 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = model(*args)
        loss.backward()
        return loss

    for step in range(steps):
        loss = opt.step(closure).item()
        print(f"step {step} loss {loss:.9g}")
        if best - loss < 1e-7:
            break
        best = loss
    print(f"{name} best {best:.9g} calls {calls}")
    h = hashlib.sha256()
    for p in model.parameters():
        h.update(p.detach().numpy().tobytes())
    print("sha256", h.hexdigest())


centers = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.5], [0.0, -2.5]])
owner = torch.randint(0, 4, (200,))
points = centers[owner] + 0.5 * torch.randn(200, 2)
allowed = torch.rand(200, 4) < 0.5
allowed[torch.arange(200), owner] = True
fit("mixture", Mixture(), (points, allowed), steps=25)

x = torch.linspace(-3, 3, 60)
y = torch.sin(2 * x) + 0.2 * torch.randn(60)
fit("process", Process(), (x, y), steps=15)
