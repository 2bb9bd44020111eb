"""Mixture of experts with a noisy (Gumbel) router, trained under bfloat16 autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(33)
torch.set_num_threads(1)

DIM, EXPERTS = 16, 4


class GumbelRouter(nn.Module):
    def __init__(self, dim, experts, tau=1.0):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.tau = tau

    def sample_noise(self, like):
        u = torch.rand(like.shape).to(like.dtype).add_(1e-9)
        return -torch.log(-torch.log(u))

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + self.sample_noise(logits)
        return F.softmax(logits / self.tau, dim=-1)


class Expert(nn.Sequential):
    def __init__(self, dim, hidden=32):
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class MoEBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.router = GumbelRouter(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert(DIM) for _ in range(EXPERTS))

    def forward(self, x):
        h = self.norm(x)
        weights = self.router(h)
        stacked = torch.stack([e(h) for e in self.experts], dim=-1)
        return x + torch.einsum("bde,be->bd", stacked, weights.to(stacked.dtype)), weights


class MoENet(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(MoEBlock() for _ in range(blocks))
        self.out = nn.Linear(DIM, 1)

    def forward(self, x):
        load = []
        for block in self.blocks:
            x, w = block(x)
            load.append(w.float().mean(dim=0))
        return self.out(x).squeeze(-1), torch.stack(load)


def main():
    gen = torch.Generator().manual_seed(11)
    model = MoENet()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(50):
        x = torch.randn(12, DIM, generator=gen)
        y = torch.where(x[:, 0] > 0, x[:, 1], -x[:, 2])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred, load = model(x)
        task_loss = F.mse_loss(pred.float(), y)
        balance_loss = EXPERTS * load.square().sum(dim=-1).mean()
        loss = task_loss + 0.01 * balance_loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
