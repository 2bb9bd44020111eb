"""Topic proportions with a learned corpus prior (sparse simplex), entropy-regularised."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)
torch.set_num_threads(1)


class TopicModel(nn.Module):
    def __init__(self, words=60, topics=8):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(words, 64), nn.ReLU(), nn.Linear(64, topics))
        self.beta = nn.Parameter(0.1 * torch.randn(topics, words))
        self.prior = nn.Parameter(torch.linspace(0.3, 1.0, topics))

    def corpus_prior(self):
        p = F.relu(self.prior) + 1e-6
        return p / p.sum()

    def forward(self, counts):
        theta = torch.log_softmax(self.encode(counts.log1p()), -1)
        words = torch.logsumexp(theta[:, :, None] + self.beta.log_softmax(-1)[None], 1)
        return theta, words


def divergence(prior, theta):
    """KL(prior || mean topic use)."""
    use = theta.exp().mean(0)
    return (torch.xlogy(prior, prior) - torch.xlogy(prior, use)).sum()


def documents(gen, n=64):
    topic = torch.randint(5, (n,), generator=gen)
    rate = torch.full((n, 60), 0.05)
    for k in range(5):
        rate[topic == k, 12 * k:12 * k + 12] = 2.0
    return torch.poisson(rate, generator=gen)


def main():
    gen = torch.Generator().manual_seed(0)
    os.makedirs("topics", exist_ok=True)
    model = TopicModel()
    opt = torch.optim.Adam([
        {"params": [*model.encode.parameters(), model.beta], "lr": 5e-3},
        {"params": [model.prior], "lr": 2e-2},
    ])
    for step in range(120):
        counts = documents(gen)
        theta, words = model(counts)
        nll = -(counts * words).sum(1).mean() / 10
        loss = nll + 2.0 * divergence(model.corpus_prior(), theta)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
        if step % 20 == 19:
            torch.save(model.state_dict(), f"topics/model_{step:03d}.pt")


if __name__ == "__main__":
    main()
