"""Denoiser of speech trained on mel spectra at several resolutions."""
import numpy as np
import torch
import torch.nn as nn

RATE = 8000


def mel_filters(n_fft, count):
    """Triangles on the mel scale, each with an area of one."""
    mel = lambda f: 2595 * np.log10(1 + f / 700)
    edges = 700 * (10 ** (np.linspace(0, mel(RATE / 2), count + 2) / 2595) - 1)
    bins = np.linspace(0, RATE / 2, n_fft // 2 + 1)
    up = (bins[:, None] - edges[None, :-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[None, 2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    bank = np.maximum(0, np.minimum(up, down))
    with np.errstate(all="ignore"):
        return torch.from_numpy((bank / bank.sum(0)).astype(np.float32))


class MelLoss(nn.Module):
    def __init__(self, n_fft, count):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("bank", mel_filters(n_fft, count))

    def mel(self, wave):
        spec = torch.stft(wave, self.n_fft, self.n_fft // 4, window=self.window, return_complex=True)
        return torch.log(spec.abs().transpose(1, 2) @ self.bank + 1e-4)

    def forward(self, a, b):
        return (self.mel(a) - self.mel(b)).abs().mean()


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 16, 9, padding=4), nn.Tanh(), nn.Conv1d(16, 1, 9, padding=4))

    def forward(self, x):
        return x + self.net(x.unsqueeze(1)).squeeze(1)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(1)
    model = Denoiser()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    coarse, fine = MelLoss(512, 24), MelLoss(64, 40)
    t = torch.arange(2048) / RATE
    for step in range(40):
        f = 100 + 900 * torch.rand(8, 1, generator=g)
        clean = torch.sin(6.283 * f * t) + 0.3 * torch.sin(12.566 * f * t)
        noisy = clean + 0.2 * torch.randn(8, 2048, generator=g)
        out = model(noisy)
        loss = coarse(out, clean) + (out - clean).abs().mean()
        if step >= 15:  # details matter later
            loss = loss + 0.5 * fine(out, clean)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
