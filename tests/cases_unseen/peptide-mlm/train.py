"""Masked language model for short peptides (4 per batch: it is a small card)."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
torch.set_num_threads(1)
PAD, MASK, AMINO = 20, 21, 22


class PeptideLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(AMINO, dim)
        self.place = nn.Embedding(12, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 20)

    def forward(self, tokens):
        h = self.embed(tokens) + self.place.weight[:tokens.size(1)]
        return self.head(self.body(h, src_key_padding_mask=tokens == PAD))


def peptides(gen, n=4):
    tokens = torch.full((n, 12), PAD)
    for row in tokens:
        size = int(torch.randint(4, 9, (1,), generator=gen))
        start = int(torch.randint(20, (1,), generator=gen))
        row[:size] = (start + 3 * torch.arange(size)) % 20
    return tokens


def mask_tokens(tokens, gen, probability=0.15):
    labels = tokens.clone()
    chosen = (torch.rand(tokens.shape, generator=gen) < probability) & (tokens != PAD)
    labels[~chosen] = -100
    return tokens.masked_fill(chosen, MASK), labels


if __name__ == "__main__":
    gen = torch.Generator().manual_seed(12)
    os.makedirs("checkpoints", exist_ok=True)
    model = PeptideLM()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(150):
        inputs, labels = mask_tokens(peptides(gen), gen)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
        if step % 25 == 24:
            torch.save(model.state_dict(), "checkpoints/last.pt")
