import numpy as np


class Rooms:
    """Vectorised heating control: keep the room near 21 degrees at little cost.

    observation: room temperature, outdoor temperature, hour, air pressure (hPa), tariff
    """

    actions = 4
    obs_dim = 5

    def __init__(self, n, seed):
        self.n = n
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.temp = self.rng.normal(18, 2, self.n)
        self.hour = self.rng.integers(0, 24, self.n).astype(float)
        self.pressure = 1013.25 + self.rng.normal(0, 0.9, self.n)
        return self.observe()

    def observe(self):
        self.outdoor = 6 + 5 * np.sin((self.hour - 9) / 24 * 2 * np.pi)
        tariff = np.where((self.hour >= 17) & (self.hour < 21), 0.4, 0.2)
        return np.stack([self.temp, self.outdoor, self.hour, self.pressure, tariff], 1).astype(np.float32)

    def step(self, action):
        heat = np.asarray(action) * 0.8
        tariff = np.where((self.hour >= 17) & (self.hour < 21), 0.4, 0.2)
        self.temp += heat - 0.08 * (self.temp - self.outdoor) + self.rng.normal(0, 0.1, self.n)
        self.hour = (self.hour + 1) % 24
        self.pressure += 0.1 * (1013.25 - self.pressure) + self.rng.normal(0, 0.4, self.n)
        reward = -0.1 * np.abs(self.temp - 21) - 0.2 * tariff * heat
        return self.observe(), reward.astype(np.float32)
