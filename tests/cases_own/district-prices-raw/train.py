"""House values per district from census columns (income, rooms, population, ...)."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)

COLUMNS = ["income", "age", "rooms", "bedrooms", "population", "households", "lat", "lon"]


def census(n=1200, seed=0):
    """Columns in their own units: dollars in ten thousands, years, counts, degrees."""
    rng = np.random.default_rng(seed)
    income = rng.gamma(3.0, 1.3, n)
    age = rng.uniform(1, 52, n)
    rooms = rng.gamma(4.0, 1.4, n)
    bedrooms = rooms / 5 + 0.1 * rng.standard_normal(n)
    population = rng.gamma(1.6, 900, n)
    households = population / 3 + 20 * rng.standard_normal(n)
    lat, lon = rng.uniform(32, 42, n), rng.uniform(-124, -114, n)
    value = 0.4 * income + 0.01 * age + 0.2 * (rooms - 5) - 0.05 * (lat - 36) + 0.2 * rng.standard_normal(n)
    table = np.stack([income, age, rooms, bedrooms, population, households, lat, lon], axis=1)
    return table.astype(np.float32), value.astype(np.float32)


class PriceNet(nn.Module):
    def __init__(self, n_in=len(COLUMNS), width=32):
        super().__init__()
        self.hidden = nn.Linear(n_in, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(nn.functional.leaky_relu(self.hidden(x), 0.1)).squeeze(-1)


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=lr)
        self.loss_fn = nn.MSELoss()

    def step(self, x, y):
        loss = self.loss_fn(self.model(x), y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


def main():
    table, value = census()
    data = TensorDataset(torch.from_numpy(table), torch.from_numpy(value))
    loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(PriceNet(), lr=1e-6)
    for step, (x, y) in enumerate(loader):
        print(f"step {step} loss {trainer.step(x, y):.4g}")


if __name__ == "__main__":
    main()
