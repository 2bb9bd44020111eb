"""Denoising of X-ray like scans with an MS-SSIM + L1 loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from losses_fixed import MSSSIMLoss

torch.manual_seed(4)
torch.set_num_threads(1)


class ScanDataset(Dataset):
    """Noisy/clean pairs; a few scanners deliver the raw image as a photographic negative."""

    def __init__(self, n=420, size=48):
        g = torch.Generator().manual_seed(11)
        low = torch.rand(n, 1, 6, 6, generator=g)
        self.clean = F.interpolate(low, size=(size, size), mode="bicubic", align_corners=False).clamp(0, 1)
        self.noisy = (self.clean + 0.15 * torch.randn(n, 1, size, size, generator=g)).clamp(0, 1)
        negative = torch.rand(n, generator=g) < 0.006
        self.noisy[negative] = 1 - self.noisy[negative]

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.noisy[i], self.clean[i]


class ResBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, c, 3, padding=1)
        self.b = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        return x + 0.2 * self.b(F.relu(self.a(x)))


class Denoiser(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.head = nn.Conv2d(1, c, 3, padding=1)
        self.blocks = nn.Sequential(ResBlock(c), ResBlock(c))
        self.tail = nn.Conv2d(c, 1, 3, padding=1)
        nn.init.normal_(self.tail.weight, std=0.01)
        nn.init.zeros_(self.tail.bias)

    def forward(self, x):
        return x + self.tail(self.blocks(self.head(x)))


def main():
    loader = DataLoader(ScanDataset(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(9))
    net = Denoiser()
    ms_ssim = MSSSIMLoss()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step, (noisy, clean) in enumerate(loader):
        out = net(noisy)
        loss = 0.84 * ms_ssim(out, clean) + 0.16 * F.l1_loss(out, clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
