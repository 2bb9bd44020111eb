"""Running-sum task with a hand-written recurrent cell; the sequence length grows during training."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)


class ReluCell(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.w_in = nn.Parameter(0.5 * torch.randn(n_in, hidden))
        self.w_rec = nn.Parameter(torch.randn(hidden, hidden) * (2.8 / hidden) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x, h):
        return torch.relu(x @ self.w_in + h @ self.w_rec + self.bias)


class SequenceModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.hidden = hidden
        self.cell = ReluCell(2, hidden)
        self.readout = nn.Linear(hidden, 1)

    def forward(self, seq):
        h = seq.new_zeros(seq.shape[1], self.hidden)
        for x in seq:
            h = self.cell(x, h)
        return self.readout(h).squeeze(-1)


def adding_problem(length, n, g):
    """Two marked numbers per sequence; the target is their sum."""
    value = torch.rand(length, n, generator=g)
    marker = torch.zeros(length, n)
    half = length // 2
    marker[torch.randint(0, half, (n,), generator=g), torch.arange(n)] = 1
    marker[torch.randint(half, length, (n,), generator=g), torch.arange(n)] = 1
    return torch.stack([value, marker], dim=-1), (value * marker).sum(0)


class Curriculum:
    """Start with short sequences and lengthen them."""

    def __init__(self, start=6, every=4, grow=1.35):
        self.start, self.every, self.grow = start, every, grow

    def length(self, step):
        return int(self.start * self.grow ** (step // self.every))


def main():
    g = torch.Generator().manual_seed(1)
    model, plan = SequenceModel(), Curriculum()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(56):
        x, y = adding_problem(plan.length(step), 32, g)
        loss = F.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4g} length {plan.length(step)}")


main()
