"""NaNDetector: checks that a training loop calls by hand, and what they have seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from stayfinite.detect.finite import all_finite, classify
from stayfinite.detect.summary import shape_of, summarize
from stayfinite.errors import ConfigError, InputError
from stayfinite.nested import (
    Named,
    is_container,
    named_gradients,
    named_states,
    named_tensors,
    named_weights,
)
from stayfinite.records import NaNReport, NaNType, Origin, to_data
from stayfinite.settings import require_whole

# Names given to check_tensor that are counted apart; a loop may make up a new one every step.
_MOST_NAMES = 10_000


class NaNDetector:
    """Checks losses, gradients, weights, optimizer state and batches for NaN and Inf.

    `check_loss`, `check_gradients` and `check_parameters` (with the buffers) switch those checks
    off and on permanently: a check that is off finds nothing. The answer always covers every
    element; `max_items_to_check` limits how many of the bad tensors in one call are described
    (have `tensor_stats`).

    With `detection_interval=n` a check looks at its 1st, (n+1)th, (2n+1)th ... call and else
    returns at once that nothing was found: a clean report, an empty list. Calls are counted
    for each model, each optimizer, and for check_loss, check_losses and check_batch, so call
    each of these once a step. check_tensor always looks.

    >>> import torch
    >>> detector = NaNDetector()
    >>> detector.check_loss(torch.tensor(float("nan"))).nan_type
    <NaNType.NAN: 'nan'>
    >>> terms = {"bbox": torch.tensor(1.0), "dfl": torch.tensor(-1.0).log()}
    >>> [report.location for report in detector.check_losses(terms)]
    ['loss.dfl']
    >>> detector.get_statistics()["hits"]
    2
    """

    def __init__(
        self,
        check_loss: bool = True,
        check_gradients: bool = True,
        check_parameters: bool = False,
        detection_interval: int = 1,
        max_items_to_check: int = 1000,
    ) -> None:
        # Not self.check_loss: that is the method.
        self._looks_at_loss = _flag("check_loss", check_loss)
        self._looks_at_gradients = _flag("check_gradients", check_gradients)
        self._looks_at_parameters = _flag("check_parameters", check_parameters)
        self._interval = require_whole("detection_interval", detection_interval, 1)
        self._described = require_whole("max_items_to_check", max_items_to_check, 0)
        self.reset_statistics()

    def check_tensor(self, tensor: Tensor, name: str = "tensor") -> NaNReport:
        """What is wrong with this tensor, if anything; `name` is the location in the report."""
        require_tensor(tensor, "check_tensor")
        known = name if name in self._names or len(self._names) < _MOST_NAMES else ""
        self._names[known] += 1
        return self._one(self._names[known] - 1, name, tensor)

    def check_loss(self, loss: Tensor) -> NaNReport:
        """What is wrong with the loss, if anything."""
        require_tensor(loss, "check_loss")
        step = self._due("loss", self._looks_at_loss)
        return clean_report("loss", loss) if step is None else self._one(step, "loss", loss)

    def check_losses(self, losses: Mapping[str, Tensor]) -> list[NaNReport]:
        """The bad terms of a loss that is a sum, such as {"bbox": ..., "dfl": ...}."""
        if not isinstance(losses, Mapping):
            raise InputError(
                f"check_losses got a {type(losses).__name__}; it accepts a mapping "
                'of names to tensors, such as {"bbox": ..., "dfl": ...}.'
            )
        for name, loss in losses.items():
            require_tensor(loss, f"check_losses[{name!r}]")
        note_terms(losses)
        step = self._due("losses", self._looks_at_loss)
        return self._many(step, ((f"loss.{name}", loss) for name, loss in losses.items()))

    def check_model(self, model: nn.Module, check_gradients: bool = True) -> list[NaNReport]:
        """The bad gradients of the model and, with check_parameters, its parameters and buffers."""
        require_model(model, "check_model")
        named: list[Named] = []
        if check_gradients and self._looks_at_gradients:
            named += named_gradients(model)
        if self._looks_at_parameters:
            named += named_weights(model)
        return self._many(self._due(model), named)

    def check_optimizer(self, optimizer: Optimizer) -> list[NaNReport]:
        """The bad tensors in the optimizer's state, and bad learning rates."""
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            kind = type(optimizer).__name__
            raise InputError(f"check_optimizer got a {kind}; it accepts a torch.optim.Optimizer.")
        return self._many(self._due(optimizer), named_states(optimizer))

    def check_batch(self, batch: Any) -> list[NaNReport]:
        """The bad tensors in a batch: a tensor, or dicts, lists, tuples, dataclasses of them."""
        if not isinstance(batch, Tensor) and not is_container(batch):
            raise InputError(
                f"check_batch got a {type(batch).__name__}; it accepts a tensor, or a dict, "
                "list, tuple or dataclass of tensors."
            )
        return self._many(self._due("batch"), named_tensors(batch, "inputs"))

    def get_statistics(self) -> dict[str, Any]:
        """What has been seen since the start or the last reset_statistics().

        - checks: calls that looked; skipped: calls that did not
        - hits: checks that found something; hit_rate: hits / checks
        - hits_by_type: bad tensors by the value of their NaNType; hits_by_location: by location
        - first_bad_step, last_bad_step: None without a hit; steps are counted from 0, by the
          calls of the same check
        - current_streak, longest_streak: bad steps in a row
        """
        return self._history.as_dict()

    def record_check(self, step: int, bad: Sequence[NaNReport] | None) -> None:
        """Count a check that a trainer has made at this step; None: it has not looked."""
        if bad is None:
            self._history.skipped += 1
        else:
            self._history.looked(step, [report for report in bad if report.has_nan])

    def reset_statistics(self) -> None:
        """Forget all that was counted, the steps included."""
        self._history = CheckHistory()
        self._names: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._objects: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    @staticmethod
    def find_nan_source(
        model: nn.Module, inputs: Any, targets: Any = None, loss_fn: Any = None
    ) -> NaNSource | None:
        """The dotted name of the layer that first makes a NaN or an Inf of these inputs.

        It is a str whose `origin` has the operation, the line and the values. The model itself
        goes by its class name; bad inputs or targets are "inputs", and what is made
        outside of any layer is "loss_fn". None if a forward and backward pass stays finite. Without
        `loss_fn` the model's own loss, or the sum of its float outputs, is back-propagated.

        >>> import torch
        >>> class Root(nn.Module):
        ...     def forward(self, x):
        ...         return x.sqrt()
        >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), Root())
        >>> _ = nn.init.constant_(model[1].bias, -9.0)
        >>> source = NaNDetector.find_nan_source(model, torch.zeros(1, 2))
        >>> source, source.origin.op
        ('2', 'aten.sqrt.default')
        """
        from stayfinite.locate.search import find_source

        origin = find_source(model, inputs, targets=targets, loss_fn=loss_fn)
        if origin is None:
            return None
        outside = "inputs" if origin.phase == "data" else "loss_fn"
        inside = origin.module or origin.root or "model"
        return NaNSource(outside if origin.module is None else inside, origin)

    def _due(self, key: Any, is_on: bool = True) -> int | None:
        """The step of this call, None if it is not to look."""
        calls: Any = self._kinds if isinstance(key, str) else self._objects
        step: int = calls.get(key, 0)
        calls[key] = step + 1
        if is_on and step % self._interval == 0:
            return step
        self._history.skipped += 1
        return None

    def _one(self, step: int, location: str, tensor: Tensor) -> NaNReport:
        report = report_on(location, tensor)
        self._history.looked(step, [report] if report.has_nan else [])
        return report

    def _many(self, step: int | None, named: Iterable[Named]) -> list[NaNReport]:
        if step is None:
            return []
        bad = bad_reports(named, described=self._described)
        self._history.looked(step, bad)
        return bad


class NaNSource(str):
    """The name of a layer, and the origin of the bad value in it."""

    origin: Origin

    def __new__(cls, name: str, origin: Origin) -> Self:
        source = super().__new__(cls, name)
        source.origin = origin
        return source

    def __getnewargs__(self) -> tuple[str, Origin]:  # type: ignore[override]
        return str(self), self.origin


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False.")
    return value


@dataclass
class CheckHistory:
    """Counts over checks; a check is one call that looked, and a hit is one that found something.

    Checks of the same step (or of one that is over) count as one step in the streaks.
    """

    checks: int = 0
    skipped: int = 0
    hits: int = 0
    by_type: Counter[str] = field(default_factory=Counter)
    by_location: Counter[str] = field(default_factory=Counter)
    first_bad_step: int | None = None
    last_bad_step: int | None = None
    longest_streak: int = 0
    _step: int = -1
    _is_bad_step: bool = False
    _streak_before: int = 0

    def looked(self, step: int, bad: Sequence[NaNReport]) -> None:
        self.checks += 1
        if step > self._step:
            self._streak_before = self.streak
            self._step, self._is_bad_step = step, False
        if not bad:
            return
        self.hits += 1
        self.by_type.update(report.nan_type.value for report in bad)
        self.by_location.update(report.location for report in bad)
        self._is_bad_step = True
        self.longest_streak = max(self.longest_streak, self.streak)
        self.last_bad_step = step
        if self.first_bad_step is None:
            self.first_bad_step = step

    @property
    def streak(self) -> int:
        """Bad steps in a row, up to now."""
        return self._streak_before + 1 if self._is_bad_step else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "checks": self.checks,
            "skipped": self.skipped,
            "hits": self.hits,
            "hit_rate": self.hits / self.checks if self.checks else 0.0,
            "hits_by_type": dict(self.by_type),
            "hits_by_location": dict(self.by_location),
            "first_bad_step": self.first_bad_step,
            "last_bad_step": self.last_bad_step,
            "current_streak": self.streak,
            "longest_streak": self.longest_streak,
        }


_ACTIONS = {
    "loss": "Do not call backward() on it; find what made it with NaNDetector.find_nan_source().",
    "gradients": "Skip this optimizer step, or the weights turn bad too; "
    "find what made it with NaNDetector.find_nan_source().",
    "parameters": "Load the last good checkpoint: training cannot repair a bad weight.",
    "buffers": "Load the last good checkpoint, or reset the running statistics of this layer.",
    "optimizer": "Load the last good checkpoint: the next step would write it into the weights.",
    "inputs": "Skip this sample, and check how the data was loaded and normalized.",
}
_OTHER = "Call stayfinite.check_tensor() on the tensors that it was computed from."


def report_on(location: str, tensor: Tensor) -> NaNReport:
    """What is wrong with this tensor, if anything; a bad one is described."""
    if all_finite([tensor]):
        return clean_report(location, tensor)
    return _bad_report(location, tensor, described=True)


def clean_report(location: str, tensor: Tensor) -> NaNReport:
    return NaNReport(
        has_nan=False, nan_type=NaNType.NONE, location=location, tensor_shape=shape_of(tensor)
    )


def bad_reports(named: Iterable[Named], *, described: int | None = None) -> list[NaNReport]:
    """Reports on the bad tensors only; at most `described` of them (None: all) with statistics."""
    named = list(named)
    if all_finite(tensor for _, tensor in named):
        return []
    bad = [(location, tensor) for location, tensor in named if not all_finite([tensor])]
    limit = len(bad) if described is None else described
    return [
        _bad_report(location, tensor, described=number < limit)
        for number, (location, tensor) in enumerate(bad)
    ]


def _bad_report(location: str, tensor: Tensor, *, described: bool) -> NaNReport:
    stats: dict[str, Any] | None = to_data(summarize(location, tensor)) if described else None
    if stats is not None:
        del stats["name"], stats["shape"]
    kind, action = classify(tensor), _ACTIONS.get(location.partition(".")[0], _OTHER)
    return NaNReport(
        has_nan=True,
        nan_type=kind,
        location=location,
        tensor_shape=shape_of(tensor),
        tensor_stats=stats,
        suggested_action=f"{location} holds {kind.word}. {action}",
    )


def require_tensor(value: Any, call: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise InputError(f"{call} got a {type(value).__name__}; it accepts a torch.Tensor.")


def require_model(value: Any, call: str) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise InputError(f"{call} got a {type(value).__name__}; it accepts a torch.nn.Module.")
    if next(value.parameters(), None) is None:
        raise InputError(
            f"{call} got a {type(value).__name__} without parameters; "
            "give it the model that is trained."
        )
    return value


_latest: dict[str, Tensor] = {}


def note_terms(terms: Mapping[str, Any]) -> None:
    """These make up the loss of the step that is under way; what is no number is left out."""
    for name, term in terms.items():
        if isinstance(term, Tensor) and term.numel() == 1:
            _latest[name] = term.detach().reshape(())


def take_terms() -> dict[str, Any] | None:
    """What was noted since the last call; None for nothing."""
    if not _latest:
        return None
    terms = dict(_latest)
    _latest.clear()
    return terms
