"""A small GAN on a ring of points, with a minibatch standard deviation in the discriminator.

With --bug, the losses are written out as logarithms, and the discriminator is trained three times as
often and at a higher rate: it becomes certain, and D of a generated sample is 0.
"""

import argparse
import json
import math
import os

import torch
import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, nz=8):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(nz, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
        self.last = nn.Linear(65, 1)

    def forward(self, x):
        h = self.main(x)
        spread = torch.sqrt(h.var(0) + 1e-8).mean().expand(len(h), 1)
        return torch.sigmoid(self.last(torch.cat([h, spread], 1))).squeeze(1)


def discriminator_loss(real, fake, written_out):
    if written_out:
        return -(torch.log(real).mean() + torch.log(1 - fake).mean())
    bce = nn.functional.binary_cross_entropy
    return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))


def generator_loss(fake, written_out):
    if written_out:
        return -torch.log(fake).mean()
    return nn.functional.binary_cross_entropy(fake, torch.ones_like(fake))


def ring(n):
    angle = 2 * math.pi * torch.randint(0, 8, (n,)) / 8
    return 20 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--outf", default="samples")
    opt = parser.parse_args()
    torch.manual_seed(3)
    torch.set_num_threads(1)
    os.makedirs(opt.outf, exist_ok=True)
    netG, netD = Generator(), Discriminator()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-2 if opt.bug else 1e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    fixed = torch.randn(16, 8)
    history = []
    for step in range(opt.steps):
        for _ in range(3 if opt.bug else 1):
            real, fake = ring(64), netG(torch.randn(64, 8)).detach()
            lossD = discriminator_loss(netD(real), netD(fake), opt.bug)
            optimizerD.zero_grad()
            lossD.backward()
            optimizerD.step()
        d_fake = netD(netG(torch.randn(64, 8)))
        lossG = generator_loss(d_fake, opt.bug)
        optimizerG.zero_grad()
        lossG.backward()
        optimizerG.step()
        history.append([lossD.item(), lossG.item()])
        if step % 30 == 0:
            print(f"[{step}/{opt.steps}] Loss_D: {history[-1][0]:.4f} Loss_G: {history[-1][1]:.4f}")
            torch.save(netG(fixed).detach(), f"{opt.outf}/fake_{step:03d}.pt")
    with open(f"{opt.outf}/history.json", "w") as file:
        json.dump(history, file)
    torch.save({"G": netG.state_dict(), "D": netD.state_dict()}, "final.pt")


if __name__ == "__main__":
    main()
