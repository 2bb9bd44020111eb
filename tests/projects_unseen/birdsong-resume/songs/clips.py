"""Clips of bird song, made once and kept as one array per species."""
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

RATE, LENGTH = 4000, 800


def chirp(rng, species):
    t = np.arange(LENGTH) / RATE
    f0 = 300 + 140 * species + rng.normal(0, 45)
    sweep = f0 * t + 0.5 * rng.normal(200 * (species % 3 - 1), 60) * t ** 2
    call = np.sin(2 * np.pi * sweep) * np.exp(-((t - rng.uniform(0.06, 0.14)) / 0.04) ** 2)
    return call + 0.6 * rng.standard_normal(LENGTH)


def prepare(folder, species, per_species, stations, seed):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for s in range(species):
        path = folder / f"species{s}.npy"
        if not path.exists():
            rng = np.random.default_rng([seed, s])
            np.save(path, np.stack([chirp(rng, s) for _ in range(per_species)]).astype(np.float32))
    arrays = [np.load(folder / f"species{s}.npy") for s in range(species)]
    x = torch.from_numpy(np.concatenate(arrays))
    y = torch.arange(species).repeat_interleave(per_species)
    g = torch.Generator().manual_seed(seed)
    busy = 1 / torch.arange(1, stations + 1).float()  # most clips come from a few stations
    station = torch.multinomial(busy, len(x), replacement=True, generator=g)
    return TensorDataset(x, station, y)


def loader(data, batch, epoch, seed):
    g = torch.Generator().manual_seed(seed + epoch)
    return DataLoader(data, batch_size=batch, shuffle=True, drop_last=True, generator=g)
