"""Small GAN on 16x16 synthetic blobs; the critic ends with a minibatch-stddev layer (PGGAN style)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
Z = 24


def make_blobs(n, g):
    """Gaussian bumps at random positions, values in [-1, 1]."""
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    c = torch.rand(n, 2, 1, 1, generator=g) * 8 + 4
    s = torch.rand(n, 1, 1, generator=g) * 2 + 1.5
    img = torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / (2 * s ** 2))
    return (img * 2 - 1).unsqueeze(1)


class MinibatchStd(nn.Module):
    """Appends one feature map with the average deviation over the batch."""

    def forward(self, x):
        dev = torch.std(x, dim=0)
        stat = dev.mean().expand(x.size(0), 1, x.size(2), x.size(3))
        return torch.cat([x, stat], dim=1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Z, 32 * 4 * 4)
        self.up1 = nn.ConvTranspose2d(32, 24, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(24, 16, 4, 2, 1)
        self.out = nn.Conv2d(16, 1, 3, 1, 1)

    def forward(self, z):
        h = F.leaky_relu(self.fc(z), 0.2).view(-1, 32, 4, 4)
        h = F.leaky_relu(self.up1(h), 0.2)
        h = F.leaky_relu(self.up2(h), 0.2)
        return torch.tanh(self.out(h))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        )
        self.mbstd = MinibatchStd()
        self.final = nn.Sequential(nn.Conv2d(33, 32, 3, 1, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32 * 16, 1))

    def forward(self, x):
        return self.final(self.mbstd(self.body(x))).squeeze(1)


def main():
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(make_blobs(385, g))
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=g)
    gen, critic = Generator(), Critic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.99))
    step = 0
    for epoch in range(2):
        for (real,) in loader:
            z = torch.randn(len(real), Z, generator=g)
            fake = gen(z)
            d_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()

            g_loss = F.softplus(-critic(fake)).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
            print(f"step {step} loss {d_loss.item():.4f}")
            step += 1


main()
