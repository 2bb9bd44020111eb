"""Learned simulator of predator-prey dynamics: polynomial features, Euler steps, short rollouts first, then long ones."""
import torch
import torch.nn as nn

torch.manual_seed(13)
torch.set_num_threads(1)

SPECIES, DT = 4, 0.5


class Library(nn.Module):
    """x, all pairwise products and cubes, as in sparse identification of dynamics."""

    def __init__(self):
        super().__init__()
        i, j = torch.triu_indices(SPECIES, SPECIES)
        self.register_buffer("i", i)
        self.register_buffer("j", j)
        self.size = SPECIES + len(i) + SPECIES

    def forward(self, x):
        pairs = x[..., self.i] * x[..., self.j]
        return torch.cat([x, pairs, x ** 3], dim=-1)


class Simulator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.lib = Library()
        self.enc = nn.Linear(self.lib.size, width)
        self.dec = nn.Linear(width, SPECIES)

    def rate(self, x):
        return self.dec(torch.relu(self.enc(self.lib(x))))

    def forward(self, x, horizon):
        states = []
        for _ in range(horizon):
            x = x + DT * self.rate(x)
            states.append(x)
        return torch.stack(states, dim=1)


@torch.no_grad()
def ecosystem(gen, n=32, horizon=16):
    growth = torch.tensor([0.4, -0.2, 0.3, -0.2])
    inter = torch.tensor([[-0.1, -0.4, 0.0, -0.1], [0.3, 0.0, 0.1, 0.0], [0.0, -0.2, -0.1, -0.4], [0.1, 0.0, 0.3, 0.0]])
    x = 0.5 + 2.0 * torch.rand(n, SPECIES, generator=gen)
    path = [x]
    for _ in range(horizon):
        for _ in range(10):
            x = x + 0.1 * DT * x * (growth + x @ inter.t())
        path.append(x)
    return torch.stack(path, dim=1)


def main():
    gen = torch.Generator().manual_seed(9)
    sim = Simulator()
    opt = torch.optim.Adam(sim.parameters(), lr=2e-3)
    for step in range(50):
        horizon = 2 if step < 20 else 16
        path = ecosystem(gen)
        pred = sim(path[:, 0], horizon)
        loss = (pred - path[:, 1:horizon + 1]).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.5g} horizon {horizon}")


main()
