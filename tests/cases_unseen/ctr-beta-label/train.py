"""Click-through rate of ads as a Beta regression: user and item embeddings, two concentrations."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Beta
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(29)
torch.set_num_threads(1)

USERS, ADS, DIM = 40, 60, 12


class Impressions(Dataset):
    """clicks / views per (segment, ad)."""

    def __init__(self, n=480):
        g = torch.Generator().manual_seed(4)
        u, a = torch.randn(USERS, 4, generator=g), torch.randn(ADS, 4, generator=g)
        self.user = torch.randint(0, USERS, (n,), generator=g)
        self.ad = torch.randint(0, ADS, (n,), generator=g)
        rate = torch.sigmoid((u[self.user] * a[self.ad]).sum(1) * 0.4 - 1.5)
        views = torch.randint(150, 900, (n,), generator=g).float()
        clicks = torch.binomial(views, rate, generator=g).clamp(min=1)
        views[349], clicks[349] = 2.0, 2.0
        self.ctr = clicks / views

    def __len__(self):
        return len(self.ctr)

    def __getitem__(self, i):
        return {"user": self.user[i], "ad": self.ad[i], "ctr": self.ctr[i]}


class BetaRecommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.ad = nn.Embedding(ADS, DIM)
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, user, ad):
        z = torch.cat([self.user(user), self.ad(ad)], dim=1)
        a, b = (F.softplus(self.mlp(z)) + 1.0).unbind(dim=1)
        return Beta(a, b, validate_args=False)


def nll(dist, target, weight_decay_on=()):
    reg = sum(p.square().mean() for p in weight_decay_on)
    return -dist.log_prob(target).mean() + 1e-3 * reg


def main():
    loader = DataLoader(Impressions(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = BetaRecommender()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    for epoch in range(2):
        for batch in loader:
            dist = model(user=batch["user"], ad=batch["ad"])
            loss = nll(dist, batch["ctr"], weight_decay_on=[model.user.weight, model.ad.weight])
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
