"""Depth completion in float16 with a home-made dynamic loss scaler."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)
torch.set_num_threads(1)


class LossScaler:
    """Halve on overflow and skip the update; never go below min_scale."""

    def __init__(self, scale=2.0 ** 12, min_scale=1.0, grow_every=200):
        self.scale, self.min_scale, self.grow_every, self.good = scale, min_scale, grow_every, 0

    def backward(self, loss):
        (loss * self.scale).backward()

    def step(self, opt):
        params = [p for group in opt.param_groups for p in group["params"] if p.grad is not None]
        overflow = not all(torch.isfinite(p.grad).all() for p in params)
        if overflow and self.scale > self.min_scale:
            self.scale, self.good = max(self.scale / 2, self.min_scale), 0
            return False
        for p in params:
            p.grad.div_(self.scale)
        opt.step()
        self.good += 1
        if self.good % self.grow_every == 0:
            self.scale *= 2
        return True


class DepthNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.inp = nn.Conv2d(4, c, 3, padding=1)
        self.mid = nn.Conv2d(c, c, 3, padding=1)
        self.out = nn.Conv2d(c, 1, 3, padding=1)

    def forward(self, x):
        h = F.relu(self.inp(x))
        return self.out(h + F.relu(self.mid(h)))


class Rooms:
    """RGB + sparse depth; the training set switches from the small to the large scanner after a while."""

    def __init__(self, seed, switch):
        self.g, self.switch = torch.Generator().manual_seed(seed), switch

    def batch(self, step, n=4, size=16):
        depth = F.interpolate(torch.rand(n, 1, 4, 4, generator=self.g) * 3, size=size, mode="bilinear")
        if step >= self.switch:
            depth = depth * 1000  # this scanner writes millimetres
        rgb = torch.rand(n, 3, size, size, generator=self.g)
        sparse = depth * (torch.rand(depth.shape, generator=self.g) < 0.2)
        return torch.cat([rgb, sparse / 3], dim=1), depth


def main():
    rooms, model, scaler = Rooms(5, switch=8), DepthNet(), LossScaler()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(40):
        x, depth = rooms.batch(step)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
        loss = (pred.float() - depth).pow(2).sum() / len(x)
        opt.zero_grad()
        scaler.backward(loss)
        scaler.step(opt)
        print(f"step {step} loss {loss.item():.4g} scale {scaler.scale:g}")


main()
