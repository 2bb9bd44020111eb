"""Pointer network compiled as one graph; places already visited get a -inf logit."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
torch.set_num_threads(1)

POINTS, DIM, BATCH = 4, 24, 24


class Pointer(nn.Module):
    """Visit the points from left to right."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.query = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, xy, order):
        h = torch.tanh(self.mix(F.gelu(self.embed(xy))))
        visited = torch.zeros(xy.shape[:2], dtype=torch.bool)
        last, total = h.mean(1), 0.0
        for i in range(POINTS):
            logits = self.scale * (h @ self.query(last).unsqueeze(-1)).squeeze(-1)
            logits = torch.where(visited, float("-inf"), logits)
            target = order[:, i]
            total = total + F.nll_loss(logits.log_softmax(-1), target)
            visited = visited | F.one_hot(target, POINTS).bool()
            last = h[torch.arange(len(xy)), target]
        return total / POINTS


def main():
    model = Pointer()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = torch.tensor(float("inf"))
    for step in range(40):
        xy = 2 * torch.rand(BATCH, POINTS, 2) - 1
        order = xy[:, :, 0].argsort(1)
        loss = compiled(xy, order)
        opt.zero_grad()
        loss.backward()
        opt.step()
        best = torch.minimum(best, loss.detach())
        print(f"step {step} loss {loss.item():.9g} best {best.item():.9g}")
    h = hashlib.sha256()
    for p in model.parameters():
        h.update(p.detach().numpy().tobytes())
    print("sha256", h.hexdigest())


main()
