"""PPO for a toy job-dispatching problem: which machine takes the next job?"""
import argparse
import csv
import dataclasses
import os
import time

import numpy as np
import torch

from ppo.config import PPOConfig
from ppo.env import DispatchEnv
from ppo.policy import Actor, Critic
from ppo.rollout import collect
from ppo.update import update


def parse():
    ap = argparse.ArgumentParser()
    for f in dataclasses.fields(PPOConfig):
        ap.add_argument("--" + f.name.replace("_", "-"), type=type(f.default), default=f.default)
    return PPOConfig(**vars(ap.parse_args()))


def greedy_return(env, actor, episodes=4):
    total = 0.0
    for _ in range(episodes):
        obs, done = env.reset(), False
        while not done:
            with torch.no_grad():
                a = actor(torch.as_tensor(obs)).argmax().item()
            obs, r, done = env.step(a)
            total += r
    return total / episodes


def main():
    cfg = parse()
    torch.manual_seed(cfg.seed)
    env = DispatchEnv(cfg.machines, np.random.default_rng(cfg.seed))
    eval_env = DispatchEnv(cfg.machines, np.random.default_rng(10_000 + cfg.seed))
    actor = Actor(env.obs_dim, cfg.machines, cfg.hidden)
    critic = Critic(env.obs_dim, cfg.hidden)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=cfg.actor_lr)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=cfg.critic_lr)

    os.makedirs(cfg.out, exist_ok=True)
    log = open(os.path.join(cfg.out, "progress.csv"), "w", newline="")
    writer = csv.writer(log)
    writer.writerow(["iteration", "updates", "transitions", "mean_return", "greedy", "seconds"])

    iteration = updates = transitions = 0
    t0 = time.time()
    while True:
        batch, mean_return = collect(env, actor, critic, cfg)
        transitions += len(batch)
        updates = update(actor, critic, actor_opt, critic_opt, batch, cfg, updates)
        greedy = ""
        if iteration % 2 == 1:
            greedy = f"{greedy_return(eval_env, actor):.3f}"
            torch.save({"actor": actor.state_dict(), "critic": critic.state_dict(),
                        "actor_opt": actor_opt.state_dict(), "critic_opt": critic_opt.state_dict(),
                        "iteration": iteration, "config": dataclasses.asdict(cfg)},
                       os.path.join(cfg.out, f"iter{iteration:03d}.pt"))
        writer.writerow([iteration, updates, transitions, f"{mean_return:.3f}", greedy, f"{time.time() - t0:.1f}"])
        log.flush()
        print(f"iteration {iteration} transitions {transitions} return {mean_return:.3f} {greedy}")
        iteration += 1
        if transitions >= cfg.total_transitions:
            break
    log.close()


if __name__ == "__main__":
    main()
