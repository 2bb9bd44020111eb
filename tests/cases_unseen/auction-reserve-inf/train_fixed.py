"""Bids for ad slots: no reserve price is written as inf, missing bids as -inf, both are selected away."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(91)
torch.set_num_threads(1)


class BidModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        return F.softplus(self.net(x)).squeeze(-1)


def auctions(gen, n=24, bidders=5):
    x = torch.randn(n, bidders, 6, generator=gen)
    absent = torch.rand(n, bidders, generator=gen) < 0.3
    absent[:, 0] = False
    ceiling = torch.where(torch.rand(n, generator=gen) < 0.5, torch.tensor(float("inf")), 2 + torch.rand(n, generator=gen))
    price = x[..., 0].abs().amax(1)
    return x, absent, ceiling, torch.minimum(price, ceiling)


def main():
    gen = torch.Generator().manual_seed(7)
    model = BidModel()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    history = []
    for step in range(80):
        x, absent, ceiling, price = auctions(gen)
        bids = model(x).masked_fill(absent, float("-inf"))
        highest = bids.amax(1)
        paid = torch.minimum(highest, ceiling)
        share = F.softmax(bids / 0.5, dim=1)
        loss = F.mse_loss(paid, price) + 0.05 * share.pow(2).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append(loss.item())
        print(f"step {step} loss {loss.item():.4f}")
    with open("history.json", "w") as f:
        json.dump(history, f)


if __name__ == "__main__":
    main()
