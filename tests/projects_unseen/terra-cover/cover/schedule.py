import numpy as np


class PolyLR:
    """lr = base * (1 - it / max_it) ** power, set before every iteration."""

    def __init__(self, optimizer, base_lr, max_iters, power=0.9, warmup=10):
        self.optimizer = optimizer
        self.base_lr = base_lr
        self.max_iters = max_iters
        self.power = power
        self.warmup = warmup

    def lr_at(self, it):
        lr = self.base_lr * np.power(1.0 - it / np.float64(self.max_iters), self.power)
        if it < self.warmup:
            lr *= (it + 1) / self.warmup
        return lr

    def __call__(self, it):
        lr = float(self.lr_at(it))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        return lr
