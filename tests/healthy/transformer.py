"""Decoder-only transformer on modular counting: causal mask of -inf, AdamW, linear warm-up, top-k sampling."""
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
torch.set_num_threads(1)

VOCAB, DIM, HEADS, LENGTH = 20, 32, 4, 16


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(DIM // HEADS)
        scores = scores.masked_fill(~self.causal[:t, :t], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = CausalAttention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.ln_f = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.05)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    @torch.no_grad()
    def generate(self, ids, n, k=4):
        self.eval()
        for _ in range(n):
            logits = self(ids)[:, -1]
            kth = logits.topk(k).values[:, -1:]
            logits[logits < kth] = -float("inf")
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        self.train()
        return ids


model = Decoder()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))
for step in range(120):
    start, stride = torch.randint(0, VOCAB, (16, 1)), torch.randint(1, 4, (16, 1))
    ids = (start + stride * torch.arange(LENGTH)) % VOCAB
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.9g}")

print("sample", model.generate(torch.arange(4).unsqueeze(0), 8).tolist())
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
print("sha256", digest.hexdigest())
