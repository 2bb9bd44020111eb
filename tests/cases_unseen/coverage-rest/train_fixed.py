"""Summariser with a stop unit: attention to sentences is accumulated and what is left of the budget is scored in logs."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(43)
torch.set_num_threads(1)


class StickBreaking(nn.Module):
    """Weights over an open-ended list: shares of a stick, the remainder goes to 'stop'."""

    def __init__(self, dim, sentences):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, 1))
        self.stop = nn.Parameter(torch.zeros(1))
        self.sentences = sentences

    def forward(self, x):
        logits = self.score(x).squeeze(-1)
        log_share = F.log_softmax(torch.cat([logits, self.stop.expand(len(x), 1)], 1), -1)
        return log_share[:, :-1].exp(), log_share[:, -1]


class Summariser(nn.Module):
    def __init__(self, dim=12, sentences=9):
        super().__init__()
        self.pick = StickBreaking(dim, sentences)
        self.topic = nn.Linear(dim, 4)

    def forward(self, x):
        share, log_stop = self.pick(x)
        return self.topic((share.unsqueeze(-1) * x).sum(1)), log_stop


def documents(n, g, dim=12, sentences=9):
    x = torch.randn(n, sentences, dim, generator=g)
    y = torch.randint(0, 4, (n,), generator=g)
    lead = torch.randint(0, sentences, (n,), generator=g)
    x[torch.arange(n), lead, y] += 3.0
    x[torch.arange(n), lead, 8] += 3.0
    return x, y


def main():
    g = torch.Generator().manual_seed(2)
    model = Summariser()
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)
    for step in range(250):
        x, y = documents(24, g)
        logits, log_stop = model(x)
        loss = F.cross_entropy(logits, y) + 0.02 * log_stop.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0 or not torch.isfinite(loss):
            print(f"step {step} loss {loss.item():.4f} stop {log_stop.mean().item():.3f}")


main()
