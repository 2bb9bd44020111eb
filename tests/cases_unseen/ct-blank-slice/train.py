"""Classify CT slices stored as .npy files; every slice is standardised on its own."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


def export_slices(folder, n=320, size=24):
    """Stands for the scanner export: one file per slice, Hounsfield-like integers, plus the labels."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, n)
    yy, xx = np.mgrid[:size, :size]
    for i in range(n):
        img = rng.normal(-200, 40, (size, size))
        cy, cx = rng.integers(6, size - 6, 2)
        r = 2 + 2 * labels[i]
        img[(yy - cy) ** 2 + (xx - cx) ** 2 <= r ** 2] += 300
        if i == 211:  # table moved out of the field of view
            img[:] = -1024
        np.save(os.path.join(folder, f"slice_{i:04d}.npy"), img.astype(np.int16))
    return labels


class SliceDataset(Dataset):
    def __init__(self, folder, labels):
        self.files = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".npy"))
        self.labels = labels

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img = np.load(self.files[i]).astype(np.float32)
        img = (img - img.mean()) / img.std()
        return torch.from_numpy(img).unsqueeze(0), int(self.labels[i])


class SliceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(24, 3))

    def forward(self, x):
        return self.head(self.features(x).amax(dim=(2, 3)))


def main():
    with tempfile.TemporaryDirectory() as folder:
        labels = export_slices(folder)
        g = torch.Generator().manual_seed(8)
        loader = DataLoader(SliceDataset(folder, labels), batch_size=8, shuffle=True, generator=g, num_workers=2)
        net = SliceNet()
        opt = torch.optim.Adam(net.parameters(), lr=3e-3)
        for step, (img, label) in enumerate(loader):
            logits = net(img)
            loss = F.cross_entropy(logits, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
