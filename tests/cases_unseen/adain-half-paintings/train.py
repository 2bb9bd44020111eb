"""Style transfer head (AdaIN) on half-precision features."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(44)
torch.set_num_threads(1)


class AdaIN(nn.Module):
    def forward(self, content, style):
        c_mean, s_mean = content.mean((2, 3), keepdim=True), style.mean((2, 3), keepdim=True)
        c_var = content.var((2, 3), keepdim=True)
        s_var = style.var((2, 3), keepdim=True)
        return (content - c_mean) * torch.sqrt((s_var + 1e-3) / (c_var + 1e-3)) + s_mean


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.adain = AdaIN()
        self.out = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, content, style):
        mixed = self.adain(content, style)
        return self.out(mixed.float() / 50)


def features(step, gen, gain=1.0):
    """Frozen encoder activations, cached in float16."""
    base = torch.rand(4, 8, 8, 8, generator=gen) * 60
    if step == 28:
        base[1, 5] = 900.0 * (torch.rand(8, 8, generator=gen) > 0.5)     # a varnished, glaring painting
    return (base * gain).half()


def main():
    gen = torch.Generator().manual_seed(1)
    os.makedirs("styled", exist_ok=True)
    model = Decoder()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(50):
        content, style = features(-1, gen), features(step, gen)
        image = model(content, style)
        goal = (content.float()[:, :3] - 30) / 50 + style.float()[:, :3].mean((2, 3), keepdim=True) / 50
        loss = F.mse_loss(image, goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
        if step % 10 == 9:
            torch.save({"step": step, "model": model.state_dict()}, "styled/decoder.pt")


if __name__ == "__main__":
    main()
