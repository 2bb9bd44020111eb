"""Brain-age regression from small MRI volumes kept in .npz files (one per participant)."""
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(3)
torch.set_num_threads(1)


def write_cohort(root, n=240, size=12):
    """Preprocessed volumes as they come out of the registration pipeline."""
    rng = np.random.default_rng(1)
    for i in range(n):
        age = rng.uniform(20, 80)
        vol = rng.normal(1.0, 0.2, (size, size, size)).astype(np.float32)
        vol[4:8, 4:8, 4:8] *= 0.3 + age / 50
        if i == 97:  # resampling left the field of view
            vol[:, :, -1] = np.nan
        np.savez(root / f"sub-{i:03d}_T1w.npz", volume=vol, age=np.float32(age))


class CohortDataset(Dataset):
    def __init__(self, root):
        self.paths = sorted(root.glob("sub-*_T1w.npz"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, idx):
        with np.load(self.paths[idx]) as f:
            vol, age = f["volume"], f["age"]
        vol = vol / 2.0
        return {"volume": torch.from_numpy(vol)[None], "age": torch.tensor((age - 50) / 20)}


class Conv3dBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv3d(cin, cout, 3, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.avg_pool3d(F.silu(self.norm(self.conv(x))), 2)


class BrainAge(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Conv3dBlock(1, 8), Conv3dBlock(8, 16))
        self.fc = nn.Linear(16 * 27, 1)

    def forward(self, vol):
        return self.fc(self.encoder(vol).flatten(1)).squeeze(1)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        root = Path(tmp)
        write_cohort(root)
        gen = torch.Generator().manual_seed(6)
        loader = DataLoader(CohortDataset(root), batch_size=6, shuffle=True, generator=gen)
        model = BrainAge()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step, batch in enumerate(loader):
            pred = model(batch["volume"])
            loss = F.smooth_l1_loss(pred, batch["age"])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")


main()
