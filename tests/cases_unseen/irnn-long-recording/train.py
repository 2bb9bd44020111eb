"""Event counting in accelerometer recordings with an identity-initialised ReLU recurrence. Recordings are sorted by
length: the network sees short ones first."""
import os
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_num_threads(1)


@dataclass
class Settings:
    hidden: int = 24
    channels: int = 3
    batch: int = 6
    lr: float = 1e-3
    clip: float = 1.0
    gain: float = 1.08
    log_dir: str = "irnn_logs"


class Recordings(Dataset):
    def __init__(self, lengths, channels, seed=0):
        self.lengths, self.channels, self.seed = lengths, channels, seed

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        t = self.lengths[i]
        events = (torch.rand(t, generator=g) < 0.05).float()
        x = 0.1 * torch.randn(t, self.channels, generator=g) + events[:, None]
        return x, events.mean() * 10


class BucketBatches(Sampler):
    """Batches of equal length, in ascending order."""

    def __init__(self, lengths, batch):
        order = sorted(range(len(lengths)), key=lambda i: lengths[i])
        self.batches = [order[i:i + batch] for i in range(0, len(order), batch)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class IRNNCell(nn.Module):
    def __init__(self, channels, hidden, gain):
        super().__init__()
        self.inp = nn.Linear(channels, hidden)
        self.rec = nn.Linear(hidden, hidden, bias=False)
        with torch.no_grad():
            self.rec.weight.copy_(gain * torch.eye(hidden))

    def forward(self, x, h):
        return torch.relu(self.inp(x) + self.rec(h))


class EventCounter(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.hidden = s.hidden
        self.cell = IRNNCell(s.channels, s.hidden, s.gain)
        self.head = nn.Linear(s.hidden, 1)

    def forward(self, x):
        h = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return F.softplus(self.head(torch.log1p(h))).squeeze(1)


def main():
    s = Settings()
    torch.manual_seed(37)
    os.makedirs(s.log_dir, exist_ok=True)
    lengths = [40] * 36 + [80] * 36 + [160] * 24 + [1200] * 18
    data = Recordings(lengths, s.channels)
    loader = DataLoader(data, batch_sampler=BucketBatches(lengths, s.batch))
    model = EventCounter(s)
    opt = torch.optim.Adam(model.parameters(), lr=s.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=8)
    with open(os.path.join(s.log_dir, "train.log"), "w") as log:
        for step, (x, count) in enumerate(loader):
            loss = F.mse_loss(model(x), count)
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            opt.step()
            plateau.step(loss.item())
            print(f"step {step} loss {loss.item():.4f} length {x.shape[1]}")
            log.write(f"{step} {loss.item():.5f} {norm.item():.3f}\n")
    torch.save(model.state_dict(), os.path.join(s.log_dir, "counter.pt"))


if __name__ == "__main__":
    main()
