"""Differentially private updates: per-example gradients, clipped and noised."""
import torch
from torch.func import functional_call, grad_and_value, vmap

from towers import click_loss


def make_example_grads(model):
    def example_loss(params, user, bags):
        scores = functional_call(model, params, (user, bags))
        return click_loss(scores)

    return vmap(grad_and_value(example_loss), in_dims=(None, 0, 0))


def clip_and_sum(grads, max_norm):
    flat = torch.cat([g.flatten(1) for g in grads.values()], dim=1)
    norms = flat.norm(dim=1)
    factor = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    return {k: torch.einsum("b,b...->...", factor, g) for k, g in grads.items()}, norms


class PrivateMomentum:
    """Momentum on noisy averages; keeps its buffers in a dict like the parameters."""

    def __init__(self, params, lr, momentum, sigma, max_norm, rng):
        self.buffers = {k: torch.zeros_like(v) for k, v in params.items()}
        self.lr, self.momentum, self.sigma, self.max_norm, self.rng = lr, momentum, sigma, max_norm, rng

    def update(self, params, grads, batch):
        summed, norms = clip_and_sum(grads, self.max_norm)
        new = {}
        for k, p in params.items():
            noise = torch.randn(p.shape, generator=self.rng) * self.sigma * self.max_norm
            g = (summed[k] + noise) / batch
            self.buffers[k] = self.momentum * self.buffers[k] + g
            new[k] = p - self.lr * self.buffers[k]
        return new, norms

    def state_dict(self):
        return {"buffers": self.buffers, "rng": self.rng.get_state()}
