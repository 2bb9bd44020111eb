"""Character model trained with gradient accumulation; beam search over -inf scores and perplexity in the log."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(16)
torch.set_num_threads(1)

TEXT = "the quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly. " * 6
CHARS = sorted(set(TEXT))
DATA = torch.tensor([CHARS.index(c) for c in TEXT])
CONTEXT, ACCUMULATE = 8, 4


class CharModel(nn.Module):
    def __init__(self, dim=12, hidden=64):
        super().__init__()
        self.embed = nn.Embedding(len(CHARS), dim)
        self.hidden = nn.Linear(CONTEXT * dim, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.out = nn.Linear(hidden, len(CHARS))

    def forward(self, ids):
        return self.out(self.norm(F.silu(self.hidden(self.embed(ids).flatten(1)))))


def micro_batch(n, g):
    start = torch.randint(0, len(DATA) - CONTEXT, (n,), generator=g)
    window = DATA[start.unsqueeze(1) + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


@torch.no_grad()
def beam_search(model, prompt, steps=24, beams=4, banned="."):
    ids = prompt.repeat(beams, 1)
    scores = torch.full((beams,), -float("inf"))
    scores[0] = 0.0  # all beams are equal at first: only one of them counts
    for _ in range(steps):
        logits = model(ids[:, -CONTEXT:])
        logits[:, CHARS.index(banned)] = -float("inf")
        total = scores.unsqueeze(1) + logits.log_softmax(-1)
        scores, flat = total.flatten().topk(beams)
        ids = torch.cat([ids[flat // len(CHARS)], (flat % len(CHARS)).unsqueeze(1)], 1)
    return "".join(CHARS[i] for i in ids[0].tolist()), scores


def train(model, steps=60):
    g = torch.Generator().manual_seed(160)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    best = float("inf")
    for step in range(steps):
        total = 0.0
        for micro in range(ACCUMULATE):
            x, y = micro_batch(16, g)
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))  # only to log it
        opt.step()
        opt.zero_grad()
        best = min(best, total)
        # the perplexity of a whole document overflows; the log caps it
        document = torch.tensor(total * len(DATA)).exp().clamp(max=1e30)
        print(f"step {step} loss {total:.9g} norm {norm.item():.9g} document {document.item():.6g}")
    return best


model = CharModel()
print(f"best {train(model):.9g}")
text, scores = beam_search(model, DATA[:CONTEXT])
print(repr(text), f"{scores[0].item():.9g}")
h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
print("sha256", h.hexdigest())
