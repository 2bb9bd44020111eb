"""AMPConfig and NaNDetectionConfig: how AMPTrainer trains, checked when they are made."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch

from stayfinite.errors import ConfigError
from stayfinite.nested import map_leaves
from stayfinite.recover.config import RecoveryConfig
from stayfinite.settings import is_number

Precision = Literal["fp16", "bf16", "fp32"]

_IN_TRAINING = (
    "precision",
    "device",
    "loss_scale",
    "gradient_clip_val",
    "accumulate_grad_batches",
    "log_every",
    "checkpoint_dir",
    "checkpoint_every",
)
# The names under which people keep these options in their own config files.
_ALIASES = {
    **{f"training.{name}": name for name in _IN_TRAINING},
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
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False.")
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
        try:
            if self.device is not None:
                torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f'device is {self.device!r}; it must be a torch device such as "cpu" or "cuda:0", '
                "or None for where the model is."
            ) from error
        if self.loss_scale != "dynamic":
            _require_positive("loss_scale", self.loss_scale, other='"dynamic"')
        for name in ("gradient_clip_val", "learning_rate", "clamp_activations"):
            _require_positive(name, getattr(self, name))
        _require_count("accumulate_grad_batches", self.accumulate_grad_batches, least=1)
        _require_count("log_every", self.log_every, least=0)
        _require_kind("nan_detection", self.nan_detection, NaNDetectionConfig)
        if not is_number(self.warmup_epochs) or self.warmup_epochs < 0:
            raise ConfigError(f"warmup_epochs is {self.warmup_epochs!r}; it must be 0 or more.")
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
        data = read_file(Path(path))
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def dtype(self) -> torch.dtype:
        """What autocast computes in."""
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        return kinds[self.precision]


def _require_positive(name: str, value: Any, *, other: str = "") -> None:
    if value is not None and not (is_number(value) and value > 0):
        other = f", {other}" if other else ""
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0{other} or None.")


def _require_count(name: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least {least}.")


def _require_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} is a {type(value).__name__}; it must be a {kind.__name__}. "
            "AMPConfig.from_dict makes one from names and values."
        )


Config = TypeVar("Config")
# PyYAML follows YAML 1.1, in which 1e-3 without a dot is a string.
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?e[+-]?\d+", re.IGNORECASE)


def read_file(path: Path) -> Mapping[str, Any]:
    """What the file holds; ConfigError when it cannot be read or is not a table of options."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(sorted(_READERS))
        raise ConfigError(f"{path} ends in {path.suffix!r}; a config file ends in one of {known}.")
    try:
        data = reader(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} holds a {type(data).__name__}; it must hold named options.")
    return data


def _toml(path: Path) -> Any:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _yaml(path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{path} is YAML, for which PyYAML is needed: pip install pyyaml. "
            "The same options can be written in a .toml file, which needs nothing."
        ) from error
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return map_leaves(data, lambda t: float(t) if _NUMBER.fullmatch(t) else t, kinds=(str,))


_READERS = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml}


def build(
    kind: type[Config], data: Mapping[str, Any], *, aliases: Mapping[str, str] | None = None
) -> Config:
    """A config of this kind from plain, nested or dotted names, or a mixture of them.

    `aliases` are other names of fields. A name that is not known, or a field that is given
    under two names, is a ConfigError.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"a config was made from a {type(data).__name__}; it takes a mapping.")
    aliases = aliases or {}
    known = [*_names_of(kind), *aliases]
    given = list(_flat(data, known))
    unknown = [f"{name!r}{_nearest(name, known)}" for name, _ in given if name not in known]
    if unknown:
        is_are = "is not an option" if len(unknown) == 1 else "are not options"
        raise ConfigError(f"{', '.join(unknown)} {is_are}. Known are: {', '.join(known)}.")
    values: dict[str, Any] = {}
    for name, value in given:
        field = aliases.get(name, name)
        if field in values:
            others = [field, *(other for other in aliases if aliases[other] == field)]
            raise ConfigError(f"{field} is given twice; give one of {', '.join(others)}.")
        values[field] = value
    return _config_of(kind, values)


def _inner_kind(field: dataclasses.Field[Any]) -> Any:
    """The kind of config in this field, known by its default; None if it is no config."""
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return type(default) if dataclasses.is_dataclass(default) else None


def _names_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields, each config's own name before those of its fields."""
    for each in dataclasses.fields(kind):
        yield prefix + each.name
        if (inner := _inner_kind(each)) is not None:
            yield from _names_of(inner, f"{prefix}{each.name}.")


def _flat(data: Mapping[Any, Any], known: list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in known):
            yield from _flat(value, known, f"{name}.")
        else:
            yield name, value


def _nearest(name: str, known: list[str]) -> str:
    """The known name that was probably meant; one of the same section comes first."""
    section, _, last = name.rpartition(".")
    close = difflib.get_close_matches(last, {other.rpartition(".")[2] for other in known}, n=1)
    meant = [other for other in known if other.rpartition(".")[2] in close]
    meant.sort(key=lambda other: other.rpartition(".")[0] != section)
    return f" (did you mean {meant[0]!r}?)" if meant else ""


def _config_of(kind: type[Config], values: Mapping[str, Any], prefix: str = "") -> Config:
    given: dict[str, Any] = {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        path = prefix + each.name
        if path in values:
            given[each.name] = values[path]
        if any(other.startswith(f"{path}.") for other in values):
            if path in values:
                raise ConfigError(f"{path} is given whole and in parts; give one of them.")
            given[each.name] = _config_of(_inner_kind(each), values, f"{path}.")
    return kind(**given)
