import numpy as np


class DispatchEnv:
    """Jobs arrive one by one; the agent picks a machine; the reward is minus the added makespan."""

    def __init__(self, machines, rng):
        self.m = machines
        self.rng = rng
        self.obs_dim = 2 * machines + 1

    def reset(self):
        self.load = np.zeros(self.m, dtype=np.float32)
        self.speed = self.rng.uniform(0.5, 1.5, self.m).astype(np.float32)
        self.left = int(self.rng.integers(12, 40))
        self.job = self._draw()
        return self._obs()

    def _draw(self):
        return float(self.rng.gamma(2.0, 0.5))

    def _obs(self):
        return np.concatenate([self.load / 5.0, self.speed, [self.job]]).astype(np.float32)

    def step(self, action):
        before = self.load.max()
        self.load[action] += self.job / self.speed[action]
        reward = -(float(self.load.max()) - float(before))
        self.load = np.maximum(self.load - 0.3, 0.0)
        self.left -= 1
        self.job = self._draw()
        return self._obs(), reward, self.left <= 0
