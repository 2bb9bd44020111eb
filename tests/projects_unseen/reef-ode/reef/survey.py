import numpy as np
import torch

SPECIES = ["coral", "algae", "grazer"]


def truth(x):
    c, a, g = x.T
    dc = c * (0.6 - 0.6 * c - 0.5 * a)
    da = a * (0.9 - 0.7 * a - 0.9 * g)
    dg = g * (-0.4 + 0.8 * a + 0.1 * c)
    return np.stack([dc, da, dg], 1)


def simulate(n, length, dt, seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.2, 1.1, (n, 3))
    rows = [x]
    fine = 10
    for _ in range(length - 1):
        for _ in range(fine):
            x = np.clip(x + dt / fine * truth(x), 0, None)
        rows.append(x)
    traj = np.stack(rows, 1)
    return torch.tensor(traj * rng.lognormal(0, 0.03, traj.shape), dtype=torch.float32)


class Segments:
    """Random pieces of the surveys, with length and survey interval set by the curriculum."""

    def __init__(self, traj, batch, seed):
        self.traj, self.batch = traj, batch
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self, length, stride):
        n, total, _ = self.traj.shape
        who = torch.randint(n, (self.batch,), generator=self.gen)
        start = torch.randint(total - length * stride, (self.batch,), generator=self.gen)
        steps = torch.arange(length + 1) * stride
        return self.traj[who[:, None], start[:, None] + steps]
