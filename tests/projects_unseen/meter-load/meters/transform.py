import numpy as np


class PowerTransform:
    """Box-Cox transformation followed by standardisation."""

    def __init__(self, lam):
        self.lam = lam
        self.mean, self.std = 0.0, 1.0

    def _forward(self, x):
        return (np.power(x, self.lam) - 1.0) / self.lam

    def fit(self, x):
        z = self._forward(x)
        self.mean, self.std = z.mean(), z.std()
        return self

    def __call__(self, x):
        return (self._forward(x) - self.mean) / self.std

    def inverse(self, z):
        y = (z * self.std + self.mean) * self.lam + 1.0
        return np.power(np.maximum(y, 0.0), 1.0 / self.lam)
