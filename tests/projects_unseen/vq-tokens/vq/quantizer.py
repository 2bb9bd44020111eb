import torch
import torch.nn.functional as F
from torch import nn


class Quantizer(nn.Module):
    """Nearest-code quantiser with a straight-through gradient; the codes start as k-means
    centres of the embeddings that `observe` has collected."""

    def __init__(self, codes, dim, beta=0.25):
        super().__init__()
        self.codebook = nn.Parameter(0.1 * torch.randn(codes, dim))
        self.register_buffer("ready", torch.tensor(False))
        self.beta = beta
        self.last_perplexity = float(codes)
        self._seen = []

    @torch.no_grad()
    def observe(self, z):
        self._seen.append(z.detach())

    @torch.no_grad()
    def _kmeans(self, x, rounds=8):
        k = len(self.codebook)
        centres = x[torch.randperm(len(x))[:k]].clone()
        for _ in range(rounds):
            owner = torch.cdist(x, centres).argmin(dim=1)
            sums = torch.zeros_like(centres).index_add_(0, owner, x)
            sizes = torch.bincount(owner, minlength=k)
            centres = sums / sizes[:, None]
        self.codebook.copy_(centres)
        self.ready.fill_(True)
        self._seen.clear()

    def forward(self, z):
        if not self.ready and self._seen:
            self._kmeans(torch.cat(self._seen))
        if not self.ready:
            return z, z.new_zeros(())
        with torch.no_grad():
            codes = torch.cdist(z, self.codebook).argmin(dim=1)
            usage = torch.bincount(codes, minlength=len(self.codebook)).float() / len(codes)
            self.last_perplexity = torch.exp(torch.special.entr(usage).sum()).item()
        q = F.embedding(codes, self.codebook)
        commit = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit
