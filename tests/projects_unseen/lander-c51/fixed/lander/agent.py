import copy
import random

import torch
import torch.nn as nn


class DistQ(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.actions, self.atoms = cfg.actions, cfg.atoms
        self.body = nn.Sequential(nn.Linear(cfg.obs_dim, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, cfg.hidden), nn.ReLU())
        self.head = nn.Linear(cfg.hidden, cfg.actions * cfg.atoms)

    def forward(self, obs):
        return self.head(self.body(obs)).view(-1, self.actions, self.atoms).log_softmax(-1)


class Agent:
    def __init__(self, cfg):
        self.cfg = cfg
        self.online = DistQ(cfg)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=cfg.lr, eps=1e-4)
        self.support = torch.linspace(cfg.v_min, cfg.v_max, cfg.atoms)
        self.delta = (cfg.v_max - cfg.v_min) / (cfg.atoms - 1)
        self.updates = 0

    @torch.no_grad()
    def act(self, obs, eps):
        if random.random() < eps:
            return random.randrange(self.cfg.actions)
        logp = self.online(torch.from_numpy(obs)[None])
        return int((logp.exp() * self.support).sum(-1).argmax(-1))

    @torch.no_grad()
    def project(self, reward, next_obs, done):
        """Distribution of r + gamma * Z(s', a*) on the fixed support."""
        n = len(reward)
        q_next = (self.online(next_obs).exp() * self.support).sum(-1)
        p_next = self.target(next_obs).exp()[torch.arange(n), q_next.argmax(-1)]
        tz = reward[:, None] + self.cfg.gamma * (1 - done[:, None]) * self.support
        b = (tz.clamp(self.cfg.v_min, self.cfg.v_max) - self.cfg.v_min) / self.delta
        lower, upper = b.floor().long(), b.ceil().long()
        m = torch.zeros_like(p_next)
        m.scatter_add_(1, lower, p_next * (upper - b + (lower == upper)))
        m.scatter_add_(1, upper, p_next * (b - lower))
        return m / m.sum(-1, keepdim=True)

    def update(self, batch):
        obs, action, reward, next_obs, done = batch
        target = self.project(reward, next_obs, done)
        logp = self.online(obs)[torch.arange(len(action)), action]
        loss = -(target * logp).sum(-1).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        self.updates += 1
        if self.updates % self.cfg.target_every == 0:
            self.target.load_state_dict(self.online.state_dict())
        return loss.item()

    def state(self):
        return {"online": self.online.state_dict(), "target": self.target.state_dict(),
                "optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load(self, state):
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
