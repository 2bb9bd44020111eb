"""CenterNet-style keypoint heatmaps trained under bfloat16 autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)
SIZE, OUT = 32, 16


def make_batch(n, g):
    """Bright squares on noise; target is a gaussian bump at each square's centre."""
    img = 0.2 * torch.randn(n, 1, SIZE, SIZE, generator=g)
    heat = torch.zeros(n, 1, OUT, OUT)
    yy, xx = torch.meshgrid(torch.arange(OUT), torch.arange(OUT), indexing="ij")
    for i in range(n):
        for _ in range(3):
            cy, cx = torch.randint(2, OUT - 2, (2,), generator=g).tolist()
            img[i, 0, 2 * cy - 1:2 * cy + 2, 2 * cx - 1:2 * cx + 2] += 2.0
            bump = torch.exp(-((yy - cy) ** 2 + (xx - cx) ** 2).float() / 2.0)
            heat[i, 0] = torch.maximum(heat[i, 0], bump)
    return img, heat


class HourglassLite(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, c, 5, 2, 2), nn.BatchNorm2d(c), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(c, 2 * c, 3, 2, 1), nn.BatchNorm2d(2 * c), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * c, c, 4, 2, 1)
        self.heat = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(), nn.Conv2d(c, 1, 1))
        nn.init.constant_(self.heat[-1].bias, -2.19)

    def forward(self, x):
        s = self.stem(x)
        return torch.sigmoid(self.heat(s + self.up(self.down(s))))


def heatmap_focal(pred, gt):
    pos = gt.eq(1).float()
    neg = 1 - pos
    pos_loss = torch.log(pred) * (1 - pred) ** 2 * pos
    neg_loss = torch.log(1 - pred) * pred ** 2 * (1 - gt) ** 4 * neg
    return -(pos_loss.sum() + neg_loss.sum()) / pos.sum().clamp(min=1)


def main():
    g = torch.Generator().manual_seed(9)
    net = HourglassLite()
    opt = torch.optim.Adam(net.parameters(), lr=1.5e-3)
    for step in range(60):
        img, heat = make_batch(8, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = net(img)
            loss = heatmap_focal(pred.float().clamp(1e-4, 1 - 1e-4), heat)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
