"""Layout of a transit map by stress: distances on paper follow travel times."""
import csv

import torch
import torch.nn as nn

torch.manual_seed(19)
torch.set_num_threads(1)


class Layout(nn.Module):
    def __init__(self, features, hidden=32):
        super().__init__()
        self.place = nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, stations):
        return self.place(stations)


def paper_distance(xy):
    return ((xy[:, None] - xy[None]) ** 2).sum(-1).add(1e-12).sqrt()


def stress(xy, minutes):
    d = paper_distance(xy)
    weight = 1 / (1 + minutes) ** 2
    upper = torch.triu(torch.ones_like(d, dtype=torch.bool), 1)
    return (weight * (d - minutes) ** 2)[upper].mean()


def city(gen, n=40):
    where = torch.randn(n, 2, generator=gen) * 3
    features = torch.cat([where, torch.rand(n, 4, generator=gen)], 1)
    minutes = (where[:, None] - where[None]).abs().sum(-1)
    return features, minutes


def main():
    gen = torch.Generator().manual_seed(23)
    features, minutes = city(gen)
    model = Layout(features.size(1))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with open("stress.csv", "w", newline="") as f:
        out = csv.writer(f)
        for step in range(40):
            some = torch.randperm(40, generator=gen)[:16]
            if step >= 22:                     # refinement: sample stations by traffic, with repeats
                some = torch.randint(40, (16,), generator=gen)
            loss = stress(model(features[some]), minutes[some][:, some])
            opt.zero_grad()
            loss.backward()
            opt.step()
            out.writerow([step, loss.item()])
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
