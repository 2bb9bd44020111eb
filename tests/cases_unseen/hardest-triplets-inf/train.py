"""Re-identification of animals with batch-hard triplets: distances that do not count are set to infinity before min and max."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(59)
torch.set_num_threads(1)
INF = float("inf")


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 12))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def batch_hard(z, ids, margin=0.3):
    d = (2 - 2 * z @ z.t()).clamp_min(1e-6).sqrt()
    same = ids[:, None] == ids[None]
    others = d.masked_fill(same, INF)
    nearest_other = others.min(1).values
    own = d.masked_fill(~same, -INF).fill_diagonal_(-INF)
    furthest_own = own.max(1).values
    usable = torch.isfinite(nearest_other) & torch.isfinite(furthest_own)  # animals seen once have no positive
    return F.relu(furthest_own[usable] - nearest_other[usable] + margin).sum() / usable.sum().clamp_min(1)


def sightings(n, g, centres):
    ids = torch.randint(0, len(centres), (n,), generator=g)
    return centres[ids] + 0.8 * torch.randn(n, centres.size(1), generator=g), ids


def main():
    g = torch.Generator().manual_seed(5)
    centres = torch.randn(12, 14, generator=g)
    model = Embedder()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    best, patience = INF, 0
    for step in range(60):
        x, ids = sightings(20, g, centres)
        if step == 31:
            ids = torch.full_like(ids, 3)  # one animal sat in front of the camera
        loss = batch_hard(model(x), ids)
        opt.zero_grad()
        loss.backward()
        opt.step()
        best, patience = (loss.item(), 0) if loss.item() < best else (best, patience + 1)
        print(f"step {step} loss {loss.item():.4f} best {best:.4f} patience {patience}")


main()
