import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


def policy_loss(actor, mb, cfg):
    dist = actor.dist(mb.obs)
    ratio = (dist.log_prob(mb.actions) - mb.logp).exp()
    adv = (mb.adv - mb.adv.mean()) / (mb.adv.std() + 1e-8)
    clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
    return -torch.min(ratio * adv, clipped * adv).mean() - cfg.entropy * dist.entropy().mean()


def apply(opt, params, loss, cfg):
    opt.zero_grad()
    loss.backward()
    clip_grad_norm_(params, cfg.max_grad_norm)
    opt.step()


def update(actor, critic, actor_opt, critic_opt, batch, cfg, step):
    for _ in range(cfg.epochs):
        for mb in batch.minibatches(cfg.minibatch):
            pl = policy_loss(actor, mb, cfg)
            apply(actor_opt, list(actor.parameters()), pl, cfg)
            vl = F.smooth_l1_loss(critic(mb.obs), mb.returns)
            apply(critic_opt, list(critic.parameters()), vl, cfg)
            print(f"step {step} loss {pl.item():.4f} value {vl.item():.4f}")
            step += 1
    return step
