import torch
from torch import nn


def mlp(n_in, hidden, n_out, gain):
    net = nn.Sequential(nn.Linear(n_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
                        nn.Linear(hidden, n_out))
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 2 ** 0.5)
            nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(net[-1].weight, gain)
    return net


class Actor(nn.Module):
    def __init__(self, obs_dim, actions, hidden):
        super().__init__()
        self.body = mlp(obs_dim, hidden, actions, gain=0.01)

    def forward(self, obs):
        return self.body(obs)

    def dist(self, obs):
        return torch.distributions.Categorical(logits=self(obs))


class Critic(nn.Module):
    def __init__(self, obs_dim, hidden):
        super().__init__()
        self.body = mlp(obs_dim, hidden, 1, gain=1.0)

    def forward(self, obs):
        return self.body(obs).squeeze(-1)
