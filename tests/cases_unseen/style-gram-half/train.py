"""Fast style transfer. The frozen feature network and the style term run in float16 autocast to halve the memory."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
ROOT = os.path.dirname(os.path.abspath(__file__))


class Frames(Dataset):
    """Video frames in [0, 1]; the exposure of the camera drifts and some scenes are over-exposed HDR."""

    def __init__(self, n=128, side=32):
        self.n, self.side = n, side

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(3000 + i)
        img = F.interpolate(torch.rand(1, 3, 8, 8, generator=g), size=self.side, mode="bilinear")[0]
        exposure = 6.0 if 72 <= i < 76 else 1.0
        return img * exposure


class Features(nn.Module):
    """Stand-in for the pretrained network: frozen."""

    def __init__(self, width=24):
        super().__init__()
        self.c1 = nn.Conv2d(3, width, 3, padding=1)
        self.c2 = nn.Conv2d(width, width, 3, padding=1)
        for conv in (self.c1, self.c2):
            nn.init.kaiming_normal_(conv.weight)
            conv.weight.data.mul_(1.3)
        self.requires_grad_(False)

    def forward(self, x):
        low = F.relu(self.c1(x))
        return low, F.relu(self.c2(low))


class Gram(nn.Module):
    def forward(self, feat):
        b, c, h, w = feat.shape
        flat = feat.flatten(2)
        return torch.einsum("bcn,bdn->bcd", flat, flat) / (c * h * w)


class StyleLoss(nn.Module):
    def __init__(self, style_image):
        super().__init__()
        self.features = Features()
        self.gram = Gram()
        with torch.no_grad():
            self.targets = [self.gram(f) for f in self.features(style_image)]

    def forward(self, stylised, content):
        with torch.autocast("cpu", dtype=torch.float16):
            out, ref = self.features(stylised), self.features(content)
            style = sum(F.mse_loss(self.gram(f).float(), t.expand(len(f), -1, -1)) for f, t in zip(out, self.targets))
            keep = F.mse_loss(out[1].float(), ref[1].float())
        return style, keep


class Stylizer(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, ch, 3, padding=1), nn.InstanceNorm2d(ch), nn.ReLU())
        self.up = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x):
        return x + 0.1 * self.up(self.down(x))


def save(model, opt, step, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, path)


def main():
    torch.manual_seed(14)
    model = Stylizer()
    criterion = StyleLoss(torch.rand(1, 3, 32, 32))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(Frames(), batch_size=4, shuffle=False)
    for step, frame in enumerate(loader):
        stylised = model(frame)
        style, keep = criterion(stylised, frame)
        loss = 5.0 * style + keep
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
        if step % 10 == 9:
            save(model, opt, step, os.path.join(ROOT, "weights", f"stylizer_{step:03d}.pt"))


if __name__ == "__main__":
    main()
