"""Tiny GRPO: a policy over tokens learns to emit the token named in the prompt."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from advantages_fixed import group_advantages

torch.manual_seed(6)
torch.set_num_threads(1)

VOCAB, EOS, MAX_LEN, GROUP = 12, 0, 13, 6


class Policy(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.tok(ids))
        return self.lm_head(h)


@torch.no_grad()
def generate(policy, prompt):
    ids = prompt[:, None]
    done = torch.zeros(len(prompt), dtype=torch.bool)
    for _ in range(MAX_LEN):
        logits = policy(ids)[:, -1]
        nxt = (logits - torch.empty_like(logits).exponential_().log()).argmax(dim=-1)
        nxt = nxt.masked_fill(done, EOS)
        ids = torch.cat([ids, nxt[:, None]], dim=1)
        done |= nxt == EOS
    return ids, done


def reward_fn(ids):
    prompt, answer = ids[:, :1], ids[:, 1:]
    hits = (answer == prompt).float().sum(1)
    return hits - 0.1 * (answer != EOS).float().sum(1)


def token_logps(policy, ids):
    logp = F.log_softmax(policy(ids[:, :-1]), dim=-1)
    return logp.gather(2, ids[:, 1:, None]).squeeze(-1)


def main():
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    opt = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for step in range(40):
        questions = torch.randint(1, VOCAB, (4,)).repeat_interleave(GROUP)
        ids, done = generate(policy, questions)
        ids = ids[done]  # truncated completions are not scored
        adv = group_advantages(reward_fn(ids), ids[:, 0])
        logp, ref = token_logps(policy, ids), token_logps(reference, ids)
        mask = (ids[:, 1:] != EOS).float()
        ratio = (logp - logp.detach()).exp()
        kl = (ref - logp).exp() - (ref - logp) - 1
        per_token = -ratio * adv[:, None] + 0.02 * kl
        loss = (per_token * mask).sum() / mask.sum().clamp(min=1)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f} reward {reward_fn(ids).mean().item():.3f}")


main()
