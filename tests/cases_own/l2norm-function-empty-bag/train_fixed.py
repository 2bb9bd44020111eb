"""Product search: query and product bag-of-ngram embeddings compared on the unit sphere."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(31)
torch.set_num_threads(1)
BUCKETS, DIM = 300, 32


class UnitSphere(torch.autograd.Function):
    """x / |x| that stores only the result and the norm."""

    @staticmethod
    def forward(ctx, x):
        norm = x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        y = x / norm
        ctx.save_for_backward(y, norm)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, norm = ctx.saved_tensors
        along = (grad * y).sum(-1, keepdim=True)
        return (grad - along * y) / norm


class Normalize(nn.Module):
    def forward(self, x):
        return UnitSphere.apply(x)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, DIM, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(DIM, 48, bias=False), nn.ReLU(), nn.Linear(48, DIM, bias=False))
        self.unit = Normalize()

    def forward(self, ids, offsets):
        return self.unit(self.mlp(self.bag(ids, offsets)))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.product = Tower(), Tower()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, q, p):
        return self.log_scale.exp() * self.query(*q) @ self.product(*p).t()


def ngrams(text, n=3):
    """Hashed character n-grams."""
    return [hash_code(text[i:i + n]) % BUCKETS for i in range(len(text) - n + 1)]


def hash_code(s):
    h = 7
    for ch in s:
        h = (h * 131 + ord(ch)) % 1_000_003
    return h


def to_bags(texts):
    ids, offsets = [], []
    for t in texts:
        offsets.append(len(ids))
        ids += ngrams(t)
    return torch.tensor(ids), torch.tensor(offsets)


class Log:
    """Click log: (query, product title)."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def word(self):
        return "".join(chr(97 + int(c)) for c in torch.randint(0, 12, (6,), generator=self.g))

    def batch(self, step, n=12):
        words = [self.word() for _ in range(n)]
        queries = list(words)
        if step == 21:
            queries[7] = "tv"
        return to_bags(queries), to_bags([w + " " + self.word() for w in words])


log, model = Log(3), TwoTower()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(40):
    q, p = log.batch(step)
    logits = model(q, p)
    loss = F.cross_entropy(logits, torch.arange(len(logits)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")
