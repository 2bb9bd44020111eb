"""Lifting of 2D keypoints to 3D poses that are compared in a body frame built from three limbs."""
import math

import torch
import torch.nn as nn

torch.manual_seed(21)
torch.set_num_threads(1)

JOINTS = 12
ROOT, LIMBS = 0, [3, 7, 11]


class Lifter(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.inp = nn.Linear(JOINTS * 2, width)
        self.res = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()) for _ in range(2))
        self.out = nn.Linear(width, JOINTS * 3)

    def forward(self, kp2d):
        h = self.inp(kp2d.flatten(1)).relu_()
        for block in self.res:
            h = h + block(h)
        return self.out(h).view(-1, JOINTS, 3)


class BodyFrame(nn.Module):
    """Orthonormal axes (Gram-Schmidt of the limbs as seen from the root joint)."""

    def forward(self, pose, visible):
        limbs = (pose[:, LIMBS] - pose[:, [ROOT]]).transpose(1, 2)
        seen = visible[:, None, LIMBS].to(pose.dtype)
        axes, tri = torch.linalg.qr(limbs * seen)
        return axes * tri.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(1)


class PoseLoss(nn.Module):
    def __init__(self, frame_weight=0.2):
        super().__init__()
        self.frame = BodyFrame()
        self.frame_weight = frame_weight

    def forward(self, pred, target, visible):
        w = visible.float()
        rel_p, rel_t = pred - pred[:, :1], target - target[:, :1]
        joint_loss = ((rel_p - rel_t).abs().sum(dim=-1) * w).sum() / w.sum()
        frame_loss = (self.frame(pred, visible) - self.frame(target, visible)).square().sum(dim=(1, 2)).mean()
        return joint_loss + self.frame_weight * frame_loss


def skeletons(gen, n=16):
    phase = torch.linspace(0, math.pi, JOINTS)
    base = torch.stack([2 * phase.cos(), phase, 2 * phase.sin()], dim=-1)
    base = base + 0.3 * torch.randn(n, JOINTS, 3, generator=gen)
    kp2d = base[..., :2] / (base[..., 2:] + 6.0)
    hidden = torch.rand(n, JOINTS, generator=gen) < 0.004
    hidden[:, ROOT] = False
    return kp2d * ~hidden[..., None], base, ~hidden


def main():
    gen = torch.Generator().manual_seed(77)
    model, criterion = Lifter(), PoseLoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(50):
        kp2d, target, visible = skeletons(gen)
        loss = criterion(pred=model(kp2d), target=target, visible=visible)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("step {} loss {:.4f}".format(step, loss.item()))


main()
