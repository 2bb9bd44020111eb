import torch.nn as nn
from torch.distributions import Categorical

from .normalizer import RunningNorm


class Agent(nn.Module):
    def __init__(self, obs_dim, n_actions, hidden=64):
        super().__init__()
        self.norm = RunningNorm(obs_dim)
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, n_actions)
        self.v = nn.Linear(hidden, 1)
        for m in self.body:
            if isinstance(m, nn.Linear):
                nn.init.orthogonal_(m.weight, 2 ** 0.5)
        nn.init.orthogonal_(self.pi.weight, 0.01)

    def forward(self, obs):
        h = self.body(self.norm(obs))
        return Categorical(logits=self.pi(h), validate_args=False), self.v(h).squeeze(-1)
