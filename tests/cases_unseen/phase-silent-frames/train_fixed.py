"""Vocoder phase loss on clips with digital silence, and a repulsion term over frame embeddings."""
import math
import os

import torch
import torch.nn as nn

torch.manual_seed(61)
torch.set_num_threads(1)


class Vocoder(nn.Module):
    def __init__(self, bins=17):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * bins, 64), nn.GELU())
        self.out = nn.Linear(64, 2 * bins, bias=False)

    def forward(self, spectrum):
        silent = spectrum.abs().amax(-1, keepdim=True) == 0
        h = self.net(torch.view_as_real(spectrum).flatten(-2)).masked_fill(silent, 0.0)
        return torch.view_as_complex(self.out(h).unflatten(-1, (-1, 2))), h


def phase_loss(a, b):
    d = torch.angle(a) - torch.angle(b)
    return (1 - torch.cos(d)).mean()


def main():
    os.makedirs("vocoder", exist_ok=True)
    gen = torch.Generator().manual_seed(2)
    window = torch.hann_window(32)
    model = Vocoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    best = float("inf")
    for step in range(60):
        t = torch.arange(512) / 512
        wave = torch.sin(2 * math.pi * (20 + 60 * torch.rand(4, 1, generator=gen)) * t)
        if step % 3 == 2:
            wave[:, 200:360] = 0.0
        clean = torch.stft(wave, 32, window=window, return_complex=True).transpose(1, 2)
        made, h = model(clean)
        spread = torch.exp(-torch.cdist(h.flatten(0, 1), h.flatten(0, 1))).mean()
        loss = (made - clean).abs().pow(2).mean() + 0.1 * phase_loss(made, clean) + 0.01 * spread
        opt.zero_grad()
        loss.backward()
        opt.step()
        if loss.item() < best:
            best = loss.item()
            torch.save({"best": best, "model": model.state_dict()}, "vocoder/best.pt")
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
