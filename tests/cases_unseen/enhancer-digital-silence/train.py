"""Speech enhancement with a real-valued mask on the STFT and a compressed magnitude loss."""
import argparse
import csv
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
N_FFT, HOP = 64, 32


class NoisySpeech(Dataset):
    """Harmonic tones in noise, 800 samples each. Some recordings begin with digital zeros (the recorder was muted)."""

    def __init__(self, n, seed, muted=()):
        self.n, self.seed, self.muted = n, seed, set(muted)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1000 + i)
        t = torch.arange(800) / 8000
        f0 = 120 + 200 * torch.rand(1, generator=g)
        clean = sum(torch.sin(2 * math.pi * f0 * k * t) / k for k in range(1, 5))
        noisy = clean + 0.3 * torch.randn(800, generator=g)
        if i in self.muted:
            clean[:300] = 0
            noisy[:300] = 0
        return noisy, clean


class Stft(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT))

    def forward(self, wav):
        spec = torch.stft(wav, N_FFT, HOP, window=self.window, return_complex=True, center=False)
        return spec.real, spec.imag


class Masker(nn.Module):
    def __init__(self, bins=N_FFT // 2 + 1, width=40):
        super().__init__()
        self.stft = Stft()
        self.rnn = nn.GRU(bins, width, batch_first=True)
        self.gain = nn.Linear(width, bins)

    def forward(self, wav):
        re, im = self.stft(wav)
        feats = torch.log1p(re.square() + im.square()).transpose(1, 2)
        h, _ = self.rnn(feats)
        mask = torch.sigmoid(self.gain(h)).transpose(1, 2)
        return re * mask, im * mask


class SpectralLoss(nn.Module):
    def __init__(self, compress=0.5):
        super().__init__()
        self.compress = compress

    def magnitude(self, re, im):
        return torch.hypot(re, im)

    def forward(self, pred, target):
        p, t = self.magnitude(*pred), self.magnitude(*target)
        mag = F.l1_loss(torch.log1p(p), torch.log1p(t))
        cplx = F.mse_loss(pred[0], target[0]) + F.mse_loss(pred[1], target[1])
        return mag + self.compress * 0.01 * cplx


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--accumulate", type=int, default=2)
    p.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "exp")
    return p.parse_args()


def main():
    args = parse()
    torch.manual_seed(8)
    args.out.mkdir(parents=True, exist_ok=True)
    loader = DataLoader(NoisySpeech(128, 3, muted=[77]), batch_size=4, num_workers=1)
    model, criterion, stft = Masker(), SpectralLoss(), Stft()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs * len(loader) // args.accumulate)
    log = csv.writer(open(args.out / "train.csv", "w", newline=""))
    step, running = 0, 0.0
    for epoch in range(args.epochs):
        for i, (noisy, clean) in enumerate(loader):
            loss = criterion(model(noisy), stft(clean)) / args.accumulate
            loss.backward()
            running += loss.item()
            if (i + 1) % args.accumulate == 0:
                opt.step()
                opt.zero_grad()
                sched.step()
                print(f"step {step} loss {running:.4f}")
                log.writerow([step, epoch, running])
                step, running = step + 1, 0.0
        torch.save(model.state_dict(), args.out / f"masker_{epoch}.pt")


if __name__ == "__main__":
    main()
