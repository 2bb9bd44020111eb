"""Behaviour cloning with a state-dependent Gaussian policy."""
import torch
import torch.nn as nn
from torch.distributions import Independent, Normal

torch.manual_seed(23)
torch.set_num_threads(1)
OBS, ACT = 5, 2


class GaussianPolicy(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, ACT)
        self.log_std = nn.Linear(hidden, ACT)

    def forward(self, obs):
        h = self.trunk(obs)
        std = self.log_std(h).exp()
        return Independent(Normal(self.mean(h), std, validate_args=False), 1, validate_args=False)


class Demonstrations:
    """Teleoperated episodes. Far from the goal the operator steers roughly, near it precisely."""

    def __init__(self, episodes=30, length=40, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.obs, self.act = [], []
        for ep in range(episodes):
            pos = torch.randn(length, OBS, generator=g)
            if ep == 17:
                pos[12] = pos[12] * 400  # the tracker lost the marker for one frame
            dist = pos[:, :2].norm(dim=1, keepdim=True).clamp(max=4)
            act = -0.5 * pos[:, :ACT].clamp(-3, 3)
            act = act + 0.4 * torch.exp(-dist) * torch.randn(length, ACT, generator=g)
            self.obs.append(pos)
            self.act.append(act)

    def batches(self):
        yield from zip(self.obs, self.act)


def nll(policy, obs, act):
    return -policy(obs).log_prob(act).mean()


def train(policy, demos, epochs=2, lr=2e-3):
    opt = torch.optim.Adam(policy.parameters(), lr=lr)
    step = 0
    for _ in range(epochs):
        for obs, act in demos.batches():
            loss = nll(policy, obs, act)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
            opt.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


if __name__ == "__main__":
    train(GaussianPolicy(), Demonstrations())
