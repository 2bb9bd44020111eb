import itertools
from pathlib import Path

import torch

MAX_ATOMS = 6


def lennard_jones(pos):
    i, j = map(list, zip(*itertools.combinations(range(len(pos)), 2)))
    r = (pos[i] - pos[j]).pow(2).sum(-1).sqrt()
    return (4 * (r ** -12 - r ** -6)).sum()


def grow(n, g):
    """Random cluster with no pair closer than 0.95."""
    pos = [torch.zeros(3)]
    while len(pos) < n:
        new = pos[int(torch.randint(len(pos), (1,), generator=g))] + 1.3 * torch.randn(3, generator=g)
        if min(float((new - p).norm()) for p in pos) > 0.95:
            pos.append(new)
    pos = torch.stack(pos)
    return pos - pos.mean(0)


def prepare(path, per_size=60):
    path = Path(path)
    if path.exists():
        return torch.load(path)
    g = torch.Generator().manual_seed(1)
    data = {}
    for n in (4, 5, 6):
        rows = []
        for _ in range(per_size):
            pos = grow(n, g).requires_grad_()
            energy = lennard_jones(pos)
            force = -torch.autograd.grad(energy, pos)[0]
            rows.append((pos.detach(), energy.detach(), force))
        data[n] = rows
    torch.save(data, path)
    return data


def collate(rows):
    pos = torch.zeros(len(rows), MAX_ATOMS, 3)
    force = torch.zeros_like(pos)
    mask = torch.zeros(len(rows), MAX_ATOMS, dtype=torch.bool)
    for k, (p, _, f) in enumerate(rows):
        pos[k, :len(p)], force[k, :len(p)], mask[k, :len(p)] = p, f, True
    return pos, mask, torch.stack([e for _, e, _ in rows]), force


def batches(data, sizes, batch, steps, seed):
    g = torch.Generator().manual_seed(100 + seed)
    pool = [row for n in sizes for row in data[n]]
    for _ in range(steps):
        pick = torch.randint(len(pool), (batch,), generator=g).tolist()
        yield collate([pool[k] for k in pick])
