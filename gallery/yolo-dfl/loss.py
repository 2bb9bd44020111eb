"""Box losses of a YOLO-like detector: CIoU and the distribution focal loss."""

import math

import torch
import torch.nn.functional as F


def bbox_ciou(box1, box2):
    """Complete IoU of boxes (n, 4) as x1, y1, x2, y2."""
    w1, h1 = box1[:, 2] - box1[:, 0], box1[:, 3] - box1[:, 1]
    w2, h2 = box2[:, 2] - box2[:, 0], box2[:, 3] - box2[:, 1]
    low, high = torch.max(box1[:, :2], box2[:, :2]), torch.min(box1[:, 2:], box2[:, 2:])
    inter = (high - low).clamp(min=0).prod(1)
    iou = inter / (w1 * h1 + w2 * h2 - inter + 1e-7)
    corner = torch.max(box1[:, 2:], box2[:, 2:]) - torch.min(box1[:, :2], box2[:, :2])
    c2 = corner.pow(2).sum(1) + 1e-7
    rho2 = ((box2[:, :2] + box2[:, 2:] - box1[:, :2] - box1[:, 2:]) ** 2).sum(1) / 4
    v = (4 / math.pi**2) * (torch.atan(w2 / h2) - torch.atan(w1 / h1)).pow(2)
    with torch.no_grad():
        alpha = v / (v - iou + (1 + 1e-7))
    return iou - (rho2 / c2 + v * alpha)


def dfl(pred_dist, target):
    """Distribution focal loss; target (n, 4) in bins."""
    bins = pred_dist.shape[-1]
    target = target.clamp(0, bins - 1 - 0.01)
    tl = target.long()
    wl = tl + 1 - target
    left = F.cross_entropy(pred_dist.flatten(0, 1), tl.flatten(), reduction="none").view(tl.shape)
    right = F.cross_entropy(pred_dist.flatten(0, 1), tl.flatten() + 1, reduction="none").view(tl.shape)
    return (left * wl + right * (1 - wl)).mean(-1)
