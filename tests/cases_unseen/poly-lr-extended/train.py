"""Land-cover classifier with the usual poly schedule; the run was planned for 60 iterations and then extended."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)
torch.set_num_threads(1)


class PolySchedule:
    def __init__(self, optimizer, max_iter, power=0.9):
        self.optimizer, self.max_iter, self.power = optimizer, np.float64(max_iter), power
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.it = 0

    def step(self):
        self.it += 1
        factor = (1 - self.it / self.max_iter) ** self.power
        for group, base in zip(self.optimizer.param_groups, self.base):
            group["lr"] = float(base * factor)


class SpectralNet(nn.Module):
    def __init__(self, bands=10, classes=5):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(bands, 48), nn.ReLU())
        self.classify = nn.Linear(48, classes)

    def forward(self, x):
        return self.classify(self.stem(x))


def pixels(n, signatures):
    y = torch.randint(0, len(signatures), (n,))
    return signatures[y] + 0.5 * torch.randn(n, signatures.size(1)), y


def train(model, iters, extra):
    opt = torch.optim.SGD([
        {"params": model.stem.parameters(), "lr": 0.05},
        {"params": model.classify.parameters(), "lr": 0.2},
    ], momentum=0.9)
    schedule = PolySchedule(opt, iters)
    signatures = torch.randn(5, 10)
    for it in range(iters + extra):
        x, y = pixels(64, signatures)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        print(f"step {it} loss {loss.item():.4f}")


if __name__ == "__main__":
    train(SpectralNet(), iters=60, extra=20)
