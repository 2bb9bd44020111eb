import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MemoryAttention(nn.Module):
    """Tokens look at the retrieved chunks of their sequence, one vector per chunk."""

    def __init__(self, cfg):
        super().__init__()
        self.attn = nn.MultiheadAttention(cfg.n_embd, cfg.n_head, batch_first=True)
        self.gate = nn.Parameter(torch.full((cfg.n_embd,), 0.1))
        self.usage = None

    def forward(self, x, memory, empty):
        out, weights = self.attn(x, memory, memory, key_padding_mask=empty)
        self.usage = weights.detach().mean(dim=(0, 1))
        return self.gate * out


class Block(nn.Module):
    def __init__(self, cfg, with_memory):
        super().__init__()
        self.ln_1 = nn.LayerNorm(cfg.n_embd)
        self.attn = CausalSelfAttention(cfg)
        self.ln_m = nn.LayerNorm(cfg.n_embd) if with_memory else None
        self.memory = MemoryAttention(cfg) if with_memory else None
        self.ln_2 = nn.LayerNorm(cfg.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(cfg.n_embd, 4 * cfg.n_embd), nn.GELU(), nn.Linear(4 * cfg.n_embd, cfg.n_embd), nn.Dropout(cfg.dropout)
        )

    def forward(self, x, memory, empty):
        x = x + self.attn(self.ln_1(x))
        if self.memory is not None:
            x = x + self.memory(self.ln_m(x), memory, empty)
        return x + self.mlp(self.ln_2(x))


class RetroGPT(nn.Module):
    def __init__(self, cfg, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.chunk, cfg.n_embd)
        self.blocks = nn.ModuleList(Block(cfg, with_memory=i == cfg.n_layer - 1) for i in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        self.lm_head = nn.Linear(cfg.n_embd, vocab_size, bias=False)
        self.apply(self._init)
        self.lm_head.weight = self.wte.weight

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def encode_memory(self, memory):
        present = (memory != 0).unsqueeze(-1)
        return (self.wte(memory) * present).sum(2) / present.sum(2).clamp(min=1)

    def forward(self, idx, targets, memory, empty):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        mem = self.encode_memory(memory)
        for block in self.blocks:
            x = block(x, mem, empty)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        return logits, loss
