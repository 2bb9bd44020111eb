import torch
from torch import nn

from .surrogate import spike


class LIF(nn.Module):
    """Leaky integrate-and-fire cell with reset by subtraction."""

    def __init__(self, beta, threshold, slope):
        super().__init__()
        self.beta = beta
        self.threshold = threshold
        self.slope = slope

    def forward(self, current, state):
        state = self.beta * state + current
        out = spike(state - self.threshold, slope=self.slope)
        return out, state - out.detach() * self.threshold


class SpikingLayer(nn.Module):
    def __init__(self, n_in, n_out, **lif):
        super().__init__()
        self.fc = nn.Linear(n_in, n_out)
        self.lif = LIF(**lif)

    def forward(self, x):  # (B, T, n_in) -> (B, T, n_out)
        current = self.fc(x)
        state = torch.zeros_like(current[:, 0])
        outs = []
        for t in range(current.shape[1]):
            s, state = self.lif(current[:, t], state)
            outs.append(s)
        return torch.stack(outs, dim=1)


class SpikingNet(nn.Module):
    def __init__(self, n_in, hidden, classes, **lif):
        super().__init__()
        sizes = [n_in, *hidden]
        self.layers = nn.ModuleList(SpikingLayer(a, b, **lif) for a, b in zip(sizes, sizes[1:]))
        self.readout = nn.Linear(sizes[-1], classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.readout(x.mean(dim=1)), x.mean()
