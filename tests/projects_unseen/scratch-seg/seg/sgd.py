"""SGD with momentum and the 'poly' learning rate of the DeepLab papers."""
import numpy as np
import torch


class PolyRate:
    def __init__(self, base, max_iters, power=0.9):
        self.base = base
        self.max_iters = max_iters
        self.power = power

    def __call__(self, it):
        return float(self.base * np.power(1.0 - it / self.max_iters, self.power))


class MomentumSGD:
    def __init__(self, params, momentum=0.9, weight_decay=1e-4):
        self.params = params
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.velocity = {k: torch.zeros_like(v) for k, v in params.items()}

    @torch.no_grad()
    def update(self, lr):
        for name, p in self.params.items():
            g = p.grad + self.weight_decay * p
            v = self.velocity[name].mul_(self.momentum).add_(g)
            p.sub_(lr * v)
            p.grad = None

    @torch.no_grad()
    def load(self, params, state):
        for name, p in params.items():
            p.copy_(state["params"][name])
            self.velocity[name].copy_(state["velocity"][name])
