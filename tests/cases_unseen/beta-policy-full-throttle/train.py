"""Clone a driving controller: throttle and steering are squashed to [0, 1] and modelled by a Beta policy."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from losses import beta_nll, entropy_bonus

torch.manual_seed(1)
torch.set_num_threads(1)
OBS, ACT = 10, 2


class Expert:
    """PD controller with actuator limits; logs one episode after another."""

    def __init__(self, seed=3):
        self.g = torch.Generator().manual_seed(seed)
        self.k = 0.215 * F.normalize(torch.randn(OBS, ACT, generator=self.g), dim=0)

    def rollout(self, n):
        obs = torch.randn(n, OBS, generator=self.g)
        raw = obs @ self.k + 0.01 * torch.randn(n, ACT, generator=self.g)
        action = raw.clamp(-0.8, 0.8)
        return obs, (action + 0.8) / 1.6


class BetaPolicy(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(OBS, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
        )
        self.alpha = nn.Linear(hidden, ACT)
        self.beta = nn.Linear(hidden, ACT)

    def forward(self, obs):
        h = self.body(obs)
        return F.softplus(self.alpha(h)) + 1.0, F.softplus(self.beta(h)) + 1.0


def main():
    expert = Expert()
    policy = BetaPolicy()
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for step in range(60):
        obs, action = expert.rollout(128)
        alpha, beta = policy(obs)
        loss = beta_nll(alpha, beta, action) - 0.01 * entropy_bonus(alpha, beta)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
