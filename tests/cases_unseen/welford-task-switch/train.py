"""Continual regression on streams of sensors: targets are scaled by running statistics (Welford), reset at task switches."""
import torch
import torch.nn as nn

torch.manual_seed(4)
torch.set_num_threads(1)


class RunningScale:
    """Mean and unbiased standard deviation of everything seen since the last reset."""

    def __init__(self, dim):
        self.dim = dim
        self.reset()

    def reset(self):
        self.count = torch.zeros(())
        self.mean = torch.zeros(self.dim)
        self.m2 = torch.zeros(self.dim)

    def push(self, rows):
        for row in rows:
            self.count += 1
            delta = row - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (row - self.mean)

    def normalise(self, rows):
        return (rows - self.mean) / (torch.sqrt(self.m2 / (self.count - 1)) + 1e-6)


class Regressor(nn.Module):
    def __init__(self, d_in=6, d_out=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 32), nn.Tanh(), nn.Linear(32, d_out))

    def forward(self, x):
        return self.net(x)


def stream(task, g):
    """Batches of a task; a new sensor first sends what little it has."""
    w = torch.randn(6, 2, generator=g) * (1 + task)
    sizes = [16] * 30 if task != 2 else [1] + [16] * 29
    for n in sizes:
        x = torch.randn(n, 6, generator=g)
        yield x, x @ w + 5 * task + 0.1 * torch.randn(n, 2, generator=g)


def main():
    g = torch.Generator().manual_seed(0)
    model, scale = Regressor(), RunningScale(2)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    for task in range(3):
        scale.reset()
        for x, y in stream(task, g):
            scale.push(y)
            loss = nn.functional.smooth_l1_loss(model(x), scale.normalise(y))
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} task {task} loss {loss.item():.4f}")
            step += 1


main()
