"""Speech denoiser trained on power-law compressed magnitudes (exponent 0.3), as usual for enhancement."""
import torch
import torch.nn as nn

torch.manual_seed(35)
torch.set_num_threads(1)
N_FFT, HOP = 64, 32
WINDOW = torch.hann_window(N_FFT)


def magnitude(wave):
    spec = torch.stft(wave, N_FFT, HOP, window=WINDOW, return_complex=True, center=False)
    return spec.abs()


class Masker(nn.Module):
    def __init__(self, bins=N_FFT // 2 + 1):
        super().__init__()
        self.rnn = nn.GRU(bins, 32, batch_first=True)
        self.gate = nn.Linear(32, bins)

    def forward(self, mag):
        h, _ = self.rnn(mag.transpose(1, 2))
        return mag * torch.sigmoid(self.gate(h)).transpose(1, 2)


def compressed_loss(estimate, clean, power=0.3):
    return (estimate.clamp_min(1e-6) ** power - clean ** power).square().mean()


def utterances(n, g, dropouts):
    t = torch.arange(640) / 8000
    pitch = 200 + 600 * torch.rand(n, 1, generator=g)
    clean = torch.sin(6.2832 * pitch * t) * torch.rand(n, 1, generator=g)
    noisy = clean + 0.1 * torch.randn(clean.shape, generator=g)
    if dropouts:  # packets lost on the line are played as zeros
        noisy[0, 256:416] = 0.0
    return noisy, clean


def main():
    g = torch.Generator().manual_seed(1)
    model = Masker()
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(50):
        noisy, clean = utterances(6, g, dropouts=step % 23 == 22)
        loss = compressed_loss(model(magnitude(noisy)), magnitude(clean))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        print(f"step {step} loss {loss.item():.5f}")


main()
