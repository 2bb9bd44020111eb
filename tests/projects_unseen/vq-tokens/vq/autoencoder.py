import torch
from torch import nn

from .audio import FRAME
from .quantizer import Quantizer


class AutoEncoder(nn.Module):
    def __init__(self, dim=8, width=64, quantise=False, codes=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FRAME, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                     nn.Linear(width, dim))
        self.decoder = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                     nn.Linear(width, FRAME))
        self.quantizer = Quantizer(codes, dim) if quantise else None

    def encode(self, frames):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.encoder(frames)
        return z.float()

    def forward(self, frames):
        z = self.encode(frames)
        commit = z.new_zeros(())
        if self.quantizer is not None:
            z, commit = self.quantizer(z)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.decoder(z)
        return out.float(), commit
