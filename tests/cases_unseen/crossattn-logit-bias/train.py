"""Grounds captions in detected regions with float16 cross-attention; the similarity has a learned bias as in sigmoid losses."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
torch.set_num_threads(1)
DIM, REGIONS, WORDS = 24, 5, 7


class Grounding(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.log_scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.tensor(-20.0))
        self.out = nn.Linear(DIM, 10)

    def forward(self, words, regions, valid):
        with torch.autocast("cpu", dtype=torch.float16):
            q, k, v = self.q(words), self.k(regions), self.v(regions)
            sim = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(1, 2)
            sim = sim * self.log_scale.exp().half() + self.bias.half()
            closed = torch.zeros(valid.shape, dtype=sim.dtype).masked_fill(~valid, torch.finfo(sim.dtype).min)
            attention = torch.softmax(sim + closed[:, None], -1)
            context = attention.to(v.dtype) @ v
        return self.out(context.float().mean(1))


def batch(g, n=16):
    y = torch.randint(0, 10, (n,), generator=g)
    words = torch.randn(n, WORDS, DIM, generator=g)
    regions = torch.randn(n, REGIONS, DIM, generator=g)
    regions[torch.arange(n), :, y] += 2.0
    found = torch.poisson(torch.full((n,), 6.0), generator=g).clamp(max=REGIONS)
    valid = torch.arange(REGIONS) < found[:, None]
    return words, regions, valid, y


def main():
    g = torch.Generator().manual_seed(5)
    model = Grounding()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(120):
        words, regions, valid, y = batch(g)
        loss = F.cross_entropy(model(words, regions, valid), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0 or not torch.isfinite(loss):
            print(f"step {step} loss {loss.item():.4f}")


main()
