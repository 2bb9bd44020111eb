"""Small training jobs in many combinations, whose whole state can be compared by its bytes."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

SIZE, CLASSES, BATCH = 6, 3, 4


class Dropping(nn.Module):
    """Dropout, and an attribute that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SIZE, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)


class Normalising(nn.Module):
    """BatchNorm, and a buffer that is not saved."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
        )
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        return self.layers(x)


class Embedding(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=sparse)
        self.out = None if sparse else nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x.abs() * 3).nan_to_num(0.0).long() % 10).mean(dim=1)
        # The batch itself takes part, so that a bad one is felt.
        mixed = rows * (1 + x.mean(dim=1, keepdim=True))
        return mixed[:, :CLASSES] if self.out is None else self.out(mixed)


class Matrices(nn.Module):
    """Only matrices: Muon takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SIZE, 8, bias=False), nn.Dropout(0.2), nn.Linear(8, CLASSES, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS = {
    "dropout": Dropping,
    "batchnorm": Normalising,
    "embedding": Embedding,
    "sparse": lambda: Embedding(sparse=True),
    "matrices": Matrices,
}
SCHEDULERS = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.7),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "onecycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=40, cycle_momentum=has_momentum(optimizer)
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


RATES = {"LBFGS": 0.1, "SGD": 0.05, "Adadelta": 0.5, "Muon": 0.01}


@dataclass(frozen=True, kw_only=True)
class Combination:
    model: str = "dropout"
    optimizer: str = "Adam"
    scheduler: str = "none"
    precision: str = "fp32"
    accumulate: int = 1
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    ema: bool = False

    def __str__(self) -> str:
        ema = "-ema" if self.ema else ""
        options = "".join(f"-{key}" for key in self.options)
        return (
            f"{self.model}-{self.optimizer}{options}-{self.scheduler}-{self.precision}"
            f"-accumulate{self.accumulate}-workers{self.workers}{ema}"
        )


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """`bad` is the number of the batch in which one value is NaN."""

    def __init__(self, count: int, *, bad: int | None = None) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count * BATCH, SIZE, generator=generator)
        self.y = torch.randint(CLASSES, (count * BATCH,), generator=generator)
        if bad is not None:
            self.x[bad * BATCH + 1, 2] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Training:
    """One job: `step((number, x, y))` does what a loop does for one batch."""

    def __init__(self, combination: Combination) -> None:
        seed_everything(3)
        self.combination = combination
        self.model = MODELS[combination.model]()
        kind = getattr(torch.optim, combination.optimizer)
        rate = RATES.get(combination.optimizer, 0.01)
        self.optimizer = kind(self.model.parameters(), lr=rate, **combination.options)
        self.scheduler = SCHEDULERS[combination.scheduler](self.optimizer)
        is_half = combination.precision == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        self.scaler._enabled = is_half
        self.ema = AveragedModel(self.model, use_buffers=True) if combination.ema else None

    def batches(self, count: int, *, bad: int | None = None) -> Iterator[tuple[int, Any, Any]]:
        loader = DataLoader(
            Samples(count, bad=bad), batch_size=BATCH, num_workers=self.combination.workers
        )
        for number, (x, y) in enumerate(loader):
            yield number, x, y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        precision = self.combination.precision
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        context: Any = contextlib.nullcontext()
        if dtype is not None:
            context = torch.autocast("cpu", dtype=dtype)
        with context:
            out = self.model(x)
        return nn.functional.cross_entropy(out.float(), y) / self.combination.accumulate

    def step(self, batch: tuple[int, Tensor, Tensor]) -> float:
        number, x, y = batch
        if self.combination.optimizer == "LBFGS":
            return self._closure_step(x, y)
        loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        if (number + 1) % self.combination.accumulate == 0:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self._follow()
        return loss.item()

    def _closure_step(self, x: Tensor, y: Tensor) -> float:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        self._follow()
        return loss.item()

    def _follow(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        """Everything that training has, by the bytes."""
        parts = {
            "model": self.model.state_dict(),
            "buffers": dict(self.model.named_buffers()),
            "attributes": {
                name: {k: v for k, v in vars(m).items() if isinstance(v, (int, bool))}
                for name, m in self.model.named_modules()
            },
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        return {name: in_bytes(part) for name, part in parts.items()}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def in_bytes(value: Any) -> Any:
    """Tensors and arrays as their bytes, within whatever holds them."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        return dense.dtype, tuple(dense.shape), dense.contiguous().view(-1).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: in_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_bytes(item) for item in value]
    return copy.copy(value)
