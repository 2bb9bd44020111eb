"""skorch: a regressor with the RMSLE of a competition as its criterion, History and Checkpoint.

With --bug, the criterion takes log1p of the prediction as it stands; it falls below -1.
"""

import argparse

import numpy as np
import torch
from skorch import NeuralNetRegressor
from skorch.callbacks import Checkpoint, EpochScoring
from torch import nn


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


class RMSLE(nn.Module):
    def __init__(self, floor=0.0):
        super().__init__()
        self.floor = floor

    def forward(self, pred, target):
        if self.floor is not None:
            pred = pred.clamp(min=self.floor)
        error = torch.log1p(pred) - torch.log1p(target)
        return torch.sqrt((error**2).mean() + 1e-8)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(480, 6)).astype(np.float32)
    y = np.maximum(0, 3 + x[:, :1] * 2 + x[:, 1:2]).astype(np.float32)
    # A season with other prices.
    x[300:330, :2] -= 8
    y[300:330] = 0
    net = NeuralNetRegressor(
        Net,
        criterion=RMSLE,
        criterion__floor=None if args.bug else 0.0,
        optimizer=torch.optim.Adam,
        lr=2e-2,
        max_epochs=3,
        batch_size=16,
        train_split=None,
        iterator_train__shuffle=False,
        callbacks=[
            EpochScoring("neg_mean_absolute_error", on_train=True, name="mae"),
            Checkpoint(dirname="checkpoints", monitor=None),
        ],
    )
    net.fit(x, y)
    net.history.to_file("history.json")
    torch.save(net.module_.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
