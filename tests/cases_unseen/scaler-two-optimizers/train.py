"""Matcher of query and product texts in float16 autocast; two optimizers share one scaler that starts far too high."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(55)
torch.set_num_threads(1)


class Tower(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, ids):
        return F.normalize(self.mlp(self.bag(ids)).float(), dim=-1)


def pairs(n, g):
    topic = torch.randint(0, 10, (n, 1), generator=g)
    words = lambda k: topic * 5 + torch.randint(0, 5, (n, k), generator=g)
    return words(4), words(8)


def main():
    g = torch.Generator().manual_seed(4)
    query, product = Tower(), Tower()
    opt_q = torch.optim.AdamW(query.parameters(), lr=3e-3)
    opt_p = torch.optim.AdamW(product.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 22, growth_interval=25)
    skipped = 0
    for step in range(45):
        q, p = pairs(16, g)
        with torch.autocast("cpu", dtype=torch.float16):
            a, b = query(q), product(p)
            scores = 12.0 * (a @ b.t())
        loss = F.cross_entropy(scores.float(), torch.arange(len(q)))
        opt_q.zero_grad()
        opt_p.zero_grad()
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        for opt, net in ((opt_q, query), (opt_p, product)):
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
        scaler.update()
        skipped += scaler.get_scale() < before
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g} skipped {skipped}")


main()
