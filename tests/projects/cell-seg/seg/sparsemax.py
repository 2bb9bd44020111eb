"""Sparsemax (Martins & Astudillo 2016) with a hand-written backward."""
import torch


class SparsemaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        s, _ = z.sort(dim=1, descending=True)
        k = torch.arange(1, z.shape[1] + 1, dtype=z.dtype).view(1, -1, *[1] * (z.dim() - 2))
        cum = s.cumsum(1)
        support = 1 + k * s > cum
        size = support.sum(1, keepdim=True)
        tau = (cum.gather(1, size - 1) - 1) / size
        p = (z - tau).clamp(min=0)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, grad):
        (p,) = ctx.saved_tensors
        active = p > 0
        mean = (grad * active).sum(1, keepdim=True) / active.sum(1, keepdim=True)
        return torch.where(active, grad - mean, torch.zeros_like(grad))


def sparsemax(z):
    return SparsemaxFunction.apply(z)
