"""GAN on a ring of Gaussians: two optimizers, spectral norm, gradient penalty by double backward, nearest-mode metric."""
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(5)
torch.set_num_threads(1)

NOISE, MODES, BATCH = 4, 8, 64
ANGLES = torch.arange(MODES) * (2 * math.pi / MODES)
CENTERS = 2 * torch.stack([ANGLES.cos(), ANGLES.sin()], 1)


def real_samples(n):
    return CENTERS[torch.randint(0, MODES, (n,))] + 0.1 * torch.randn(n, 2)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            spectral_norm(nn.Linear(2, 48)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(48, 48)), nn.LeakyReLU(0.2)
        )
        self.out = nn.Linear(48, 1)

    def forward(self, x):
        return self.out(self.net(x)).squeeze(1)


def penalty(critic, real):
    real = real.detach().requires_grad_()
    (grad,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
    return grad.square().sum(1).mean()


@torch.no_grad()
def mode_error(gen):
    """Distance to each mode's nearest sample; a mode that got no sample has none (inf) and is left out."""
    x = gen(torch.randn(256, NOISE))
    dist = torch.cdist(x, CENTERS)
    owner = F.one_hot(dist.argmin(1), MODES).bool()
    nearest = torch.where(owner, dist, torch.inf).amin(0)
    covered = nearest.isfinite()
    return nearest[covered].mean().item(), int(covered.sum())


gen, critic = Generator(), Critic()
opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
for step in range(120):
    real, fake = real_samples(BATCH), gen(torch.randn(BATCH, NOISE))
    loss_d = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
    if step % 4 == 0:
        loss_d = loss_d + 0.1 * penalty(critic, real)
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    loss_g = F.softplus(-critic(gen(torch.randn(BATCH, NOISE)))).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss_d.item():.9g} generator {loss_g.item():.9g}")
    if step % 40 == 39:
        error, covered = mode_error(gen)
        print(f"modes {covered} error {error:.9g}")

h = hashlib.sha256()
for p in [*gen.parameters(), *critic.parameters()]:
    h.update(p.detach().numpy().tobytes())
print("sha256", h.hexdigest())
