from pathlib import Path

import lightning as L
import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset

from .prepare import simulate
from .transform import PowerTransform


class Windows(Dataset):
    """Windows in order of time: (history of a day, next half day)."""

    def __init__(self, frames, transform, start, stop, history=48, horizon=24, stride=12):
        self.frames, self.transform = frames, transform
        self.history, self.horizon = history, horizon
        self.index = [(h, t) for t in range(start, stop - history - horizon, stride) for h in range(len(frames))]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        home, t = self.index[i]
        series = self.frames[home][t:t + self.history + self.horizon]
        z = self.transform(series).astype(np.float32)
        slot = (np.arange(t, t + len(series)) % 48) / 48 * 2 * np.pi
        clock = np.stack([np.sin(slot), np.cos(slot)], 1).astype(np.float32)
        h = self.history
        return torch.from_numpy(z[:h]), torch.from_numpy(clock), torch.from_numpy(z[h:])


class MeterData(L.LightningDataModule):
    def __init__(self, folder, homes, days, batch_size, seed, workers=2):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        if not Path(self.hparams.folder).exists():
            simulate(self.hparams.folder, self.hparams.homes, self.hparams.days, self.hparams.seed)

    def setup(self, stage=None):
        files = sorted(Path(self.hparams.folder).glob("*.csv"))
        frames = [pd.read_csv(f)["kwh"].to_numpy() for f in files]
        n = len(frames[0])
        month = np.concatenate([f[:n // 6] for f in frames])
        transform = PowerTransform(0.3).fit(month)
        self.train = Windows(frames, transform, 0, n)
        self.val = Windows(frames, transform, n // 2, n // 2 + 240)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=False, num_workers=self.hparams.workers)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)
