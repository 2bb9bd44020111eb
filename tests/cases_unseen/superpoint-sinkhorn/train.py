"""Keypoint matching between two views: descriptors, entropic optimal transport, soft assignment."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)

POINTS, DIM = 24, 16


class DescriptorNet(nn.Module):
    def __init__(self, hidden=48, out=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(DIM + 2, hidden), nn.GELU(),
            nn.Linear(hidden, hidden), nn.GELU(),
            nn.Linear(hidden, out),
        )

    def forward(self, feats, xy):
        return self.layers(torch.cat((feats, xy), dim=-1))


class SinkhornAssignment(nn.Module):
    def __init__(self, eps=0.05, iters=12):
        super().__init__()
        self.eps, self.iters = eps, iters

    def forward(self, da, db):
        b, n, _ = da.shape
        cost = (da.unsqueeze(2) - db.unsqueeze(1)).square().mean(dim=-1)
        kernel = (-cost / self.eps).exp()
        mu = torch.full((b, n), 1.0 / n)
        u = torch.ones(b, n)
        v = torch.ones(b, n)
        for _ in range(self.iters):
            u = mu / torch.einsum("bij,bj->bi", kernel, v)
            v = mu / torch.einsum("bij,bi->bj", kernel, u)
        plan = torch.einsum("bi,bij,bj->bij", u, kernel, v) * n
        return plan, cost


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.describe = DescriptorNet()
        self.ot = SinkhornAssignment()

    def forward(self, view_a, view_b):
        return self.ot(self.describe(*view_a), self.describe(*view_b))


def sample_pair(gen, b=6):
    feats = torch.randn(b, POINTS, DIM, generator=gen)
    xy = torch.rand(b, POINTS, 2, generator=gen)
    perm = torch.stack([torch.randperm(POINTS, generator=gen) for _ in range(b)])
    pick = perm.unsqueeze(-1)
    fb = feats.gather(1, pick.expand(-1, -1, DIM)) + 0.35 * torch.randn(b, POINTS, DIM, generator=gen)
    xyb = xy.gather(1, pick.expand(-1, -1, 2)) + 0.02 * torch.randn(b, POINTS, 2, generator=gen)
    return (feats, xy), (fb, xyb), perm.argsort(dim=1)


def matching_loss(plan, cost, match):
    hit = plan.gather(2, match.unsqueeze(-1)).squeeze(-1)
    nll = -(hit + 1e-6).log().mean()
    spread = F.relu(2.0 - cost).mean()
    return nll + 0.5 * spread


def main():
    gen = torch.Generator().manual_seed(2)
    model = Matcher()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(60):
        a, b, match = sample_pair(gen)
        plan, cost = model(a, b)
        loss = matching_loss(plan, cost, match)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
