"""Image-caption matching; caption tokens are pooled by attention, everything under float16 autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)
torch.set_num_threads(1)
VOCAB, DIM, PAD = 60, 32, 0


class AttentionPool(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(0.2 * torch.randn(1, heads, 1, dim // heads))
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, keep):
        n, t, d = x.shape
        k, v = self.kv(x).view(n, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = self.query.expand(n, -1, -1, -1) @ k.transpose(-1, -2)
        keep = keep[:, None, None].to(scores.dtype)
        scores = scores + (1.0 - keep) * -1e9
        pooled = scores.softmax(-1) @ v
        return self.out(pooled.transpose(1, 2).reshape(n, d))


class CaptionEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.pool = AttentionPool(DIM)

    def forward(self, ids):
        x = self.embed(ids)
        return self.pool(x + F.gelu(self.mix(x)), ids != PAD)


class Matcher(nn.Module):
    def __init__(self, image_dim=20):
        super().__init__()
        self.caption = CaptionEncoder()
        self.image = nn.Sequential(nn.Linear(image_dim, 64), nn.GELU(), nn.Linear(64, DIM))
        self.log_temp = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, ids):
        a = F.normalize(self.image(image).float(), dim=-1)
        b = F.normalize(self.caption(ids).float(), dim=-1)
        return self.log_temp.exp() * a @ b.t()


def pairs(g, step, n=16, t=9):
    topic = torch.randint(0, 6, (n,), generator=g)
    ids = 1 + (topic[:, None] * 9 + torch.randint(0, 9, (n, t), generator=g)) % (VOCAB - 1)
    length = torch.randint(3, t + 1, (n,), generator=g)
    if step == 24:
        length[9] = 0  # the alt text of this image is empty
    ids[torch.arange(t)[None] >= length[:, None]] = PAD
    image = F.one_hot(topic, 20).float() + 0.2 * torch.randn(n, 20, generator=g)
    return image, ids


def main():
    g = torch.Generator().manual_seed(7)
    model = Matcher()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        image, ids = pairs(g, step)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(image, ids)
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits.float(), target) + F.cross_entropy(logits.float().t(), target)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
