import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn = nn.BatchNorm2d(cout)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class BilinearPool(nn.Module):
    """Second-order pooling (B-CNN) with signed square root and L2 normalisation."""

    def forward(self, fmap):
        b, c, h, w = fmap.shape
        x = fmap.reshape(b, c, h * w)
        gram = torch.bmm(x, x.transpose(1, 2)) / (h * w)
        z = gram.reshape(b, c * c)
        z = torch.sign(z) * torch.sqrt(z.abs() + 1e-5)
        return F.normalize(z, dim=1)


class BCNN(nn.Module):
    def __init__(self, n_classes, width=16):
        super().__init__()
        self.stem = Block(3, width, 2)
        self.body = Block(width, width, 1)
        self.expand = nn.Conv2d(width, 2 * width, 1)
        self.gain = nn.Parameter(torch.full((2 * width, 1, 1), 6.0))
        self.pool = BilinearPool()
        self.fc = nn.Linear(4 * width * width, n_classes)

    def forward(self, x):
        h = self.body(self.stem(x))
        h = F.relu(self.expand(h)) * self.gain
        return self.fc(self.pool(h))
