"""Energy-based critic with a gradient penalty, trained to tell recorded joint torques from simulated ones."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(14)
torch.set_num_threads(1)
JOINTS = 8


class Features(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.fc1 = nn.Linear(JOINTS, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


class EnergyCritic(nn.Module):
    """Score = learned affine map of the feature length."""

    def __init__(self):
        super().__init__()
        self.features = Features()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        energy = self.features(x).norm(dim=1)
        return self.scale * energy + self.shift


class Simulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, JOINTS))

    def forward(self, z):
        return self.net(z)


def gradient_penalty(critic, x):
    x = x.detach().requires_grad_(True)
    (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return grad.pow(2).sum(dim=1).mean()


def recorded(n, g, step):
    torque = 1.5 * torch.randn(n, JOINTS, generator=g) + torch.linspace(-1, 1, JOINTS)
    if step == 19:
        torque[5] = 0.0  # motors off
    return torque


def main():
    g = torch.Generator().manual_seed(3)
    critic, sim = EnergyCritic(), Simulator()
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
    opt_s = torch.optim.Adam(sim.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for step in range(40):
        real = recorded(16, g, step)
        fake = sim(torch.randn(16, 6, generator=g))
        loss_c = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        loss_c = loss_c + 0.5 * gradient_penalty(critic, real)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()

        loss_s = F.softplus(-critic(sim(torch.randn(16, 6, generator=g)))).mean()
        opt_s.zero_grad()
        loss_s.backward()
        opt_s.step()
        print(f"step {step} loss {loss_c.item():.4f}")


main()
