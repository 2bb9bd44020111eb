"""Object orientation from point sets (6D rotation output) with an augmentation-consistency term."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)
torch.set_num_threads(1)


class PointEncoder(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.merge = nn.Linear(dim, dim)

    def forward(self, pts):
        return F.relu(self.merge(self.point(pts).amax(dim=1)))


class RotationHead(nn.Module):
    """Gram-Schmidt on two predicted columns."""

    def __init__(self, dim=48):
        super().__init__()
        self.out = nn.Linear(dim, 6)

    def forward(self, h):
        a, b = self.out(h).split(3, dim=-1)
        x = F.normalize(a, dim=-1)
        y = F.normalize(b - (x * b).sum(-1, keepdim=True) * x, dim=-1)
        return torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = PointEncoder()
        self.head = RotationHead()

    def forward(self, pts):
        return self.head(self.encoder(pts))


def relative_angle(r1, r2):
    m = r1 @ r2.transpose(1, 2)
    cos = (m.diagonal(dim1=1, dim2=2).sum(-1) - 1) / 2
    return torch.acos(cos.clamp(-1 + 1e-6, 1 - 1e-6))


def random_rotations(n, g):
    q = F.normalize(torch.randn(n, 4, generator=g), dim=-1)
    w, x, y, z = q.unbind(-1)
    rows = [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]
    return torch.stack(rows, -1).view(n, 3, 3)


class Jitter:
    """Sensor noise; a share of the batches is left as recorded."""

    def __init__(self, sigma=0.2, keep=0.04):
        self.sigma, self.keep = sigma, keep

    def __call__(self, pts, g):
        if torch.rand(1, generator=g) < self.keep:
            return pts
        return pts + self.sigma * torch.randn(pts.shape, generator=g)


def main():
    g = torch.Generator().manual_seed(7)
    template = torch.randn(24, 3, generator=g) * torch.tensor([1.0, 0.6, 0.3])
    model, jitter = PoseNet(), Jitter()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        rot = random_rotations(24, g)
        pts = template @ rot.transpose(1, 2)
        pred, other = model(pts), model(jitter(pts, g))
        loss = F.mse_loss(pred, rot) + 0.1 * relative_angle(pred, other).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
