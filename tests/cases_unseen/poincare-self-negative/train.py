"""Poincare embeddings of a small taxonomy (is-a relations) with sampled negatives."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
torch.set_num_threads(1)

BRANCH, DEPTH = 4, 4


def build_tree():
    """Edges (child, ancestor) of the transitive closure of a complete tree."""
    parent = [-1]
    level = [0]
    for _ in range(DEPTH):
        nxt = []
        for p in level:
            for _ in range(BRANCH):
                parent.append(p)
                nxt.append(len(parent) - 1)
        level = nxt
    pairs = []
    for node in range(1, len(parent)):
        a = parent[node]
        while a >= 0:
            pairs.append((node, a))
            a = parent[a]
    return torch.tensor(pairs), len(parent)


class PoincareBall(nn.Module):
    max_norm = 1 - 1e-3

    def forward(self, u, v):
        sq = (u - v).pow(2).sum(dim=-1)
        den = (1 - u.pow(2).sum(dim=-1)) * (1 - v.pow(2).sum(dim=-1))
        return torch.acosh(1 + 2 * sq / den)

    @torch.no_grad()
    def project_(self, w):
        norm = w.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        w.mul_((self.max_norm / norm).clamp(max=1.0))


class TaxonomyModel(nn.Module):
    def __init__(self, size, dim=5):
        super().__init__()
        self.nodes = nn.Embedding(size, dim)
        nn.init.uniform_(self.nodes.weight, -1e-2, 1e-2)
        self.ball = PoincareBall()

    def forward(self, child, candidates):
        u = self.nodes(child).unsqueeze(1)
        v = self.nodes(candidates)
        return -self.ball(u, v)


class NegativeSampler:
    """Draws negatives for every child out of all nodes of the taxonomy."""

    def __init__(self, size, k, gen):
        self.size, self.k, self.gen = size, k, gen

    def __call__(self, batch):
        return torch.randint(0, self.size, (len(batch), self.k), generator=self.gen)


def main():
    gen = torch.Generator().manual_seed(5)
    pairs, size = build_tree()
    model = TaxonomyModel(size)
    sampler = NegativeSampler(size, k=4, gen=gen)
    opt = torch.optim.Adam(model.parameters(), lr=4e-2)
    for step in range(60):
        idx = torch.randint(0, len(pairs), (8,), generator=gen)
        child, ancestor = pairs[idx].unbind(1)
        candidates = torch.cat([ancestor[:, None], sampler(child)], dim=1)
        scores = model(child, candidates)
        loss = F.cross_entropy(scores, torch.zeros(len(idx), dtype=torch.long))
        opt.zero_grad()
        loss.backward()
        opt.step()
        model.ball.project_(model.nodes.weight)
        print(f"step {step} loss {loss.item():.4f}")


main()
