"""Neural vocoder block with activation checkpointing; magnitudes are made positive by a smooth rectifier."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(33)
torch.set_num_threads(1)
BANDS = 16


class Rectifier(nn.Module):
    """Smooth positive part with adjustable sharpness."""

    def __init__(self, beta=1.0):
        super().__init__()
        self.beta = beta

    def forward(self, x):
        return torch.log(1 + torch.exp(self.beta * x)) / self.beta


class ResidualStack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=2, dilation=2)
        self.act = Rectifier()

    def forward(self, x):
        return x + self.conv2(self.act(self.conv1(x)))


class Vocoder(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.inp = nn.Conv1d(BANDS, width, 1)
        self.stacks = nn.ModuleList(ResidualStack(width) for _ in range(depth))
        self.out = nn.Conv1d(width, BANDS, 1)

    def forward(self, mel):
        h = self.inp(mel)
        for stack in self.stacks:
            h = checkpoint(stack, h, use_reentrant=False)
        return self.out(h)


class Studio:
    """Mel energies in, magnitudes out; one take was recorded with the gain wide open."""

    def __init__(self, seed, hot=(22,)):
        self.g, self.hot = torch.Generator().manual_seed(seed), hot

    def __call__(self, step, n=6, frames=20):
        mel = F.interpolate(torch.rand(n, BANDS, 5, generator=self.g), size=frames, mode="linear")
        target = mel.sqrt()
        if step in self.hot:
            mel[2] = mel[2] * 900
        return mel, target


def main():
    studio, model = Studio(6), Vocoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(40):
        mel, target = studio(step)
        loss = F.l1_loss(model(mel), target)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
