"""Group-relative advantages (GRPO): rewards are normalised inside the group of one prompt."""
from collections import defaultdict

import torch


def group_index(prompt_ids):
    groups = defaultdict(list)
    for row, pid in enumerate(prompt_ids.tolist()):
        groups[pid].append(row)
    return groups


@torch.no_grad()
def group_advantages(rewards, prompt_ids, eps=1e-4):
    adv = torch.zeros_like(rewards)
    for rows in group_index(prompt_ids).values():
        r = rewards[rows]
        adv[rows] = (r - r.mean()) / (r.std() + eps)
    return adv


def whiten(x, eps=1e-8):
    return (x - x.mean()) * torch.rsqrt(x.var(unbiased=False) + eps)
