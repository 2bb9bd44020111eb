"""Motion forecasting with a displacement loss and a heading loss on the predicted trajectory."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(6)
torch.set_num_threads(1)
HIST, FUT = 8, 6


class TrackDataset(Dataset):
    """Tracks of vehicles. Short tracks are padded; `valid` marks the observed future steps."""

    def __init__(self, n=1600):
        g = torch.Generator().manual_seed(13)
        speed = torch.rand(n, 1, generator=g) + 0.3
        head = (torch.rand(n, 1, generator=g) * 2 - 1) * math.pi
        turn = (torch.rand(n, 1, generator=g) - 0.5) * 0.2
        ang = head + turn * torch.arange(HIST + FUT).float()
        step = torch.stack([speed * ang.cos(), speed * ang.sin()], -1)
        self.hist, self.fut = step[:, :HIST].clone(), step[:, HIST:].clone()
        self.valid = torch.ones(n, FUT, dtype=torch.bool)
        for i in range(900, n):
            if torch.rand(1, generator=g) < 0.05:
                self.valid[i, int(torch.randint(2, FUT, (1,), generator=g)):] = False

    def __len__(self):
        return len(self.hist)

    def __getitem__(self, i):
        return self.hist[i], self.fut[i], self.valid[i]


class Forecaster(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Linear(2, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, FUT * 2))

    def forward(self, hist, valid):
        _, h = self.rnn(F.relu(self.embed(hist)))
        steps = self.out(h[-1]).view(-1, FUT, 2)
        return steps * valid.unsqueeze(-1)


def heading_loss(pred, target, valid):
    heading = pred / pred.norm(dim=-1, keepdim=True)
    true_heading = target / target.norm(dim=-1, keepdim=True)
    err = 1 - (heading * true_heading).sum(-1)
    return err[valid].mean()


def displacement_loss(pred, target, valid):
    return F.smooth_l1_loss(pred[valid], target[valid])


def main():
    loader = DataLoader(TrackDataset(), batch_size=32, shuffle=False)
    model = Forecaster()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, (hist, fut, valid) in enumerate(loader):
        pred = model(hist, valid)
        loss = displacement_loss(pred, fut, valid) + 0.5 * heading_loss(pred, fut, valid)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
