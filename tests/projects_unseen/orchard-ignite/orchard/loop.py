"""The ignite engine, its checkpoints, its log."""
import json
import os

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler

from .losses import yield_loss


def build(model, optimizer, scheduler, config):
    def update(engine, batch):
        model.train()
        x, y, counted = batch
        loss = yield_loss(model(x), y, counted)
        (loss / 2).backward()
        if engine.state.iteration % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return loss.item()

    trainer = Engine(update)
    ema = EMAHandler(model, momentum=1 - config["ema"])
    ema.attach(trainer, name="ema_momentum", event=Events.ITERATION_COMPLETED)
    saver = DiskSaver(os.path.join(config["out"], "checkpoints"), create_dir=True, require_empty=False)
    keep = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trainer": trainer}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(keep, saver, n_saved=2))
    losses = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def report(engine):
        losses.append(engine.state.output)
        print(f"step {engine.state.iteration - 1} loss {engine.state.output:.4f}", flush=True)

    @trainer.on(Events.EPOCH_COMPLETED)
    def write(engine):
        with open(os.path.join(config["out"], "losses.json"), "w") as f:
            json.dump(losses, f)

    return trainer
