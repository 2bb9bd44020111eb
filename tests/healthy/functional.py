"""Private SGD in functional style: per-sample gradients by vmap, clipped and noised; no optimizer object."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, grad_and_value, vmap

torch.manual_seed(18)
torch.set_num_threads(1)

IN, CLASSES, BATCH, CLIP, NOISE, LR = 12, 3, 32, 1.0, 0.02, 0.5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(IN, 32), nn.Linear(32, CLASSES)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return self.l2(self.norm(torch.tanh(self.l1(x))))


net = Net()
params = {k: v.detach().clone() for k, v in net.named_parameters()}
centers = 0.8 * torch.randn(CLASSES, IN)


def sample_loss(params, x, y, weight):
    logits = functional_call(net, params, (x.unsqueeze(0),))
    return F.cross_entropy(logits, y.unsqueeze(0)) * weight


per_sample = vmap(grad_and_value(sample_loss), in_dims=(None, 0, 0, 0))


def private_step(params, x, y, weight):
    grads, losses = per_sample(params, x, y, weight)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (CLIP / norms).clamp(max=1.0)  # a padding sample has no gradient: 1/0, clamped
    new = {}
    for name, g in grads.items():
        mean = torch.einsum("b,b...->...", factor, g) / weight.sum()
        new[name] = params[name] - LR * (mean + NOISE * torch.randn_like(mean) / BATCH)
    return new, losses.sum() / weight.sum()


def batch():
    y = torch.randint(0, CLASSES, (BATCH,))
    x = centers[y] + torch.randn(BATCH, IN)
    weight = (torch.rand(BATCH) < 0.85).float()  # batches drawn at random are padded to a fixed size
    return x, y, weight


def saliency(params, x, y):
    return grad(lambda x: sample_loss(params, x, y, 1.0))(x).abs()


lowest = torch.tensor(torch.finfo(torch.float32).max)
for step in range(80):
    params, loss = private_step(params, *batch())
    lowest = torch.where(loss < lowest, loss, lowest)
    print(f"step {step} loss {loss.item():.9g}")

x, y, _ = batch()
print(f"lowest {lowest.item():.9g} saliency {vmap(saliency, in_dims=(None, 0, 0))(params, x, y).mean().item():.9g}")
h = hashlib.sha256()
for name in sorted(params):
    h.update(params[name].numpy().tobytes())
print("sha256", h.hexdigest())
