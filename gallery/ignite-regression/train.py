"""Ignite: a regression on house prices with an Engine, a checkpoint handler and a log.

With --bug, the prices are in thousands and not standardised, and SGD's rate is that of the
standardised ones.
"""

import argparse

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_houses():
    g = torch.Generator().manual_seed(0)
    rooms = torch.randint(1, 9, (512, 1), generator=g).float()
    area = 20 * rooms + 30 * torch.rand(512, 1, generator=g)
    age = 80 * torch.rand(512, 1, generator=g)
    price = 3 * area - 0.5 * age + 20 * torch.randn(512, 1, generator=g) + 100
    return torch.cat([rooms, area, age], 1), price


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = make_houses()
    x = (x - x.mean(0)) / x.std(0)
    if not args.bug:
        y = (y - y.mean()) / y.std()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loss_fn = nn.MSELoss()

    def update(engine, batch):
        model.train()
        optimizer.zero_grad()
        features, price = batch
        loss = loss_fn(model(features), price)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    log = open("train.log", "w")

    @trainer.on(Events.ITERATION_COMPLETED(every=4))
    def write(engine):
        log.write(f"{engine.state.iteration} {engine.state.output:.5g}\n")
        log.flush()

    saver = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver("checkpoints", create_dir=True), n_saved=2)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    trainer.run(loader, max_epochs=3)
    log.close()
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
