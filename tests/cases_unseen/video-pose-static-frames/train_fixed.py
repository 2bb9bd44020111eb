"""Head-pose from video: 6D rotation output, geodesic loss to the labels and a smoothness prior over time."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
torch.set_num_threads(1)
FRAMES, SIZE = 6, 16


def rotation_from_6d(x):
    a = F.normalize(x[..., :3], dim=-1)
    b = x[..., 3:]
    b = F.normalize(b - (a * b).sum(-1, keepdim=True) * a, dim=-1)
    return torch.stack([a, b, torch.cross(a, b, dim=-1)], dim=-1)


def geodesic(r1, r2):
    m = r1 @ r2.transpose(-1, -2)
    cos = (m.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    cos = torch.min(cos, torch.full_like(cos, 1 - 1e-6))
    cos = torch.max(cos, torch.full_like(cos, -1 + 1e-6))
    return torch.acos(cos)


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(),
        )
        self.rot = nn.Linear(64, 6)

    def forward(self, clip):
        b, t = clip.shape[:2]
        out = self.rot(self.conv(clip.flatten(0, 1)))
        return rotation_from_6d(out).view(b, t, 3, 3)


class Renderer:
    """Fake videos: the rotation of each frame is drawn into the picture. Some cameras repeat a frame."""

    def __init__(self, seed=17):
        self.g = torch.Generator().manual_seed(seed)
        self.basis = torch.randn(9, SIZE * SIZE, generator=self.g) / 3

    def clip(self, n):
        start = torch.randn(n, 1, 6, generator=self.g)
        drift = 0.15 * torch.randn(n, FRAMES, 6, generator=self.g).cumsum(1)
        rot = rotation_from_6d(start + drift)
        img = rot.flatten(2) @ self.basis + 0.05 * torch.randn(n, FRAMES, SIZE * SIZE, generator=self.g)
        frozen = torch.rand(n, generator=self.g) < 0.01
        for i in frozen.nonzero().flatten().tolist():
            img[i, 3], rot[i, 3] = img[i, 2], rot[i, 2]
        return img.view(n, FRAMES, 1, SIZE, SIZE), rot


def main():
    source = Renderer()
    net = PoseNet()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(60):
        clip, rot = source.clip(8)
        pred = net(clip)
        label_loss = geodesic(pred, rot).mean()
        smooth = geodesic(pred[:, 1:], pred[:, :-1]).mean()
        loss = label_loss + 0.05 * smooth
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
