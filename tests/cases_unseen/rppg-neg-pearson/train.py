"""Remote photoplethysmography: pulse wave from face clips (PhysNet-like), negative Pearson loss."""
import torch
import torch.nn as nn

from signal_losses import NegPearson, Smoothness

torch.manual_seed(14)
torch.set_num_threads(1)

FRAMES, SIZE, FPS = 48, 8, 24.0


class PhysNetLite(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(3, ch, (1, 3, 3), padding=(0, 1, 1)), nn.ELU())
        self.temporal = nn.Sequential(
            nn.Conv3d(ch, ch, (5, 1, 1), padding=(2, 0, 0), padding_mode="replicate"), nn.ELU(),
            nn.Conv3d(ch, ch, (5, 1, 1), padding=(2, 0, 0), padding_mode="replicate"), nn.ELU(),
        )
        self.head = nn.Conv1d(ch, 1, 1)

    def forward(self, clip):
        h = self.temporal(self.stem(clip)).mean(dim=(3, 4))
        return self.head(h).squeeze(1)


class ClipSource:
    """Synthetic face crops; when the tracker loses the face the crop is black."""

    def __init__(self, seed, lost=0.01):
        self.gen = torch.Generator().manual_seed(seed)
        self.lost = lost

    def __call__(self, n=6):
        t = torch.arange(FRAMES) / FPS
        rate = 0.9 + 0.8 * torch.rand(n, 1, generator=self.gen)
        phase = 6.28 * torch.rand(n, 1, generator=self.gen)
        pulse = torch.sin(6.2832 * rate * t + phase)
        skin = torch.tensor([0.7, 0.5, 0.4]).view(1, 3, 1, 1, 1)
        clip = skin * (1 + 0.25 * pulse.view(n, 1, FRAMES, 1, 1) * torch.tensor([0.3, 1.0, 0.5]).view(1, 3, 1, 1, 1))
        clip = clip + 0.1 * torch.randn(n, 3, FRAMES, SIZE, SIZE, generator=self.gen)
        gone = torch.rand(n, generator=self.gen) < self.lost
        clip[gone] = 0.0
        return clip, pulse


def train(steps=50):
    source = ClipSource(seed=30)
    model = PhysNetLite()
    pearson, smooth = NegPearson(), Smoothness()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        clip, pulse = source()
        wave = model(clip)
        loss_wave = pearson(wave, pulse)
        loss_smooth = smooth(wave)
        loss = loss_wave + 0.1 * loss_smooth
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
