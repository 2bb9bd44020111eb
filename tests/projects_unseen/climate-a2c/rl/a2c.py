import json
from pathlib import Path

import torch


class A2C:
    def __init__(self, env, agent, args):
        self.env, self.agent, self.args = env, agent, args
        self.opt = torch.optim.RMSprop(agent.parameters(), lr=args.lr, eps=1e-5, alpha=0.99)
        self.out = Path(args.out)

    @torch.no_grad()
    def rollout(self, obs):
        data = {"obs": [], "act": [], "rew": []}
        for _ in range(self.args.horizon):
            dist, _ = self.agent(obs)
            act = dist.sample()
            nxt, rew = self.env.step(act.numpy())
            data["obs"].append(obs)
            data["act"].append(act)
            data["rew"].append(torch.from_numpy(rew))
            obs = torch.from_numpy(nxt)
            self.agent.norm.update(obs)
        _, last = self.agent(obs)
        return {k: torch.stack(v) for k, v in data.items()}, last, obs

    def returns(self, rew, last):
        out, run = [], last
        for r in rew.flip(0):
            run = r + self.args.gamma * run
            out.append(run)
        return torch.stack(out).flip(0)

    def update(self, data, last):
        target = self.returns(data["rew"], last)
        dist, value = self.agent(data["obs"].flatten(0, 1))
        adv = target.flatten() - value
        logp = dist.log_prob(data["act"].flatten())
        pg = -(logp * adv.detach()).mean()
        loss = pg + 0.5 * adv.square().mean() - self.args.entropy * dist.entropy().mean()
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
        self.opt.step()
        return loss.item()

    def learn(self):
        obs = torch.from_numpy(self.env.reset())
        self.agent.norm.update(obs)
        with (self.out / "progress.jsonl").open("w") as fh:
            for it in range(self.args.iterations):
                data, last, obs = self.rollout(obs)
                loss = self.update(data, last)
                row = {"it": it, "loss": loss, "reward": data["rew"].mean().item()}
                fh.write(json.dumps(row) + "\n")
                if it % 10 == 0:
                    print(row, flush=True)
                if it % 50 == 49:
                    torch.save(self.agent.state_dict(), self.out / f"agent_{it + 1}.pt")
