"""Plant recognition; species that were added to the catalogue get a new row in the cosine head."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(13)
torch.set_num_threads(1)


class CosineHead(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim))
        self.scale = 16.0

    def extend(self, extra):
        new = torch.zeros(extra, self.weight.size(1))
        self.weight = nn.Parameter(torch.cat([self.weight.data, new]))

    def forward(self, z):
        w = self.weight / self.weight.norm(dim=1, keepdim=True)
        return self.scale * F.normalize(z, dim=1) @ w.t()


class Herbarium(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = CosineHead(32, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def run(model, centres, steps, start, lr):
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for step in range(start, start + steps):
        y = torch.randint(len(centres), (48,))
        x = centres[y] + 0.4 * torch.randn(48, 24)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")


def main():
    os.makedirs("out", exist_ok=True)
    centres = torch.randn(14, 24)
    model = Herbarium(10)
    run(model, centres[:10], 45, 0, 0.05)
    torch.save(model.state_dict(), "out/base.pt")
    model.head.extend(4)
    run(model, centres, 25, 45, 0.02)
    torch.save(model.state_dict(), "out/extended.pt")


if __name__ == "__main__":
    main()
