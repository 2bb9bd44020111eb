"""Learns soft labels together with the classifier (noisy annotations): targets are sparse weights on the simplex."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
torch.set_num_threads(1)
N, C = 200, 5


class Refinery(nn.Module):
    """One row of non-negative scores per sample; normalised they are the sample's label."""

    def __init__(self, noisy, classes, trust=0.8):
        super().__init__()
        start = torch.full((len(noisy), classes), (1 - trust) / (classes - 1))
        start[torch.arange(len(noisy)), noisy] = trust
        self.scores = nn.Parameter(start)

    def forward(self, idx):
        s = F.relu(self.scores[idx])
        return (s + 1e-6) / (s + 1e-6).sum(-1, keepdim=True)


def data():
    centres = 1.6 * torch.randn(C, 8)
    y = torch.randint(0, C, (N,))
    x = centres[y] + torch.randn(N, 8)
    flip = torch.rand(N) < 0.2
    return x, torch.where(flip, torch.randint(0, C, (N,)), y), y


def main():
    x, noisy, clean = data()
    refinery = Refinery(noisy, C)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, C))
    opt_net = torch.optim.Adam(net.parameters(), lr=5e-3)
    opt_labels = torch.optim.SGD(refinery.parameters(), lr=1.0)
    for step in range(120):
        idx = torch.randint(0, N, (32,))
        logp = F.log_softmax(net(x[idx]), -1)
        target = refinery(idx)
        loss = F.kl_div(logp, target, reduction="batchmean")
        anchor = F.mse_loss(target, F.one_hot(noisy[idx], C).float())
        opt_net.zero_grad()
        opt_labels.zero_grad()
        (loss + 0.1 * anchor).backward()
        opt_net.step()
        if step >= 40:  # the network first, then the labels
            opt_labels.step()
        if step % 5 == 0 or not torch.isfinite(loss):
            print(f"step {step} loss {loss.item():.4f}")


main()
