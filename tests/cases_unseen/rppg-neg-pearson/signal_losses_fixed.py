import torch
import torch.nn as nn
import torch.nn.functional as F


class NegPearson(nn.Module):
    """1 - Pearson correlation of predicted and true pulse, one clip per row."""

    def forward(self, preds, labels):
        n = preds.shape[1]
        sum_x, sum_y = preds.sum(dim=1), labels.sum(dim=1)
        sum_xy = (preds * labels).sum(dim=1)
        sum_x2, sum_y2 = preds.pow(2).sum(dim=1), labels.pow(2).sum(dim=1)
        pearson = (n * sum_xy - sum_x * sum_y) / (
            torch.sqrt(
                (n * sum_x2 - sum_x.pow(2)).clamp(min=1e-4)
                * (n * sum_y2 - sum_y.pow(2)).clamp(min=1e-4)
            )
        )
        return (1 - pearson).mean()


class Smoothness(nn.Module):
    def forward(self, preds):
        return F.mse_loss(preds[:, 1:], preds[:, :-1])
