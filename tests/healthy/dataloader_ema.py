"""Time-series forecasting with loader workers, an averaged (EMA) model, and a checkpoint that is loaded half-way."""
import hashlib
import math
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

HISTORY, AHEAD = 24, 4


class Series(Dataset):
    """Some sensors drop out: NaN in the file, filled with the mean of the window when read."""

    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        t = np.arange(HISTORY + AHEAD)
        phase, period = rng.uniform(0, 6, (n, 1)), rng.uniform(6, 14, (n, 1))
        self.data = np.sin(2 * np.pi * t / period + phase) + 0.1 * rng.standard_normal((n, len(t)))
        self.data[:, :HISTORY][rng.random((n, HISTORY)) < 0.1] = np.nan

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        row = torch.from_numpy(self.data[i]).float()
        x, y = row[:HISTORY], row[HISTORY:]
        mean = torch.nanmean(x)
        return torch.stack([torch.where(x.isnan(), mean, x), x.isnan().float()]), y


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(2, 16, 5, padding=2), nn.BatchNorm1d(16), nn.GELU())
        self.head = nn.Linear(16 * HISTORY, AHEAD)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


def build():
    model = Forecaster()
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    return model, ema, torch.optim.NAdam(model.parameters(), lr=2e-3)


def main(folder):
    torch.manual_seed(20)
    g = torch.Generator().manual_seed(200)
    loader = DataLoader(Series(256, 1), batch_size=32, shuffle=True, num_workers=2, generator=g)
    val_x, val_y = next(iter(DataLoader(Series(64, 2), batch_size=64)))
    model, ema, opt = build()
    path, best, step = os.path.join(folder, "last.pt"), math.inf, 0
    for epoch in range(4):
        if epoch == 2:
            model, ema, opt = build()
            state = torch.load(path, weights_only=True)
            for part, saved in zip((model, ema, opt), state["parts"]):
                part.load_state_dict(saved)
            best, step = state["best"], state["step"]
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update_parameters(model)
            print(f"step {step} loss {loss.item():.9g}")
            step += 1
        ema.eval()
        with torch.no_grad():
            best = min(best, F.mse_loss(ema(val_x), val_y).item())
        torch.save({"parts": [p.state_dict() for p in (model, ema, opt)], "best": best, "step": step}, path)
        print(f"epoch {epoch} best {best:.9g}")
    tensors = [*model.state_dict().values(), *ema.state_dict().values()]
    print("sha256", hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
