"""A walker on a narrow bridge: reach the far end, do not fall off."""
import os

import numpy as np


class Bridge:
    LENGTH, HALF_WIDTH = 6.0, 1.0

    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.pos = np.array([0.0, self.rng.uniform(-0.5, 0.5)])
        self.t = 0
        return self.observe()

    def observe(self):
        return np.array([self.pos[0] / self.LENGTH, self.pos[1], self.t / 40], np.float32)

    def step(self, action):
        a = np.clip(action, -1, 1)
        self.pos = self.pos + np.array([0.5, 0.4]) * a + self.rng.normal(0, 0.03, 2)
        self.t += 1
        if abs(self.pos[1]) > self.HALF_WIDTH:
            return self.observe(), -20.0, True
        if self.pos[0] > self.LENGTH:
            return self.observe(), 50.0, True
        return self.observe(), -0.1, self.t >= 40


def behaviour(obs, rng):
    """A clumsy pilot: walks forward, corrects sideways late."""
    forward = rng.normal(0.4, 0.5)
    sideways = -0.8 * obs[1] + rng.normal(0, 0.6)
    return np.clip(np.array([forward, sideways]), -1, 1).astype(np.float32)


def collect(folder, episodes, seed, shard=50):
    paths = [os.path.join(folder, f"episodes_{i:03d}.npz") for i in range(0, episodes, shard)]
    if all(os.path.exists(p) for p in paths):
        return paths
    os.makedirs(folder, exist_ok=True)
    rng = np.random.default_rng(seed)
    env = Bridge(rng)
    for path in paths:
        rows = {k: [] for k in ("obs", "act", "rew", "next", "done")}
        for _ in range(shard):
            obs, done = env.reset(), False
            while not done:
                act = behaviour(obs, rng)
                nxt, rew, done = env.step(act)
                for k, v in zip(rows, (obs, act, rew, nxt, done)):
                    rows[k].append(v)
                obs = nxt
        np.savez(path, **{k: np.array(v, np.float32) for k, v in rows.items()})
    return paths
