"""Monocular depth with an edge-aware term (Sobel magnitude) next to the scale-invariant data term."""
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(8)
torch.set_num_threads(1)

MAX_DEPTH = 10.0


class ConvBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class DepthNet(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.enc1, self.enc2 = ConvBlock(3, ch), ConvBlock(ch, 2 * ch, stride=2)
        self.dec = ConvBlock(3 * ch, ch)
        self.head = nn.Conv2d(ch, 1, 3, padding=1)
        nn.init.constant_(self.head.bias, 4.0)

    def forward(self, img):
        a = self.enc1(img)
        b = F.interpolate(self.enc2(a), scale_factor=2.0, mode="nearest")
        depth = self.head(self.dec(torch.cat([a, b], dim=1)))
        return depth.clamp(0.1, MAX_DEPTH)


class Sobel(nn.Module):
    def __init__(self):
        super().__init__()
        kx = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]]) / 8
        self.register_buffer("weight", torch.stack([kx, kx.t()]).unsqueeze(1))

    def forward(self, x):
        gx, gy = F.conv2d(x, self.weight).chunk(2, dim=1)
        return torch.hypot(gx, gy)


class DepthLoss(nn.Module):
    def __init__(self, edge_weight=0.5):
        super().__init__()
        self.edges = Sobel()
        self.edge_weight = edge_weight

    def forward(self, pred, target):
        diff = pred.log() - target.log()
        data_term = diff.square().mean() - 0.5 * diff.mean().square()
        edge_term = F.l1_loss(self.edges(pred), self.edges(target))
        return data_term + self.edge_weight * edge_term


def render(gen, n=4, size=24, far=None):
    """Ramps with a box in front; `far` puts an open sky at the sensor limit behind them."""
    ys = torch.linspace(0, 1, size).view(1, 1, size, 1)
    base = 2.0 + 4.0 * torch.rand(n, 1, 1, 1, generator=gen)
    depth = (base + 1.5 * ys).expand(n, 1, size, size).clone()
    if far:
        depth[:, :, : size // 2] = far
    for i in range(n):
        r, c = torch.randint(8, size - 10, (2,), generator=gen).tolist()
        depth[i, :, r:r + 10, c:c + 10] = 1.0 + torch.rand(1, generator=gen).item()
    shade = 1.0 / depth
    img = torch.cat([shade, depth / MAX_DEPTH, ys.expand_as(depth)], dim=1)
    return img + 0.01 * torch.randn(img.shape, generator=gen), depth


def main():
    gen = torch.Generator().manual_seed(4)
    model, criterion = DepthNet(), DepthLoss()
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(60):
        img, depth = render(gen, far=MAX_DEPTH if step >= 12 else None)
        loss = criterion(model(img), depth)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.5f}")


main()
