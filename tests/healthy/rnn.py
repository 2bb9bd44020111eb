"""Sequence tagger and classifier: bidirectional GRU over packed sequences, max pooling that ignores padding."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(3)
torch.set_num_threads(1)

VOCAB, PAD = 30, 0


class Classifier(nn.Module):
    def __init__(self, dim=24, hidden=20):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.gru = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(2 * hidden, 2)
        self.classify = nn.Linear(2 * hidden, 3)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        pad = torch.arange(states.shape[1]) >= lengths.unsqueeze(1)
        pooled = states.masked_fill(pad.unsqueeze(-1), float("-inf")).amax(1)
        return self.tag(states), self.classify(pooled)


def batch(n, g):
    lengths = torch.randint(1, 15, (n,), generator=g)
    seqs = [torch.randint(1, VOCAB, (int(k),), generator=g) for k in lengths]
    ids = pad_sequence(seqs, batch_first=True, padding_value=PAD)
    tags = (ids % 2).masked_fill(ids == PAD, -100)
    return ids, lengths, tags, ids.amax(1) // 10


class Trainer:
    def __init__(self, model):
        self.model = model
        self.opt = torch.optim.RMSprop(model.parameters(), lr=4e-3)
        self.lowest = torch.tensor(float("inf"))
        self.highest_norm = torch.tensor(float("-inf"))

    def step(self, ids, lengths, tags, labels):
        tag_logits, logits = self.model(ids, lengths)
        # without reduction the ignored positions are just zero
        per_token = F.cross_entropy(tag_logits.transpose(1, 2), tags, ignore_index=-100, reduction="none")
        loss = per_token.sum() / lengths.sum() + F.cross_entropy(logits, labels)
        self.opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, error_if_nonfinite=True)
        self.opt.step()
        self.lowest = torch.minimum(self.lowest, loss.detach())
        self.highest_norm = torch.maximum(self.highest_norm, norm)
        return loss.item()


def main():
    g = torch.Generator().manual_seed(30)
    trainer = Trainer(Classifier())
    for step in range(60):
        print(f"step {step} loss {trainer.step(*batch(16, g)):.9g}")
    print(f"lowest {trainer.lowest.item():.9g} highest norm {trainer.highest_norm.item():.9g}")
    h = hashlib.sha256()
    for p in trainer.model.parameters():
        h.update(p.detach().numpy().tobytes())
    print("sha256", h.hexdigest())


main()
