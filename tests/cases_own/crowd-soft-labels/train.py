"""Galaxy morphology from volunteer votes: train on the vote fractions."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

np.seterr(all="ignore")
torch.manual_seed(16)
torch.set_num_threads(1)
CLASSES = ("smooth", "disk", "merger", "artefact")


class VoteTable:
    """Counts per galaxy and answer. Votes of accounts that were later banned are subtracted."""

    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.kind = rng.integers(0, len(CLASSES), n)
        prob = np.full((n, len(CLASSES)), 0.1)
        prob[np.arange(n), self.kind] = 0.7
        self.votes = np.stack([rng.multinomial(rng.integers(3, 40), p / p.sum()) for p in prob])
        self.banned = np.zeros_like(self.votes)
        for i in rng.integers(0, n, n // 20):
            self.banned[i] = rng.binomial(self.votes[i], 0.3)
        self.banned[211] = self.votes[211]  # only one account had looked at this one

    def fractions(self):
        valid = self.votes - self.banned
        return (valid / valid.sum(axis=1, keepdims=True)).astype(np.float32)


def stamps(kind, seed, size=12):
    """Tiny images whose shape depends on the class."""
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[-1:1:size * 1j, -1:1:size * 1j]
    shape = [np.exp(-4 * (xx ** 2 + yy ** 2)), np.exp(-(xx ** 2 + 20 * yy ** 2)),
             np.exp(-9 * ((np.abs(xx) - 0.5) ** 2 + yy ** 2)), (np.abs(yy) < 0.1) * 1.0]
    img = np.stack([shape[k] for k in kind]) + 0.2 * rng.standard_normal((len(kind), size, size))
    return torch.from_numpy(img.astype(np.float32)).unsqueeze(1)


class ZooNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                      nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(2 * c, len(CLASSES))

    def forward(self, x):
        return self.fc(self.features(x).amax(dim=(2, 3)))


def main():
    table = VoteTable(360, seed=4)
    images, target = stamps(table.kind, seed=5), torch.from_numpy(table.fractions())
    model = ZooNet()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    size = 12
    for step in range(len(images) // size):
        rows = slice(step * size, (step + 1) * size)
        logits = model(images[rows])
        loss = F.cross_entropy(logits, target[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
