"""Rotation helpers (batched, any leading shape)."""
import torch


def hat(v):
    x, y, z = v.unbind(-1)
    o = torch.zeros_like(x)
    return torch.stack([o, -z, y, z, o, -x, -y, x, o], dim=-1).view(*v.shape[:-1], 3, 3)


def rodrigues(rotvec):
    """Axis-angle to matrix."""
    theta = rotvec.norm(dim=-1, keepdim=True)
    # no axis for the identity rotation
    axis = torch.where(theta > 1e-6, rotvec / theta, torch.zeros_like(rotvec))
    k = hat(axis)
    s, c = theta.sin()[..., None], theta.cos()[..., None]
    return torch.eye(3) + s * k + (1 - c) * (k @ k)


def forward_kinematics(rotations, bones):
    """Chain of joints; bones are the offsets in the rest pose."""
    out, pos, acc = [], torch.zeros_like(rotations[:, 0, :, 0]), torch.eye(3).expand_as(rotations[:, 0])
    for j in range(rotations.shape[1]):
        acc = acc @ rotations[:, j]
        pos = pos + acc @ bones[j]
        out.append(pos)
    return torch.stack(out, dim=1)
