"""PPO on a scheduling toy: jobs go to machines, busy machines are masked out of the policy."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
torch.set_num_threads(1)

MACHINES, FEATS = 6, 8


class ActorCritic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATS + MACHINES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi = nn.Linear(width, MACHINES)
        self.v = nn.Linear(width, 1)

    def forward(self, obs, free):
        h = self.body(torch.cat([obs, free.float()], dim=-1))
        logits = self.pi(h).masked_fill(~free, float("-inf"))
        return F.log_softmax(logits, dim=-1), self.v(h).squeeze(-1)


class JobShop:
    """Every job prefers one machine; machines become busy as the shift goes on."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.clock = 0

    def observe(self, n=64):
        obs = torch.randn(n, FEATS, generator=self.gen)
        busy_rate = 0.0 if self.clock < 14 else 0.3
        free = torch.rand(n, MACHINES, generator=self.gen) >= busy_rate
        free[:, 0] = True
        self.clock += 1
        return obs, free

    @staticmethod
    def reward(obs, action):
        return (obs[:, :MACHINES].gather(1, action[:, None]).squeeze(1)).clamp(-2, 2)


class PPOLoss:
    def __init__(self, clip=0.2, vf_coef=0.5, ent_coef=0.01):
        self.clip, self.vf_coef, self.ent_coef = clip, vf_coef, ent_coef

    def __call__(self, logp_all, value, action, old_logp, ret):
        adv = ret - value.detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        logp = logp_all.gather(1, action[:, None]).squeeze(1)
        ratio = (logp - old_logp).exp()
        policy_loss = -torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv).mean()
        value_loss = F.mse_loss(value, ret)
        entropy = -(logp_all.exp() * logp_all.clamp(min=-1e4)).sum(dim=-1).mean()
        return policy_loss + self.vf_coef * value_loss - self.ent_coef * entropy


def main():
    env = JobShop(seed=1)
    agent = ActorCritic()
    criterion = PPOLoss()
    opt = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
    for step in range(50):
        obs, free = env.observe()
        with torch.no_grad():
            logp_all, _ = agent(obs, free)
            noise = -torch.empty_like(logp_all).exponential_().log()
            action = (logp_all + noise).argmax(dim=-1)
            old_logp = logp_all.gather(1, action[:, None]).squeeze(1)
            ret = env.reward(obs, action)
        for _ in range(2):
            loss = criterion(*agent(obs, free), action=action, old_logp=old_logp, ret=ret)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
        print(f"step {step} loss {loss.item():.4f} reward {ret.mean().item():.3f}")


main()
