"""Two-tower retrieval: match search queries and product titles with in-batch negatives."""
import os
import pickle
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SEED = 31
random.seed(SEED)
torch.manual_seed(SEED)
torch.set_num_threads(1)

ADJ = "red blue small large warm light heavy cheap wool cotton steel glass".split()
NOUN = "coat lamp chair table knife bottle jacket sofa mug shelf rug pan".split()
PAD = 0


class Vocabulary:
    def __init__(self, words):
        self.ids = {w: i + 1 for i, w in enumerate(sorted(words))}

    def encode(self, text, length):
        known = [self.ids[w] for w in text.lower().split() if w in self.ids][:length]
        return known + [PAD] * (length - len(known))

    def __len__(self):
        return len(self.ids) + 1


class ClickLog(Dataset):
    def __init__(self, n, rng):
        self.rows = []
        for i in range(n):
            a, b, noun = rng.choice(ADJ), rng.choice(ADJ), rng.choice(NOUN)
            self.rows.append((f"{a} {noun}", f"{a} {b} {noun}"))
        self.rows[203] = ("4006381333931", self.rows[203][1])  # somebody pasted a bar code

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class Collate:
    def __init__(self, vocab):
        self.vocab = vocab

    def __call__(self, rows):
        queries = torch.tensor([self.vocab.encode(q, 4) for q, _ in rows])
        titles = torch.tensor([self.vocab.encode(t, 6) for _, t in rows])
        return queries, titles


class Tower(nn.Module):
    """Mean of the word vectors, projected to the unit sphere."""

    def __init__(self, vocab_size, dim=24):
        super().__init__()
        self.words = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.project = nn.Linear(dim, dim, bias=False)

    def forward(self, ids):
        count = (ids != PAD).sum(dim=1, keepdim=True).clamp(min=1)
        pooled = self.words(ids).sum(dim=1) / count
        v = self.project(pooled)
        return v / v.norm(dim=-1, keepdim=True)


class TwoTower(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.query = Tower(vocab_size)
        self.title = Tower(vocab_size)
        self.log_temperature = nn.Parameter(torch.tensor(-2.0))

    def forward(self, queries, titles):
        return self.query(queries) @ self.title(titles).t() / self.log_temperature.exp()


def recall_at_1(model, loader):
    model.eval()
    hit = total = 0
    with torch.no_grad():
        for q, t in loader:
            hit += (model(q, t).argmax(1) == torch.arange(len(q))).sum().item()
            total += len(q)
    model.train()
    return hit / total


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    os.makedirs(os.path.join(here, "artifacts"), exist_ok=True)
    vocab = Vocabulary(ADJ + NOUN)
    with open(os.path.join(here, "artifacts", "vocab.pkl"), "wb") as f:
        pickle.dump(vocab.ids, f)
    data = ClickLog(256, random.Random(3))
    loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=Collate(vocab), generator=torch.Generator().manual_seed(10))
    model = TwoTower(len(vocab))
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    step = 0
    for epoch in range(2):
        for queries, titles in loader:
            logits = model(queries, titles)
            labels = torch.arange(len(queries))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1
        print(f"epoch {epoch} recall@1 {recall_at_1(model, loader):.3f}")
        torch.save(model.state_dict(), os.path.join(here, "artifacts", f"towers_{epoch}.pt"))


if __name__ == "__main__":
    main()
