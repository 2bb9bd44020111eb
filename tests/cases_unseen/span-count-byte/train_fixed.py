"""Masked language modelling of DNA reads: the loss is averaged per read over the masked bases."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)
torch.set_num_threads(1)
BASES, MASK = 4, 4


class ReadModel(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(BASES + 1, dim)
        self.conv = nn.Sequential(nn.Conv1d(dim, dim, 9, padding=4), nn.ReLU(), nn.Conv1d(dim, dim, 9, padding=4), nn.ReLU())
        self.out = nn.Conv1d(dim, BASES, 1)

    def forward(self, ids):
        return self.out(self.conv(self.embed(ids).transpose(1, 2)))


def corrupt(ids, ratio, g):
    """Hides a span of every read; the mask is kept in bytes, as it is written to disk."""
    n, length = ids.shape
    mask = torch.zeros(n, length, dtype=torch.uint8)
    span = int(length * ratio)
    for row in mask:
        start = int(torch.randint(0, length - span + 1, (1,), generator=g))
        row[start:start + span] = 1
    return ids.masked_fill(mask.bool(), MASK), mask


def per_read_loss(logits, ids, mask):
    nll = F.cross_entropy(logits, ids, reduction="none")
    hidden = mask.sum(1)
    return ((nll * mask).sum(1) / hidden).mean()


def main():
    g = torch.Generator().manual_seed(8)
    model = ReadModel()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    motif = torch.randint(0, BASES, (32,), generator=g)
    for step in range(50):
        length = 512 if step < 30 else 1024  # long reads come last
        ids = motif.repeat(6, length // 32).roll(step, 1)
        noise = torch.rand(ids.shape, generator=g) < 0.05
        ids = torch.where(noise, torch.randint(0, BASES, ids.shape, generator=g), ids)
        corrupted, mask = corrupt(ids, 0.25, g)
        loss = per_read_loss(model(corrupted), ids, mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} length {length} loss {loss.item():.4f}")


main()
