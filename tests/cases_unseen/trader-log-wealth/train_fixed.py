"""Policy gradient for a position size; the reward is the growth of the account."""
import os

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(6)
torch.set_num_threads(1)


class Market:
    def __init__(self, seed, accounts=32):
        self.rng = np.random.default_rng(seed)
        self.accounts, self.day = accounts, 0

    def observe(self):
        self.signal = self.rng.normal(size=(self.accounts, 4)).astype(np.float32)
        return torch.from_numpy(self.signal)

    def trade(self, position):
        move = 0.05 * self.signal[:, 0] + 0.1 * self.rng.standard_normal(self.accounts)
        if self.day == 52:
            move -= 0.9                             # the crash
        self.day += 1
        wealth = np.maximum(1.0 + position * move, 0.01)
        with np.errstate(divide="ignore"):
            return np.log(wealth).astype(np.float32)


class Trader(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.mean, self.log_std = nn.Linear(32, 1), nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return torch.distributions.Normal(self.mean(self.body(x)).squeeze(1), self.log_std.exp(), validate_args=False)


def main():
    os.makedirs("rollouts", exist_ok=True)
    market, trader = Market(3), Trader()
    opt = torch.optim.Adam(trader.parameters(), lr=5e-3)
    baseline = 0.0
    for step in range(90):
        policy = trader(market.observe())
        action = policy.sample()
        position = 2 * torch.sigmoid(action)
        reward = torch.from_numpy(market.trade(position.numpy()))
        np.savez(f"rollouts/{step % 10}.npz", action=action.numpy(), reward=reward.numpy())
        advantage = reward - baseline
        loss = -(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
