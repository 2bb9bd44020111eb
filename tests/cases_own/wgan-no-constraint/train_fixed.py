"""Wasserstein GAN on a ring of Gaussians."""
import math

import torch
import torch.nn as nn

torch.manual_seed(8)
torch.set_num_threads(1)


def mlp(n_in, n_out, width=64):
    return nn.Sequential(nn.Linear(n_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
                         nn.Linear(width, n_out))


class Generator(nn.Module):
    def __init__(self, z=8):
        super().__init__()
        self.z, self.net = z, mlp(z, 2)

    def forward(self, n):
        return self.net(torch.randn(n, self.z))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(2, 1)

    def forward(self, x):
        return self.net(x).squeeze(-1)


class Ring:
    def __init__(self, modes=8, radius=2.0, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        angle = torch.arange(modes) * 2 * math.pi / modes
        self.centres = radius * torch.stack([angle.cos(), angle.sin()], dim=1)

    def sample(self, n):
        k = torch.randint(0, len(self.centres), (n,), generator=self.g)
        return self.centres[k] + 0.05 * torch.randn(n, 2, generator=self.g)


class WGAN:
    def __init__(self, lr=0.05, n_critic=5):
        self.gen, self.critic, self.n_critic = Generator(), Critic(), n_critic
        self.opt_g = torch.optim.SGD(self.gen.parameters(), lr=lr)
        self.opt_c = torch.optim.SGD(self.critic.parameters(), lr=lr)

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.gen(len(real))
        loss = self.critic(fake).mean() - self.critic(real).mean()
        self.opt_c.zero_grad()
        loss.backward()
        self.opt_c.step()
        with torch.no_grad():
            for p in self.critic.parameters():
                p.clamp_(-0.1, 0.1)
        return loss

    def generator_step(self, n):
        loss = -self.critic(self.gen(n)).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()

    def train_step(self, data, n=64):
        for _ in range(self.n_critic):
            loss = self.critic_step(data.sample(n))
        self.generator_step(n)
        return loss.item()


data, gan = Ring(), WGAN()
for step in range(40):
    print(f"step {step} loss {gan.train_step(data):.4g}")
