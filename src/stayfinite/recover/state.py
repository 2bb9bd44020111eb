"""What must stay finite, and what a bad step leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

from stayfinite.detect.gradients import params_of
from stayfinite.detect.scan import all_finite
from stayfinite.detect.walk import Named, named_states, named_weights
from stayfinite.recover.scale import let_loop_go_on
from stayfinite.recover.situation import Situation, Trouble


def drop_gradients(situation: Situation) -> None:
    """Without gradients an update changes nothing; before a rerun there are none of this step."""
    if situation.will_rerun:
        return
    for param in params_of(situation.optimizer):
        param.grad = None
    if situation.model is not None:
        situation.model.zero_grad(set_to_none=True)
    let_loop_go_on(situation.scaler, situation.optimizer)


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
