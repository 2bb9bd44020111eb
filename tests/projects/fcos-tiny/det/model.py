import torch
import torch.nn as nn


class ConvGN(nn.Sequential):
    def __init__(self, cin, cout, stride=1):
        super().__init__(nn.Conv2d(cin, cout, 3, stride, 1), nn.GroupNorm(4, cout), nn.ReLU())


class Head(nn.Module):
    def __init__(self, dim, classes, stride):
        super().__init__()
        self.stride = stride
        self.cls_tower = ConvGN(dim, dim)
        self.box_tower = ConvGN(dim, dim)
        self.cls = nn.Conv2d(dim, classes, 3, 1, 1)
        self.ctr = nn.Conv2d(dim, 1, 3, 1, 1)
        self.reg = nn.Conv2d(dim, 4, 3, 1, 1)
        nn.init.constant_(self.cls.bias, -2.0)
        nn.init.normal_(self.reg.weight, std=0.01)
        self.reg.bias.data = torch.tensor([0.0, 0.0, 1.0, 1.0])

    def forward(self, x):
        box = self.box_tower(x)
        shift, size = self.reg(box).chunk(2, dim=1)
        half = 0.5 * torch.exp(size)
        ltrb = torch.cat([half - shift, half + shift], dim=1) * self.stride
        return self.cls(self.cls_tower(x)), self.ctr(box), ltrb


class FCOS(nn.Module):
    def __init__(self, width=16, stride=4, classes=3):
        super().__init__()
        self.stride = stride
        self.backbone = nn.Sequential(ConvGN(3, width), ConvGN(width, 2 * width, 2), ConvGN(2 * width, 2 * width, 2), ConvGN(2 * width, 2 * width))
        self.head = Head(2 * width, classes, stride)

    def locations(self, h, w):
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        return torch.stack([x, y], -1).reshape(-1, 2) * self.stride + self.stride / 2

    def forward(self, img):
        cls, ctr, ltrb = self.head(self.backbone(img))
        points = self.locations(*cls.shape[-2:])
        flat = [t.flatten(2).transpose(1, 2) for t in (cls, ctr, ltrb)]
        return flat[0], flat[1].squeeze(-1), flat[2], points
