"""Two-speaker separation on short mixtures stored as .npy, SI-SDR objective."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(19)
torch.set_num_threads(1)

SAMPLES, ITEMS = 256, 96


def record_corpus(folder):
    """Sources of shape (2, SAMPLES) per item; speakers take turns, so activity differs from item to item."""
    rng = np.random.default_rng(8)
    t = np.arange(SAMPLES) / 64.0
    for i in range(ITEMS):
        f0 = rng.uniform([1.0, 5.0], [3.0, 9.0])[:, None]
        src = np.sin(2 * np.pi * f0 * t + rng.uniform(0, 6, (2, 1))) * rng.uniform(0.4, 1.0, (2, 1))
        onset = rng.integers(0, SAMPLES // 3, 2)
        for s in range(2):
            src[s, : onset[s]] = 0.0
        if i == 61:
            src[1, :] = 0.0
        np.save(os.path.join(folder, f"utt_{i:04d}.npy"), src.astype(np.float32))


class Mixtures(Dataset):
    def __init__(self, folder):
        self.files = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".npy"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        src = torch.from_numpy(np.load(self.files[i]))
        return src.sum(dim=0), src


class ConvTasLite(nn.Module):
    def __init__(self, ch=32, k=16):
        super().__init__()
        self.encoder = nn.Conv1d(1, ch, k, stride=k // 2, bias=False)
        self.separator = nn.Sequential(
            nn.GroupNorm(1, ch),
            nn.Conv1d(ch, ch, 3, padding=1), nn.PReLU(),
            nn.Conv1d(ch, ch, 3, padding=2, dilation=2), nn.PReLU(),
            nn.Conv1d(ch, 2 * ch, 1),
        )
        self.decoder = nn.ConvTranspose1d(ch, 1, k, stride=k // 2, bias=False)

    def forward(self, mix):
        w = self.encoder(mix.unsqueeze(1))
        masks = self.separator(w).sigmoid().chunk(2, dim=1)
        return torch.cat([self.decoder(w * m) for m in masks], dim=1)


def si_sdr(est, ref):
    est = est - est.mean(dim=-1, keepdim=True)
    ref = ref - ref.mean(dim=-1, keepdim=True)
    scale = (est * ref).sum(-1, keepdim=True) / (ref.pow(2).sum(-1, keepdim=True) + 1e-8)
    target = scale * ref
    noise = est - target
    return 10 * torch.log10(target.pow(2).sum(-1) / (noise.pow(2).sum(-1) + 1e-8) + 1e-8)


def main():
    with tempfile.TemporaryDirectory() as folder:
        record_corpus(folder)
        loader = DataLoader(Mixtures(folder), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
        model = ConvTasLite()
        opt = torch.optim.Adam(model.parameters(), lr=3e-3)
        step = 0
        for epoch in range(2):
            for mix, sources in loader:
                loss = -si_sdr(model(mix), sources).mean()
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                opt.step()
                print(f"step {step} loss {loss.item():.4f}")
                step += 1


main()
