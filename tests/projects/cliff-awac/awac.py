import copy

import torch
import torch.nn.functional as F

from nets import Actor, Critic


class AWAC:
    """Advantage-weighted actor critic (Nair et al. 2020), offline part."""

    def __init__(self, obs, act, hidden=64, lr=1e-3, gamma=0.98, tau=0.02, lam=0.5):
        self.actor, self.critic = Actor(obs, act, hidden), Critic(obs, act, hidden)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=lr)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=3 * lr)
        self.gamma, self.tau, self.lam = gamma, tau, lam

    def critic_loss(self, batch):
        with torch.no_grad():
            next_act = self.actor(batch["next"]).sample().clamp(-1, 1)
            next_q = torch.min(*self.target(batch["next"], next_act))
            goal = batch["rew"] + self.gamma * (1 - batch["done"]) * next_q
        q1, q2 = self.critic(batch["obs"], batch["act"])
        return F.mse_loss(q1, goal) + F.mse_loss(q2, goal)

    def advantage(self, batch, dist):
        value = torch.min(*self.critic(batch["obs"], dist.sample().clamp(-1, 1)))
        return torch.min(*self.critic(batch["obs"], batch["act"])) - value

    def actor_loss(self, batch):
        dist = self.actor(batch["obs"])
        with torch.no_grad():
            weights = torch.exp(self.advantage(batch, dist) / self.lam)
            weights = weights / weights.mean()
        log_prob = dist.log_prob(batch["act"]).sum(-1)
        return -(weights * log_prob).mean()

    def update(self, batch):
        critic_loss = self.critic_loss(batch)
        self.critic_opt.zero_grad()
        critic_loss.backward()
        self.critic_opt.step()

        actor_loss = self.actor_loss(batch)
        self.actor_opt.zero_grad()
        actor_loss.backward()
        torch.nn.utils.clip_grad_norm_(self.actor.parameters(), 5.0)
        self.actor_opt.step()

        with torch.no_grad():
            for t, p in zip(self.target.parameters(), self.critic.parameters()):
                t.lerp_(p, self.tau)
        return {"critic": critic_loss.item(), "actor": actor_loss.item()}

    def state_dict(self):
        return {k: getattr(self, k).state_dict() for k in ("actor", "critic", "target", "actor_opt", "critic_opt")}
