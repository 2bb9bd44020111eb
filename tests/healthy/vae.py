"""Variational autoencoder on binary patterns, free bits, and an importance-weighted bound for validation."""
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)
torch.set_num_threads(1)

PIXELS, LATENT = 64, 6
PROTOTYPES = (torch.rand(5, PIXELS) > 0.5).float()


def sample(n):
    x = PROTOTYPES[torch.randint(0, len(PROTOTYPES), (n,))]
    flip = torch.rand_like(x) < 0.05
    return torch.where(flip, 1 - x, x)


class VAE(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, hidden), nn.Tanh(), nn.Linear(hidden, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, hidden), nn.Tanh(), nn.Linear(hidden, PIXELS))
        self.mixture = nn.Parameter(torch.zeros(4))
        self.register_buffer("pruned", torch.tensor([False, False, True, False]))
        self.centers = nn.Parameter(0.3 * torch.randn(4, LATENT))

    def encode(self, x):
        mu, logvar = self.encoder(x).chunk(2, -1)
        return mu, logvar.clamp(-8, 4)

    def log_prior(self, z):
        """Mixture of unit Gaussians; a pruned component has weight log 0."""
        logits = self.mixture.masked_fill(self.pruned, -math.inf)
        sq = (z.unsqueeze(-2) - self.centers).square().sum(-1)
        return torch.logsumexp(logits.log_softmax(0) - 0.5 * sq, -1) - 0.5 * LATENT * math.log(2 * math.pi)

    def terms(self, x):
        mu, logvar = self.encode(x)
        eps = torch.randn_like(mu)
        z = mu + eps * (0.5 * logvar).exp()
        log_q = -0.5 * (eps.square() + logvar + math.log(2 * math.pi)).sum(-1)
        probs = torch.sigmoid(self.decoder(z))
        rec = F.binary_cross_entropy(probs, x, reduction="none").sum(-1)
        return rec, log_q - self.log_prior(z)


@torch.no_grad()
def iw_bound(model, x, k=8):
    """Importance samples with a weight below the cut count as log 0."""
    logw = torch.stack([-(rec + kl) for rec, kl in (model.terms(x) for _ in range(k))])
    keep = logw > logw.amax(0) - 10
    logw = torch.where(keep, logw, torch.full_like(logw, -math.inf))
    return (torch.logsumexp(logw, 0) - math.log(k)).mean().item()


model = VAE()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
best = -math.inf
for step in range(120):
    rec, kl = model.terms(sample(32))
    beta = min(1.0, step / 40)
    loss = (rec + beta * kl.mean().clamp(min=0.5)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.9g}")
    if step % 30 == 29:
        best = max(best, iw_bound(model, sample(64)))
        print(f"bound {best:.9g}")

h = hashlib.sha256()
for name, p in model.named_parameters():
    h.update(p.detach().numpy().tobytes())
print("sha256", h.hexdigest())
