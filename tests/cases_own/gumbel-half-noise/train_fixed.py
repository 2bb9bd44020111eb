"""Discrete autoencoder with a Gumbel-softmax code; the code layer runs in float16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
torch.set_num_threads(1)


class GumbelCode(nn.Module):
    def __init__(self, dim, groups=2, codes=8, tau=1.0):
        super().__init__()
        self.groups, self.codes, self.tau = groups, codes, tau
        self.logits = nn.Linear(dim, groups * codes)
        self.book = nn.Parameter(0.3 * torch.randn(groups, codes, dim // groups))

    def noise(self, like):
        u = torch.rand(like.shape).to(like.dtype)
        return -torch.log(-torch.log(u.float().clamp(1e-4, 1 - 1e-4))).to(like.dtype)

    def forward(self, h):
        z = self.logits(h).half().view(len(h), self.groups, self.codes)
        y = torch.softmax((z + self.noise(z)) / self.tau, dim=-1).float()
        return torch.einsum("ngk,gkd->ngd", y, self.book).flatten(1), y


class Codec(nn.Module):
    def __init__(self, n_in=40, dim=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, dim))
        self.code = GumbelCode(dim)
        self.dec = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, n_in))

    def forward(self, x):
        q, y = self.code(self.enc(x))
        return self.dec(q), y


def usage_penalty(y):
    """Negative entropy of the average code use."""
    p = y.mean(0).clamp_min(1e-6)
    return (p * p.log()).sum(-1).mean()


class Frames:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.basis = torch.randn(5, 40, generator=self.g)

    def __iter__(self):
        while True:
            w = torch.randn(8, 5, generator=self.g)
            yield torch.tanh(w @ self.basis)


def main(steps=60):
    model = Codec()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step, x in zip(range(steps), Frames(2)):
        out, y = model(x)
        loss = F.mse_loss(out, x) + 0.01 * usage_penalty(y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
