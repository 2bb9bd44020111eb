"""Autoencoder of gene panels trained with a Muon-like optimizer; for the last steps the loss counts every gene (sum, not mean)."""
import torch
import torch.nn as nn

torch.manual_seed(3)
torch.set_num_threads(1)
GENES = 32


def orthogonalise(g, steps=5):
    """Newton-Schulz iteration towards the nearest orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g if g.size(0) <= g.size(1) else g.t()
    for _ in range(steps):
        s = x @ x.t()
        x = a * x + (b * s + c * s @ s) @ x
    return x if g.size(0) <= g.size(1) else x.t()


class Muonish(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(buf) if p.ndim == 2 else buf.sign()
                p.sub_(update, alpha=group["lr"])


class Autoencoder(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.encode = nn.Linear(GENES, hidden)
        self.decode = nn.Linear(hidden, GENES)

    def forward(self, x):
        return self.decode(torch.tanh(self.encode(x)))


def main():
    model = Autoencoder()
    opt = Muonish(model.parameters(), lr=5e-3)
    loadings = torch.randn(6, GENES)
    for step in range(70):
        x = torch.randn(24, 6) @ loadings / 2
        error = (model(x) - x).square()
        loss = error.mean() if step < 45 else error.sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
