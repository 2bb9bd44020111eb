"""Title/body matching with an in-batch contrastive loss; the encoder runs in float16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)
torch.set_num_threads(1)
VOCAB, TOPICS, DIM, PAD = 400, 20, 48, 0


class Corpus:
    """Title and body share a topic. Stop words are removed, so that a title may end up empty."""

    def __init__(self, seed=10):
        self.g = torch.Generator().manual_seed(seed)

    def text(self, topic, width, p_keep):
        n = len(topic)
        words = 1 + topic[:, None] * 19 + torch.randint(0, 19, (n, width), generator=self.g)
        keep = torch.rand(n, width, generator=self.g) < p_keep
        return words.masked_fill(~keep, PAD)

    def batch(self, n=20):
        topic = torch.randperm(TOPICS, generator=self.g)[:n]
        return self.text(topic, 5, 0.75), self.text(topic, 16, 0.8)


class BagEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, tokens):
        length = (tokens != PAD).sum(1, keepdim=True).clamp(min=1)
        bag = self.embed(tokens).sum(1) / length
        return F.normalize(self.proj(bag), dim=-1, eps=1e-3)


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.title, self.body = BagEncoder(), BagEncoder()

    def forward(self, title, body):
        return self.title(title), self.body(body)


def contrastive(a, b, temperature=0.1):
    logits = (a @ b.t()).float() / temperature
    target = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def main():
    corpus = Corpus()
    model = Matcher().half()
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(60):
        title, body = corpus.batch()
        za, zb = model(title, body)
        loss = contrastive(za, zb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
