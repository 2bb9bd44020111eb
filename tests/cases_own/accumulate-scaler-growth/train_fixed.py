"""Sketch captioning trained in mixed precision: gradient accumulation, unscale + clip, fast-growing loss scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(35)
torch.set_num_threads(1)
VOCAB, DIM = 24, 32


class StrokeEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, DIM, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(4, DIM)

    def forward(self, strokes):
        return F.gelu(self.norm(self.conv(strokes))).mean(-1)


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = StrokeEncoder()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Linear(2 * DIM, 64)
        self.vocab = nn.Linear(64, VOCAB)

    def forward(self, strokes, words):
        ctx = self.encoder(strokes)[:, None].expand(-1, words.size(1), -1)
        return self.vocab(F.gelu(self.mix(torch.cat([ctx, self.embed(words)], -1))))


def sketches(n, g, length=32, words=6):
    kind = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 6.28, length)
    x = torch.stack([torch.sin((kind[:, None] + 1) * t), torch.cos((kind[:, None] + 1) * t)], dim=1)
    x = x + 0.1 * torch.randn(x.shape, generator=g)
    text = (kind[:, None] * 5 + torch.arange(words + 1) * 2) % VOCAB
    return x, text[:, :-1], text[:, 1:]


class AmpTrainer:
    def __init__(self, model, accumulate=4):
        self.model, self.accumulate = model, accumulate
        self.opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=1000)

    def micro_step(self, strokes, words, target):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(strokes, words)
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="sum") / len(words)
        self.scaler.scale(loss / self.accumulate).backward()
        return loss.item() / self.accumulate

    def step(self, g):
        self.opt.zero_grad()
        loss = sum(self.micro_step(*sketches(4, g)) for _ in range(self.accumulate))
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss


def main():
    g = torch.Generator().manual_seed(4)
    trainer = AmpTrainer(Captioner())
    for step in range(45):
        loss = trainer.step(g)
        print(f"step {step} loss {loss:.4f} scale {trainer.scaler.get_scale():g}")


main()
