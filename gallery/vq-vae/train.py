"""vector-quantize-pytorch: a small VQ autoencoder on data of four kinds.

With --bug, the codebook's moving average has neither memory nor smoothing (decay 0, eps 0); a batch
that lacks one of the kinds leaves a code without a member, and its mean is 0 / 0.
"""

import argparse
import os

import torch
from torch import nn
from vector_quantize_pytorch import VectorQuantize


class Autoencoder(nn.Module):
    def __init__(self, **quantizer):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        self.vq = VectorQuantize(dim=4, codebook_size=4, kmeans_init=True, threshold_ema_dead_code=0, **quantizer)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        z = self.encoder(x).unsqueeze(1)
        quantized, indices, commit_loss = self.vq(z)
        return self.decoder(quantized.squeeze(1)), indices, commit_loss


def make_batches(steps):
    """Batches of all kinds; from time to time one comes from a file that has three."""
    g = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(4, 8, generator=g)
    for step in range(steps):
        kinds = 3 if step % 20 == 15 else 4
        kind = torch.arange(32) % kinds
        yield centres[kind] + 0.1 * torch.randn(32, 8, generator=g)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs("out", exist_ok=True)
    model = Autoencoder(decay=0.0, eps=0.0) if args.bug else Autoencoder(decay=0.8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, x in enumerate(make_batches(args.steps)):
        out, indices, commit_loss = model(x)
        rec_loss = (out - x).abs().mean()
        loss = rec_loss + 10 * commit_loss.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"rec loss {rec_loss.item():.3f} | active {indices.unique().numel()}")
            torch.save(model.state_dict(), "out/model.pt")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
