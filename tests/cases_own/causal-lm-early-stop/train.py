"""Character-level language model with hand-written causal attention, per-class validation accuracy and early stopping."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(36)
torch.set_num_threads(1)
VOCAB, DIM, CONTEXT = 20, 32, 16


class CausalAttention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        future = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("future", future)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + self.future[:t, :t]
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, DIM))


class CharLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.attn, self.ln = CausalAttention(), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[:ids.size(1)]
        return self.head(x + self.attn(self.ln(x)))


class EarlyStopping:
    def __init__(self, patience):
        self.best = torch.tensor(float("inf"))
        self.patience, self.bad = patience, 0

    def __call__(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = torch.minimum(self.best, value)
        return self.bad > self.patience


def text(g, n=12):
    start = torch.randint(0, VOCAB - 4, (n, 1), generator=g)
    ids = (start + 3 * torch.arange(CONTEXT + 1)) % (VOCAB - 4)
    return ids[:, :-1], ids[:, 1:]


@torch.no_grad()
def validate(model, g):
    """Loss, and accuracy per character (undefined for characters that do not occur)."""
    x, y = text(g)
    logits = model(x)
    hit = (logits.argmax(-1) == y).float().flatten()
    total = torch.bincount(y.flatten(), minlength=VOCAB).float()
    per_char = torch.bincount(y.flatten(), weights=hit, minlength=VOCAB) / total
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), per_char.nanmean()


def main():
    g = torch.Generator().manual_seed(2)
    model, stop = CharLM(), EarlyStopping(patience=5)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(40):
        x, y = text(g)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        val, acc = validate(model, g)
        print(f"step {step} loss {loss.item():.4f} val {val.item():.4f} acc {acc.item():.3f}")
        if stop(val):
            break


main()
