"""L0 pruning of a keyword spotter: hard-concrete gates with a learned temperature."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
torch.set_num_threads(1)


class HardConcrete(nn.Module):
    def __init__(self, size, low=-0.1, high=1.1):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.full((size,), 1.5))
        self.beta = nn.Parameter(torch.tensor(0.66))
        self.low, self.high = low, high

    def forward(self, batch):
        u = torch.rand(batch, self.log_alpha.numel(), dtype=torch.float32).clamp(1e-6, 1 - 1e-6)
        noise = torch.log(u) - torch.log1p(-u)
        s = torch.sigmoid((noise + self.log_alpha) / self.beta)
        return (s * (self.high - self.low) + self.low).clamp(0, 1)

    def penalty(self):
        return torch.sigmoid(self.log_alpha).mean()


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(40, 64)
        self.gate = HardConcrete(64)
        self.words = nn.Linear(64, 6)

    def forward(self, x):
        h = F.relu(self.front(x))
        return self.words(h * self.gate(len(x)))


def train(steps=60):
    gen = torch.Generator().manual_seed(4)
    centres = torch.randn(6, 40, generator=gen)
    model = Spotter()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    history = []
    for step in range(steps):
        y = torch.randint(6, (4,), generator=gen)
        x = centres[y] + torch.randn(4, 40, generator=gen)
        loss = F.cross_entropy(model(x), y) + 0.1 * model.gate.penalty()
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append(loss.item())
        print(f"step {step} loss {loss.item():.4f}")
    with open("history.json", "w") as f:
        json.dump(history, f)


if __name__ == "__main__":
    train()
