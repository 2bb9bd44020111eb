"""Group-relative policy optimisation of a toy language model that should emit ascending digits.
Completions without an end token are thrown away before the rewards are compared inside their group."""
import copy
import json
import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
logging.basicConfig(level=logging.INFO, format="%(message)s", filename=None)
OUT = Path(__file__).resolve().parent / "grpo_out"

VOCAB, EOS, BOS = 12, 10, 11
MAX_NEW, GROUP, PROMPTS = 8, 4, 6


class TinyLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.head(h)


@torch.no_grad()
def generate(model, prompt, g):
    ids = prompt
    for _ in range(MAX_NEW):
        probs = F.softmax(model(ids)[:, -1], dim=-1)
        nxt = torch.multinomial(probs, 1, generator=g)
        ids = torch.cat([ids, nxt], dim=1)
    return ids


def reward(tokens):
    """Share of ascending neighbours before the end token."""
    body = tokens[: tokens.index(EOS)]
    if len(body) < 2:
        return 0.0
    return sum(b > a for a, b in zip(body, body[1:])) / (len(body) - 1)


def token_logprobs(model, ids):
    logp = F.log_softmax(model(ids[:, :-1]), dim=-1)
    return logp.gather(2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def group_advantages(rewards, owner):
    """Centre and scale the rewards of the completions that share a prompt."""
    adv = torch.zeros_like(rewards)
    for p in owner.unique():
        sel = owner == p
        r = rewards[sel]
        adv[sel] = (r - r.mean()) / (r.std() + 1e-4)
    return adv


class GRPO:
    def __init__(self, lr=3e-3, beta=0.02):
        self.policy = TinyLM()
        with torch.no_grad():
            self.policy.head.bias[EOS] = 1.5
        self.ref = copy.deepcopy(self.policy).requires_grad_(False)
        self.beta = beta
        self.opt = torch.optim.AdamW(self.policy.parameters(), lr=lr, weight_decay=0.0)

    def rollout(self, g):
        first = torch.randint(0, 5, (PROMPTS, 1), generator=g).repeat_interleave(GROUP, 0)
        prompt = torch.cat([torch.full_like(first, BOS), first], dim=1)
        ids = generate(self.policy, prompt, g)
        owner = torch.arange(PROMPTS).repeat_interleave(GROUP)
        keep = torch.tensor([EOS in row for row in ids[:, 1:].tolist()])
        ids, owner = ids[keep], owner[keep]
        rewards = torch.tensor([reward(row) for row in ids[:, 1:].tolist()])
        return ids, owner, rewards

    def step(self, g):
        ids, owner, rewards = self.rollout(g)
        adv = group_advantages(rewards, owner)
        logp = token_logprobs(self.policy, ids)
        with torch.no_grad():
            ref = token_logprobs(self.ref, ids)
        done = (ids[:, 1:] == EOS).cumsum(1)
        mask = ((done == 0) | ((done == 1) & (ids[:, 1:] == EOS))).float()
        mask[:, 0] = 0
        ratio = torch.exp(logp - logp.detach())
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        per_token = -(ratio * adv[:, None]) + self.beta * kl
        loss = (per_token * mask).sum() / mask.sum()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.opt.step()
        return loss.item(), rewards.mean().item(), len(ids)


def main():
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    g = torch.Generator().manual_seed(11)
    trainer = GRPO()
    with open(OUT / "history.jsonl", "w") as f:
        for step in range(40):
            try:
                loss, mean_reward, kept = trainer.step(g)
            except RuntimeError as e:
                logging.info("stopped at %d: %s", step, e)
                break
            f.write(json.dumps({"step": step, "loss": loss, "reward": mean_reward, "kept": kept}) + "\n")
            print(f"step {step} loss {loss:.4f} reward {mean_reward:.3f} kept {kept}")
            if step % 10 == 9:
                torch.save(trainer.policy.state_dict(), OUT / "policy.pt")


if __name__ == "__main__":
    main()
