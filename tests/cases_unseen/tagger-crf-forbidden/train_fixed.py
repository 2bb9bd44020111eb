"""Sequence tagger with a CRF: forbidden BIO transitions are -inf in the score matrix, and stay so."""
import torch
import torch.nn as nn

torch.manual_seed(47)
torch.set_num_threads(1)
TAGS = ["O", "B", "I"]
FORBIDDEN = [(0, 2)]  # O -> I


class CRF(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.transition = nn.Parameter(0.1 * torch.randn(n, n))
        allowed = torch.zeros(n, n)
        for a, b in FORBIDDEN:
            allowed[a, b] = float("-inf")
        self.register_buffer("allowed", allowed)
        self.register_buffer("start", torch.tensor([0.0, 0.0, float("-inf")]))

    def scores(self):
        return self.transition + self.allowed

    def nll(self, emission, tags):
        t = self.scores()
        alpha = self.start + emission[:, 0]
        for k in range(1, emission.size(1)):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + t, dim=1) + emission[:, k]
        total = torch.logsumexp(alpha, 1)
        gold = self.start[tags[:, 0]] + emission.gather(2, tags.unsqueeze(2)).squeeze(2).sum(1)
        gold = gold + t[tags[:, :-1], tags[:, 1:]].sum(1)
        return (total - gold).mean()

    @torch.no_grad()
    def decode(self, emission):
        t, best, back = self.scores(), self.start + emission[:, 0], []
        for k in range(1, emission.size(1)):
            best, arg = (best.unsqueeze(2) + t).max(1)
            best = best + emission[:, k]
            back.append(arg)
        path = [best.argmax(1)]
        for arg in reversed(back):
            path.append(arg.gather(1, path[-1].unsqueeze(1)).squeeze(1))
        return torch.stack(path[::-1], 1)


def sentences(n, length, g):
    tags = torch.zeros(n, length, dtype=torch.long)
    for row in tags:
        for k in range(length):
            r = float(torch.rand((), generator=g))
            row[k] = 1 if r < 0.3 else (2 if r < 0.6 and k and row[k - 1] > 0 else 0)
    return torch.eye(3)[tags] @ torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) + 0.7 * torch.randn(n, length, 8, generator=g), tags


def main():
    g = torch.Generator().manual_seed(3)
    rnn, emit, crf = nn.GRU(8, 16, batch_first=True, bidirectional=True), nn.Linear(32, 3), CRF(3)
    params = [*rnn.parameters(), *emit.parameters(), *crf.parameters()]
    opt = torch.optim.Adam(params, lr=1e-2)
    best = float("inf")
    for step in range(40):
        x, tags = sentences(8, 10, g)
        emission = emit(rnn(x)[0])
        loss = crf.nll(emission, tags)
        opt.zero_grad()
        loss.backward()
        opt.step()
        best = min(best, loss.item())
        right = (crf.decode(emission.detach()) == tags).float().mean().item()
        print(f"step {step} loss {loss.item():.4f} best {best:.4f} accuracy {right:.3f}")


main()
