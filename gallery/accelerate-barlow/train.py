"""Accelerate: Barlow Twins on synthetic vectors, with checkpoints by save_state.

With --bug, the loader keeps the last batch, which has one sample; its standard deviation is no number.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BarlowTwins(nn.Module):
    def __init__(self, lambd=5e-3):
        super().__init__()
        self.lambd = lambd
        self.backbone = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def normalised(self, z):
        return (z - z.mean(0)) / z.std(0)

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.normalised(z1).T @ self.normalised(z2) / len(z1)
        on = (torch.diagonal(c) - 1).pow(2).sum()
        off = c.pow(2).sum() - torch.diagonal(c).pow(2).sum()
        return on + self.lambd * off


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    data = torch.randn(385, 24)
    loader = DataLoader(TensorDataset(data), batch_size=32, shuffle=True, drop_last=not args.bug)
    model = BarlowTwins()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for epoch in range(3):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.print(f"epoch {epoch}: {losses[-1]:.4f}")
        accelerator.save_state(f"checkpoints/epoch_{epoch}")
    with open("losses.json", "w") as file:
        json.dump(losses, file)
    torch.save(accelerator.unwrap_model(model).state_dict(), "final.pt")


if __name__ == "__main__":
    main()
