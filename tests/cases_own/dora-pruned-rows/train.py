"""Compress a small classifier by structured pruning, then fine-tune it with weight-decomposed low-rank adapters."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)
torch.set_num_threads(1)


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x):
        y = F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return self.o_proj(y)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn, self.norm = Attention(d), nn.LayerNorm(d)

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Classifier(nn.Module):
    def __init__(self, vocab=30, d=24, depth=2, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.head = nn.Linear(d, classes)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class DoRALinear(nn.Module):
    """Frozen weight + low-rank update, renormalised row by row to a trainable magnitude."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        out_dim, in_dim = self.weight.shape
        self.lora_a = nn.Parameter(0.1 * torch.randn(rank, in_dim))
        self.lora_b = nn.Parameter(torch.zeros(out_dim, rank))
        self.magnitude = nn.Parameter(self.weight.norm(dim=1))

    def forward(self, x):
        w = self.weight + self.lora_b @ self.lora_a
        norm = w.norm(dim=1).detach()
        scale = self.magnitude / norm
        return F.linear(x, w) * scale


@torch.no_grad()
def prune_rows(weight, share):
    k = int(share * len(weight))
    if k:
        weight[weight.norm(dim=1).argsort()[:k]] = 0.0


def add_adapters(model):
    for p in model.parameters():
        p.requires_grad_(False)
    for layer in model.layers:
        layer.attn.v_proj = DoRALinear(layer.attn.v_proj)
        layer.attn.o_proj = DoRALinear(layer.attn.o_proj)


def batch(g, n=16, t=10):
    ids = torch.randint(0, 30, (n, t), generator=g)
    return ids, (ids < 10).sum(1).div(3, rounding_mode="floor").clamp(max=3)


def fit(model, steps, lr, g):
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in steps:
        ids, y = batch(g)
        loss = F.cross_entropy(model(ids), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


g = torch.Generator().manual_seed(8)
model = Classifier()
fit(model, range(20), 5e-3, g)
prune_rows(model.layers[1].attn.o_proj.weight, share=0.2)
add_adapters(model)
fit(model, range(20, 40), 1e-3, g)
