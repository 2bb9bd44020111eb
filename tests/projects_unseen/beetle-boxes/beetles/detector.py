import torch
import torch.nn as nn
import torch.nn.functional as F


def conv(i, o, stride):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Detector(nn.Module):
    """One box per cell of a 6 x 6 grid."""

    STRIDE = 4

    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(conv(1, width, 2), conv(width, 2 * width, 2), conv(2 * width, 2 * width, 1))
        self.score, self.sides = nn.Conv2d(2 * width, 1, 1), nn.Conv2d(2 * width, 4, 1)

    def forward(self, images):
        h = self.body(images)
        return self.score(h).squeeze(1), self.sides(h).movedim(1, 3)


def assign(boxes, grid, stride):
    """For every cell the box whose centre is in it."""
    score, sides = torch.zeros(len(boxes), grid, grid), torch.zeros(len(boxes), grid, grid, 4)
    for i, b in enumerate(boxes):
        centre = (b[:, :2] + b[:, 2:]) / 2
        col, row = (centre / stride).long().clamp(0, grid - 1).unbind(1)
        score[i, row, col] = 1
        at = (torch.stack([col, row], 1) + 0.5) * stride
        sides[i, row, col] = torch.cat([at - b[:, :2], b[:, 2:] - at], 1)
    return score, sides


def detection_loss(outputs, boxes, stride=Detector.STRIDE):
    logits, sides = outputs
    score, target = assign(boxes, logits.size(1), stride)
    found = score > 0
    box_loss = F.mse_loss(sides[found], target[found])
    return {"score": F.binary_cross_entropy_with_logits(logits, score, pos_weight=torch.tensor(6.0)), "box": box_loss}
