from dataclasses import dataclass

import torch


@dataclass
class Batch:
    obs: torch.Tensor
    actions: torch.Tensor
    logp: torch.Tensor
    adv: torch.Tensor
    returns: torch.Tensor

    def __len__(self):
        return len(self.obs)

    def __getitem__(self, idx):
        return Batch(self.obs[idx], self.actions[idx], self.logp[idx], self.adv[idx], self.returns[idx])

    def minibatches(self, size):
        order = torch.randperm(len(self))
        for i in range(0, len(self), size):
            yield self[order[i:i + size]]


def gae(rewards, values, gamma, lam):
    adv, last = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        nxt = values[t + 1] if t + 1 < len(values) else 0.0
        delta = rewards[t] + gamma * nxt - values[t]
        last = delta + gamma * lam * last
        adv[t] = last
    return adv


@torch.no_grad()
def collect(env, actor, critic, cfg):
    """Whole episodes until `horizon` transitions are there."""
    obs_b, act_b, logp_b, adv_b, ret_b, scores = [], [], [], [], [], []
    while len(obs_b) < cfg.horizon:
        obs, done = env.reset(), False
        rewards, values = [], []
        while not done:
            o = torch.as_tensor(obs)
            dist = actor.dist(o)
            a = dist.sample()
            obs_b.append(o)
            act_b.append(a)
            logp_b.append(dist.log_prob(a))
            values.append(critic(o).item())
            obs, r, done = env.step(a.item())
            rewards.append(r)
        adv = gae(rewards, values, cfg.gamma, cfg.lam)
        adv_b += adv
        ret_b += [a + v for a, v in zip(adv, values)]
        scores.append(sum(rewards))
    batch = Batch(torch.stack(obs_b), torch.stack(act_b), torch.stack(logp_b),
                  torch.tensor(adv_b), torch.tensor(ret_b))
    return batch, sum(scores) / len(scores)
