"""Length-of-stay regression from an exported patient table."""
import io

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(13)
torch.set_num_threads(1)

HEADER = ["age", "pulse", "temp", "crp", "sodium", "stay"]


def export(n=480, seed=3):
    """What the hospital system writes: one line per admission, a missing lab value is an empty cell."""
    rng = np.random.default_rng(seed)
    lines = [",".join(HEADER)]
    for i in range(n):
        age, pulse, temp = rng.uniform(18, 95), rng.normal(82, 12), rng.normal(37.2, 0.7)
        crp, sodium = rng.gamma(1.5, 20), rng.normal(139, 3)
        stay = 1 + 0.04 * age + 0.03 * crp + 0.8 * max(temp - 37, 0) + rng.normal(0, 0.5)
        cells = [f"{v:.2f}" for v in (age, pulse, temp, crp, sodium, stay)]
        if i == 303:
            cells[3] = ""
        lines.append(",".join(cells))
    return "\n".join(lines)


class Admissions(Dataset):
    def __init__(self, text):
        table = np.genfromtxt(io.StringIO(text), delimiter=",", skip_header=1, dtype=np.float32)
        x, self.stay = table[:, :-1], table[:, -1]
        self.x = (x - np.nanmean(x, axis=0)) / np.nanstd(x, axis=0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"features": torch.from_numpy(self.x[i]), "stay": torch.tensor(self.stay[i])}


class StayNet(nn.Module):
    def __init__(self, n_in=5, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.SiLU())
        self.mean = nn.Linear(width, 1)

    def forward(self, batch):
        return self.mean(self.body(batch["features"])).squeeze(-1)


def run(model, loader, opt):
    for step, batch in enumerate(loader):
        pred = model(batch)
        loss = F.smooth_l1_loss(pred, batch["stay"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


def main():
    loader = DataLoader(Admissions(export()), batch_size=16)
    model = StayNet()
    run(model, loader, torch.optim.AdamW(model.parameters(), lr=5e-3))


main()
