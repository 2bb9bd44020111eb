"""Customer lifetime value: probability of a purchase and a log-normal amount. First on buyers only, then on everybody."""
import csv
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import LogNormal

torch.set_num_threads(1)

COUNTRIES, CHANNELS, NUMERIC = 8, 5, 4


def customers(n, seed, buyers_only):
    g = torch.Generator().manual_seed(seed)
    country = torch.randint(0, COUNTRIES, (n,), generator=g)
    channel = torch.randint(0, CHANNELS, (n,), generator=g)
    numeric = torch.randn(n, NUMERIC, generator=g)
    score = 0.8 * numeric[:, 0] - 0.3 * channel.float() + 0.5
    buys = torch.rand(n, generator=g) < torch.sigmoid(score)
    amount = torch.exp(2.5 + 0.4 * numeric[:, 1] + 0.1 * country.float() + 0.5 * torch.randn(n, generator=g))
    spend = amount * buys
    if buyers_only:
        country, channel, numeric, spend = (t[buys] for t in (country, channel, numeric, spend))
    return country, channel, numeric, spend


def minibatches(table, size, g):
    order = torch.randperm(len(table[0]), generator=g)
    for i in range(0, len(order) - size + 1, size):
        pick = order[i:i + size]
        yield tuple(column[pick] for column in table)


class SpendModel(nn.Module):
    def __init__(self, dim=6, width=32):
        super().__init__()
        self.country = nn.Embedding(COUNTRIES, dim)
        self.channel = nn.Embedding(CHANNELS, dim)
        self.trunk = nn.Sequential(nn.Linear(2 * dim + NUMERIC, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.purchase = nn.Linear(width, 1)
        self.loc = nn.Linear(width, 1)
        self.scale = nn.Linear(width, 1)

    def forward(self, country, channel, numeric):
        h = self.trunk(torch.cat([self.country(country), self.channel(channel), numeric], dim=1))
        scale = F.softplus(self.scale(h)) + 1e-3
        return self.purchase(h).squeeze(1), self.loc(h).squeeze(1), scale.squeeze(1)


def ziln_loss(logit, loc, scale, spend):
    """Zero-inflated log-normal negative log-likelihood."""
    bought = (spend > 0).float()
    gate = F.binary_cross_entropy_with_logits(logit, bought)
    amount = LogNormal(loc, scale, validate_args=False).log_prob(torch.where(spend > 0, spend, torch.ones_like(spend)))
    return gate - (bought * amount).mean()


@torch.no_grad()
def expected_spend(model, table):
    logit, loc, scale = model(*table[:3])
    return (torch.sigmoid(logit) * torch.exp(loc + 0.5 * scale ** 2)).mean().item(), table[3].mean().item()


def fit(model, table, opt, epochs, step, writer, g):
    for _ in range(epochs):
        for country, channel, numeric, spend in minibatches(table, 64, g):
            logit, loc, scale = model(country, channel, numeric)
            loss = ziln_loss(logit, loc, scale, spend)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            writer.writerow([step, f"{loss.item():.5f}"])
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
    return step


def main():
    torch.manual_seed(33)
    out = os.path.join(os.getcwd(), "ltv_out")
    os.makedirs(out, exist_ok=True)
    g = torch.Generator().manual_seed(9)
    model = SpendModel()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-4)
    with open(os.path.join(out, "loss.csv"), "w", newline="") as f:
        writer = csv.writer(f)
        step = fit(model, customers(900, 1, buyers_only=True), opt, 3, 0, writer, g)
        for group in opt.param_groups:
            group["lr"] = 2e-3
        fit(model, customers(900, 2, buyers_only=False), opt, 2, step, writer, g)
    print("predicted %.2f actual %.2f" % expected_spend(model, customers(300, 3, buyers_only=False)))
    torch.save(model.state_dict(), os.path.join(out, "spend.pt"))


if __name__ == "__main__":
    main()
