"""PPO with invalid action masking in one file, in the shape of CleanRL's ppo_multidiscrete_mask.

The game: boxes of some sizes are put on shelves; a shelf that is too full is not a legal action.
With --bug, only eight boxes may be dropped in an episode, so that there are states without a legal
action.
"""

import argparse
import os
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


class Shelves:
    """4 shelves of 10, boxes of 1 to 6; action 4 drops the box, which costs a point."""

    def __init__(self, seed, bug):
        self.rng, self.bug = np.random.default_rng(seed), bug
        self.reset()

    def reset(self):
        self.free, self.left, self.dropped = np.full(4, 10.0), 30, 0
        self.box = float(self.rng.integers(1, 7))
        return self.observation()

    def observation(self):
        return np.array([*self.free / 10, self.box / 6, self.dropped / 30], dtype=np.float32)

    def action_mask(self):
        drop = self.dropped < 8 or not self.bug
        return np.array([*(self.free >= self.box), drop], dtype=bool)

    def step(self, action):
        if action == 4:
            self.dropped += 1
            reward = -1.0
        else:
            self.free[action] -= self.box
            reward = self.box / 6
        self.left -= 1
        self.box = float(self.rng.integers(1, 7))
        done = self.left == 0 or self.free.max() == 0
        return (self.reset() if done else self.observation()), reward, done


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(6, 32)), nn.Tanh(), layer_init(nn.Linear(32, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(6, 32)), nn.Tanh(), layer_init(nn.Linear(32, 5), std=0.01)
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, mask, action=None):
        logits = self.actor(x)
        logits = logits.masked_fill(~mask, float("-inf"))
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--num-updates", type=int, default=12)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--update-epochs", type=int, default=2)
    parser.add_argument("--clip-coef", type=float, default=0.2)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    parser.add_argument("--vf-coef", type=float, default=0.5)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    args = parser.parse_args()
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    os.makedirs("runs", exist_ok=True)
    writer = open("runs/metrics.csv", "w")

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    envs = [Shelves(args.seed + i, args.bug) for i in range(args.num_envs)]
    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    obs = torch.zeros((args.num_steps, args.num_envs, 6))
    masks = torch.zeros((args.num_steps, args.num_envs, 5), dtype=torch.bool)
    actions = torch.zeros((args.num_steps, args.num_envs))
    logprobs = torch.zeros((args.num_steps, args.num_envs))
    rewards = torch.zeros((args.num_steps, args.num_envs))
    dones = torch.zeros((args.num_steps, args.num_envs))
    values = torch.zeros((args.num_steps, args.num_envs))

    start_time = time.time()
    next_obs = torch.from_numpy(np.stack([env.reset() for env in envs]))
    next_done = torch.zeros(args.num_envs)

    for update in range(1, args.num_updates + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (update - 1.0) / args.num_updates) * args.learning_rate
        for step in range(0, args.num_steps):
            obs[step] = next_obs
            dones[step] = next_done
            masks[step] = torch.from_numpy(np.stack([env.action_mask() for env in envs]))
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs, masks[step])
                values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob
            results = [env.step(int(a)) for env, a in zip(envs, action)]
            next_obs = torch.from_numpy(np.stack([r[0] for r in results]))
            rewards[step] = torch.tensor([r[1] for r in results])
            next_done = torch.tensor([float(r[2]) for r in results])

        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                if t == args.num_steps - 1:
                    nextnonterminal, nextvalues = 1.0 - next_done, next_value
                else:
                    nextnonterminal, nextvalues = 1.0 - dones[t + 1], values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nextnonterminal - values[t]
                lastgaelam = delta + args.gamma * args.gae_lambda * nextnonterminal * lastgaelam
                advantages[t] = lastgaelam
            returns = advantages + values

        b_obs, b_masks = obs.reshape(-1, 6), masks.reshape(-1, 5)
        b_actions, b_logprobs = actions.reshape(-1), logprobs.reshape(-1)
        b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
        b_inds = np.arange(batch_size)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                    b_obs[mb_inds], b_masks[mb_inds], b_actions[mb_inds]
                )
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        writer.write(f"{update},{v_loss.item():.4f},{pg_loss.item():.4f},{rewards.mean().item():.3f}\n")
        writer.flush()
        print("SPS:", int(update * batch_size / (time.time() - start_time)))

    writer.close()
    torch.save(agent.state_dict(), "final.pt")
