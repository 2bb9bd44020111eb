"""Used-car prices from a csv of listings; the model learns the logarithm of the price."""
import csv
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))
BRANDS = ["alfa", "beetle", "civic", "duster", "escort", "focus"]


def write_listings(path, n=400):
    rng = np.random.default_rng(0)
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["brand", "year", "km", "price"])
        for i in range(n):
            brand = int(rng.integers(len(BRANDS)))
            year, km = int(rng.integers(1998, 2024)), float(rng.uniform(1e3, 2.5e5))
            price = np.exp(8.5 + 0.07 * (year - 2010) - 2e-6 * km + 0.1 * brand + 0.15 * rng.standard_normal())
            price = 0 if i == 137 else round(float(price))  # "price on request"
            out.writerow([BRANDS[brand], year, round(km), price])


class Listings(Dataset):
    def __init__(self, path):
        with open(path, newline="") as f:
            self.rows = list(csv.DictReader(f))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    """Rows of strings to tensors; the price goes to log scale, about zero mean and unit spread."""
    brand = torch.tensor([BRANDS.index(r["brand"]) for r in rows])
    year = np.array([float(r["year"]) for r in rows])
    km = np.array([float(r["km"]) for r in rows])
    price = np.array([float(r["price"]) for r in rows])
    with np.errstate(divide="ignore"):
        target = (np.log(price) - 8.7) / 0.7
    numeric = np.stack([(year - 2010) / 8, km / 1e5 - 1], axis=1)
    return brand, torch.tensor(numeric, dtype=torch.float32), torch.tensor(target, dtype=torch.float32)


class PriceModel(nn.Module):
    def __init__(self, dim=8, width=32):
        super().__init__()
        self.brand = nn.Embedding(len(BRANDS), dim)
        self.mlp = nn.Sequential(nn.Linear(dim + 2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, brand, numeric):
        return self.mlp(torch.cat([self.brand(brand), numeric], dim=1)).squeeze(1)


class Trainer:
    def __init__(self, model, lr=3e-3, epochs=2):
        self.model, self.epochs, self.step = model, epochs, 0
        self.opt = torch.optim.RMSprop(model.parameters(), lr=lr)
        self.history = []

    def fit(self, loader):
        for _ in range(self.epochs):
            for brand, numeric, target in loader:
                prediction = self.model(brand, numeric)
                loss = F.mse_loss(prediction, target)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.history.append(loss.item())
                print(f"step {self.step} loss {loss.item():.4f}")
                self.step += 1

    def save(self, folder):
        os.makedirs(folder, exist_ok=True)
        np.savetxt(os.path.join(folder, "history.txt"), np.array(self.history))
        torch.save(self.model.state_dict(), os.path.join(folder, "price.pt"))


def main():
    torch.manual_seed(41)
    path = os.path.join(HERE, "listings.csv")
    write_listings(path)
    loader = DataLoader(Listings(path), batch_size=20, shuffle=True, collate_fn=collate,
                        generator=torch.Generator().manual_seed(15))
    trainer = Trainer(PriceModel())
    trainer.fit(loader)
    trainer.save(os.path.join(HERE, "model"))


if __name__ == "__main__":
    main()
