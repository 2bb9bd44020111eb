"""One function per strategy: what it does, or why it cannot help here.

After any of them the parameters and the optimizer's state are as they were, or from a good
snapshot. A step is skipped by taking its gradients away: an optimizer leaves a parameter without
a gradient alone, while a gradient of zero would still move it.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from stayfinite.clip import ClipResult, clip_gradients
from stayfinite.detect.gradients import gradients_of, params_of
from stayfinite.detect.parts import float_parts
from stayfinite.detect.scan import all_finite
from stayfinite.errors import NonFiniteError, SnapshotError, TrainingAbortedError
from stayfinite.recover.config import RecoveryConfig, RecoveryStrategy
from stayfinite.recover.disk import load_from_disk
from stayfinite.recover.eps import raise_eps
from stayfinite.recover.precision import (
    find_module,
    has_half_tensors,
    is_raised,
    run_in_float32,
)
from stayfinite.recover.rates import height_of, lower_rates, rates_of, schedulers_of
from stayfinite.recover.scale import (
    current_scale,
    floor_of,
    forget_found_inf,
    gradient_scale,
    set_scale,
)
from stayfinite.recover.situation import Answer, Cannot, Done, Situation, Trouble
from stayfinite.recover.state import drop_gradients, first_bad_state
from stayfinite.snapshot import Snapshot

logger = logging.getLogger("stayfinite")
_MOST_NAMES = 3
_OLDEST = sys.maxsize

Action = Callable[[Situation, RecoveryConfig, Trouble], Answer]


def act(
    strategy: RecoveryStrategy, situation: Situation, config: RecoveryConfig, trouble: Trouble
) -> Answer:
    """What came of the strategy; a failure of our own is logged and counts as Cannot."""
    try:
        if strategy in _KEEPING and (bad := first_bad_state(situation, trouble)):
            return Cannot(f"{bad} is not finite already, and only a good snapshot mends that")
        return _ACTIONS[strategy](situation, config, trouble)
    except TrainingAbortedError:
        raise
    except Exception as error:
        logger.exception("the strategy %r failed", strategy.value)
        return Cannot(f"it failed: {type(error).__name__}: {error}")


def skip_step(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    drop_gradients(situation)
    return Done("the step was skipped")


def reduce_scale(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    scaler = situation.scaler
    scale = current_scale(scaler)
    if scale is None:
        return Cannot("there is no enabled loss scaler")
    floor = floor_of(scaler)
    if not scale > floor:
        return Cannot(f"the loss scale is {scale:g}, and its floor is {floor:g}")
    lower = max(scale * config.scale_reduction_factor, floor)
    set_scale(scaler, lower)
    drop_gradients(situation)
    return Done(f"the loss scale went from {scale:g} to {lower:g}")


def clip(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    if situation.will_rerun:
        return Done("the gradients are clipped when the step is run again")
    optimizer, scaler = situation.optimizer, situation.scaler
    params = [param for param in params_of(optimizer) if param.grad is not None]
    whole = config.drop_whole_tensors
    has_bad_loss = any(report.location == "loss" for report in trouble.reports)
    if has_bad_loss and _finite_share(params) < 0.5:
        return Cannot("the loss is not finite, nor is most of the gradients")
    if not any(_is_usable(param.grad, whole=whole) for param in params):
        left = "nothing finite is left of the gradients but zeros"
        return Cannot(left if params else "there are no gradients")
    limit = math.inf if config.grad_clip_value is None else config.grad_clip_value
    result = clip_gradients(
        params,
        limit * gradient_scale(scaler, optimizer),
        drop="tensors" if whole else "elements",
        names=_names(situation, params),
    )
    forget_found_inf(scaler, optimizer)
    return Done(_clip_text(result))


def reset_model(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    return _go_back_or_load(situation, config)


def rewind(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    answer = _go_back(situation, config.rewind_snapshots)
    if isinstance(answer, Cannot) or not config.rewind_skip_batches:
        return answer
    skipped = f"{answer.detail}; the next {config.rewind_skip_batches} batches are left out"
    return Done(skipped, went_back_to=answer.went_back_to)


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
    before, target = max(rates_of(optimizer), default=0.0), height_of(optimizer) * factor
    if not before > 0:
        return Cannot("there is no learning rate above 0")
    # Divergence begins long before the first bad value.
    back = _go_back(situation, _OLDEST) if config.lower_lr_goes_back else None
    schedulers = situation.schedulers or schedulers_of(optimizer)
    lower_rates(optimizer, schedulers, factor)
    while height_of(optimizer) > 1.01 * target:  # going back has undone earlier cuts
        lower_rates(optimizer, schedulers, factor)
    drop_gradients(situation)
    lowered = f"the learning rate went from {before:g} to {max(rates_of(optimizer)):g}"
    if not isinstance(back, Done):
        return Done(lowered)
    return Done(f"{back.detail}; {lowered}", went_back_to=back.went_back_to)


def raise_precision(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    if any(report.location.startswith("parameters") for report in trouble.reports):
        raised_eps = raise_eps(situation.optimizer)
        if raised_eps is not None:
            drop_gradients(situation)
            return Done(raised_eps)
    module = find_module(situation.model, situation.module)
    name = f"module {situation.module!r}" if situation.module else "the model"
    if situation.model is None or module is None:
        return Cannot("it is not known which module is to blame")
    if is_raised(module):
        return Cannot(f"{name} runs in float32 already")
    # A module without weights gets what others compute.
    if not has_half_tensors(situation.model) and not _uses_autocast(situation, trouble):
        return Cannot(f"{name} runs in float32 already: no 16-bit weights, no autocast")
    raised = run_in_float32(module)
    drop_gradients(situation)
    return Done(f"{name} runs in float32 from now on", undo=raised.undo)


def abort(situation: Situation, config: RecoveryConfig, trouble: Trouble) -> Answer:
    """Leave the weights at a good state, whatever can still be done for that."""
    drop_gradients(situation)
    if first_bad_state(situation, trouble) is None:
        return Done("training stops here; the weights are those of the last good step")
    answer = _go_back_or_load(situation, config)
    if isinstance(answer, Cannot):
        return Done(f"training stops here; the state is not finite, and {answer.reason}")
    return replace(answer, detail=f"training stops here; {answer.detail}")


_ACTIONS: dict[RecoveryStrategy, Action] = {
    RecoveryStrategy.SKIP_STEP: skip_step,
    RecoveryStrategy.REDUCE_SCALE: reduce_scale,
    RecoveryStrategy.CLIP_GRADIENTS: clip,
    RecoveryStrategy.RESET_MODEL: reset_model,
    RecoveryStrategy.CUSTOM: custom,
    RecoveryStrategy.LOWER_LR: lower_lr,
    RecoveryStrategy.REWIND: rewind,
    RecoveryStrategy.RAISE_PRECISION: raise_precision,
    RecoveryStrategy.ABORT: abort,
}
# The others can mend weights that are bad already, or need not.
_KEEPING = frozenset(
    {
        RecoveryStrategy.SKIP_STEP,
        RecoveryStrategy.REDUCE_SCALE,
        RecoveryStrategy.CLIP_GRADIENTS,
        RecoveryStrategy.LOWER_LR,
        RecoveryStrategy.RAISE_PRECISION,
    }
)


def _finite_share(params: list[Tensor]) -> float:
    """How much of the gradients is finite, from 0 to 1."""
    parts = [part for param in params for part in float_parts(param.grad)]
    finite = sum(int(part.isfinite().sum()) for part in parts)  # host sync
    return finite / max(1, sum(part.numel() for part in parts))


def _is_usable(gradient: Tensor | None, *, whole: bool) -> bool:
    if gradient is None:
        return False
    parts = list(float_parts(gradient))
    if whole and not all_finite(parts):
        return False
    return any(bool((part.isfinite() & (part != 0)).any()) for part in parts)  # host sync


def _names(situation: Situation, params: list[Tensor]) -> list[str]:
    named = situation.model.named_parameters() if situation.model is not None else ()
    known = {id(param): name for name, param in named}
    return [known.get(id(param), str(number)) for number, param in enumerate(params)]


def _clip_text(result: ClipResult) -> str:
    text = f"the gradient norm was {result.norm:g}"
    if not result.dropped:
        return text
    more = len(result.dropped) - _MOST_NAMES
    names = ", ".join(result.dropped[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    count = result.dropped_elements
    elements = "1 bad element was" if count == 1 else f"{count} bad elements were"
    return f"{elements} dropped from {names}; {text}"


def way_back(
    strategy: RecoveryStrategy, situation: Situation, config: RecoveryConfig
) -> Snapshot | None:
    """The snapshot that the strategy would restore; None where it restores none."""
    if strategy is RecoveryStrategy.RESET_MODEL:
        return _snapshot(situation)[1]
    if strategy is RecoveryStrategy.REWIND:
        return _snapshot(situation, config.rewind_snapshots)[1]
    if strategy is RecoveryStrategy.LOWER_LR and config.lower_lr_goes_back:
        return _snapshot(situation, _OLDEST)[1]
    return None


def _snapshot(situation: Situation, back: int = 0) -> tuple[int, Snapshot | None]:
    """The one that is so many older than the newest, or the oldest there is."""
    ring = situation.snapshots
    number = min(back, len(ring) - 1) if ring is not None else -1
    return number, ring.back(number) if ring is not None else None


def _go_back(situation: Situation, back: int = 0) -> Answer:
    number, snapshot = _snapshot(situation, back)
    if snapshot is None or situation.snapshots is None:
        return Cannot("there is no snapshot")
    situation.snapshots.restore(number)
    drop_gradients(situation)
    return Done(f"back at the snapshot of step {snapshot.step}", went_back_to=snapshot.step)


def _go_back_or_load(situation: Situation, config: RecoveryConfig) -> Answer:
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


def _uses_autocast(situation: Situation, trouble: Trouble) -> bool:
    if situation.autocast is not None:
        return situation.autocast
    dtypes = [(report.tensor_stats or {}).get("dtype") for report in trouble.reports]
    return (
        current_scale(situation.scaler) is not None
        or (trouble.cause or "").startswith("low_precision")
        or any(dtype in ("float16", "bfloat16") for dtype in dtypes)
        or any(torch.is_autocast_enabled(each) for each in ("cpu", "cuda"))
    )
