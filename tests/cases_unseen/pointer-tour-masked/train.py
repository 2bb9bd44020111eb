"""Pointer network that learns short tours with REINFORCE. Visited cities are masked out of the next choice."""
import csv
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
CITIES, BATCH = 8, 32
NEG_INF = float("-inf")


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, xy, block):
        h = self.inp(xy)
        a, _ = self.attn(h, h, h, attn_mask=block, need_weights=False)
        return self.norm(h + a)


class PointerTour(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.encoder = Encoder(dim)
        self.cell = nn.GRUCell(dim, dim)
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def local_mask(self, xy, keep=5):
        """Every city only looks at its nearest neighbours (itself included)."""
        near = torch.cdist(xy, xy).argsort(dim=-1)[..., :keep]
        block = torch.full((len(xy), CITIES, CITIES), NEG_INF)
        block.scatter_(2, near, 0.0)
        return block.repeat_interleave(4, dim=0)

    def forward(self, xy, g=None):
        h = self.encoder(xy, self.local_mask(xy))
        state, last = h.mean(1), h.mean(1)
        visited = torch.zeros(len(xy), CITIES, dtype=torch.bool)
        tour, logps, entropies = [], [], []
        for _ in range(CITIES):
            state = self.cell(last, state)
            score = (self.key(h) @ self.query(state).unsqueeze(-1)).squeeze(-1) / h.shape[-1] ** 0.5
            logp = F.log_softmax(score.masked_fill(visited, NEG_INF), dim=-1)
            with torch.no_grad():
                p = logp.exp()
                entropies.append(-(p * logp).nan_to_num().sum(-1).mean())
                pick = logp.argmax(-1) if g is None else torch.multinomial(p, 1, generator=g).squeeze(1)
            logps.append(logp.gather(1, pick[:, None]).squeeze(1))
            tour.append(pick)
            visited = visited.scatter(1, pick[:, None], True)
            last = h[torch.arange(len(xy)), pick]
        return torch.stack(tour, 1), torch.stack(logps, 1).sum(1), torch.stack(entropies).mean()


def tour_length(xy, tour):
    path = xy.gather(1, tour[..., None].expand(-1, -1, 2))
    return (path - path.roll(-1, dims=1)).norm(dim=-1).sum(1)


def nearest_unvisited_baseline(xy):
    """Greedy nearest-neighbour tours, for comparison."""
    d = torch.cdist(xy, xy)
    at = torch.zeros(len(xy), dtype=torch.long)
    seen, order = torch.zeros(len(xy), CITIES, dtype=torch.bool), []
    for _ in range(CITIES):
        order.append(at)
        seen = seen.scatter(1, at[:, None], True)
        row = d[torch.arange(len(xy)), at].masked_fill(seen, float("inf"))
        at = row.argmin(dim=1)
    return tour_length(xy, torch.stack(order, 1))


def main():
    torch.manual_seed(17)
    out = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tours")
    os.makedirs(out, exist_ok=True)
    g = torch.Generator().manual_seed(1)
    model = PointerTour()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    best = float("inf")
    test = torch.rand(64, CITIES, 2, generator=torch.Generator().manual_seed(1234))
    with open(os.path.join(out, "log.csv"), "w", newline="") as f:
        log = csv.writer(f)
        for step in range(40):
            xy = torch.rand(BATCH, CITIES, 2, generator=g)
            tour, logp, entropy = model(xy, g)
            length = tour_length(xy, tour)
            advantage = (length - length.mean()) / (length.std() + 1e-6)
            loss = (advantage * logp).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            print(f"step {step} loss {loss.item():.4f} length {length.mean().item():.3f}")
            log.writerow([step, loss.item(), length.mean().item(), entropy.item()])
            if step % 10 == 9:
                with torch.no_grad():
                    score = tour_length(test, model(test)[0]).mean().item()
                if score < best:
                    best = score
                    torch.save(model.state_dict(), os.path.join(out, "best.pt"))
                print(f"eval {score:.3f} greedy {nearest_unvisited_baseline(test).mean().item():.3f}")


if __name__ == "__main__":
    main()
