"""Two-stage fine-tuning with LAMB: first the classification head, then LoRA adapters in the attention."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)
torch.set_num_threads(1)

VOCAB, LEN, DIM, CLASSES = 30, 12, 32, 3


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["t"], st["m"], st["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                st["t"] += 1
                st["m"].lerp_(p.grad, 1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m_hat = st["m"] / (1 - b1 ** st["t"])
                v_hat = st["v"] / (1 - b2 ** st["t"])
                update = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p
                w_norm, u_norm = p.norm(), update.norm()
                trust = torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, torch.ones_like(w_norm))
                p.sub_(group["lr"] * trust * update)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(rank))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.qkv = LoRALinear(nn.Linear(DIM, 3 * DIM))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids):
        x = self.tok(ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.norm(x + F.scaled_dot_product_attention(q, k, v)).mean(dim=1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(DIM, CLASSES)
        for p in (self.encoder.tok.weight, *self.encoder.norm.parameters()):
            p.requires_grad_(False)

    def forward(self, ids):
        return self.head(self.encoder(ids))


def sentences(gen, n=32):
    y = torch.randint(0, CLASSES, (n,), generator=gen)
    ids = torch.randint(0, VOCAB, (n, LEN), generator=gen)
    cue = torch.rand(n, LEN, generator=gen) < 0.35
    return torch.where(cue, y[:, None] * 10 + torch.randint(0, 5, (n, LEN), generator=gen), ids), y


def main():
    gen = torch.Generator().manual_seed(0)
    model = Classifier()
    adapters = [p for n, p in model.named_parameters() if "lora_" in n]
    opt = Lamb(model.head.parameters(), lr=2e-2)
    for step in range(45):
        if step == 18:
            opt.add_param_group({"params": adapters, "lr": 1e-2})
        ids, y = sentences(gen)
        loss = F.cross_entropy(model(ids), y)
        model.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
