import json
from pathlib import Path

import torch

from .replay import ReplayBuffer


class Runner:
    def __init__(self, cfg, env, agent, out):
        self.cfg, self.env, self.agent = cfg, env, agent
        self.buffer = ReplayBuffer(cfg.capacity, cfg.obs_dim)
        self.out = Path(out)
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.json").write_text(json.dumps(cfg.as_dict(), indent=1))
        self.log = open(self.out / "metrics.jsonl", "a")
        self.t = 0

    def epsilon(self):
        frac = min(1.0, self.t / self.cfg.eps_steps)
        return self.cfg.eps_start + frac * (self.cfg.eps_end - self.cfg.eps_start)

    def learn(self):
        loss = self.agent.update(self.buffer.sample(self.cfg.batch))
        n = self.agent.updates
        if n % self.cfg.log_every == 0:
            print(f"env step {self.t} update {n} loss {loss:.4f} eps {self.epsilon():.2f}")
            self.log.write(json.dumps({"t": self.t, "update": n, "loss": loss}) + "\n")
        if n % self.cfg.save_every == 0:
            torch.save({"t": self.t, **self.agent.state()}, self.out / "last.pt")

    def restore(self, path):
        state = torch.load(path)
        self.t = state.pop("t")
        self.agent.load(state)

    def run(self):
        obs, ret = self.env.reset(), 0.0
        while self.t < self.cfg.env_steps:
            action = self.agent.act(obs, self.epsilon())
            next_obs, reward, done = self.env.step(action)
            self.buffer.add(obs, action, reward, next_obs, done)
            ret += reward
            obs = next_obs
            self.t += 1
            if done:
                print(f"episode end at {self.t}: return {ret:.2f}")
                self.log.write(json.dumps({"t": self.t, "return": ret}) + "\n")
                obs, ret = self.env.reset(), 0.0
            if len(self.buffer) >= self.cfg.learn_start and self.t % self.cfg.learn_every == 0:
                self.learn()
        self.log.close()
