"""AMPConfig and NaNDetectionConfig: how AMPTrainer trains, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from stayfinite.amp.config_files import build, read_file
from stayfinite.errors import ConfigError
from stayfinite.recover.config import RecoveryConfig

Precision = Literal["fp16", "bf16", "fp32"]

# The names under which people keep these options in their own config files.
_ALIASES = {
    **{
        f"training.{name}": name
        for name in (
            "precision",
            "device",
            "loss_scale",
            "gradient_clip_val",
            "accumulate_grad_batches",
            "log_every",
            "checkpoint_dir",
            "checkpoint_every",
        )
    },
    "optimizer.lr": "learning_rate",
    "scheduler.warmup_epochs": "warmup_epochs",
    "model.clamp_activations": "clamp_activations",
}


@dataclass(frozen=True, kw_only=True)
class NaNDetectionConfig:
    """What the trainer looks at, how often, and what it does about a bad value.

    `check_loss` covers each named term too. `check_parameters` looks at all weights after each
    update, which finds what an optimizer makes bad itself. With `detection_interval=n` the steps
    0, n, 2n ... are checked; what goes bad between them is found at the next one, and undone from
    a snapshot.

    >>> NaNDetectionConfig(detection_interval=10).recovery.max_consecutive_nans
    5
    """

    check_loss: bool = True
    check_gradients: bool = True
    check_parameters: bool = True
    detection_interval: int = 1
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)

    def __post_init__(self) -> None:
        for name in ("check_loss", "check_gradients", "check_parameters"):
            _require_flag(name, getattr(self, name))
        _require_count("detection_interval", self.detection_interval, least=1)
        _require_kind("recovery", self.recovery, RecoveryConfig)


@dataclass(frozen=True, kw_only=True)
class AMPConfig:
    """How AMPTrainer trains.

    `device` None is where the model is. `loss_scale` None is what the precision needs: "dynamic"
    with fp16, else none; a number is a scale that stays. `gradient_clip_val` is the largest norm
    of all gradients. `log_every` 0 never logs. With a `checkpoint_dir` a checkpoint is written
    after each epoch, and every `checkpoint_every` updates if that is given.

    `learning_rate` is set on those groups of the optimizer that have none of their own.
    `warmup_epochs` is a linear warm-up in a trainer that was given no scheduler.
    `clamp_activations` limits what each module of the model gives out to [-x, x].

    >>> AMPConfig(precision="bf16").accumulate_grad_batches
    1
    >>> AMPConfig.from_dict({"training.precision": "fp16", "optimizer": {"lr": 0.1}}).learning_rate
    0.1
    """

    precision: Precision = "fp16"
    device: str | torch.device | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    gradient_clip_val: float | None = None
    accumulate_grad_batches: int = 1
    log_every: int = 50
    checkpoint_dir: str | Path | None = None
    checkpoint_every: int | None = None
    nan_detection: NaNDetectionConfig = field(default_factory=NaNDetectionConfig)
    learning_rate: float | None = None
    warmup_epochs: float = 0
    clamp_activations: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(map(repr, get_args(Precision)))
            raise ConfigError(f"precision is {self.precision!r}; it must be one of {known}.")
        _require_device(self.device)
        if self.loss_scale != "dynamic":
            _require_positive("loss_scale", self.loss_scale, other='"dynamic"')
        for name in ("gradient_clip_val", "learning_rate", "clamp_activations"):
            _require_positive(name, getattr(self, name))
        _require_count("accumulate_grad_batches", self.accumulate_grad_batches, least=1)
        _require_count("log_every", self.log_every, least=0)
        _require_kind("nan_detection", self.nan_detection, NaNDetectionConfig)
        if not _is_number(self.warmup_epochs) or self.warmup_epochs < 0:
            raise ConfigError(f"warmup_epochs is {self.warmup_epochs!r}; it must be 0 or more.")
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        if not isinstance(self.checkpoint_dir, (str, Path, type(None))):
            raise ConfigError(f"checkpoint_dir is {self.checkpoint_dir!r}; it must be a path.")
        if self.checkpoint_every is not None:
            _require_count("checkpoint_every", self.checkpoint_every, least=1)
            if self.checkpoint_dir is None:
                raise ConfigError(
                    f"checkpoint_every is {self.checkpoint_every}, but there is no "
                    "checkpoint_dir to write to; give one."
                )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AMPConfig:
        """A config from names and values: plain, nested or dotted.

        An unknown name is a ConfigError that lists the known ones.
        """
        return build(cls, data, aliases=_ALIASES)

    @classmethod
    def from_file(cls, path: str | Path) -> AMPConfig:
        """A config from a .toml file, or a .yaml one where PyYAML is installed."""
        data = read_file(path)
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def dtype(self) -> torch.dtype:
        """What autocast computes in."""
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        return kinds[self.precision]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require_positive(name: str, value: Any, *, other: str = "") -> None:
    if value is not None and not (_is_number(value) and value > 0):
        other = f", {other}" if other else ""
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0{other} or None.")


def _require_count(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least {least}.")


def _require_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False.")


def _require_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is a {type(value).__name__}; it must be a {kind.__name__}. "
            "AMPConfig.from_dict makes one from names and values."
        )


def _require_device(device: Any) -> None:
    try:
        if device is not None:
            torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f'device is {device!r}; it must be a torch device such as "cpu" or "cuda:0", or None '
            "for where the model is."
        ) from error
