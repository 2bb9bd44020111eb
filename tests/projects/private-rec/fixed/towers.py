import torch
import torch.nn as nn
import torch.nn.functional as F


class ItemTower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Linear(vocab, 2 * dim, bias=False)
        self.project = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, bag):
        return self.project(torch.tanh(self.embed(bag)))


def unit(v):
    return v / v.norm(dim=-1, keepdim=True).clamp(min=1e-8)


class TwoTower(nn.Module):
    def __init__(self, users, vocab, dim=24, temperature=0.2):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = ItemTower(vocab, dim)
        self.temperature = temperature

    def forward(self, user, bags):
        """Scores of one user for a stack of items; the first one is the clicked item."""
        return unit(self.item(bags)) @ unit(self.user(user)) / self.temperature


def click_loss(scores):
    return -F.log_softmax(scores, dim=-1)[0]
