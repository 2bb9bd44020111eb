"""Monocular depth with sparse lidar targets: scale-invariant log loss + L1 + edge-aware smoothness."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(10)
torch.set_num_threads(1)
MAX_DEPTH = 10.0


def drive_frames(n, g, size=24):
    """Ground plane with boxes; lidar hits ~40% of the pixels, the others are 0."""
    row = torch.linspace(1.0, 0.05, size).view(1, 1, size, 1)
    depth = (row * 6).expand(n, 1, size, size).clone()
    for i in range(n):
        x, y = torch.randint(0, size - 8, (2,), generator=g).tolist()
        depth[i, 0, y:y + 8, x:x + 8] = 0.3 + torch.rand(1, generator=g).item() * 2
    img = torch.cat([depth / 6, row.expand(n, 1, size, size), 0.1 * torch.randn(n, 1, size, size, generator=g)], 1)
    img = img + 0.05 * torch.randn(img.shape, generator=g)
    hit = torch.rand(depth.shape, generator=g) < 0.4
    return img, depth * hit


class DepthNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(3, c, 3, 1, 1), nn.ELU())
        self.enc2 = nn.Sequential(nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ELU())
        self.dec = nn.Sequential(nn.Conv2d(3 * c, c, 3, 1, 1), nn.ELU())
        self.get_depth = nn.Conv2d(c, 1, 3, 1, 1)
        nn.init.constant_(self.get_depth.bias, 0.35)

    def forward(self, img):
        a = self.enc1(img)
        b = F.interpolate(self.enc2(a), scale_factor=2)
        return F.relu(self.get_depth(self.dec(torch.cat([a, b], 1)))) * MAX_DEPTH


def depth_losses(pred, gt, img):
    mask = gt > 0
    log_gt = torch.where(mask, torch.log(gt), torch.zeros_like(gt))
    d = torch.log(pred[mask] + 1e-4) - log_gt[mask]
    silog = torch.sqrt((d ** 2).mean() - 0.85 * d.mean() ** 2)
    l1 = F.l1_loss(pred[mask], gt[mask])
    dx = (pred[..., 1:] - pred[..., :-1]).abs()
    edge = torch.exp(-(img[..., 1:] - img[..., :-1]).abs().mean(1, keepdim=True))
    smooth = (dx * edge).mean()
    return silog, l1, smooth


def main():
    g = torch.Generator().manual_seed(1)
    net = DepthNet()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(60):
        img, gt = drive_frames(8, g)
        pred = net(img)
        silog, l1, smooth = depth_losses(pred, gt, img)
        loss = silog + 0.5 * l1 + 0.05 * smooth
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
