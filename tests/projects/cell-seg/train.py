import argparse
import os

import torch
from torch.utils.data import DataLoader, random_split
from torch.utils.tensorboard import SummaryWriter

from seg.images import Cells, prepare
from seg.losses import SegLoss
from seg.net import SmallUNet

CLASSES = 3


def evaluate(model, loader):
    model.eval()
    hits = total = 0
    with torch.no_grad():
        for img, mask in loader:
            hits += (model(img).argmax(1) == mask).sum().item()
            total += mask.numel()
    model.train()
    return hits / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workdir", default="runs/cells")
    ap.add_argument("--images", type=int, default=200)
    ap.add_argument("--size", type=int, default=32)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--entropy", type=float, default=0.02)
    ap.add_argument("--workers", type=int, default=0)
    ap.add_argument("--seed", type=int, default=9)
    args = ap.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    index = prepare(os.path.join(args.workdir, "images"), args.images, args.size, args.seed)
    train_set, val_set = random_split(Cells(index), [0.85, 0.15])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.workers, drop_last=True)
    val_loader = DataLoader(val_set, args.batch_size)

    model = SmallUNet(CLASSES)
    criterion = SegLoss(CLASSES, args.entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    writer = SummaryWriter(os.path.join(args.workdir, "tb"))

    step = 0
    for epoch in range(args.epochs):
        for img, mask in train_loader:
            probs = model(img)
            loss = criterion(probs, mask)
            optimizer.zero_grad()
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if step % 4 == 0:
                writer.add_scalar("loss", loss.item(), step)
                writer.add_scalar("grad_norm", grad_norm.item(), step)
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            step += 1
        accuracy = evaluate(model, val_loader)
        writer.add_scalar("val/accuracy", accuracy, step)
        print(f"epoch {epoch} accuracy {accuracy:.3f}", flush=True)
        torch.save({"model": model.state_dict(), "epoch": epoch, "accuracy": accuracy}, os.path.join(args.workdir, f"epoch{epoch}.pt"))
    writer.close()


if __name__ == "__main__":
    main()
