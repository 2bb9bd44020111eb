import csv
import itertools

import torch
import torch.nn.functional as F


class Recorder:
    def __init__(self, path):
        self.path = path
        self.step = 0

    def __enter__(self):
        self.file = open(self.path, "a", newline="")
        self.writer = csv.writer(self.file)
        return self

    def __exit__(self, *exc):
        self.file.close()

    def row(self, *values):
        self.writer.writerow([self.step, *values])
        self.file.flush()


def collect_embeddings(model, batches, n):
    model.eval()
    with torch.no_grad():
        for frames in itertools.islice(batches, n):
            model.quantizer.observe(model.encode(frames))
    model.train()


def fit(model, store, steps, lr, recorder, collect=0):
    """Generator: one optimizer step per iteration, yields (step, loss)."""
    opt = torch.optim.NAdam(model.parameters(), lr=lr)
    batches = iter(store)

    def closure():
        opt.zero_grad()
        out, commit = model(frames)
        loss = F.mse_loss(out, frames) * 10 + commit
        loss.backward()
        return loss

    for i in range(steps):
        if collect and i == 5:  # after a few steps with the fresh optimizer
            collect_embeddings(model, batches, collect)
        frames = next(batches)
        loss = opt.step(closure)
        recorder.row(loss.item(), lr)
        yield recorder.step, loss.item()
        recorder.step += 1
