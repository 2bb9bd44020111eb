import torch
import torch.nn as nn


def mlp(sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    """Twin Q functions."""

    def __init__(self, obs, act, hidden):
        super().__init__()
        self.q1 = mlp([obs + act, hidden, hidden, 1])
        self.q2 = mlp([obs + act, hidden, hidden, 1])

    def forward(self, obs, act):
        x = torch.cat([obs, act], -1)
        return self.q1(x).squeeze(-1), self.q2(x).squeeze(-1)


class Actor(nn.Module):
    def __init__(self, obs, act, hidden):
        super().__init__()
        self.body = mlp([obs, hidden, hidden, act])
        self.log_std = nn.Parameter(torch.full((act,), -0.5))

    def forward(self, obs):
        return torch.distributions.Normal(torch.tanh(self.body(obs)), self.log_std.clamp(-3, 0.5).exp())
