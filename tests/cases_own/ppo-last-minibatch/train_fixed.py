"""PPO on a one-dimensional balancing task; the rollout ends with the episode, so its length varies."""
import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(4)
torch.set_num_threads(1)


class Cart:
    """Keep the position near zero with pushes to the left or right."""

    def __init__(self, limit=2.0):
        self.limit = limit

    def reset(self):
        self.s = 0.2 * torch.randn(2)
        return self.s.clone()

    def step(self, a):
        force = 0.6 if a == 1 else -0.6
        self.s[1] += 0.3 * force + 0.1 * torch.randn(()) + 0.1 * self.s[0]
        self.s[0] += 0.5 * self.s[1]
        return self.s.clone(), 1.0 - 0.2 * self.s[0].abs().item(), bool(self.s[0].abs() > self.limit)


class ActorCritic(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.pi = nn.Linear(hidden, 2)
        self.v = nn.Linear(hidden, 1)

    def forward(self, s):
        h = self.body(s)
        return Categorical(logits=self.pi(h), validate_args=False), self.v(h).squeeze(-1)


def rollout(env, net, episodes=2, horizon=40, gamma=0.97):
    obs, acts, logps, rets, vals = [], [], [], [], []
    for _ in range(episodes):
        s, rewards = env.reset(), []
        for _ in range(horizon):
            with torch.no_grad():
                dist, v = net(s)
                a = (torch.rand(()) < dist.probs[1]).long()
            obs.append(s)
            acts.append(a)
            logps.append(dist.log_prob(a))
            vals.append(v)
            s, r, done = env.step(int(a))
            rewards.append(r)
            if done:
                break
        ret, out = 0.0, []
        for r in reversed(rewards):
            ret = r + gamma * ret
            out.append(ret)
        rets += out[::-1]
    rets, vals = torch.tensor(rets), torch.stack(vals)
    return torch.stack(obs), torch.stack(acts), torch.stack(logps), rets, rets - vals


def ppo_loss(net, obs, act, old, ret, adv, clip=0.2):
    if len(adv) > 1:
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    dist, v = net(obs)
    ratio = (dist.log_prob(act) - old).exp()
    policy = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
    return policy + 0.05 * (v - ret).pow(2).mean() - 0.01 * dist.entropy().mean()


env, net = Cart(), ActorCritic()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
step = 0
for it in range(14):
    data = rollout(env, net)
    order = torch.randperm(len(data[0]))
    for idx in order.split(8):
        loss = ppo_loss(net, *(d[idx] for d in data))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
