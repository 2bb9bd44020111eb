import numpy as np
import torch


def lorenz(s, sigma=10.0, rho=28.0, beta=8.0 / 3.0):
    x, y, z = s
    return np.array([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])


def load_or_simulate(path, gap, n=1500, sub=10):
    """Standardised trajectory (n, 3), one sample every `gap` units of time."""
    if not path.exists():
        s, out = np.array([1.0, 1.0, 20.0]), []
        h = gap / sub
        for i in range(n + 100):
            for _ in range(sub):
                k1 = lorenz(s)
                k2 = lorenz(s + 0.5 * h * k1)
                k3 = lorenz(s + 0.5 * h * k2)
                k4 = lorenz(s + h * k3)
                s = s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            out.append(s.copy())
        traj = np.stack(out[100:])
        np.savez(path, traj=((traj - traj.mean(0)) / traj.std(0)).astype(np.float32))
    with np.load(path) as f:
        return torch.from_numpy(f["traj"])
