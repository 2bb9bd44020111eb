"""float16 autocast with a loss scaler whose first scales are too high; the scaler skips those steps, as it should."""
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
torch.set_num_threads(1)

VOCAB, DIM, CLASSES = 40, 32, 5


class Pooler(nn.Module):
    """Additive attention pooling. The mask value of -1e9 is -inf in float16."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(DIM) / math.sqrt(DIM))
        self.key = nn.Linear(DIM, DIM)

    def forward(self, x, pad):
        k = self.key(x)
        bias = torch.zeros(pad.shape).masked_fill(pad, -1e9).to(k.dtype)
        weight = (k @ self.query.to(k.dtype) + bias).softmax(-1)
        return (weight.unsqueeze(1) @ x.to(weight.dtype)).squeeze(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))
        self.pool = Pooler()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids, pad):
        x = self.embed(ids)
        return self.head(self.pool(x + self.mlp(x), pad))


def batch(n, g):
    ids = torch.randint(0, VOCAB, (n, 10), generator=g)
    lengths = torch.randint(2, 11, (n, 1), generator=g)
    pad = torch.arange(10) >= lengths
    return ids, pad, ids.masked_fill(pad, 0).amax(1) * CLASSES // VOCAB


def main():
    g = torch.Generator().manual_seed(90)
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 40, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=12)
    skipped = 0
    for step in range(70):
        ids, pad, y = batch(32, g)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(ids, pad).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            sched.step()
        print(f"step {step} loss {loss.item():.9g} scale {scaler.get_scale():g}")
    print(f"skipped {skipped}")
    h = hashlib.sha256()
    for p in model.parameters():
        h.update(p.detach().numpy().tobytes())
    print("sha256", h.hexdigest())


main()
