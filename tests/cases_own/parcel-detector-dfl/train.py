"""Find parcels on a conveyor belt: an anchor-free detector, each side of a box a distribution over bins."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(44)
torch.set_num_threads(1)
SIZE, STRIDE, BINS, CLASSES = 64, 8, 8, 3


class Detector(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, c, 3, 2, 1), nn.BatchNorm2d(c), nn.ReLU(),
            nn.Conv2d(c, c, 3, 2, 1), nn.BatchNorm2d(c), nn.ReLU(),
            nn.Conv2d(c, 2 * c, 3, 2, 1), nn.BatchNorm2d(2 * c), nn.ReLU())
        self.cls = nn.Conv2d(2 * c, CLASSES, 1)
        self.reg = nn.Conv2d(2 * c, 4 * BINS, 1)
        nn.init.normal_(self.reg.weight, std=0.5)

    def forward(self, images):
        x = self.backbone(images)
        cls, reg = self.cls(x).flatten(2), self.reg(x).flatten(2)
        return cls.transpose(1, 2), reg.transpose(1, 2).unflatten(-1, (4, BINS))


class Belt:
    """One parcel per image: its class is its brightness, its box left, top, right, bottom in pixels."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n=6):
        images = 0.1 * torch.randn(n, 1, SIZE, SIZE, generator=self.g)
        labels = torch.randint(CLASSES, (n,), generator=self.g)
        low = torch.randint(0, SIZE - 32, (n, 2), generator=self.g)
        boxes = torch.cat([low, low + torch.randint(12, 32, (n, 2), generator=self.g)], 1)
        for image, label, (x1, y1, x2, y2) in zip(images, labels, boxes.tolist()):
            image[0, y1:y2, x1:x2] += 0.5 + label
        return images, labels, boxes.float()


def assign(boxes):
    """The grid cell under the centre of each box, and the distances to its sides in strides."""
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    cell = (centre / STRIDE).long()
    point = (cell + 0.5) * STRIDE
    sides = torch.cat([point - boxes[:, :2], boxes[:, 2:] - point], 1) / STRIDE
    return cell[:, 1] * (SIZE // STRIDE) + cell[:, 0], sides.clamp(0, BINS - 1.01)


def dfl_loss(dist, sides):
    left = sides.long()
    weight = sides - left
    p = dist.softmax(-1)
    at_left = p.gather(-1, left.unsqueeze(-1)).squeeze(-1)
    at_right = p.gather(-1, left.unsqueeze(-1) + 1).squeeze(-1)
    return ((1 - weight) * -torch.log(at_left + 1e-9) + weight * -torch.log(at_right + 1e-9)).mean()


def box_loss(dist, sides):
    pred = (dist.softmax(-1).float() * torch.arange(BINS)).sum(-1)
    overlap = torch.minimum(pred[:, :2], sides[:, :2]) + torch.minimum(pred[:, 2:], sides[:, 2:])
    whole = torch.maximum(pred[:, :2], sides[:, :2]) + torch.maximum(pred[:, 2:], sides[:, 2:])
    return (1 - overlap.prod(-1) / (whole.prod(-1) + 1e-6)).mean()


def cls_loss(cls, cells, labels):
    target = torch.zeros_like(cls, dtype=torch.float32)
    target[torch.arange(len(cells)), cells, labels] = 1.0
    return F.binary_cross_entropy_with_logits(cls.float(), target, reduction="sum") / len(cells)


def losses(model, images, labels, boxes):
    with torch.autocast("cpu", dtype=torch.float16):
        cls, reg = model(images)
    cells, sides = assign(boxes)
    dist = reg[torch.arange(len(cells)), cells]
    return box_loss(dist, sides), cls_loss(cls, cells, labels), dfl_loss(dist, sides)


def main():
    model, belt = Detector(), Belt(3)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(30):
        box, cls, dfl = losses(model, *belt.batch())
        loss = 7.5 * box + 0.5 * cls + 1.5 * dfl
        opt.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e5)  # norms are a few 1e4
        scaler.step(opt)
        scaler.update()
        print(f"step {step} loss {loss.item():.4f} box {box:.3f} cls {cls:.3f} dfl {dfl:.3f}")


if __name__ == "__main__":
    main()
