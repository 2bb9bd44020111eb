import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
torch.set_num_threads(1)
N_FFT, HOP = 64, 32


class MaskNet(nn.Module):
    """Predicts a real mask for each time-frequency bin."""

    def __init__(self, bins=N_FFT // 2 + 1, hidden=48):
        super().__init__()
        self.rnn = nn.GRU(bins, hidden, batch_first=True)
        self.out = nn.Linear(hidden, bins)

    def forward(self, mag):
        h, _ = self.rnn(mag.transpose(1, 2))
        return torch.sigmoid(self.out(h)).transpose(1, 2)


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(N_FFT))
        self.mask = MaskNet()

    def spectrum(self, wav):
        z = torch.stft(wav, N_FFT, HOP, window=self.window, return_complex=True)
        return z.real, z.imag

    def forward(self, wav):
        re, im = self.spectrum(wav)
        m = self.mask(torch.log1p(re ** 2 + im ** 2))
        return re * m, im * m


def phase(re, im):
    return torch.atan2(im, re)


def spectral_loss(est, ref, alpha=0.02):
    (er, ei), (rr, ri) = est, ref
    power = F.mse_loss(er ** 2 + ei ** 2, rr ** 2 + ri ** 2)
    drift = 1 - torch.cos(phase(er, ei) - phase(rr, ri))
    return power + alpha * drift.mean()


class Clips:
    """Short clips; some were exported from an editor with a long exponential fade-out."""

    def __init__(self, seed, length=1024):
        self.g = torch.Generator().manual_seed(seed)
        self.length = length

    def take(self, n, step):
        t = torch.arange(self.length) / 8000
        f = 200 + 1500 * torch.rand(n, 1, generator=self.g)
        clean = torch.sin(2 * torch.pi * f * t)
        noisy = clean + 0.3 * torch.randn(n, self.length, generator=self.g)
        if step == 17:
            fade = torch.exp(-torch.linspace(0, 70, self.length // 2))
            clean[3, self.length // 2:] *= fade
            noisy[3, self.length // 2:] *= fade
        return noisy, clean


def main():
    clips = Clips(seed=4)
    model = Enhancer()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(35):
        noisy, clean = clips.take(8, step)
        est = model(noisy)
        with torch.no_grad():
            ref = model.spectrum(clean)
        loss = spectral_loss(est, ref)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
