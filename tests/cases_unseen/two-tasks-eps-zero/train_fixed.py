"""Energy and comfort of buildings from one trunk; the comfort head joins later. Hand-written Adam, to log its denominators."""
import torch
import torch.nn as nn

torch.manual_seed(27)
torch.set_num_threads(1)


class TinyAdam:
    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8):
        self.params = list(params)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.t = 0

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for p, m, v in zip(self.params, self.m, self.v):
            if p.grad is None:
                continue
            m.mul_(b1).add_(p.grad, alpha=1 - b1)
            v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            denom = (v / (1 - b2 ** self.t)).sqrt() + self.eps
            p -= self.lr * (m / (1 - b1 ** self.t)) / denom


class Building(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 24), nn.Tanh())
        self.energy = nn.Linear(24, 1)
        self.comfort = nn.Linear(24, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.energy(h), self.comfort(h)


def main():
    model = Building()
    opt = TinyAdam(model.parameters(), lr=3e-3)
    w = torch.randn(7, 2)
    for step in range(60):
        x = torch.randn(32, 7)
        y = torch.tanh(x @ w)
        energy, comfort = model(x)
        loss = (energy - y[:, :1]).square().mean()
        if step >= 20:
            ramp = min(1.0, (step - 20) / 20)
            loss = loss + ramp * (comfort - y[:, 1:]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
