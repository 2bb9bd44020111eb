"""Multi-scale structural similarity as a training loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def gaussian_window(size, sigma, channels):
    x = torch.arange(size, dtype=torch.float32) - size // 2
    g = torch.exp(-x ** 2 / (2 * sigma ** 2))
    g = g / g.sum()
    return (g[:, None] * g[None, :]).expand(channels, 1, size, size).contiguous()


def ssim_maps(x, y, window, c1=0.01 ** 2, c2=0.03 ** 2):
    ch = x.size(1)
    mu_x = F.conv2d(x, window, groups=ch)
    mu_y = F.conv2d(y, window, groups=ch)
    var_x = F.conv2d(x * x, window, groups=ch) - mu_x ** 2
    var_y = F.conv2d(y * y, window, groups=ch) - mu_y ** 2
    cov = F.conv2d(x * y, window, groups=ch) - mu_x * mu_y
    cs = (2 * cov + c2) / (var_x + var_y + c2)
    lum = (2 * mu_x * mu_y + c1) / (mu_x ** 2 + mu_y ** 2 + c1)
    return (lum * cs).mean(dim=(1, 2, 3)), cs.mean(dim=(1, 2, 3))


class MSSSIMLoss(nn.Module):
    def __init__(self, channels=1, weights=(0.3, 0.4, 0.3), window_size=7):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))
        self.register_buffer("window", gaussian_window(window_size, 1.5, channels))

    def forward(self, pred, target):
        scores = []
        levels = len(self.weights)
        for i in range(levels):
            ssim, cs = ssim_maps(pred, target, self.window)
            scores.append(ssim if i == levels - 1 else cs)
            pred = F.avg_pool2d(pred, 2)
            target = F.avg_pool2d(target, 2)
        scores = torch.stack(scores, dim=1)
        value = torch.prod(scores ** self.weights, dim=1)
        return 1 - value.mean()
