import torch
import torch.nn.functional as F


def random_rotations(n, generator):
    q = torch.randn(n, 4, generator=generator)
    q = q / q.norm(dim=1, keepdim=True)
    w, x, y, z = q.unbind(1)
    return torch.stack([
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)], 1).view(n, 3, 3)


def from_6d(v):
    """Gram-Schmidt on two 3-vectors (Zhou et al., 2019)."""
    a, b = v[:, :3], v[:, 3:]
    x = F.normalize(a, dim=1)
    y = F.normalize(b - (x * b).sum(1, keepdim=True) * x, dim=1)
    z = torch.cross(x, y, dim=1)
    return torch.stack([x, y, z], dim=2)


def geodesic(r1, r2):
    """Angle between two batches of rotations, in radians."""
    trace = (r1 * r2).sum(dim=(1, 2))
    cos = ((trace - 1) / 2).clamp(-1.0, 1.0)
    return torch.acos(cos)
