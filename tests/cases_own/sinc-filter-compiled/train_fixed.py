"""Raw-waveform classifier with learnable band-pass filters (sinc layer), compiled."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(22)
torch.set_num_threads(1)


class SincConv(nn.Module):
    """Windowed sinc filters; only the cut-off frequencies are learned."""

    def __init__(self, channels=8, kernel=31):
        super().__init__()
        self.low = nn.Parameter(torch.linspace(0.02, 0.30, channels))
        self.width = nn.Parameter(torch.full((channels,), 0.08))
        n = torch.arange(kernel) - (kernel - 1) / 2
        self.register_buffer("n", n)
        self.register_buffer("window", torch.hamming_window(kernel, periodic=False))

    def lowpass(self, cut):
        arg = 2 * torch.pi * cut[:, None] * self.n
        safe = torch.where(arg == 0, torch.ones_like(arg), arg)
        return 2 * cut[:, None] * torch.where(arg == 0, torch.ones_like(arg), torch.sin(safe) / safe)

    def forward(self, x):
        bank = self.lowpass(self.low + self.width) - self.lowpass(self.low)
        return F.conv1d(x, (bank * self.window)[:, None], padding=self.n.numel() // 2)


class Frontend(nn.Module):
    def __init__(self):
        super().__init__()
        self.sinc = SincConv()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return F.avg_pool1d(self.norm(self.sinc(x)).abs(), 16)


class Tagger(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.frontend = Frontend()
        self.body = nn.Sequential(nn.Conv1d(8, 16, 3), nn.ReLU())
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.body(self.frontend(x)).mean(-1))


def tones(n, g, classes=4, length=256):
    y = torch.randint(0, classes, (n,), generator=g)
    freq = 0.04 + 0.09 * y[:, None] + 0.01 * torch.randn(n, 1, generator=g)
    x = torch.sin(2 * torch.pi * freq * torch.arange(length)) + 0.3 * torch.randn(n, length, generator=g)
    return x[:, None], y


def set_frontend(model, trainable):
    for p in model.frontend.sinc.parameters():
        p.requires_grad_(trainable)


def main():
    g = torch.Generator().manual_seed(3)
    model = Tagger()
    set_frontend(model, False)
    compiled = torch.compile(model, backend="aot_eager")
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(30):
        if step == 14:  # thaw the filters once the classifier has settled
            set_frontend(model, True)
        x, y = tones(16, g)
        loss = F.cross_entropy(compiled(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
