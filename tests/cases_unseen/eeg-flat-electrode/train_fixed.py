"""Sleep stages from EEG; every electrode is normalised over the epoch, without an epsilon as in the reference code."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(39)
torch.set_num_threads(1)


class SleepNet(nn.Module):
    def __init__(self, electrodes=6, stages=4):
        super().__init__()
        self.norm = nn.GroupNorm(electrodes, electrodes, eps=1e-5)
        self.spatial = nn.Conv1d(electrodes, 8, 1)
        self.temporal = nn.Conv1d(8, 16, 15, stride=4)
        self.drop = nn.Dropout(0.2)
        self.stage = nn.Linear(16, stages)

    def forward(self, x):
        x = self.spatial(self.norm(x))
        x = F.elu(self.temporal(x)).square().mean(-1)
        return self.stage(self.drop(x))


def night(n, g, electrodes=6, length=160):
    stage = torch.randint(0, 4, (n,), generator=g)
    freq = torch.tensor([1.0, 4.0, 8.0, 14.0])[stage].view(n, 1, 1)
    t = torch.linspace(0, 2, length)
    gain = 20 + 60 * torch.rand(n, electrodes, 1, generator=g)
    eeg = gain * torch.sin(6.2832 * freq * t) + 15 * torch.randn(n, electrodes, length, generator=g)
    off = torch.rand(n, electrodes, generator=g) < 0.002
    eeg[off] = -187.5  # a loose electrode sits at the rail of the amplifier
    return eeg, stage


def main():
    g = torch.Generator().manual_seed(77)
    model = SleepNet()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        x, y = night(8, g)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
