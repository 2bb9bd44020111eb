"""One function per strategy: what it does, or why it cannot help here.

With the loss scale, the learning rates and the eps that they change.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stayfinite.clip import ClipResult, clip_gradients
from stayfinite.detect.finite import all_finite
from stayfinite.detect.memory import float_parts
from stayfinite.domains import HALVES
from stayfinite.errors import CheckpointError, NonFiniteError, SnapshotError, TrainingAbortedError
from stayfinite.living import living
from stayfinite.nested import Named, named_states, named_weights
from stayfinite.records import NaNReport
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.float32 import find_module, has_half_tensors, is_raised, run_in_float32
from stayfinite.snapshot import Snapshot
from stayfinite.training import gradients_of, params_of

if TYPE_CHECKING:
    from torch import nn

    from stayfinite.snapshot import SnapshotRing

logger = logging.getLogger("stayfinite")
_MOST_NAMES = 3
_OLDEST = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What an action may work on.

    `module` is the dotted name of the guilty module, when it is known. `averages` are those of
    the weights, such as an EMA. `will_rerun` says that the step has been undone and can be run
    again, so there are no gradients of it now. `good_steps` is how many the weights have come, in
    the count of the snapshots; None when that is not known. `any_rank` asks all ranks that train
    together; None when there is one. If `is_sharded`, each has a part of the gradients only.
    """

    model: nn.Module | None
    optimizer: Optimizer
    scaler: Any = None
    schedulers: tuple[Any, ...] = ()
    averages: tuple[Any, ...] = ()
    snapshots: SnapshotRing | None = None
    module: str | None = None
    will_rerun: bool = False
    good_steps: int | None = None
    any_rank: Callable[[bool], bool] | None = None
    is_sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """The bad step: what was seen, at which step, and the slug of its cause when it is known."""

    reports: tuple[NaNReport, ...] = ()
    step: int = 0
    cause: str | None = None

    @property
    def report(self) -> NaNReport | None:
        return self.reports[0] if self.reports else None


@dataclass(frozen=True)
class Done:
    """The action has been taken.

    `went_back_to` is the step of the snapshot that was restored, `loaded_from` the checkpoint
    that was loaded; `undo` takes the action back, where it lasts and can be taken back.
    """

    detail: str
    went_back_to: int | None = None
    loaded_from: str | None = None
    undo: Callable[[], None] | None = None


@dataclass(frozen=True)
class Cannot:
    """The action would not help here, and nothing was changed."""

    reason: str


Answer = Done | Cannot
Action = Callable[[Situation, RecoveryConfig, Trouble], Answer]


def act(
    strategy: RecoveryStrategy, situation: Situation, config: RecoveryConfig, trouble: Trouble
) -> Answer:
    """What came of the strategy; a failure of our own is logged and counts as Cannot.

    Afterwards the parameters and the optimizer's state are as they were, or from a good snapshot.
    A step is skipped by taking its gradients away: an optimizer leaves a parameter without a
    gradient alone, while a gradient of zero would still move it.
    """
    action, keeps_weights = _ACTIONS[strategy]
    if situation.is_sharded and strategy in _WHOLE_ONLY:
        return Cannot("the parameters are sharded over ranks")
    try:
        if keeps_weights and (bad := first_bad_state(situation, trouble)):
            return Cannot(f"{bad} is not finite already, and only a good snapshot can restore it")
        return action(situation, config, trouble)
    except TrainingAbortedError:
        raise
    except Exception as error:
        logger.exception("the strategy %r failed", strategy.value)
        return Cannot(f"it failed: {type(error).__name__}: {error}")


# Each rank would clip by the norm of its own shard, or change a module that FSDP has taken over.
_WHOLE_ONLY = (RecoveryStrategy.CLIP_GRADIENTS, RecoveryStrategy.RAISE_PRECISION)


def skip_step(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    drop_gradients(situation)
    return Done("the step was skipped")


def reduce_scale(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    scaler = situation.scaler
    scale = current_scale(scaler)
    if scale is None:
        return Cannot("there is no enabled loss scaler")
    if trouble.cause == "transient_fault":
        return Cannot("the step was finite with the same loss scale when it was run again")
    given = getattr(scaler, "min_scale", None)
    # Below a scale of 1 the loss would be made smaller, which no overflow needs.
    floor = float(given) if isinstance(given, (int, float)) and given > 0 else 1.0
    if not scale > floor:
        return Cannot(f"the loss scale is {scale:g}, and its floor is {floor:g}")
    lower = max(scale * config.scale_reduction_factor, floor)
    set_scale(scaler, lower)
    drop_gradients(situation)
    return Done(f"the loss scale went from {scale:g} to {lower:g}")


def clip(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    if situation.will_rerun:
        return Done("the gradients are clipped when the step is run again")
    optimizer, scaler, whole = situation.optimizer, situation.scaler, config.drop_whole_tensors
    params = [param for param in params_of(optimizer) if param.grad is not None]
    parts = [list(float_parts(param.grad)) for param in params]
    if any(report.location == "loss" for report in trouble.reports):
        elements = sum(part.numel() for its in parts for part in its)
        finite = sum(int(part.isfinite().sum()) for its in parts for part in its)  # host sync
        if finite < 0.5 * max(1, elements):
            return Cannot("the loss is not finite, nor is most of the gradients")
    if not any(_has_usable_values(its, whole=whole) for its in parts):
        left = "nothing finite is left of the gradients but zeros"
        return Cannot(left if params else "there are no gradients")
    limit = math.inf if config.grad_clip_value is None else config.grad_clip_value
    named = situation.model.named_parameters() if situation.model is not None else ()
    names = {id(param): name for name, param in named}
    result = clip_gradients(
        params,
        limit * _gradient_scale(scaler, optimizer),
        drop="tensors" if whole else "elements",
        names=[names.get(id(param), str(number)) for number, param in enumerate(params)],
    )
    if isinstance(scaler, GradScaler) and scaler.is_enabled():
        # The bad values that it has found are gone: it is to make this step after all.
        for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            flag.zero_()
    return Done(_clip_text(result))


def _has_usable_values(parts: list[Tensor], *, whole: bool) -> bool:
    if whole and not all_finite(parts):
        return False
    return any(bool((part.isfinite() & (part != 0)).any()) for part in parts)  # host sync


def _gradient_scale(scaler: Any, optimizer: Optimizer) -> float:
    """What the optimizer's gradients are multiplied with now: 1 once they are unscaled."""
    scale = current_scale(scaler)
    if scale is None or not isinstance(scaler, GradScaler):
        return 1.0
    # Only the scaler's own notes tell whether unscale_() was called.
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scale if stage is OptState.READY and math.isfinite(scale) else 1.0


def _clip_text(result: ClipResult) -> str:
    text = f"the gradient norm was {result.norm:g}"
    if not result.dropped:
        return text
    more = len(result.dropped) - _MOST_NAMES
    names = ", ".join(result.dropped[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    count = result.dropped_elements
    elements = "1 bad element was" if count == 1 else f"{count} bad elements were"
    return f"{elements} dropped from {names}; {text}"


def reset_model(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    """To the newest snapshot; where there is none that can be used, to a checkpoint on disk."""
    if config.checkpoint_path is None:
        return _go_back(situation)
    try:
        answer = _go_back(situation)
    except (NonFiniteError, SnapshotError) as error:
        answer = Cannot(f"the snapshot cannot be used: {str(error).rstrip('.')}")
    if isinstance(answer, Done):
        return answer
    loaded = load_from_disk(situation, config.checkpoint_path)
    if isinstance(loaded, Cannot):
        return Cannot(f"{answer.reason}, and {loaded.reason}")
    drop_gradients(situation)
    return loaded


def rewind(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    answer = _go_back(situation, config.rewind_snapshots)
    if isinstance(answer, Cannot) or not config.rewind_skip_batches:
        return answer
    left_out = f"; the next {config.rewind_skip_batches} batches are skipped"
    return replace(answer, detail=answer.detail + left_out)


def custom(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    function = config.custom_recovery_fn
    if function is None:
        return Cannot("there is no custom_recovery_fn")
    did = function(
        trouble.report, situation.model, situation.optimizer, situation.scaler, trouble.step
    )
    if not did:
        return Cannot("custom_recovery_fn returned False")
    if bad := first_bad_state(situation, trouble):
        return Cannot(f"custom_recovery_fn left {bad} that is not finite")
    if not all_finite(gradients_of(situation.optimizer)):
        drop_gradients(situation)
    return Done("custom_recovery_fn has dealt with it")


def lower_lr(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    optimizer, factor = situation.optimizer, config.lr_reduction_factor
    before, target = max(rates_of(optimizer), default=0.0), _height_of(optimizer) * factor
    if not before > 0:
        return Cannot("there is no learning rate above 0")
    # Divergence begins long before the first bad value.
    back = _go_back(situation, _OLDEST) if config.lower_lr_goes_back else None
    schedulers = situation.schedulers or schedulers_of(optimizer)
    lower_rates(optimizer, schedulers, factor)
    while _height_of(optimizer) > 1.01 * target:  # going back has undone earlier cuts
        lower_rates(optimizer, schedulers, factor)
    drop_gradients(situation)
    lowered = f"the learning rate went from {before:g} to {max(rates_of(optimizer)):g}"
    if not isinstance(back, Done):
        return Done(lowered)
    return replace(back, detail=f"{back.detail}; {lowered}")


def raise_precision(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    if any(report.location.startswith("parameters") for report in trouble.reports):
        raised_eps = raise_eps(situation.optimizer)
        if raised_eps is not None:
            drop_gradients(situation)
            return Done(raised_eps)
    module = find_module(situation.model, situation.module)
    name = f"module {situation.module!r}" if situation.module else "the model"
    if situation.model is None or module is None:
        return Cannot("the module that made the bad value was not found")
    if is_raised(module):
        return Cannot(f"{name} runs in float32 already")
    # A module without weights gets what others compute.
    if not has_half_tensors(situation.model) and not _uses_autocast(situation, trouble):
        return Cannot(f"{name} runs in float32 already: no 16-bit weights, no autocast")
    raised = run_in_float32(module)
    drop_gradients(situation)
    return Done(f"{name} runs in float32 from now on", undo=raised.undo)


def _uses_autocast(situation: Situation, trouble: Trouble) -> bool:
    dtypes = [(report.tensor_stats or {}).get("dtype") for report in trouble.reports]
    return (
        current_scale(situation.scaler) is not None
        or (trouble.cause or "").startswith("low_precision")
        or any(dtype in HALVES for dtype in dtypes)
        or any(torch.is_autocast_enabled(each) for each in ("cpu", "cuda"))
    )


def raise_eps(optimizer: Optimizer) -> str | None:
    """Make every eps that rounds to 0 in its parameters' type large enough; what was done.

    Adam's 1e-8 is 0 in float16, and 0/0 for each weight that had no gradient yet.
    """
    done = None
    for group in optimizer.param_groups:
        eps = group.get("eps")
        dtypes = {param.dtype for param in group["params"] if param.is_floating_point()}
        if not isinstance(eps, float) or not dtypes:
            continue
        lowest = max(dtypes, key=lambda dtype: torch.finfo(dtype).smallest_normal)
        if not torch.tensor(eps, dtype=lowest, device="cpu"):
            group["eps"] = torch.finfo(lowest).smallest_normal
            name = str(lowest).removeprefix("torch.")
            done = f"eps went from {eps:g}, which is 0 in {name}, to {group['eps']:g}"
    return done


def abort(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    """Leave the weights at a good state, whatever can still be done for that."""
    drop_gradients(situation)
    is_bad = first_bad_state(situation, trouble) is not None
    if situation.any_rank is not None:  # all go back, or none
        is_bad = situation.any_rank(is_bad)
    if not is_bad:
        return Done("training stops here; the weights are those of the last good step")
    answer = reset_model(situation, config, trouble)
    if isinstance(answer, Cannot):
        return Done(f"training stops here; the state is not finite, and {answer.reason}")
    return replace(answer, detail=f"training stops here; {answer.detail}")


# Each with whether it keeps the weights, so that they must be good; the others can mend weights
# that are bad already, or need not.
_ACTIONS: dict[RecoveryStrategy, tuple[Action, bool]] = {
    RecoveryStrategy.SKIP_STEP: (skip_step, True),
    RecoveryStrategy.REDUCE_SCALE: (reduce_scale, True),
    RecoveryStrategy.CLIP_GRADIENTS: (clip, True),
    RecoveryStrategy.RESET_MODEL: (reset_model, False),
    RecoveryStrategy.CUSTOM: (custom, False),
    RecoveryStrategy.LOWER_LR: (lower_lr, True),
    RecoveryStrategy.REWIND: (rewind, False),
    RecoveryStrategy.RAISE_PRECISION: (raise_precision, True),
    RecoveryStrategy.ABORT: (abort, False),
}


def way_back(
    strategy: RecoveryStrategy, situation: Situation, config: RecoveryConfig
) -> Snapshot | None:
    """The snapshot that the strategy would restore; None where it restores none."""
    back = {
        RecoveryStrategy.RESET_MODEL: 0,
        RecoveryStrategy.REWIND: config.rewind_snapshots,
        RecoveryStrategy.LOWER_LR: _OLDEST if config.lower_lr_goes_back else None,
    }.get(strategy)
    ring = situation.snapshots
    return None if ring is None or back is None else ring.back(min(back, len(ring) - 1))


def _go_back(situation: Situation, back: int = 0) -> Answer:
    """To the snapshot that is so many older than the newest, or the oldest there is."""
    ring = situation.snapshots
    if ring is None or not len(ring):
        return Cannot("there is no snapshot")
    snapshot = ring.restore(min(back, len(ring) - 1))
    drop_gradients(situation)
    return Done(f"back at the snapshot of step {snapshot.step}", went_back_to=snapshot.step)


def drop_gradients(situation: Situation) -> None:
    """Without gradients an update changes nothing; before a rerun there are none of this step."""
    if situation.will_rerun:
        return
    optimizer, scaler = situation.optimizer, situation.scaler
    for param in params_of(optimizer):
        param.grad = None
    if situation.model is not None:
        situation.model.zero_grad(set_to_none=True)
    if isinstance(scaler, GradScaler) and scaler.is_enabled():
        # Whatever the loop calls next is to work. Between "ready", where step() refuses to go
        # without gradients, and "unscaled", where unscale_() refuses to come again, there is no
        # state in torch in which both are allowed.
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"] is OptState.UNSCALED:
            state["stage"] = None


def first_bad_state(situation: Situation, trouble: Trouble) -> str | None:
    """The name of a parameter, a reported buffer or optimizer state that is not finite."""
    named = list(_state(situation, trouble))
    if all_finite(tensor for _, tensor in named):
        return None
    return next(name for name, tensor in named if not all_finite([tensor]))


def _state(situation: Situation, trouble: Trouble) -> Iterator[Named]:
    # Buffers and frozen parameters may hold -inf on purpose, as attention masks do.
    reported = {report.location for report in trouble.reports}
    if situation.model is not None:
        for name, tensor in named_weights(situation.model):
            if tensor.requires_grad or name in reported:
                yield name, tensor
    for number, param in enumerate(params_of(situation.optimizer)):
        yield f"parameters.{number}", param
    yield from named_states(situation.optimizer)


def current_scale(scaler: Any) -> float | None:
    """The scale of an enabled scaler; None without one."""
    if scaler is None or not callable(getattr(scaler, "get_scale", None)):
        return None
    is_enabled = getattr(scaler, "is_enabled", None)
    if callable(is_enabled) and not is_enabled():
        return None
    return float(scaler.get_scale())  # host sync


def set_scale(scaler: Any, value: float) -> None:
    """Give the scaler a new scale, and let it wait as long as after an overflow to raise it."""
    if not isinstance(scaler, GradScaler):
        scaler.update(value)
    elif scaler._scale is None:  # nothing has been scaled yet
        scaler._init_scale = value
    else:
        # update(value) would forget which optimizers are unscaled, in the middle of a step.
        scaler._scale.fill_(value)
        if scaler._growth_tracker is not None:
            scaler._growth_tracker.zero_()


# Where optimizers and schedulers keep learning rates, a number or a list of numbers each.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr")
_IN_SCHEDULERS = (
    *("base_lrs", "max_lrs", "min_lrs", "_last_lr"),
    *("eta_min", "min_lr", "max_lr", "default_min_lr"),
)


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each group that has one."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [float(rate) for rate in rates if rate is not None]


def _height_of(optimizer: Optimizer) -> float:
    """The largest learning rate that the schedules start from, wherever on them we are."""
    rates = [group.get("initial_lr", group.get("lr", 0.0)) for group in optimizer.param_groups]
    return max(map(float, rates), default=0.0)


def schedulers_of(optimizer: Optimizer) -> tuple[LRScheduler, ...]:
    """The living schedulers that set this optimizer's learning rates; looks through the heap."""
    return tuple(each for each in living(LRScheduler) if vars(each).get("optimizer") is optimizer)


@torch.no_grad()
def lower_rates(optimizer: Optimizer, schedulers: Iterable[Any], factor: float) -> None:
    """Multiply all learning rates, now and those that the schedulers will set, by the factor."""
    owners: list[tuple[dict[str, Any], tuple[str, ...]]]
    owners = [(group, _IN_GROUPS) for group in optimizer.param_groups]
    waiting, seen = [each for each in schedulers if hasattr(each, "__dict__")], set()
    while waiting:  # each scheduler once, and those that it drives
        scheduler = waiting.pop()
        if id(scheduler) not in seen:
            seen.add(id(scheduler))
            owners.append((vars(scheduler), _IN_SCHEDULERS))
            for value in vars(scheduler).values():
                inner = value if isinstance(value, (list, tuple)) else [value]
                waiting += [each for each in inner if isinstance(each, LRScheduler)]
    done: set[int] = set()
    for own, names in owners:
        for name in names:
            if own.get(name) is not None:
                own[name] = _multiply(own[name], factor, done)


def _multiply(value: Any, factor: float, done: set[int]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_multiply(each, factor, done) for each in value)
    if not isinstance(value, Tensor):
        return value * factor
    if id(value) not in done:  # in place, because a captured graph reads this very tensor
        done.add(id(value))
        value.mul_(factor)
    return value


def load_from_disk(situation: Situation, place: str | os.PathLike[str]) -> Answer:
    """Load the checkpoint, or the newest good one of a folder; all of it or nothing.

    The optimizer, schedulers, scaler and averages get their states back where the file has them.
    Random states stay as they are: they would deliver the same batches once more.
    """
    # Late: training that stays finite reads no checkpoint of ours.
    from stayfinite.checkpoint.load import restore_checkpoint

    model, optimizer = situation.model, situation.optimizer
    if model is None:
        return Cannot(f"no model was found that {place} is for")
    ours = {id(param) for param in model.parameters()}
    if not all_finite(param for param in params_of(optimizer) if id(param) not in ours):
        return Cannot("the optimizer has bad parameters that are not the model's")
    rates = [group.get("lr") for group in optimizer.param_groups]
    schedulers = situation.schedulers or schedulers_of(optimizer)
    try:
        loaded = restore_checkpoint(
            place,
            model=model,
            optimizer=optimizer,
            needs_optimizer=not all_finite(tensor for _, tensor in named_states(optimizer)),
            scheduler=tuple(s for s in schedulers if getattr(s, "optimizer", None) is optimizer),
            scaler=situation.scaler,
            ema=situation.averages,
        )
    except CheckpointError as error:
        return Cannot(" ".join(str(error).split()).rstrip("."))
    if "scheduler" not in loaded.parts:
        # The schedule goes on from where it is, and a rate that was lowered stays so.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
    step = "" if loaded.step is None else f" of step {loaded.step}"
    kept = "" if "optimizer" in loaded.parts else "; the optimizer's state is not in it, and stays"
    said = f"back at the checkpoint {loaded.path}{step}{kept}"
    return Done(said, loaded_from=str(loaded.path))


def changed_at(place: str | os.PathLike[str]) -> int:
    """When the checkpoint, or anything in the folder of checkpoints, was last written."""
    path = Path(place)
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)
