"""nn.MultiheadAttention with additive -inf masks: causal self-attention and padded cross-attention."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
torch.set_num_threads(1)

VOCAB, DIM, LENGTH, PAD = 16, 32, 10, 0
NEG_INF = float("-inf")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(DIM, 4, dropout=0.1, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM))
        self.n1, self.n2, self.n3 = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x, memory, causal, tgt_pad, src_pad):
        y = self.n1(x)
        x = x + self.self_attn(y, y, y, attn_mask=causal, key_padding_mask=tgt_pad, need_weights=False)[0]
        y, weights = self.cross_attn(self.n2(x), memory, memory, key_padding_mask=src_pad)
        x = x + y
        return x + self.ff(self.n3(x)), weights


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, DIM, PAD), nn.Embedding(VOCAB, DIM, PAD)
        self.pos = nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.encoder = nn.TransformerEncoderLayer(DIM, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.layer = Layer()
        self.head = nn.Linear(DIM, VOCAB)
        self.register_buffer("causal", torch.full((LENGTH, LENGTH), NEG_INF).triu(1))

    def forward(self, src, tgt):
        n = tgt.shape[1]
        src_pad = torch.zeros(src.shape).masked_fill(src == PAD, NEG_INF)
        tgt_pad = torch.zeros(tgt.shape).masked_fill(tgt == PAD, NEG_INF)
        memory = self.encoder(self.src(src) + self.pos, src_key_padding_mask=src_pad)
        x, weights = self.layer(self.tgt(tgt) + self.pos[:n], memory, self.causal[:n, :n], tgt_pad, src_pad)
        return self.head(x), weights


def batch(n):
    """Translate: each symbol plus one, in the same order; symbol 1 starts the output."""
    src = torch.randint(2, VOCAB - 1, (n, LENGTH))
    src = src.masked_fill(torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (n, 1)), PAD)
    out = torch.where(src == PAD, PAD, src + 1)
    return src, torch.cat([torch.ones(n, 1, dtype=torch.long), out[:, :-1]], 1), out


def attention_entropy(weights, tgt):
    """Mean over the real queries; rows of padding become NaN and are left out."""
    entropy = torch.special.entr(weights.detach()).sum(-1)
    return torch.nanmean(entropy.masked_fill(tgt == PAD, float("nan"))).item()


model = Translator()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=5e-3, total_steps=60)
for step in range(60):
    src, tgt, out = batch(16)
    logits, weights = model(src, tgt)
    loss = F.cross_entropy(logits.flatten(0, 1), out.flatten(), ignore_index=PAD)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    print(f"step {step} loss {loss.item():.9g} entropy {attention_entropy(weights, tgt):.9g}")

model.eval()
with torch.no_grad():
    src, tgt, out = batch(64)
    hit = (model(src, tgt)[0].argmax(-1) == out)[out != PAD]
print(f"accuracy {hit.float().mean().item():.6f}")
print("sha256", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
