"""Distillation of a crop-disease model: sharpening goes up during training."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
torch.set_num_threads(1)


class LeafNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, width), nn.ReLU())
        self.head = nn.Linear(width, 7)

    def forward(self, x):
        return self.head(self.body(x))


def leaves(gen, centres, n=64):
    y = torch.randint(7, (n,), generator=gen)
    return centres[y] + 0.5 * torch.randn(n, 20, generator=gen), y


def soft_targets(student, teacher, sharpness):
    p = F.softmax(student * sharpness, dim=-1)
    q = F.softmax(teacher * sharpness, dim=-1)
    return -(q * torch.log(p)).sum(-1).mean()


def main():
    os.makedirs("models", exist_ok=True)
    gen = torch.Generator().manual_seed(10)
    centres = 2 * torch.randn(7, 20, generator=gen)
    teacher, student = LeafNet(96), LeafNet(24)
    opt = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(60):
        x, y = leaves(gen, centres)
        opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt.step()
    torch.save(teacher.state_dict(), "models/teacher.pt")
    opt = torch.optim.Adam(student.parameters(), lr=5e-3)
    for step in range(80):
        x, y = leaves(gen, centres)
        with torch.no_grad():
            t = teacher(x)
        loss = soft_targets(student(x), t, sharpness=0.5 + 0.4 * step) + F.cross_entropy(student(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
    torch.save(student.state_dict(), "models/student.pt")


if __name__ == "__main__":
    main()
