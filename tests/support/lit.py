"""Small trainings with Lightning, and their bytes to compare."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stayfinite import RecoveryConfig
from stayfinite.integrations.lightning import StayFinite

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SKIP = RecoveryConfig(primary_strategy="skip", snapshot_every=4)
BAD = 5


class Layers(nn.Module):
    """BatchNorm and dropout, so that buffers and random state count; a log that can go bad."""

    def __init__(self, noise: float = 0.3) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.noise = nn.Dropout(noise)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.noise(self.norm(self.inner(x)))
        return torch.log(self.head(hidden).square().mean(1) + x[:, 0])  # the line that goes bad


class Net(LightningModule):
    """Automatic optimization; `schedule` is the interval of its scheduler."""

    def __init__(self, *, schedule: str | None = "step", noise: float = 0.3) -> None:
        super().__init__()
        self.layers = Layers(noise)
        self.schedule = schedule
        self.calls = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = self.layers(batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        config = {"scheduler": scheduler, "interval": self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": config}


def batches(count: int = 8, *, bad: Sequence[int] = ()) -> list[Tensor]:
    """So many batches; in the bad ones a logarithm gets a negative number."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(6, 4, generator=generator) + 1 for _ in range(count)]
    for number in bad:
        made[number][2] = -100.0
    return made


def without(made: list[Tensor], *left_out: int) -> list[Tensor]:
    return [batch for number, batch in enumerate(made) if number not in left_out]


def fit(
    module: LightningModule,
    made: Any,
    callback: StayFinite | None = None,
    *,
    callbacks: Sequence[Any] = (),
    precision: str = "32-true",
    logger: Any = False,
    ckpt_path: Any = None,
    **options: Any,
) -> Trainer:
    """Train with the seed 0, in one epoch unless told otherwise."""
    options = {"max_epochs": 1, "enable_checkpointing": False} | options
    ours = [] if callback is None else [callback]
    # On a CPU Lightning takes bf16 for "16-mixed", unless it is given the plugin.
    plugins = [MixedPrecision("16-mixed", "cpu")] if precision == "fp16" else []
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers, and of options that tests do without
        trainer = Trainer(
            accelerator="cpu",
            devices=options.pop("devices", 1),
            logger=logger,
            callbacks=[*ours, *callbacks],
            plugins=plugins,
            precision=None if plugins else precision,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        loader = DataLoader(made, batch_size=None) if isinstance(made, list) else made
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def made_net(kind: Callable[..., Any] = Net, **options: Any) -> Any:
    """A module whose weights are the same every time."""
    torch.manual_seed(7)
    return kind(**options)


def callback(config: RecoveryConfig | None = SKIP, **options: Any) -> StayFinite:
    return StayFinite(config, **{"sinks": [], **options})


def state(trainer: Trainer) -> dict[str, Any]:
    """All that training has changed, by the bytes."""
    tensors = dict(trainer.lightning_module.state_dict())
    for number, optimizer in enumerate(trainer.optimizers):
        for place, entry in enumerate(optimizer.state.values()):
            tensors |= {f"{number}.{place}.{k}": v for k, v in entry.items() if torch.is_tensor(v)}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        **{name: raw(tensor) for name, tensor in tensors.items()},
        "random": raw(torch.get_rng_state()),
        "rates": [g["lr"] for o in trainer.optimizers for g in o.param_groups],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "scaler": None if scaler is None else scaler.state_dict(),
        "global_step": trainer.global_step,
        "metrics": {key: value.item() for key, value in trainer.callback_metrics.items()},
    }


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def is_finite(module: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in module.state_dict().values())


NAN = math.nan
