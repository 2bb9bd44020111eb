import torch
from torch import nn


class QuadraticCell(nn.Module):
    """dx/dt = A x + H (x kron x) + c, one explicit Euler step."""

    def __init__(self, dim, dt):
        super().__init__()
        self.dt = dt
        self.A = nn.Linear(dim, dim)
        self.H = nn.Linear(dim * dim, dim, bias=False)

    def forward(self, x):
        pairs = torch.einsum("bi,bj->bij", x, x).flatten(1)
        return x + self.dt * (self.A(x) + self.H(pairs))


class Emulator(nn.Module):
    def __init__(self, dim, dt):
        super().__init__()
        self.cell = QuadraticCell(dim, dt)

    def forward(self, x, horizon):
        states = []
        for _ in range(horizon):
            x = self.cell(x)
            states.append(x)
        return torch.stack(states, dim=1)

    @torch.no_grad()
    def one_step_error(self, flow):
        return (self.cell(flow[:-1]) - flow[1:]).pow(2).mean().item()
