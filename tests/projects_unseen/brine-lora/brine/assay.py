import torch
from torch.utils.data import TensorDataset

# typical concentrations in mol/L: Na, Mg, K, Ca, Sr, Li, Cs, U
TYPICAL = torch.tensor([0.47, 0.053, 0.010, 0.0103, 9e-5, 2.6e-5, 2.3e-9, 1.4e-8])


def sample(n, seed, drift=0.0):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, len(TYPICAL), generator=g)
    mix = 0.5 * torch.eye(len(TYPICAL)) + 0.1
    conc = TYPICAL * torch.exp(0.25 * z @ mix + drift * torch.sin(torch.arange(len(TYPICAL)).float()))
    u = (conc / TYPICAL).log()
    target = 1.2 * u[:, 0] - 0.7 * u[:, 5] * u[:, 6] + torch.tanh(3 * u[:, 7]) + 0.4 * u[:, 3] ** 2
    target = target + drift * u[:, 2] + 0.02 * torch.randn(n, generator=g)
    return TensorDataset(conc, target)
