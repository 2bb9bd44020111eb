import torch
import torch.nn.functional as F


def assign(points, boxes, labels):
    """Each location takes the smallest box that contains it."""
    x, y = points[:, 0, None], points[:, 1, None]
    b = boxes[:, None]
    sides = torch.stack([x - b[..., 0], y - b[..., 1], b[..., 2] - x, b[..., 3] - y], -1)
    inside = (sides.min(-1).values > 0) & (labels[:, None] >= 0)
    area = ((b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])).expand(inside.shape)
    area = area.masked_fill(~inside, float("inf"))
    best, which = area.min(-1)
    ltrb = sides.gather(2, which[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
    cls = labels.gather(1, which)
    cls[best == float("inf")] = -1
    return cls, ltrb


def centerness(ltrb):
    lr, tb = ltrb[:, [0, 2]], ltrb[:, [1, 3]]
    return torch.sqrt(lr.min(1).values / lr.max(1).values * tb.min(1).values / tb.max(1).values)


def iou_loss(pred, target, weight):
    """-log IoU of boxes given as distances to the four sides, weighted by centerness."""
    area_p = (pred[:, 0] + pred[:, 2]) * (pred[:, 1] + pred[:, 3])
    area_t = (target[:, 0] + target[:, 2]) * (target[:, 1] + target[:, 3])
    least = torch.min(pred, target)
    inter = (least[:, 0] + least[:, 2]).clamp(min=0) * (least[:, 1] + least[:, 3]).clamp(min=0)
    iou = (inter + 1.0) / (area_p + area_t - inter + 1.0)
    return (-torch.log(iou) * weight).sum() / weight.sum()


def focal_loss(logits, onehot, alpha=0.25, gamma=2.0):
    ce = F.binary_cross_entropy_with_logits(logits, onehot, reduction="none")
    p = torch.sigmoid(logits)
    pt = torch.where(onehot > 0, p, 1 - p)
    a = torch.where(onehot > 0, alpha, 1 - alpha)
    return (a * (1 - pt) ** gamma * ce).sum()


def fcos_losses(outputs, boxes, labels):
    cls_logits, ctr_logits, ltrb, points = outputs
    cls_t, ltrb_t = assign(points, boxes, labels)
    pos = cls_t >= 0
    onehot = F.one_hot(cls_t.clamp(min=0), cls_logits.shape[-1]).float() * pos[..., None]
    n_pos = pos.sum().clamp(min=1)
    ctr_t = centerness(ltrb_t[pos])
    return {
        "cls": focal_loss(cls_logits, onehot) / n_pos,
        "ctr": F.binary_cross_entropy_with_logits(ctr_logits[pos], ctr_t),
        "box": iou_loss(ltrb[pos], ltrb_t[pos], ctr_t),
    }
