"""One .npz per recording: windows of six accelerometers at 1 kHz. Batches hold the windows of one recording."""
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

LENGTH = 64


def synthesise(rng, windows, channels=6):
    rpm = rng.uniform(20, 60)
    t = np.arange(windows * LENGTH) / 1000
    mesh = np.stack([np.sin(2 * np.pi * rpm * (c + 1) * t + rng.uniform(0, 6)) for c in range(channels)])
    noise = rng.standard_normal(mesh.shape)
    signal = rng.uniform(0.5, 1.5, (channels, 1)) * mesh + 0.3 * noise
    return signal.reshape(channels, windows, LENGTH).transpose(1, 0, 2).astype(np.float32)


def prepare(cfg):
    root = Path(cfg["root"])
    if (root / "done").exists():
        return
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(77)
    for i in range(cfg["recordings"]):
        x = synthesise(rng, cfg["windows"])
        if i in (23, 38):  # the logger was started before the cable was plugged in
            x[:, :] = 0.0
        np.savez(root / f"rec{i:03d}.npz", x=x)
    (root / "done").touch()


class Recordings(Dataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        x = torch.from_numpy(np.load(self.files[i])["x"])
        scale = x.std(dim=(0, 2), keepdim=True) + 1e-6
        return x / scale


def augment(x, generator):
    shift = int(torch.randint(0, 16, (1,), generator=generator))
    gain = 1 + 0.1 * torch.randn(x.size(0), x.size(1), 1, generator=generator)
    return torch.roll(x, shift, -1) * gain


def loaders(cfg, seed):
    files = sorted(Path(cfg["root"]).glob("rec*.npz"))
    train, valid = files[:-6], files[-6:-2]
    make = lambda f: DataLoader(Recordings(f), batch_size=None, shuffle=False, num_workers=cfg["workers"])
    return make(train), make(valid)
