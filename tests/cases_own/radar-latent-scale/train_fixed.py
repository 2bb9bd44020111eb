"""Latent diffusion on rain radar tiles: one night of training, saved, and resumed the next night."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)
torch.set_num_threads(1)


class Encoder(nn.Module):
    """Stand-in for the pre-trained first stage: 16x16 tile -> 6x4x4 latent."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 4, 4)
        for p in self.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.conv(x))


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inp = nn.Conv2d(6, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.out = nn.Conv2d(width, 6, 3, padding=1)

    def forward(self, z, t):
        h = self.inp(z) + self.time(t[:, None])[:, :, None, None]
        return self.out(F.silu(h))


class RadarDiffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_stage = Encoder()
        self.unet = Denoiser()
        self.register_buffer("scale_factor", torch.zeros(()))  # the spread of the latents

    @torch.no_grad()
    def measure(self, tiles):
        self.scale_factor = self.first_stage(tiles).std()

    def forward(self, tiles):
        z = self.first_stage(tiles) / self.scale_factor
        t = torch.rand(len(z))
        noise = torch.randn_like(z)
        keep = (1 - t)[:, None, None, None]
        return F.mse_loss(self.unet(keep.sqrt() * z + (1 - keep).sqrt() * noise, t), noise)


def tiles(n, g):
    rain = F.interpolate(torch.rand(n, 1, 4, 4, generator=g), size=16, mode="bilinear")
    return (rain - 0.5).relu() * 8


def build():
    model = RadarDiffusion()
    return model, torch.optim.Adam(model.unet.parameters(), lr=2e-3)


def night(model, opt, g, first, steps=20):
    for step in range(first, first + steps):
        loss = model(tiles(8, g))
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
    return first + steps


def save(path, model, opt, step):
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "step": step}, path)


def resume(path, model, opt):
    ckpt = torch.load(path)
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["optimizer"])
    return ckpt["step"]


def main():
    g = torch.Generator().manual_seed(4)
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "radar.pt")
        model, opt = build()
        model.measure(tiles(32, g))
        save(path, model, opt, night(model, opt, g, 0))

        model, opt = build()
        night(model, opt, g, resume(path, model, opt))


if __name__ == "__main__":
    main()
