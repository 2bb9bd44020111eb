import torch
import torch.nn.functional as F


def soft_dice(p, onehot, smooth=1.0):
    inter = (p * onehot).sum(dim=(0, 2, 3))
    total = p.sum(dim=(0, 2, 3)) + onehot.sum(dim=(0, 2, 3))
    return 1 - ((2 * inter + smooth) / (total + smooth)).mean()


def entropy(p):
    """Mean pixel entropy; 0 log 0 counts as 0."""
    safe = torch.where(p > 0, p, torch.ones_like(p))
    plogp = safe * torch.log(safe)
    return -plogp.sum(dim=1).mean()


class SegLoss:
    def __init__(self, classes, entropy_weight):
        self.classes = classes
        self.entropy_weight = entropy_weight

    def __call__(self, p, mask):
        onehot = F.one_hot(mask, self.classes).permute(0, 3, 1, 2).float()
        brier = (p - onehot).pow(2).sum(1).mean()
        return soft_dice(p, onehot) + brier + self.entropy_weight * entropy(p)
