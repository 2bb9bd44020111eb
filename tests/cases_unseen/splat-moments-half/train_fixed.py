"""Fits an image with 2-D Gaussians; the run is split in two jobs and the optimizer state is stored compactly in between."""
import io

import torch
import torch.nn as nn

torch.manual_seed(12)
torch.set_num_threads(1)
N, SIZE = 150, 24


class Splats(nn.Module):
    def __init__(self):
        super().__init__()
        self.xy = nn.Parameter(torch.rand(N, 2))
        self.log_scale = nn.Parameter(torch.full((N, 2), -3.2))
        self.colour = nn.Parameter(torch.rand(N, 3))
        self.opacity = nn.Parameter(torch.zeros(N))

    def forward(self, pixels):
        inv = torch.exp(-2 * self.log_scale)
        d2 = ((pixels[:, None] - self.xy) ** 2 * inv).sum(-1)
        weight = torch.sigmoid(self.opacity) * torch.exp(-0.5 * d2) * (d2 < 9)  # culled beyond three sigma
        return weight @ self.colour


def target_image(pixels):
    r = (pixels - 0.5).norm(dim=-1)
    rings = 0.5 + 0.5 * torch.cos(20 * r)
    return torch.stack([rings, pixels[:, 0], 1 - rings], -1)


def compact(obj):
    """float32 -> float16 everywhere: the optimizer state is twice the model."""
    if torch.is_tensor(obj) and obj.dtype == torch.float32:
        return obj.half()
    if isinstance(obj, dict):
        return {k: compact(v) for k, v in obj.items()}
    return obj


def make():
    model = Splats()
    return model, torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-15)


def fit(model, opt, steps):
    line = (torch.arange(SIZE) + 0.5) / SIZE
    pixels = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2)
    image = target_image(pixels)
    for step in steps:
        pick = torch.randint(len(pixels), (12,))
        loss = (model(pixels[pick]) - image[pick]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.5f}")


def main():
    model, opt = make()
    fit(model, opt, range(60))
    disk = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, disk)
    disk.seek(0)
    state = torch.load(disk)
    model, opt = make()
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    fit(model, opt, range(60, 120))


main()
