"""An anchor-free detector with CIoU and distribution focal loss, on synthetic rectangles.

With --bug, boxes that the random crop cut away are not dropped: their row is set to 0.
"""

import argparse
import csv
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from loss import bbox_ciou, dfl

SIZE, STRIDE, BINS, CLASSES = 32, 4, 8, 2


class Rectangles(torch.utils.data.Dataset):
    def __init__(self, n, keep_empty):
        self.n, self.keep_empty = n, keep_empty

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        image = torch.zeros(3, SIZE + 8, SIZE + 8)
        boxes, labels = [], []
        for _ in range(2):
            w, h = torch.randint(6, 14, (2,), generator=g).tolist()
            x = int(torch.randint(0, SIZE + 8 - w, (1,), generator=g))
            y = int(torch.randint(0, SIZE + 8 - h, (1,), generator=g))
            label = int(torch.randint(0, CLASSES, (1,), generator=g))
            image[label, y : y + h, x : x + w] = 1
            boxes.append([x, y, x + w, y + h])
            labels.append(label)
        dx, dy = torch.randint(0, 9, (2,), generator=g).tolist()
        image = image[:, dy : dy + SIZE, dx : dx + SIZE]
        boxes = torch.tensor(boxes, dtype=torch.float) - torch.tensor([dx, dy, dx, dy])
        boxes = boxes.clamp(0, SIZE)
        labels = torch.tensor(labels)
        visible = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1)
        if self.keep_empty:
            boxes[~visible] = 0
        else:
            boxes, labels = boxes[visible], labels[visible]
        return image + 0.05 * torch.randn(image.shape, generator=g), boxes, labels


def collate(samples):
    images, boxes, labels = zip(*samples)
    index = torch.cat([torch.full((len(b),), i) for i, b in enumerate(boxes)])
    return torch.stack(images), index, torch.cat(boxes), torch.cat(labels)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU(),
            nn.Conv2d(32, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.SiLU(),
        )
        self.cls, self.reg = nn.Conv2d(32, CLASSES, 1), nn.Conv2d(32, 4 * BINS, 1)
        self.register_buffer("project", torch.arange(BINS, dtype=torch.float), persistent=False)

    def forward(self, images):
        x = self.backbone(images)
        return self.cls(x), self.reg(x)

    def decode(self, dist, points):
        """Boxes in pixels from distributions (n, 4, bins) at these cells."""
        ltrb = dist.softmax(-1) @ self.project
        return torch.cat([points - ltrb[:, :2], points + ltrb[:, 2:]], 1) * STRIDE


def compute_loss(model, batch):
    images, index, boxes, labels = batch
    cls, reg = model(images)
    centre = ((boxes[:, :2] + boxes[:, 2:]) / 2 / STRIDE).long().clamp(0, SIZE // STRIDE - 1)
    target = torch.zeros_like(cls)
    target[index, labels, centre[:, 1], centre[:, 0]] = 1
    loss_cls = F.binary_cross_entropy_with_logits(cls, target, reduction="sum") / len(boxes)
    dist = reg[index, :, centre[:, 1], centre[:, 0]].view(-1, 4, BINS)
    points = centre + 0.5
    ciou = bbox_ciou(model.decode(dist, points), boxes)
    wanted = torch.cat([points - boxes[:, :2] / STRIDE, boxes[:, 2:] / STRIDE - points], 1)
    return 0.5 * loss_cls + 7.5 * (1.0 - ciou).mean() + 1.5 * dfl(dist, wanted).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--project", default="runs/detect")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.makedirs(os.path.join(args.project, "weights"), exist_ok=True)

    data = Rectangles(240, keep_empty=args.bug)
    loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=collate)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.epochs)
    with open(os.path.join(args.project, "results.csv"), "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["epoch", "step", "loss"])
        for epoch in range(args.epochs):
            for step, batch in enumerate(loader):
                loss = compute_loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                optimizer.step()
                rows.writerow([epoch, step, f"{loss.item():.4f}"])
            scheduler.step()
            print(f"{epoch + 1}/{args.epochs} loss {loss.item():.4f}")
            torch.save(model.state_dict(), os.path.join(args.project, "weights", "last.pt"))
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
