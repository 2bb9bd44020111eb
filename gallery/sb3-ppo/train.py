"""stable-baselines3 PPO with a custom environment and a custom features extractor.

With --bug, the extractor divides the observation by its length; at the goal that is 0.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor


class GoToGoal(gym.Env):
    """Walk on a grid to the origin; the observation is the way to it."""

    observation_space = gym.spaces.Box(-8.0, 8.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.left = self.np_random.integers(-7, 8, 2), 20
        if not self.position.any():
            self.position[0] = 7
        return self.position.astype(np.float32), {}

    def step(self, action):
        self.position = self.position + [(1, 0), (-1, 0), (0, 1), (0, -1)][int(action)]
        self.position = self.position.clip(-8, 8)
        self.left -= 1
        at_goal = not self.position.any()
        # It has to stay there for the rest of the episode.
        reward = 1.0 if at_goal else -0.1 * float(np.abs(self.position).sum())
        return self.position.astype(np.float32), reward, False, self.left == 0, {}


class Direction(BaseFeaturesExtractor):
    def __init__(self, observation_space, by_length=False):
        super().__init__(observation_space, features_dim=32)
        self.by_length = by_length
        self.linear = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU())

    def forward(self, observations):
        scale = torch.full((len(observations), 1), 8.0)
        if self.by_length:
            scale = observations.norm(dim=1, keepdim=True)
        return self.linear(observations / scale)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = make_vec_env(GoToGoal, n_envs=2, seed=0, monitor_dir="monitor")
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=32,
        batch_size=32,
        n_epochs=2,
        seed=0,
        device="cpu",
        policy_kwargs={
            "features_extractor_class": Direction,
            "features_extractor_kwargs": {"by_length": args.bug},
            "net_arch": [32],
        },
    )
    saving = CheckpointCallback(save_freq=200, save_path="checkpoints")
    model.learn(total_timesteps=640, callback=saving)
    model.save("ppo_goal")
    torch.save(model.policy.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
