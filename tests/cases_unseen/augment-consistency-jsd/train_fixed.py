"""Image classifier with a consistency term: sharpened predictions of two corrupted views should agree (Jensen-Shannon)."""
import logging
import os
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass
class Options:
    classes: int = 6
    temperature: float = 0.1
    weight: float = 0.5
    lr: float = 6e-3
    epochs: int = 6
    batch: int = 32
    run_dir: str = field(default_factory=lambda: os.path.join(HERE, "runs", "jsd"))


def make_patterns(classes, n, seed, side=10):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(classes, 1, side, side, generator=torch.Generator().manual_seed(42))
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(proto[y] + 0.4 * torch.randn(n, 1, side, side, generator=g), y)


class Classifier(nn.Module):
    def __init__(self, classes, ch=12):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                 nn.Conv2d(ch, 2 * ch, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(8 * ch, classes)

    def forward(self, x):
        return self.fc(self.net(x))


def corrupt(x, g):
    noise = 0.2 * torch.randn(x.shape, generator=g)
    gain = 0.8 + 0.4 * torch.rand(len(x), 1, 1, 1, generator=g)
    return gain * x + noise


class Agreement(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def divergence(self, p, m):
        return (torch.xlogy(p, p.clamp(min=1e-8)) - torch.xlogy(p, m.clamp(min=1e-8))).sum(dim=1).mean()

    def forward(self, *logits):
        probs = [F.softmax(z / self.temperature, dim=1) for z in logits]
        mixture = torch.stack(probs).mean(dim=0)
        return sum(self.divergence(p, mixture) for p in probs) / len(probs)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return hits / len(loader.dataset)


def main():
    opts = Options()
    torch.manual_seed(12)
    os.makedirs(opts.run_dir, exist_ok=True)
    log = logging.getLogger("jsd")
    log.addHandler(logging.FileHandler(os.path.join(opts.run_dir, "train.log"), mode="w"))
    log.setLevel(logging.INFO)
    g = torch.Generator().manual_seed(5)
    train = DataLoader(make_patterns(opts.classes, 384, 1), opts.batch, shuffle=True, generator=torch.Generator().manual_seed(2))
    test = DataLoader(make_patterns(opts.classes, 96, 3), opts.batch)
    model, agree = Classifier(opts.classes), Agreement(opts.temperature)
    opt = torch.optim.Adam(model.parameters(), lr=opts.lr)
    step = 0
    for epoch in range(opts.epochs):
        for x, y in train:
            clean, a, b = model(x), model(corrupt(x, g)), model(corrupt(x, g))
            ce, jsd = F.cross_entropy(clean, y), agree(clean, a, b)
            loss = ce + opts.weight * jsd
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            log.info("step %d ce %.4f jsd %.4f", step, ce.item(), jsd.item())
            step += 1
        log.info("epoch %d acc %.3f", epoch, accuracy(model, test))
    torch.save({"model": model.state_dict(), "opts": vars(opts)}, os.path.join(opts.run_dir, "last.pt"))


if __name__ == "__main__":
    main()
