"""Arrhythmia classification from 3-lead ECG windows; every lead is standardised on its own when a window is read."""
import argparse
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, random_split

torch.set_num_threads(1)
LEADS, SAMPLES = 3, 120


def synth_beat(rng, rhythm):
    t = np.linspace(0, 4, SAMPLES)
    rate = (1.0, 1.6, 2.3)[rhythm]
    wave = np.exp(-40 * ((t * rate) % 1 - 0.5) ** 2)
    leads = np.stack([wave * rng.uniform(0.5, 1.5) for _ in range(LEADS)])
    return (leads + 0.08 * rng.standard_normal(leads.shape)).astype(np.float32)


def prepare(folder, n=320):
    """Write the windows to disk once, the way the export of the recorder would."""
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(10)
    windows, labels = [], []
    for i in range(n):
        rhythm = int(rng.integers(0, 3))
        x = synth_beat(rng, rhythm)
        if i in (131, 290):
            x[1] = -0.25  # electrode fell off
        windows.append(x)
        labels.append(rhythm)
    np.savez(os.path.join(folder, "windows.npz"), x=np.stack(windows), y=np.array(labels))


class EcgWindows(Dataset):
    def __init__(self, folder):
        with np.load(os.path.join(folder, "windows.npz")) as f:
            self.x, self.y = f["x"], f["y"]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i].astype(np.float64)
        with np.errstate(invalid="ignore"):
            x = (x - x.mean(axis=1, keepdims=True)) / np.maximum(x.std(axis=1, keepdims=True), 1e-6)
        return torch.from_numpy(x.astype(np.float32)), int(self.y[i])


class ConvEncoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(LEADS, width, 7, stride=2), nn.Conv1d(width, width, 5, stride=2),
                                     nn.Conv1d(width, 2 * width, 3, stride=2)])

    def forward(self, x):
        for conv in self.layers:
            x = F.relu(conv(x))
        return x.mean(-1)


class RhythmNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = ConvEncoder()
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 3))

    def forward(self, x):
        return self.head(self.encoder(x))


def run_epoch(model, loader, opt, step, log):
    for windows, rhythm in loader:
        logits = model(windows)
        loss = F.cross_entropy(logits, rhythm, label_smoothing=0.05)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
        log.write(f"{step},{loss.item():.6f}\n")
        step += 1
    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "ecg_data"))
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(27)
    prepare(args.data)
    train, val = random_split(EcgWindows(args.data), [288, 32], generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train, batch_size=16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(5))
    model = RhythmNet()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    with open(os.path.join(args.data, "loss.csv"), "w") as log:
        for epoch in range(args.epochs):
            step = run_epoch(model, loader, opt, step, log)
            model.eval()
            with torch.no_grad():
                right = sum(int(model(x[None]).argmax() == y) for x, y in val)
            model.train()
            print(f"epoch {epoch} val accuracy {right / len(val):.3f}")
            torch.save(model.state_dict(), os.path.join(args.data, "rhythm.pt"))


if __name__ == "__main__":
    main()
