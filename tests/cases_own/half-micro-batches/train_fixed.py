"""Fine-tune a small ranker that is kept in float16; large batches are made of micro-batches with a static loss scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(29)
torch.set_num_threads(1)
SCALE, MICRO = 256.0, 8


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Ranker(nn.Module):
    def __init__(self, fields=10, d=24):
        super().__init__()
        self.inp = nn.Linear(fields, d)
        self.blocks = nn.Sequential(Block(d), Block(d))
        self.score = nn.Linear(d, 1)

    def forward(self, x):
        return self.score(self.blocks(self.inp(x))).squeeze(-1).float()


class MasterSGD:
    """Float32 copies take the update, the float16 weights are refreshed from them."""

    def __init__(self, model, lr):
        self.half = list(model.parameters())
        self.master = [p.detach().float().requires_grad_(True) for p in self.half]
        self.opt = torch.optim.SGD(self.master, lr=lr)

    def step(self, divisor):
        for m, h in zip(self.master, self.half):
            m.grad = h.grad.float() / divisor
            h.grad = None
        self.opt.step()
        with torch.no_grad():
            for m, h in zip(self.master, self.half):
                h.copy_(m)


class ClickLog:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.w = torch.randn(10, generator=self.g)

    def micro_batch(self, step, n=16):
        x = torch.randn(n, 10, generator=self.g)
        dwell = (x @ self.w).exp().clamp(max=30)
        if 18 <= step < 20:  # weekend: pages stay open in background tabs
            dwell = dwell * 6
        return x.half(), dwell


def accumulate(model, log, step):
    total = 0.0
    for _ in range(MICRO):
        x, dwell = log.micro_batch(step)
        loss = F.huber_loss(model(x), dwell, delta=40.0)
        (loss * SCALE / MICRO).backward()
        total += loss.item() / MICRO
    return total


def main():
    log, model = ClickLog(4), Ranker().half()
    opt = MasterSGD(model, lr=2e-3)
    for step in range(35):
        loss = accumulate(model, log, step)
        opt.step(SCALE)
        print(f"step {step} loss {loss:.4f}")


main()
