import torch
from torch import nn

from .dataset import BONES, JOINTS
from .rotation import forward_kinematics, rodrigues


class ChainDecoder(nn.Module):
    """Rotation vectors -> rotation matrices and joint positions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bones", BONES.clone())

    def forward(self, rotvec):
        rot = rodrigues(rotvec)
        return rot, forward_kinematics(rot, self.bones)


class Lifter(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(JOINTS * 3, width), nn.LayerNorm(width), nn.GELU(),
                                     nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        self.to_rotvec = nn.Linear(width, JOINTS * 3)
        self.decoder = ChainDecoder()

    def forward(self, keypoints, visible):
        h = self.encoder(torch.cat([keypoints.flatten(1), visible], dim=1))
        rotvec = self.to_rotvec(h).view(-1, JOINTS, 3)
        rotvec = rotvec * visible[..., None]  # joints that are not seen stay in the rest pose
        rot, joints = self.decoder(rotvec)
        return {"rotvec": rotvec, "rot": rot, "joints": joints}
