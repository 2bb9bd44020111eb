"""Arrival forecasts for a bus stop from the last vehicles seen (cross-attention over sightings)."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
torch.set_num_threads(1)
NEG = torch.finfo(torch.float32).min


class SightingAttention(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, stop, seen, bias):
        b, n, d = seen.shape
        q = self.q(stop).view(b, 1, self.heads, -1).transpose(1, 2)
        k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.kv(seen).chunk(2, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
        weights = torch.softmax(scores + bias[:, None, None, :], dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, d))


class ArrivalNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.stop = nn.Embedding(20, dim)
        self.sighting = nn.Linear(5, dim)
        self.attend = SightingAttention(dim)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 1))

    def forward(self, stop, seen, padded, age):
        pad_bias = padded.float() * NEG
        stale_bias = (age > 30.0).float() * NEG
        s = self.stop(stop)
        return self.head(s + self.attend(s, self.sighting(seen), pad_bias + stale_bias)).squeeze(-1)


def minute(gen, step, n=24, slots=6):
    stop = torch.randint(20, (n,), generator=gen)
    seen = torch.randn(n, slots, 5, generator=gen)
    count = torch.randint(1, slots + 1, (n,), generator=gen)
    if step >= 37:                       # night service: some stops have not seen a vehicle at all
        count[torch.rand(n, generator=gen) < 0.2] = 0
    padded = torch.arange(slots)[None] >= count[:, None]
    age = torch.rand(n, slots, generator=gen) * 40
    age[padded] = 1e4
    y = torch.sin(stop.float()) + 0.2 * seen[..., 0].mean(1)
    return stop, seen, padded, age, y


if __name__ == "__main__":
    gen = torch.Generator().manual_seed(2)
    model = ArrivalNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(70):
        stop, seen, padded, age, y = minute(gen, step)
        loss = F.mse_loss(model(stop, seen, padded, age), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
