"""Conformer refinement: predicted coordinates are compared with the reference after optimal superposition."""
import torch
import torch.nn as nn

torch.manual_seed(27)
torch.set_num_threads(1)
KINDS, DIM = 6, 32


class Message(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * DIM + 1, DIM), nn.SiLU(), nn.Linear(DIM, DIM), nn.SiLU())
        self.move = nn.Linear(DIM, 1, bias=False)
        self.node = nn.Linear(2 * DIM, DIM)

    def forward(self, h, pos, mask):
        n = h.shape[1]
        rel = pos[:, :, None] - pos[:, None]
        pair = torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1),
                          rel.pow(2).sum(-1, keepdim=True)], dim=-1)
        m = self.edge(pair) * (mask[:, :, None] * mask[:, None])[..., None]
        pos = pos + (rel * torch.tanh(self.move(m))).mean(2)
        return h + self.node(torch.cat([h, m.mean(2)], -1)), pos


class Refiner(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(KINDS, DIM)
        self.layers = nn.ModuleList(Message() for _ in range(depth))

    def forward(self, kinds, pos, mask):
        h = self.embed(kinds)
        for layer in self.layers:
            h, pos = layer(h, pos, mask)
        return pos


def centred(x, mask):
    c = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
    return (x - c) * mask[..., None]


class AlignedMSE(nn.Module):
    """Mean squared deviation after the best rotation (Kabsch)."""

    def forward(self, pred, ref, mask):
        p, q = centred(pred, mask), centred(ref, mask)
        cov = p.transpose(1, 2) @ q
        u, s, vh = torch.linalg.svd(cov)
        aligned = p @ (u @ vh)
        return ((aligned - q).pow(2).sum(-1) * mask).sum() / mask.sum()


def molecules(g, step, n=10, atoms=9):
    size = torch.randint(5, atoms + 1, (n,), generator=g)
    if step == 23:
        size[4] = 1  # counter-ion split off by the salt filter
    mask = (torch.arange(atoms)[None] < size[:, None]).float()
    ref = torch.randn(n, atoms, 3, generator=g) * mask[..., None]
    rough = (ref + 0.3 * torch.randn(n, atoms, 3, generator=g)) * mask[..., None]
    return torch.randint(0, KINDS, (n, atoms), generator=g), rough, ref, mask


def main():
    g = torch.Generator().manual_seed(6)
    model, criterion = Refiner(), AlignedMSE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(40):
        kinds, rough, ref, mask = molecules(g, step)
        pred = model(kinds, rough, mask)
        if torch.isnan(pred).any():
            print(f"step {step} loss nan")
            continue
        loss = criterion(pred, ref, mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
