"""Momentum-contrast style training with preallocated memory. In deterministic mode torch.empty is filled with NaN."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.use_deterministic_algorithms(True)
torch.manual_seed(12)
torch.set_num_threads(1)

DIM, OUT, QUEUE, BATCH, STEPS = 16, 8, 96, 24, 60


class ScaledLinear(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cout, cin))
        self.bias = nn.Parameter(torch.empty(cout))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = ScaledLinear(DIM, 32), ScaledLinear(32, OUT)

    def forward(self, x):
        return F.normalize(self.l2(F.relu(self.l1(x))), dim=1)


class Queue(nn.Module):
    """Ring buffer of keys; only the rows already written are used."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.empty(QUEUE, OUT))
        self.ptr, self.size = 0, 0

    def push(self, keys):
        self.keys[self.ptr : self.ptr + len(keys)].copy_(keys)
        self.ptr = (self.ptr + len(keys)) % QUEUE
        self.size = min(QUEUE, self.size + len(keys))

    def filled(self):
        return self.keys[: self.size]


def augment(x):
    out = x.new_empty(x.shape)
    keep = torch.rand(x.shape) > 0.2
    out[keep] = x[keep] + 0.1 * torch.randn(int(keep.sum()))
    out[~keep] = 0.0
    return out


query, key, queue = Encoder(), Encoder(), Queue()
key.load_state_dict(query.state_dict())
opt = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)
history = torch.empty(STEPS)
centers = torch.randn(12, DIM)
scratch = torch.empty(BATCH, DIM)

for step in range(STEPS):
    torch.add(centers[torch.randint(0, 12, (BATCH,))], torch.randn(BATCH, DIM), alpha=0.3, out=scratch)
    with torch.no_grad():
        k = key(augment(scratch))
    q = query(augment(scratch))
    logits = torch.empty(BATCH, BATCH + queue.size)
    logits[:, :BATCH] = q @ k.t()
    logits[:, BATCH:] = q @ queue.filled().clone().t()
    loss = F.cross_entropy(logits / 0.2, torch.arange(BATCH))
    opt.zero_grad()
    loss.backward()
    opt.step()
    queue.push(k)
    with torch.no_grad():
        for pk, pq in zip(key.parameters(), query.parameters()):
            pk.lerp_(pq, 0.05)
    history[step] = loss.detach()
    print(f"step {step} loss {loss.item():.9g} mean {history[: step + 1].mean().item():.9g}")

print("sha256", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in query.parameters())).hexdigest())
