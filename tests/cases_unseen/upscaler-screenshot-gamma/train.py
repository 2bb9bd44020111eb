"""x2 super-resolution of linear-light images; the loss is taken after display encoding."""
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset

torch.set_num_threads(1)
SIZE = 24


class Landscapes(Dataset):
    def __init__(self, n, seed=0):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        img = F.interpolate(torch.rand(1, 3, 5, 5, generator=g), size=SIZE, mode="bilinear", align_corners=True)[0]
        return 0.15 + 0.8 * img


class Screenshots(Dataset):
    """Black text on a white page."""

    def __init__(self, n, seed=500):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        ink = (torch.rand(1, SIZE // 4, SIZE // 4, generator=g) > 0.6).float()
        page = 1.0 - F.interpolate(ink[None], size=SIZE, mode="nearest")[0]
        return page.expand(3, -1, -1).clone()


class DisplayEncode(nn.Module):
    """Linear light to display values."""

    def __init__(self, gamma=2.2):
        super().__init__()
        self.inv_gamma = 1.0 / gamma

    def forward(self, linear):
        return torch.pow(linear, self.inv_gamma)


class Upscaler(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU())
        self.residual = nn.Sequential(nn.Conv2d(ch, 12, 3, padding=1), nn.PixelShuffle(2))
        nn.init.zeros_(self.residual[0].weight)
        nn.init.zeros_(self.residual[0].bias)
        self.encode = DisplayEncode()

    def forward(self, low):
        base = F.interpolate(low, scale_factor=2, mode="bicubic", align_corners=False)
        detail = 0.02 * torch.tanh(self.residual(self.features(low)))
        return self.encode(base * (1 + detail))


class Ema:
    def __init__(self, model, decay=0.95):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v.detach(), 1 - self.decay)


def degrade(high):
    return F.avg_pool2d(high, 2)


def train(out="sr_logs"):
    torch.manual_seed(6)
    os.makedirs(out, exist_ok=True)
    data = ConcatDataset([Landscapes(120), Screenshots(24), Landscapes(24, seed=900)])
    loader = DataLoader(data, batch_size=8, num_workers=0)
    model = Upscaler()
    target_encode = DisplayEncode()
    ema = Ema(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    for step, high in enumerate(loader):
        low = degrade(high)
        out_img = model(low)
        loss = F.l1_loss(out_img, target_encode(high))
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
        history.append({"step": step, "loss": loss.item()})
        print(f"step {step} loss {loss.item():.5f}")
    with open(os.path.join(out, "history.json"), "w") as f:
        json.dump(history, f)
    torch.save(ema.shadow, os.path.join(out, "ema.pt"))


if __name__ == "__main__":
    train()
