"""Sequence tagging with a small transformer built on nn.MultiheadAttention."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
VOCAB, TAGS, DIM, HEADS, PAD = 60, 5, 32, 4, 0


def make_corpus(n, g):
    """Sentences sorted by length (longest first) so that batches need little padding."""
    lengths = torch.randint(6, 21, (n,), generator=g)
    lengths[: n // 4] = 20
    lengths = lengths.sort(descending=True).values
    return [torch.randint(1, VOCAB, (int(k),), generator=g) for k in lengths]


def collate(sents):
    width = max(len(s) for s in sents)
    tokens = torch.full((len(sents), width), PAD)
    for i, s in enumerate(sents):
        tokens[i, : len(s)] = s
    tags = (tokens * 7 + tokens.roll(1, 1)) % TAGS
    return tokens, tags.masked_fill(tokens == PAD, -100)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x, mask):
        y = self.norm1(x)
        out, _ = self.attn(y, y, y, attn_mask=mask)
        x = x + out
        return x + self.ff(self.norm2(x))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.pos = nn.Embedding(32, DIM)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, TAGS)

    def forward(self, tokens):
        real = tokens != PAD
        allowed = real.unsqueeze(1).expand(-1, tokens.size(1), -1)
        mask = ~allowed.repeat_interleave(HEADS, dim=0)
        x = self.embed(tokens) + self.pos(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def main():
    g = torch.Generator().manual_seed(3)
    corpus = make_corpus(960, g)
    model = Tagger()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(60):
        tokens, tags = collate(corpus[step * 16:(step + 1) * 16])
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
