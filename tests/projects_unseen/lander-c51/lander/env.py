import numpy as np


class Lander:
    """Height, speed, fuel. Thrust 0, 1 or 2. +5 for a soft landing, -5 for a crash; a little shaping on the way."""

    G, DT = 1.0, 0.05

    def __init__(self, max_len, seed=0):
        self.max_len = max_len
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.h = 12.0 + 2.0 * self.rng.random()
        self.v = 0.3 * self.rng.standard_normal()
        self.fuel = 1.0
        self.t = 0
        return self.obs()

    def obs(self):
        return np.array([self.h / 10, self.v / 3, self.fuel], dtype=np.float32)

    def step(self, action):
        thrust = action if self.fuel > 0 else 0
        self.fuel = max(0.0, self.fuel - 0.002 * thrust)
        self.v += (thrust - self.G) * self.DT + 0.01 * self.rng.standard_normal()
        self.h = min(self.h + self.v * self.DT, 16.0)
        self.t += 1
        if self.h <= 0.0:
            return self.obs(), (5.0 if abs(self.v) < 1.0 else -5.0), True
        if self.t >= self.max_len:
            return self.obs(), -5.0, True
        reward = -0.013 * abs(self.v) - 0.001 * thrust + 0.002 * self.rng.standard_normal()
        return self.obs(), reward, False
