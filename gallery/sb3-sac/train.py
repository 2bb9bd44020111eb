"""stable-baselines3 SAC on a custom environment with a shaped reward.

With --bug, the reward is one over the distance, which is 0 where the arm rests exactly at the goal.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor


class Reach(gym.Env):
    """A point that moves on a line; at the ends of the rail it stops exactly."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, inverse):
        self.inverse = inverse

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = np.float32(self.np_random.uniform(-1, 0.5))
        self.goal, self.left = np.float32(1.0), 25
        return np.array([self.x, self.goal], dtype=np.float32), {}

    def step(self, action):
        self.x = np.clip(self.x + np.float32(0.3) * action[0], np.float32(-1), np.float32(1))
        distance = np.abs(self.goal - self.x)
        self.left -= 1
        if self.inverse:
            with np.errstate(divide="ignore"):
                reward = 0.1 / distance
        else:
            reward = 0.1 / (distance + 0.05)
        return np.array([self.x, self.goal], dtype=np.float32), float(reward), False, self.left == 0, {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = Monitor(Reach(inverse=args.bug), "monitor.csv")
    model = SAC(
        "MlpPolicy",
        env,
        learning_starts=40,
        batch_size=32,
        seed=2,
        device="cpu",
        policy_kwargs={"net_arch": [32, 32]},
    )
    model.set_logger(configure("logs", ["csv"]))
    model.learn(total_timesteps=250)
    model.save("sac_reach")
    torch.save(model.policy.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
