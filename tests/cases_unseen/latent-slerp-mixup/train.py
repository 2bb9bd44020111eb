"""Mixup on the sphere: embeddings of a batch are interpolated with those of a permuted batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(29)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 48), nn.GELU(), nn.Linear(48, 16))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def slerp(a, b, t):
    dot = (a * b).sum(-1, keepdim=True).clamp(-1, 1)
    omega = torch.acos(dot)
    return (torch.sin((1 - t) * omega) * a + torch.sin(t * omega) * b) / torch.sin(omega)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(16, 5)

    def forward(self, x, other=None, t=None):
        z = self.encoder(x)
        if other is not None:
            z = slerp(z, z[other], t)
        return self.head(z)


def main():
    gen = torch.Generator().manual_seed(3)
    centres = torch.randn(5, 10, generator=gen)
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        y = torch.randint(5, (32,), generator=gen)
        x = centres[y] + 0.7 * torch.randn(32, 10, generator=gen)
        if step < 30:
            loss = F.cross_entropy(model(x), y)
        else:
            other = torch.randperm(32, generator=gen)
            t = torch.rand(32, 1, generator=gen)
            logits = model(x, other, t)
            loss = ((1 - t.squeeze(1)) * F.cross_entropy(logits, y, reduction="none")
                    + t.squeeze(1) * F.cross_entropy(logits, y[other], reduction="none")).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
