from pathlib import Path

import torch
from torch.utils.data import Dataset

from .rotation import forward_kinematics, rodrigues

JOINTS = 6
BONES = torch.tensor([[0.0, 0.5, 0.0]] + [[0.0, 0.3, 0.05]] * (JOINTS - 1))


def _clip(g, frames, camera):
    key = 0.5 * torch.randn(4, JOINTS, 3, generator=g)
    t = torch.linspace(0, 3, frames)
    i = t.floor().long().clamp(max=2)
    w = (t - i)[:, None, None]
    rotvec = key[i] * (1 - w) + key[i + 1] * w
    joints = forward_kinematics(rodrigues(rotvec), BONES)
    visible = torch.ones(frames, JOINTS)
    if camera == "side":  # the far end of the chain leaves the picture in some frames
        visible[:, -2:] = (joints[:, -2:, 0].abs() < 0.55).float()
    keypoints = joints[..., :2] + 0.01 * torch.randn(frames, JOINTS, 2, generator=g)
    return {"keypoints": keypoints * visible[..., None], "visible": visible, "rotvec": rotvec, "joints": joints}


def generate(folder, seed, frames=48):
    folder = Path(folder)
    if folder.exists():
        return
    folder.mkdir(parents=True)
    g = torch.Generator().manual_seed(seed)
    plan = ["front"] * 10 + ["side"] * 6
    for n, camera in enumerate(plan):
        torch.save(_clip(g, frames, camera), folder / f"train_{n:02d}_{camera}.pt")
    for n in range(2):
        torch.save(_clip(g, frames, "front"), folder / f"val_{n:02d}_front.pt")


class Clips(Dataset):
    def __init__(self, folder, split):
        clips = [torch.load(p, weights_only=True) for p in sorted(Path(folder).glob(f"{split}_*.pt"))]
        self.data = {k: torch.cat([c[k] for c in clips]) for k in clips[0]}

    def __len__(self):
        return len(self.data["visible"])

    def __getitem__(self, i):
        return {k: v[i] for k, v in self.data.items()}
