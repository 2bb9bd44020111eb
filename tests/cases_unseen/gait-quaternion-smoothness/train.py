"""Joint orientations (unit quaternions) from inertial sensors, with a temporal smoothness term. Clips shorter than
the window are padded by repeating their last frame."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(2)
torch.set_num_threads(1)

WINDOW, SENSORS, JOINTS = 24, 18, 4
CKPT_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints")


def random_walk_quaternions(t, g):
    q = torch.randn(1, JOINTS, 4, generator=g) + torch.cumsum(0.15 * torch.randn(t, JOINTS, 4, generator=g), 0)
    return F.normalize(q, dim=-1)


class GaitClips(Dataset):
    def __init__(self, lengths, seed):
        g = torch.Generator().manual_seed(seed)
        mix = torch.randn(JOINTS * 4, SENSORS, generator=torch.Generator().manual_seed(1))
        self.clips = []
        for n in lengths:
            q = random_walk_quaternions(n, g)
            imu = q.reshape(n, -1) @ mix + 0.1 * torch.randn(n, SENSORS, generator=g)
            self.clips.append((imu, q))

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        return self.clips[i]


def pad_clip(x):
    missing = WINDOW - x.shape[0]
    if missing > 0:
        x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
    return x[:WINDOW]


def collate(batch):
    imu, quat = zip(*batch)
    return torch.stack([pad_clip(x) for x in imu]), torch.stack([pad_clip(x) for x in quat])


class OrientationNet(nn.Module):
    """Frame-wise network; the output is normalised to unit quaternions."""

    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SENSORS, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.out = nn.Linear(width, JOINTS * 4)

    def forward(self, imu):
        q = self.out(self.body(imu)).unflatten(-1, (JOINTS, 4))
        return F.normalize(q, dim=-1)


def angle_between(a, b):
    dot = (a * b).sum(-1).abs().clamp(max=1.0)
    return 2 * torch.acos(dot)


def losses(pred, target):
    data = (1 - (pred * target).sum(-1) ** 2).mean()
    smooth = angle_between(pred[:, 1:], pred[:, :-1]).mean()
    return data, smooth


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = sum(losses(model(x), q)[0].item() for x, q in loader) / len(loader)
    model.train()
    return total


def main():
    os.makedirs(CKPT_DIR, exist_ok=True)
    lengths = [WINDOW + 2] * 84 + [WINDOW - 10] * 4 + [WINDOW + 2] * 40
    train = DataLoader(GaitClips(lengths, 5), batch_size=6, collate_fn=collate)
    val = DataLoader(GaitClips([WINDOW] * 12, 6), batch_size=6, collate_fn=collate)
    model = OrientationNet()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    best, step = float("inf"), 0
    for epoch in range(2):
        for imu, quat in train:
            data, smooth = losses(model(imu), quat)
            loss = data + 0.05 * smooth
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f} smooth {smooth.item():.4f}")
            step += 1
        score = evaluate(model, val)
        if score < best:
            best = score
            torch.save({"model": model.state_dict(), "epoch": epoch}, os.path.join(CKPT_DIR, "best.pt"))
        print(f"epoch {epoch} val {score:.4f}")


if __name__ == "__main__":
    main()
