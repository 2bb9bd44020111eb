"""Predicts walks of pedestrians; besides the position error the sharpness of turns is matched (cosine of successive steps)."""
import torch
import torch.nn as nn

torch.manual_seed(21)
torch.set_num_threads(1)
HIST, FUT = 8, 6


def turn_cosine(path):
    """cos of the angle between each displacement and the next one, (batch, time - 2)."""
    step = path[:, 1:] - path[:, :-1]
    a, b = step[:, :-1], step[:, 1:]
    length = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return (a * b).sum(-1) / length.clamp_min(1e-6)


class Walker(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, FUT * 2)

    def forward(self, history):
        steps = history.diff(dim=1)
        _, h = self.rnn(steps)
        future = self.out(h[-1]).view(-1, FUT, 2).cumsum(1)
        return history[:, -1:] + future


def pedestrians(n, g):
    heading = 6.28 * torch.rand(n, 1, generator=g) + 0.15 * torch.randn(n, HIST + FUT, generator=g).cumsum(1)
    speed = 0.4 + torch.rand(n, 1, generator=g)
    step = speed[..., None] * torch.stack([heading.cos(), heading.sin()], -1)
    waits = torch.rand(n, generator=g) < 0.004  # stops at the kerb
    step[waits, HIST:] = 0.0
    return step.cumsum(1)


def main():
    g = torch.Generator().manual_seed(6)
    model = Walker()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        walk = pedestrians(12, g)
        history, future = walk[:, :HIST], walk[:, HIST:]
        pred = model(history)
        ade = (pred - future).norm(dim=-1).mean()
        turn = (turn_cosine(pred) - turn_cosine(future)).abs().mean()
        loss = ade + 0.2 * turn
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f} turn {turn.item():.4f}")


main()
