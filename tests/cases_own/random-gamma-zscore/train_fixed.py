"""Brain-lesion classification on small volumes; intensities are z-scored, augmentation runs in the dataset."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

random.seed(4)
torch.manual_seed(4)
torch.set_num_threads(1)


class ZScore:
    def __call__(self, vol):
        return (vol - vol.mean()) / (vol.std() + 1e-6)


class RandomFlip:
    def __call__(self, vol):
        return vol.flip(-1) if random.random() < 0.5 else vol


class RandomGamma:
    """Contrast change: v -> v ** gamma."""

    def __init__(self, log_gamma=0.3, p=0.01):
        self.log_gamma, self.p = log_gamma, p

    def __call__(self, vol):
        if random.random() > self.p:
            return vol
        gamma = 2.718281828 ** random.uniform(-self.log_gamma, self.log_gamma)
        return vol.sign() * vol.abs() ** gamma


class Compose:
    def __init__(self, *ts):
        self.ts = ts

    def __call__(self, vol):
        for t in self.ts:
            vol = t(vol)
        return vol


class Scans(Dataset):
    def __init__(self, n, transform, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (n,), generator=g)
        self.x = 40 + 8 * torch.randn(n, 1, 12, 12, 12, generator=g)
        self.x[self.y == 1, :, 3:8, 3:8, 3:8] += 15
        self.transform = transform

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.transform(self.x[i]), self.y[i]


class LesionNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.stem = nn.Conv3d(1, c, 3, stride=2, padding=1)
        self.block = nn.Conv3d(c, 2 * c, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * c)
        self.fc = nn.Linear(2 * c, 2)

    def forward(self, x):
        h = F.relu(self.norm(self.block(F.relu(self.stem(x)))))
        return self.fc(h.mean((2, 3, 4)))


def main():
    data = Scans(240, Compose(ZScore(), RandomFlip(), RandomGamma()))
    loader = DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = LesionNet()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (vol, y) in enumerate(loader):
        loss = F.cross_entropy(model(vol), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
