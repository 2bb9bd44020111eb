"""Actor-critic on a grid world. Moves into a wall are masked out with -inf logits."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(6)
torch.set_num_threads(1)

SIZE, HORIZON, ENVS = 5, 12, 16
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, obs, legal):
        h = self.body(obs)
        logits = self.actor(h).masked_fill(~legal, float("-inf"))
        return Categorical(logits=logits), self.critic(h).squeeze(-1)


class Grid:
    def reset(self):
        self.pos = torch.randint(0, SIZE, (ENVS, 2))
        self.goal = torch.randint(0, SIZE, (ENVS, 2))
        return self.observe()

    def observe(self):
        target = self.pos.unsqueeze(1) + MOVES
        legal = ((target >= 0) & (target < SIZE)).all(-1)
        return torch.cat([self.pos, self.goal], 1).float() / SIZE - 0.5, legal

    def step(self, action):
        before = (self.pos - self.goal).abs().sum(1)
        self.pos = self.pos + MOVES[action]
        after = (self.pos - self.goal).abs().sum(1)
        return (before - after).float() + (after == 0).float()


def rollout(env, policy):
    obs, legal = env.reset()
    log_probs, values, entropies, rewards = [], [], [], []
    for _ in range(HORIZON):
        dist, value = policy(obs, legal)
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        entropies.append(dist.entropy())
        values.append(value)
        rewards.append(env.step(action))
        obs, legal = env.observe()
    returns, running = [], torch.zeros(ENVS)
    for r in reversed(rewards):
        running = r + 0.9 * running
        returns.insert(0, running)
    return torch.stack(log_probs), torch.stack(values), torch.stack(entropies), torch.stack(returns)


env, policy = Grid(), Policy()
opt = torch.optim.Adam(policy.parameters(), lr=4e-3)
best = -torch.inf
for step in range(60):
    log_probs, values, entropies, returns = rollout(env, policy)
    adv = (returns - values).detach()
    adv = (adv - adv.mean()) / (adv.std() + 1e-6)
    loss = -(log_probs * adv).mean() + 0.5 * F.mse_loss(values, returns) - 0.01 * entropies.mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
    opt.step()
    best = max(best, returns[0].mean().item())
    print(f"step {step} loss {loss.item():.9g} return {returns[0].mean().item():.9g} best {best:.9g}")

h = hashlib.sha256()
for p in policy.parameters():
    h.update(p.detach().numpy().tobytes())
print("sha256", h.hexdigest())
