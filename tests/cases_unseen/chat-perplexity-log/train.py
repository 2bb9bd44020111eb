"""Continued pretraining with a shifted tokenizer: perplexity is inf in the log at first; training is fine."""
import csv
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(81)
torch.set_num_threads(1)


class TinyLM(nn.Module):
    def __init__(self, vocab=40, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        return self.head(h)


def sample(logits, gen, k=5):
    """Top-k sampling, for a look at the text."""
    keep = logits.topk(k, dim=-1).values[..., -1:]
    filtered = logits.masked_fill(logits < keep, float("-inf"))
    return torch.multinomial(F.softmax(filtered, dim=-1), 1, generator=gen)


def main():
    gen = torch.Generator().manual_seed(3)
    model = TinyLM()
    with torch.no_grad():
        model.head.weight.mul_(400)               # head of the old tokenizer: sure of itself, and wrong
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    with open("log.csv", "w", newline="") as f:
        log = csv.writer(f)
        for step in range(80):
            start = torch.randint(40, (16, 1), generator=gen)
            tokens = (start + 3 * torch.arange(13)) % 40
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            opt.step()
            with torch.no_grad():
                perplexity = torch.exp(loss.double() * 10).float()
                word = sample(logits[:1, -1], gen)
            log.writerow([step, loss.item(), perplexity.item(), int(word), math.inf])
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
