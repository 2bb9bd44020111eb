"""A label that cannot be, in a run of Lightning, without and with our callback.

python examples/lightning_example.py

Its logarithm is NaN. Without us all weights are NaN one step later, and training goes on like that.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stayfinite.integrations.lightning import StayFinite


class Prices(LightningModule):
    """Learns the logarithm of a price."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, price = batch
        predicted = self.head(self.body(x)).squeeze(1)
        loss = nn.functional.mse_loss(predicted, torch.log(price))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def houses() -> TensorDataset:
    """One of them was sold for less than nothing."""
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    price = x[:, :2].sum(1).exp()
    price[300] = -1.0
    return TensorDataset(x, price)


def train(*callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Prices(), DataLoader(houses(), batch_size=16))
    return trainer


def told(trainer: Trainer) -> str:
    parameters = trainer.lightning_module.parameters()
    state = "finite" if all(p.isfinite().all() for p in parameters) else "all NaN"
    loss = float(trainer.callback_metrics["loss"])
    return f"loss {loss:.2f} after {trainer.global_step} steps; the model is {state}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    without = told(train())
    callback = StayFinite()
    watched = told(train(callback))
    print(f"without: {without}")
    print(f"with:    {watched}")
    (incident,) = callback.incidents
    assert incident.origin is not None
    assert incident.diagnosis is not None
    print(f"step {incident.step}: {incident.diagnosis.cause} in `{incident.origin.code.strip()}`")


if __name__ == "__main__":
    main()
