"""torchdiffeq: a neural ODE for the level of a tank, after Torricelli, with an adaptive solver.

With --bug, the outflow is the square root of the level as it stands; the solver tries levels below 0.
"""

import argparse
import os

import torch
import torch.nn as nn
from torchdiffeq import odeint


class Tank(nn.Module):
    def __init__(self, guarded):
        super().__init__()
        self.guarded = guarded
        self.inflow = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_k = nn.Parameter(torch.tensor(-1.5))

    def forward(self, t, h):
        if self.guarded:
            speed = torch.sqrt(h.clamp(min=1e-2))
        else:
            speed = torch.sqrt(h)
        return 0.1 * self.inflow(t.view(1, 1)) - self.log_k.exp() * speed


def get_batch(size=4):
    """Levels of true tanks with k = 1.1, from initial levels between 1 and 3."""
    h0 = 1 + 2 * torch.rand(size, 1)
    t = torch.linspace(0, 1.5, 10)
    level = (h0.sqrt() - 0.55 * t).clamp(min=0) ** 2
    return h0, t, level.T.unsqueeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--niters", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs("out", exist_ok=True)
    func = Tank(guarded=not args.bug)
    optimizer = torch.optim.Adam(func.parameters(), lr=5e-2)
    log = open("out/loss.txt", "w")
    for itr in range(1, args.niters + 1):
        optimizer.zero_grad()
        h0, t, true = get_batch()
        pred = odeint(func, h0, t, rtol=1e-2, atol=1e-3, method="dopri5")
        loss = (pred - true).abs().mean()
        loss.backward()
        optimizer.step()
        log.write(f"{itr} {loss.item():.5f}\n")
        log.flush()
        if itr % 10 == 0:
            print(f"Iter {itr:04d} | Total Loss {loss.item():.6f}")
            torch.save(func.state_dict(), "out/func.pt")
    log.close()
    torch.save(func.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
