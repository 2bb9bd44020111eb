"""Node classification on one graph (full batch) with gradient clipping that adapts to the usual gradient norm."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
torch.set_num_threads(1)


class GraphConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.lin = nn.Linear(n_in, n_out)

    def forward(self, x, adj):
        return adj @ self.lin(x)


class GCN(nn.Module):
    def __init__(self, n_in, hidden, classes):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(n_in, hidden), GraphConv(hidden, classes)

    def forward(self, x, adj):
        return self.conv2(F.relu(self.conv1(x, adj)), adj)


class AdaptiveClipper:
    """Clip to mean + z * std of the gradient norm (exponential moving averages)."""

    def __init__(self, params, beta=0.6, z=2.0):
        self.params, self.beta, self.z = list(params), beta, z
        self.mean = self.square = None

    def __call__(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        if self.mean is None:
            self.mean, self.square = norm.clone(), norm ** 2
        std = torch.sqrt(self.square - self.mean ** 2)
        limit = self.mean + self.z * std
        for p in self.params:
            p.grad.mul_((limit / norm).clamp(max=1.0))
        self.mean = self.beta * self.mean + (1 - self.beta) * norm
        self.square = self.beta * self.square + (1 - self.beta) * norm ** 2


def citation_graph(n=120, classes=4, feats=24, seed=2):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    x = F.one_hot(y, feats).float() + torch.randn(n, feats, generator=g)
    same = y[:, None] == y[None]
    link = torch.rand(n, n, generator=g) < torch.where(same, 0.12, 0.01)
    adj = (link | link.t()).float() + torch.eye(n)
    d = adj.sum(1).rsqrt()
    return x, d[:, None] * adj * d[None], y


def learning_rate(step, decay_steps=20, peak=0.01):
    """Linear decay to zero."""
    return peak * max(0.0, 1.0 - step / decay_steps)


def main():
    x, adj, y = citation_graph()
    model = GCN(x.shape[1], 16, 4)
    clip = AdaptiveClipper(model.parameters())
    opt = torch.optim.Adam(model.parameters(), lr=0.0)
    for step in range(60):
        opt.param_groups[0]["lr"] = learning_rate(step)
        loss = F.cross_entropy(model(x, adj), y)
        opt.zero_grad()
        loss.backward()
        clip()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
