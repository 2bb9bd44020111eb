"""Fit a neural point renderer: per-pixel sorted points are alpha-composited front to back."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)
PIX, K = 256, 6


class AlphaComposite(torch.autograd.Function):
    """color = sum_k c_k a_k prod_{j<k} (1 - a_j); hand-written backward saves memory."""

    @staticmethod
    def forward(ctx, alpha, color):
        trans = torch.cumprod(1 - alpha, dim=1)
        trans = torch.cat([torch.ones_like(trans[:, :1]), trans[:, :-1]], dim=1)
        weight = alpha * trans
        out = (weight.unsqueeze(-1) * color).sum(1)
        ctx.save_for_backward(alpha, color, trans, weight)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        alpha, color, trans, weight = ctx.saved_tensors
        g = (grad_out.unsqueeze(1) * color).sum(-1)
        contrib = g * weight
        behind = contrib.sum(1, keepdim=True) - contrib.cumsum(1)
        grad_alpha = g * trans - behind / (1 - alpha).clamp(min=1e-6)
        grad_color = grad_out.unsqueeze(1) * weight.unsqueeze(-1)
        return grad_alpha, grad_color


class PointField(nn.Module):
    """Predicts density and colour of a point from its features."""

    def __init__(self, dim=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.opacity = nn.Linear(64, 1)
        self.rgb = nn.Linear(64, 3)

    def forward(self, feat, depth):
        h = self.trunk(feat)
        density = F.softplus(8 * self.opacity(h)).squeeze(-1)
        alpha = 1 - torch.exp(-density * depth)
        return alpha, torch.sigmoid(self.rgb(h))


class Renderer(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = PointField()

    def forward(self, feat, depth):
        alpha, color = self.field(feat, depth)
        return AlphaComposite.apply(alpha, color)


def make_scene(g):
    feat = torch.randn(PIX, K, 16, generator=g)
    depth = torch.rand(PIX, K, generator=g) * 0.8 + 0.2
    solid = feat[..., 0] > 0.2
    true_alpha = 1 - torch.exp(-torch.where(solid, 12.0, 0.1) * depth)
    color = torch.sigmoid(feat[..., 1:4] * 2)
    return feat, depth, AlphaComposite.apply(true_alpha, color)


def main():
    g = torch.Generator().manual_seed(3)
    model = Renderer()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(70):
        feat, depth, image = make_scene(g)
        pred = model(feat, depth)
        loss = F.mse_loss(pred, image) * 10
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.5f}")


main()
