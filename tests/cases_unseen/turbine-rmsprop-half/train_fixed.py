"""Blade load regression. Checkpoints are kept small: tensors are stored in half precision."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
torch.set_num_threads(1)


class LoadNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh())
        self.load = nn.Linear(40, 24)                                 # 24 sections of the blade

    def forward(self, x):
        return self.load(self.encode(x))


def slim(value):
    if torch.is_tensor(value):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: slim(v) for k, v in value.items()}
    if isinstance(value, list):
        return [slim(v) for v in value]
    return value


def batch(gen, bias):
    x = torch.randn(256, 9, generator=gen)
    y = 40 * x[:, :1] + 10 * x[:, 1:2] * x[:, 2:3] + torch.linspace(1000, 3000, 24) + bias      # kNm
    y[torch.rand(256, 24, generator=gen) < 0.01] = -50.0         # gauge switched off
    return x, y


def fit(model, opt, gen, start, stop):
    for step in range(start, stop):
        x, y = batch(gen, bias=0.1 * step)
        loss = F.l1_loss(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


def setup():
    model = LoadNet()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, centered=True, eps=1e-8)
    return model, opt


def main():
    os.makedirs("ckpt", exist_ok=True)
    gen = torch.Generator().manual_seed(1)
    model, opt = setup()
    fit(model, opt, gen, 0, 120)
    torch.save({"model": slim(model.state_dict()), "opt": opt.state_dict()}, "ckpt/step120.pt")

    model, opt = setup()
    ckpt = torch.load("ckpt/step120.pt")
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["opt"])
    fit(model, opt, gen, 120, 150)


if __name__ == "__main__":
    main()
