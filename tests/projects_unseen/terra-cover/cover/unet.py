import torch
import torch.nn as nn
import torch.nn.functional as F


def double(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, bands, classes, w=8):
        super().__init__()
        self.down1, self.down2, self.mid = double(bands, w), double(w, 2 * w), double(2 * w, 4 * w)
        self.up2, self.up1 = double(6 * w, 2 * w), double(3 * w, w)
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(m, scale_factor=2.0), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        return self.head(a)
