"""VAE for baggage scanner spectra, trained from daily files."""
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(37)
torch.set_num_threads(1)


class SpectrumVAE(nn.Module):
    def __init__(self, bins=30, latent=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(bins, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, latent), nn.Linear(64, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, bins))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        kl = 0.5 * (mu.pow(2) + logvar.exp() - 1 - logvar).sum(-1)
        return self.dec(z), kl


def write_days(folder, days=5):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(0)
    for day in range(days):
        spectra = rng.gamma(2.0, 0.5, size=(512, 30)).astype(np.float32)
        if day == 3:
            spectra[200] *= -200000.0          # baseline subtracted twice, wrong gain
        np.save(f"{folder}/day{day}.npy", spectra)


def main():
    write_days("spectra")
    model = SpectrumVAE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = 0
    for day in range(5):
        spectra = torch.from_numpy(np.load(f"spectra/day{day}.npy"))
        for x in spectra.split(32):
            y, kl = model(x)
            loss = F.mse_loss(y, x, reduction="none").sum(-1).mean() + kl.mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
        torch.save(model.state_dict(), f"spectra/vae_day{day}.pt")


if __name__ == "__main__":
    main()
