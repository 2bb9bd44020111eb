"""Image retrieval head: frozen-ish trunk, GeM pooling with a learnable exponent, proxy classification."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)

CLASSES = 8


def conv_bn(cin, cout, act=True):
    layers = [nn.Conv2d(cin, cout, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(cout)]
    if act:
        layers.append(nn.LeakyReLU(0.1, inplace=True))
    return nn.Sequential(*layers)


class GeneralizedMean(nn.Module):
    def __init__(self, p=3.0):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, x):
        pooled = x.pow(self.p).mean(dim=(-2, -1))
        return pooled.clamp(min=1e-6).pow(1.0 / self.p)

    def extra_repr(self):
        return f"p={self.p.item():.3f}"


class RetrievalNet(nn.Module):
    def __init__(self, width=16, dim=32):
        super().__init__()
        self.trunk = nn.Sequential(conv_bn(3, width), conv_bn(width, 2 * width))
        self.gem = GeneralizedMean()
        self.embed = nn.Linear(2 * width, dim)
        self.proxies = nn.Parameter(torch.randn(CLASSES, dim))

    def forward(self, img):
        z = F.normalize(self.embed(self.gem(self.trunk(img))), dim=1)
        return 8.0 * z @ F.normalize(self.proxies, dim=1).t()


def photos(gen, n=24, size=24):
    label = torch.randint(0, CLASSES, (n,), generator=gen)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    freq = (1 + label).view(-1, 1, 1) * 0.35
    pattern = torch.sin(freq * xx) * torch.cos(0.5 * freq * yy)
    img = pattern.unsqueeze(1).repeat(1, 3, 1, 1) * torch.tensor([1.0, 0.6, 0.3]).view(1, 3, 1, 1)
    return img + 0.25 * torch.randn(n, 3, size, size, generator=gen), label


def set_trainable(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def main():
    gen = torch.Generator().manual_seed(12)
    net = RetrievalNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    set_trainable(net.gem, False)
    for step in range(45):
        if step == 15:
            set_trainable(net.gem, True)
        img, label = photos(gen)
        loss = F.cross_entropy(net(img), label)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
