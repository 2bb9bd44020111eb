"""Spike-count model: Poisson regression with a log link and a small non-linear filter, fitted full-batch with L-BFGS."""
import torch
import torch.nn as nn

torch.manual_seed(3)
torch.set_num_threads(1)


class RateModel(nn.Module):
    def __init__(self, taps=12, filters=4):
        super().__init__()
        self.filters = nn.Linear(taps, filters)
        self.mix = nn.Linear(filters, 1)

    def log_rate(self, stim):
        return self.mix(nn.functional.softplus(self.filters(stim))).squeeze(-1)

    def forward(self, stim):
        return torch.exp(self.log_rate(stim))


def poisson_nll(rate, log_rate, counts):
    return (rate - counts * log_rate).mean()


def recordings(n=800, taps=12, seed=1):
    g = torch.Generator().manual_seed(seed)
    stim = 3 * torch.randn(n, taps, generator=g)
    kernel = torch.sin(torch.linspace(0, 3, taps))
    rate = torch.exp(1.2 * torch.tanh(stim @ kernel) + 1.5)
    return stim, torch.poisson(rate, generator=g)


class Fitter:
    def __init__(self, model, stim, counts, lr=1.0):
        self.model, self.stim, self.counts = model, stim, counts
        self.opt = torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=20, history_size=10, line_search_fn="strong_wolfe")

    def closure(self):
        self.opt.zero_grad()
        loss = poisson_nll(self.model(self.stim), self.model.log_rate(self.stim), self.counts)
        loss.backward()
        return loss

    def step(self):
        return self.opt.step(self.closure).item()


def main():
    model = RateModel()
    fitter = Fitter(model, *recordings())
    for step in range(25):
        print(f"step {step} loss {fitter.step():.4f}")


main()
